// Vectors of 16 numbers: what kernels are written in, whatever the processor has.
//
// F is sixteen float32, I sixteen int32. One AVX-512 register, two of AVX2 or, elsewhere, a plain array. Each file
// behind this one has the same functions for one kind of processor; here is what follows from them. Products are fused
// with sums only where `fma` says so, and sums over lanes have one order: a result has the same bits everywhere, but
// for products of pairs of bfloat16, which only some processors have.
//
// An element is how a number lies in memory: float, Bfloat16, Float16 or E4m3.
#pragma once
#include <stdint.h>
#include <string.h>

typedef int64_t i64;
struct Bfloat16 {
    uint16_t bits;
};
struct Float16 {
    uint16_t bits;
};
struct E4m3 {  // of eight bits, without infinities; loaded as its 256th, which is a float16 of the same bits
    uint8_t bits;
};
const i64 LANES = 16, CACHE_LINE = 64;

#define INLINE static inline __attribute__((always_inline))
#define INLINED __attribute__((always_inline))  // of a lambda that is called twice
#define EXPORT extern "C" __attribute__((visibility("default")))

#if defined(__AVX512F__)
#include "vec_avx512.h"
#elif defined(__AVX2__)
#include "vec_avx2.h"
#else
#include "vec_plain.h"
#endif

// A pair of bfloat16 in each lane, the first in its lower half, of numbers that bfloat16 has.
INLINE F as_pair(F first, F second) {
    return float_of(choose_bits(splat((int32_t)0xffff0000), bits_of(second), shift_right<16>(bits_of(first))));
}
#if !defined(__AVX512F__)  // what vec_avx512.h has instructions for
struct SixteenOfPairs {
    Sixteen numbers;
};
INLINE SixteenOfPairs sixteen_of_pairs(const int8_t *p) { return {sixteen(p)}; }
template <int INDEX>
INLINE F chosen_pair(I x, SixteenOfPairs table) {
    return as_pair(chosen<INDEX>(x, table.numbers), chosen<INDEX + 4>(x, table.numbers));
}
INLINE void store_pairs(uint16_t *pairs, const Bfloat16 *x) {
    for (int i = 0; i < 32; i++) pairs[i] = x[i / 8 * 8 + i % 2 * 4 + i % 8 / 2].bits;
}
#endif

// The compiler loads nothing from memory before what is stored above here.
INLINE void in_order() { asm volatile("" ::: "memory"); }

// As long as there is one, denormal numbers count as 0 for this thread, as inputs and as results. A compiler moves
// arithmetic past its ends, but no call of a function that it does not put in place.
struct DenormalsAreZeros {
#if defined(__SSE__)
    uint32_t before = __builtin_ia32_stmxcsr();
    DenormalsAreZeros() { set(before | 0x8040); }
    ~DenormalsAreZeros() { set(before); }
    static void set(uint32_t state) {
        in_order();
        __builtin_ia32_ldmxcsr(state);
        in_order();
    }
#endif
};

INLINE void prefetch(const void *place) { __builtin_prefetch(place, 0, 3); }
INLINE void prefetch_second_level(const void *place) { __builtin_prefetch(place, 0, 2); }

template <class T>
INLINE const T *at(const T *start, i64 bytes) {
    return (const T *)((const char *)start + bytes);
}
template <class T>
INLINE T *at(T *start, i64 bytes) {
    return (T *)((char *)start + bytes);
}

INLINE i64 smaller(i64 a, i64 b) { return a < b ? a : b; }
INLINE i64 larger(i64 a, i64 b) { return a > b ? a : b; }

// `run` with `count`, 1 to MOST, as a constant: how many rows a tile has, for one.
template <int NUM>
struct Number {
    static const int value = NUM;
};
template <int MOST, class Do>
INLINE void with_number(i64 count, Do run) {
    if (count == MOST) run(Number<MOST>());
    else if constexpr (MOST > 1) with_number<MOST - 1>(count, run);
}

// ---- elements -------------------------------------------------------------------------------------------------------
// To nearest, ties to even. NaN stays NaN, whose low bits would else be rounded into another number.
INLINE I rounded_to_bfloat16(F x) {
    I bits = bits_of(where_nan(x, splat(__builtin_nanf("")), x));
    return shift_right<16>(bits + splat(0x7fff) + (shift_right<16>(bits) & splat(1)));
}
INLINE void store(Bfloat16 *p, F x) { narrow(p, rounded_to_bfloat16(x)); }

INLINE float as_float(float x) { return x; }
INLINE float as_float(Bfloat16 x) {
    uint32_t bits = (uint32_t)x.bits << 16;
    float number;
    memcpy(&number, &bits, 4);
    return number;
}
INLINE float as_float(Float16 x) {
    Float16 halves[LANES] = {x};
    float numbers[LANES];
    store(numbers, load(halves));
    return numbers[0];
}
INLINE Float16 as_half(float x) {
    Float16 halves[LANES];
    store(halves, splat(x));
    return halves[0];
}

// The first `count` of 16 numbers, and zeros; nothing behind them is read or written.
template <class T>
INLINE F load_part(const T *p, i64 count) {
    T part[LANES] = {};
    memcpy(part, p, count * sizeof(T));
    return load(part);
}
template <class T>
INLINE void store_part(T *p, F x, i64 count) {
    T part[LANES];
    store(part, x);
    memcpy(p, part, count * sizeof(T));
}

// `run(first, count)` for each 16 elements of `size`; count is 16, and less for what is left.
template <class Do>
INLINE void each_vector(i64 size, Do run) {
    i64 i = 0;
    for (; i + LANES <= size; i += LANES) run(i, (i64)LANES);
    if (i < size) run(i, size - i);
}
template <class T>
INLINE F load_some(const T *p, i64 count) {
    return count == LANES ? load(p) : load_part(p, count);
}
template <class T>
INLINE void store_some(T *p, F x, i64 count) {
    if (count == LANES) store(p, x);
    else store_part(p, x, count);
}
// As it comes back from memory where it lies as such elements.
INLINE F rounded_as(F x, const float *) { return x; }
INLINE F rounded_as(F x, const Bfloat16 *) { return float_of(shift_left<16>(rounded_to_bfloat16(x))); }
INLINE F rounded_as(F x, const Float16 *) {
    Float16 halves[LANES];
    store(halves, x);
    return load(halves);
}

// ---- functions ------------------------------------------------------------------------------------------------------
// e^x = 2^n (1 + r + r^2 P(r)), n = round(x log2 e), r = x - n ln 2, P as in Cephes `expf`: within 1 ulp for x <= 0,
// 0 below -87, e^88 above 88, NaN of NaN.
INLINE F exp_of(F x) {
    const F lowest = splat(-87.0f);
    F inside = min(max(x, lowest), splat(88.0f));
    F n = rounded(inside * splat(1.4426950408889634f));
    F r = fma(n, splat(2.12194440e-4f), fma(n, splat(-0.693359375f), inside));
    F p = splat(1.9875691500e-4f);
    p = fma(p, r, splat(1.3981999507e-3f));
    p = fma(p, r, splat(8.3334519073e-3f));
    p = fma(p, r, splat(4.1665795894e-2f));
    p = fma(p, r, splat(1.6666665459e-1f));
    p = fma(p, r, splat(5.0000001201e-1f));
    F power = fma(p, r * r, r) + splat(1.0f);
    F result = float_of(bits_of(power) + shift_left<23>(to_int(n)));
    return where_less(x, lowest, splat(0.0f), where_nan(x, x, result));
}
// (e^2x - 1) / (e^2x + 1): off by some 1e-7, whatever the size of x.
INLINE F tanh_of(F x) {
    F power = exp_of(x + x);
    return (power - splat(1.0f)) / (power + splat(1.0f));
}
// 1 + e^x, infinite above 88: what is divided by it gets as small as it should.
INLINE F one_and_exp_of(F x) {
    const F most = splat(88.0f);
    return where_less(most, x, splat(__builtin_inff()), splat(1.0f) + exp_of(x));
}
// x / (1 + e^-x)
INLINE F silu_of(F x) { return x / one_and_exp_of(splat(0.0f) - x); }
