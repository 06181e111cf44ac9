// The words of `vec.h` in plain C++ with the compiler's own vectors: for processors that have no file of their own, and
// to read what each word means.
#pragma once

enum { HAS_WIDE_REGISTERS = 0, HAS_PAIRS = 0 };

typedef float Floats __attribute__((vector_size(64)));
typedef int32_t Ints __attribute__((vector_size(64)));
typedef uint32_t Unsigned __attribute__((vector_size(64)));
struct F {
    Floats v;
};
struct I {
    Ints v;
};

INLINE float float_of_bits(uint32_t bits) {
    float x;
    memcpy(&x, &bits, 4);
    return x;
}
INLINE float wide(Float16 x) {
    uint32_t sign = (uint32_t)(x.bits & 0x8000) << 16, exponent = x.bits >> 10 & 31, fraction = x.bits & 1023;
    if (exponent == 31) return float_of_bits(sign | 0x7f800000 | fraction << 13);
    float size =
        exponent ? float_of_bits((exponent + 112) << 23 | fraction << 13) : (float)fraction * 5.9604644775390625e-8f;
    return sign ? -size : size;
}
INLINE Float16 half(float x) {  // to nearest, ties to even
    uint32_t bits;
    memcpy(&bits, &x, 4);
    uint16_t sign = bits >> 16 & 0x8000;
    uint32_t size = bits & 0x7fffffff;
    if (size > 0x7f800000) return {(uint16_t)(sign | 0x7e00)};
    if (size >= 0x477ff000) return {(uint16_t)(sign | 0x7c00)};
    if (size < 0x38800000) {  // a denormal number, in units of 2^-24: adding 0.5 rounds to them
        float sum = float_of_bits(size) + 0.5f;
        uint32_t units;
        memcpy(&units, &sum, 4);
        return {(uint16_t)(sign | (units - 0x3f000000))};
    }
    return {(uint16_t)(sign | (size - 0x38000000 + 0xfff + (size >> 13 & 1)) >> 13)};
}

INLINE F load(const float *p) {
    F x;
    memcpy(&x, p, sizeof x);
    return x;
}
INLINE I load(const int32_t *p) {
    I x;
    memcpy(&x, p, sizeof x);
    return x;
}
INLINE void store(float *p, F x) { memcpy(p, &x, sizeof x); }
INLINE void store(int32_t *p, I x) { memcpy(p, &x, sizeof x); }
static F load(const Float16 *p) {
    F x;
    for (int i = 0; i < LANES; i++) x.v[i] = wide(p[i]);
    return x;
}
static F load(const E4m3 *p) {
    F x;
    for (int i = 0; i < LANES; i++) x.v[i] = wide(Float16{(uint16_t)((p[i].bits & 128) << 8 | (p[i].bits & 127) << 7)});
    return x;
}
static void store(Float16 *p, F x) {
    for (int i = 0; i < LANES; i++) p[i] = half(x.v[i]);
}
static I widen(const Bfloat16 *p) {
    I x;
    for (int i = 0; i < LANES; i++) x.v[i] = p[i].bits;
    return x;
}
static void narrow(Bfloat16 *p, I x) {
    for (int i = 0; i < LANES; i++) p[i].bits = (uint16_t)x.v[i];
}
static I widen(const int8_t *p) {
    I x;
    for (int i = 0; i < LANES; i++) x.v[i] = p[i];
    return x;
}

// The lowest byte of each lane; of eight in a row first those of even number, then those of odd.
static void store_quads(int8_t *p, I x) {
    for (int i = 0; i < LANES; i++) p[i / 8 * 8 + i % 2 * 4 + i % 8 / 2] = (int8_t)x.v[i];
}

INLINE F splat(float x) { return {x - Floats{}}; }  // not plus, which takes the sign of -0
INLINE I splat(int32_t x) { return {Ints{} + x}; }
INLINE F splat_at(const float *p) { return splat(*p); }
INLINE I splat_at(const int8_t *p) {
    int32_t x;
    memcpy(&x, p, 4);
    return splat(x);
}

INLINE F in_turn(F sums) { return sums; }
INLINE F operator+(F a, F b) { return {a.v + b.v}; }
INLINE F operator-(F a, F b) { return {a.v - b.v}; }
INLINE F operator*(F a, F b) { return {a.v * b.v}; }
INLINE F operator/(F a, F b) { return {a.v / b.v}; }
static F fma(F a, F b, F c) {
    for (int i = 0; i < LANES; i++) c.v[i] = __builtin_fmaf(a.v[i], b.v[i], c.v[i]);
    return c;
}
INLINE F max(F a, F b) { return {a.v > b.v ? a.v : b.v}; }  // b where one is NaN; likewise min
INLINE F min(F a, F b) { return {a.v < b.v ? a.v : b.v}; }
static F rounded(F x) {
    for (int i = 0; i < LANES; i++) x.v[i] = __builtin_rintf(x.v[i]);
    return x;
}  // to nearest, ties to even
INLINE F where_less(F a, F b, F then, F otherwise) { return {a.v < b.v ? then.v : otherwise.v}; }
INLINE F where_nan(F x, F then, F otherwise) { return {x.v != x.v ? then.v : otherwise.v}; }

INLINE I operator+(I a, I b) { return {(Ints)((Unsigned)a.v + (Unsigned)b.v)}; }
INLINE I operator-(I a, I b) { return {(Ints)((Unsigned)a.v - (Unsigned)b.v)}; }
INLINE I operator&(I a, I b) { return {a.v & b.v}; }
INLINE I choose_bits(I mask, I a, I b) { return {(a.v & mask.v) | (b.v & ~mask.v)}; }  // a where 1
INLINE I larger_unsigned(I a, I b) { return {(Unsigned)a.v > (Unsigned)b.v ? a.v : b.v}; }
static int32_t sum_of_lanes(I x) {
    uint32_t sum = 0;
    for (int i = 0; i < LANES; i++) sum += (uint32_t)x.v[i];
    return (int32_t)sum;
}
static int32_t largest_of_lanes(I x) {
    int32_t largest = x.v[0];
    for (int i = 1; i < LANES; i++) largest = x.v[i] > largest ? x.v[i] : largest;
    return largest;
}
template <int BITS>
INLINE I shift_left(I x) {
    return {(Ints)((Unsigned)x.v << BITS)};
}
template <int BITS>
INLINE I shift_right(I x) {
    return {(Ints)((Unsigned)x.v >> BITS)};
}
INLINE I lanes_from(int32_t first) { return {Ints{0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15} + first}; }
INLINE F where_within(I x, I start, I end, F then, F otherwise) {  // start <= x < end
    return {((start.v <= x.v) & (x.v < end.v)) ? then.v : otherwise.v};
}

INLINE I bits_of(F x) { return {(Ints)x.v}; }
INLINE F float_of(I x) { return {(Floats)x.v}; }
INLINE F load(const Bfloat16 *p) { return float_of(shift_left<16>(widen(p))); }
static I to_int(F x) {  // of whole numbers; of what none is, as x86 does
    I y;
    for (int i = 0; i < LANES; i++)
        y.v[i] = x.v[i] >= -2147483648.0f && x.v[i] < 2147483648.0f ? (int32_t)x.v[i] : INT32_MIN;
    return y;
}
INLINE F to_float(I x) { return {__builtin_convertvector(x.v, Floats)}; }

// Sixteen integers of eight bits, and what bits 4 INDEX .. 4 INDEX + 3 of each lane choose of them.
struct Sixteen {
    const int8_t *p;
};
INLINE Sixteen sixteen(const int8_t *p) { return {p}; }
template <int INDEX>
static F chosen(I x, Sixteen table) {
    F y;
    for (int i = 0; i < LANES; i++) y.v[i] = table.p[(uint32_t)x.v[i] >> 4 * INDEX & 15];
    return y;
}

// sums + in each lane four products of an unsigned byte of `weights` and a signed one of `inputs`, exact.
enum { HAS_BYTE_PRODUCTS = 1 };
struct Quad {
    I bytes;
};
INLINE Quad quad_at(const int8_t *bytes, const int16_t *) { return {splat_at(bytes)}; }
INLINE I dot_small_bytes(I sums, I weights, I inputs) {
    for (int shift = 0; shift < 32; shift += 8)
        sums.v += (weights.v >> shift & 255) * ((Ints)((Unsigned)inputs.v << (24 - shift)) >> 24);
    return sums;
}
INLINE I dot_bytes(I sums, I weights, Quad inputs) { return dot_small_bytes(sums, weights, inputs.bytes); }
INLINE I add_as_words(I words, I, I) { return words; }  // never called, as bytes are multiplied; nor is the next
INLINE I sums_of_words(I words) { return words; }
INLINE F dot_pairs(F, F, F sums) { return sums; }  // never called: there are no pairs

// 16 vectors become their columns.
static void transpose(F r[LANES]) {
    float lines[LANES][LANES];
    memcpy(lines, r, sizeof lines);
    for (int i = 0; i < LANES; i++)
        for (int j = 0; j < LANES; j++) r[i].v[j] = lines[j][i];
}

// Of 16 lanes their sum or the largest, in one order: lane i with i + 8, then with i + 4, i + 2 and i + 1.
static float sum_of_lanes(F x) {
    for (int width = LANES / 2; width; width /= 2)
        for (int i = 0; i < width; i++) x.v[i] += x.v[i + width];
    return x.v[0];
}
static float largest_of_lanes(F x) {
    for (int width = LANES / 2; width; width /= 2)
        for (int i = 0; i < width; i++) x.v[i] = x.v[i] > x.v[i + width] ? x.v[i] : x.v[i + width];
    return x.v[0];
}
