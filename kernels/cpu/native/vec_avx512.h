// The words of `vec.h` for AVX-512 (F, BW, DQ, VL), with its instructions for bytes and bfloat16 where they are.
#pragma once
#include "vec_avx.h"

enum { HAS_WIDE_REGISTERS = 1 };  // 32 of 16 numbers

struct F {
    __m512 v;
};
struct I {
    __m512i v;
};

INLINE F load(const float *p) { return {_mm512_loadu_ps(p)}; }
INLINE F load(const Float16 *p) { return {_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)p))}; }
INLINE F load(const E4m3 *p) { return {_mm512_cvtph_ps(halves_of(p))}; }
INLINE I load(const int32_t *p) { return {_mm512_loadu_si512(p)}; }
INLINE void store(float *p, F x) { _mm512_storeu_ps(p, x.v); }
INLINE void store(Float16 *p, F x) { _mm256_storeu_si256((__m256i *)p, _mm512_cvtps_ph(x.v, 8)); }
INLINE void store(int32_t *p, I x) { _mm512_storeu_si512(p, x.v); }
INLINE I widen(const Bfloat16 *p) { return {_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)p))}; }
INLINE void narrow(Bfloat16 *p, I x) { _mm256_storeu_si256((__m256i *)p, _mm512_cvtepi32_epi16(x.v)); }
INLINE I widen(const int8_t *p) { return {_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)p))}; }

// The lowest byte of each lane; of eight in a row first those of even number, then those of odd.
INLINE void store_quads(int8_t *p, I x) {
    const __m128i order = _mm_set_epi8(15, 13, 11, 9, 14, 12, 10, 8, 7, 5, 3, 1, 6, 4, 2, 0);
    _mm_storeu_si128((__m128i *)p, _mm_shuffle_epi8(_mm512_cvtepi32_epi8(x.v), order));
}

INLINE F splat(float x) { return {_mm512_set1_ps(x)}; }
INLINE I splat(int32_t x) { return {_mm512_set1_epi32(x)}; }
INLINE F splat_at(const float *p) { return {_mm512_set1_ps(*p)}; }
INLINE I splat_at(const int8_t *p) {
    int32_t x;
    memcpy(&x, p, 4);
    return {_mm512_set1_epi32(x)};
}

INLINE F in_turn(F sums) { return sums; }  // as registers are many
INLINE F operator+(F a, F b) { return {_mm512_add_ps(a.v, b.v)}; }
INLINE F operator-(F a, F b) { return {_mm512_sub_ps(a.v, b.v)}; }
INLINE F operator*(F a, F b) { return {_mm512_mul_ps(a.v, b.v)}; }
INLINE F operator/(F a, F b) { return {_mm512_div_ps(a.v, b.v)}; }
INLINE F fma(F a, F b, F c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
INLINE F max(F a, F b) { return {_mm512_max_ps(a.v, b.v)}; }  // b where one is NaN; likewise min
INLINE F min(F a, F b) { return {_mm512_min_ps(a.v, b.v)}; }
INLINE F rounded(F x) { return {_mm512_roundscale_ps(x.v, 8)}; }  // to nearest, ties to even
INLINE F where_less(F a, F b, F then, F otherwise) {
    return {_mm512_mask_blend_ps(_mm512_cmp_ps_mask(a.v, b.v, _CMP_LT_OQ), otherwise.v, then.v)};
}
INLINE F where_nan(F x, F then, F otherwise) {
    return {_mm512_mask_blend_ps(_mm512_cmp_ps_mask(x.v, x.v, _CMP_UNORD_Q), otherwise.v, then.v)};
}

INLINE I operator+(I a, I b) { return {_mm512_add_epi32(a.v, b.v)}; }
INLINE I operator-(I a, I b) { return {_mm512_sub_epi32(a.v, b.v)}; }
INLINE I operator&(I a, I b) { return {_mm512_and_si512(a.v, b.v)}; }
INLINE I choose_bits(I mask, I a, I b) { return {_mm512_ternarylogic_epi32(mask.v, a.v, b.v, 0xca)}; }  // a where 1
INLINE I larger_unsigned(I a, I b) { return {_mm512_max_epu32(a.v, b.v)}; }
INLINE int32_t sum_of_lanes(I x) { return _mm512_reduce_add_epi32(x.v); }
INLINE int32_t largest_of_lanes(I x) { return _mm512_reduce_max_epi32(x.v); }
template <int BITS>
INLINE I shift_left(I x) {
    return {_mm512_slli_epi32(x.v, BITS)};
}
template <int BITS>
INLINE I shift_right(I x) {
    return {_mm512_srli_epi32(x.v, BITS)};
}
INLINE I lanes_from(int32_t first) {
    return {_mm512_add_epi32(_mm512_set1_epi32(first),
                             _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0))};
}
INLINE F where_within(I x, I start, I end, F then, F otherwise) {  // start <= x < end
    __mmask16 inside =
        _mm512_cmp_epi32_mask(x.v, start.v, _MM_CMPINT_NLT) & _mm512_cmp_epi32_mask(x.v, end.v, _MM_CMPINT_LT);
    return {_mm512_mask_blend_ps(inside, otherwise.v, then.v)};
}

INLINE I bits_of(F x) { return {_mm512_castps_si512(x.v)}; }
INLINE F float_of(I x) { return {_mm512_castsi512_ps(x.v)}; }
INLINE F load(const Bfloat16 *p) { return float_of(shift_left<16>(widen(p))); }
INLINE I to_int(F x) { return {_mm512_cvttps_epi32(x.v)}; }  // of whole numbers
INLINE F to_float(I x) { return {_mm512_cvtepi32_ps(x.v)}; }

// Sixteen integers of eight bits, and what bits 4 INDEX .. 4 INDEX + 3 of each lane choose of them.
struct Sixteen {
    __m512 v;
};
INLINE Sixteen sixteen(const int8_t *p) { return {to_float(widen(p)).v}; }
template <int INDEX>
INLINE F chosen(I x, Sixteen table) {
    return {_mm512_permutexvar_ps(shift_right<4 * INDEX>(x).v, table.v)};
}

// sums + in each lane four products of an unsigned byte of `weights` and a signed one of `inputs`, exact; of small ones
// below 128.
#ifdef __AVX512VNNI__
enum { HAS_BYTE_PRODUCTS = 1 };
struct Quad {
    I bytes;
};
INLINE Quad quad_at(const int8_t *bytes, const int16_t *) { return {splat_at(bytes)}; }
INLINE I dot_small_bytes(I sums, I weights, I inputs) { return {_mm512_dpbusd_epi32(sums.v, weights.v, inputs.v)}; }
INLINE I dot_bytes(I sums, I weights, Quad inputs) { return dot_small_bytes(sums, weights, inputs.bytes); }
INLINE I add_as_words(I words, I, I) { return words; }  // never called, as bytes are multiplied; nor is the next
INLINE I sums_of_words(I words) { return words; }
#else
enum { HAS_BYTE_PRODUCTS = 0 };
struct Quad {  // as words: the first and the third input, and the others
    I even, odd;
};
INLINE Quad quad_at(const int8_t *, const int16_t *words) {
    return {splat_at((const int8_t *)words), splat_at((const int8_t *)(words + 2))};
}
INLINE I in_turn(__m512i sums) {  // else a compiler makes many products first, for which there are no registers
    asm("" : "+v"(sums));
    return {sums};
}
INLINE I dot_small_bytes(I sums, I weights, I inputs) {  // two products fit a word
    __m512i pairs = _mm512_maddubs_epi16(weights.v, inputs.v);
    return in_turn(_mm512_add_epi32(sums.v, _mm512_madd_epi16(pairs, _mm512_set1_epi16(1))));
}
// Of bytes below 16 eight such sums fit words, and become four products a lane once.
INLINE I add_as_words(I words, I weights, I inputs) {
    return in_turn(_mm512_add_epi16(words.v, _mm512_maddubs_epi16(weights.v, inputs.v)));
}
INLINE I sums_of_words(I words) { return {_mm512_madd_epi16(words.v, _mm512_set1_epi16(1))}; }
INLINE I dot_bytes(I sums, I weights, Quad inputs) {
    __m512i even = _mm512_madd_epi16(_mm512_and_si512(weights.v, _mm512_set1_epi16(255)), inputs.even.v);
    __m512i odd = _mm512_madd_epi16(_mm512_srli_epi16(weights.v, 8), inputs.odd.v);
    return in_turn(_mm512_add_epi32(sums.v, _mm512_add_epi32(even, odd)));
}
#endif

// sums + in each lane both products of a pair of bfloat16 of a and one of b; denormal numbers count as 0.
#ifdef __AVX512BF16__
enum { HAS_PAIRS = 1 };
INLINE F dot_pairs(F a, F b, F sums) { return {_mm512_dpbf16_ps(sums.v, (__m512bh)a.v, (__m512bh)b.v)}; }
#else
enum { HAS_PAIRS = 0 };
INLINE F dot_pairs(F, F, F sums) { return sums; }
#endif
// Sixteen integers as bfloat16, and what bits 4 INDEX .. 4 INDEX + 3 of each half of each lane choose of them: a pair.
struct SixteenOfPairs {
    __m512i v;
};
INLINE SixteenOfPairs sixteen_of_pairs(const int8_t *p) {
    __m256i numbers = _mm512_cvtepi32_epi16(_mm512_srli_epi32(_mm512_castps_si512(to_float(widen(p)).v), 16));
    return {_mm512_broadcast_i64x4(numbers)};  // twice, as five bits choose
}
template <int INDEX>
INLINE F chosen_pair(I x, SixteenOfPairs table) {
    return {_mm512_castsi512_ps(_mm512_permutexvar_epi16(shift_right<4 * INDEX>(x).v, table.v))};
}
// Of each eight of 32 inputs the pairs of i and i + 4.
INLINE void store_pairs(uint16_t *pairs, const Bfloat16 *x) {
    const __m128i order = _mm_set_epi8(15, 14, 7, 6, 13, 12, 5, 4, 11, 10, 3, 2, 9, 8, 1, 0);  // of bytes
    _mm512_storeu_si512(pairs, _mm512_shuffle_epi8(_mm512_loadu_si512(x), _mm512_broadcast_i32x4(order)));
}

// 16 vectors become their columns, by 64 shuffles.
INLINE void transpose(F r[LANES]) {
    __m512 a[LANES], b[LANES];
#pragma GCC unroll 16
    for (int i = 0; i < LANES; i += 2) {
        a[i] = _mm512_unpacklo_ps(r[i].v, r[i + 1].v);
        a[i + 1] = _mm512_unpackhi_ps(r[i].v, r[i + 1].v);
    }
#pragma GCC unroll 4
    for (int i = 0; i < LANES; i += 4) {
        b[i] = _mm512_shuffle_ps(a[i], a[i + 2], 0x44);
        b[i + 1] = _mm512_shuffle_ps(a[i], a[i + 2], 0xee);
        b[i + 2] = _mm512_shuffle_ps(a[i + 1], a[i + 3], 0x44);
        b[i + 3] = _mm512_shuffle_ps(a[i + 1], a[i + 3], 0xee);
    }
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) {
        __m512 upper_even = _mm512_shuffle_f32x4(b[i], b[i + 4], 0x88),
               upper_odd = _mm512_shuffle_f32x4(b[i], b[i + 4], 0xdd);
        __m512 lower_even = _mm512_shuffle_f32x4(b[i + 8], b[i + 12], 0x88),
               lower_odd = _mm512_shuffle_f32x4(b[i + 8], b[i + 12], 0xdd);
        r[i].v = _mm512_shuffle_f32x4(upper_even, lower_even, 0x88);
        r[i + 8].v = _mm512_shuffle_f32x4(upper_even, lower_even, 0xdd);
        r[i + 4].v = _mm512_shuffle_f32x4(upper_odd, lower_odd, 0x88);
        r[i + 12].v = _mm512_shuffle_f32x4(upper_odd, lower_odd, 0xdd);
    }
}

// In the order that vec_avx.h says.
INLINE float sum_of_lanes(F x) {
    return sum_of_eight(_mm256_add_ps(_mm512_castps512_ps256(x.v), _mm512_extractf32x8_ps(x.v, 1)));
}
INLINE float largest_of_lanes(F x) {
    return largest_of_eight(_mm256_max_ps(_mm512_castps512_ps256(x.v), _mm512_extractf32x8_ps(x.v, 1)));
}
