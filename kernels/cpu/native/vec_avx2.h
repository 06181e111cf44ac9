// The words of `vec.h` for AVX2 with FMA and F16C: two registers of 8 numbers are one vector.
#pragma once
#include "vec_avx.h"

enum { HAS_WIDE_REGISTERS = 0, HAS_PAIRS = 0 };

struct F {
    __m256 a, b;
};
struct I {
    __m256i a, b;
};

INLINE F load(const float *p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
INLINE __m256 load_eight(const Bfloat16 *p) {  // the upper halves of float32
    const __m256i places = _mm256_setr_epi8(-1, -1, 0, 1, -1, -1, 2, 3, -1, -1, 4, 5, -1, -1, 6, 7,  //
                                            -1, -1, 8, 9, -1, -1, 10, 11, -1, -1, 12, 13, -1, -1, 14, 15);
    __m256i twice = _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i *)p));
    return _mm256_castsi256_ps(_mm256_shuffle_epi8(twice, places));
}
INLINE F load(const Bfloat16 *p) { return {load_eight(p), load_eight(p + 8)}; }
INLINE F load(const Float16 *p) {
    return {_mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)p)),
            _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)p + 1))};
}
INLINE F load(const E4m3 *p) {
    __m256i words = halves_of(p);
    return {_mm256_cvtph_ps(_mm256_castsi256_si128(words)), _mm256_cvtph_ps(_mm256_extracti128_si256(words, 1))};
}
INLINE I load(const int32_t *p) {
    return {_mm256_loadu_si256((const __m256i *)p), _mm256_loadu_si256((const __m256i *)p + 1)};
}
INLINE void store(float *p, F x) { _mm256_storeu_ps(p, x.a), _mm256_storeu_ps(p + 8, x.b); }
INLINE void store(Float16 *p, F x) {
    _mm_storeu_si128((__m128i *)p, _mm256_cvtps_ph(x.a, 0)),
        _mm_storeu_si128((__m128i *)p + 1, _mm256_cvtps_ph(x.b, 0));
}
INLINE void store(int32_t *p, I x) {
    _mm256_storeu_si256((__m256i *)p, x.a), _mm256_storeu_si256((__m256i *)p + 1, x.b);
}
INLINE I widen(const Bfloat16 *p) {
    return {_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)p)),
            _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)p + 1))};
}
INLINE void narrow(Bfloat16 *p, I x) {  // of numbers below 2^16
    __m256i words = _mm256_permute4x64_epi64(_mm256_packus_epi32(_mm256_and_si256(x.a, _mm256_set1_epi32(0xffff)),
                                                                 _mm256_and_si256(x.b, _mm256_set1_epi32(0xffff))),
                                             0xd8);
    _mm256_storeu_si256((__m256i *)p, words);
}
INLINE I widen(const int8_t *p) {  // by way of the highest byte of each lane
    const __m256i low = _mm256_setr_epi32(0x00ffffff, 0x01ffffff, 0x02ffffff, 0x03ffffff,  //
                                          0x04ffffff, 0x05ffffff, 0x06ffffff, 0x07ffffff);
    const __m256i eight = _mm256_set1_epi32(0x08000000);
    __m256i twice = _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i *)p));
    return {_mm256_srai_epi32(_mm256_shuffle_epi8(twice, low), 24),
            _mm256_srai_epi32(_mm256_shuffle_epi8(twice, _mm256_add_epi32(low, eight)), 24)};
}

// The lowest byte of each lane; of eight in a row first those of even number, then those of odd.
INLINE void store_quads(int8_t *p, I x) {
    const __m256i even_then_odd = _mm256_set1_epi32(0x0c040800);  // of a half of eight: 0, 2, 1, 3
    __m256i low = _mm256_shuffle_epi8(x.a, even_then_odd), high = _mm256_shuffle_epi8(x.b, even_then_odd);
    __m128i eight = _mm_unpacklo_epi16(_mm256_castsi256_si128(low), _mm256_extracti128_si256(low, 1));
    __m128i others = _mm_unpacklo_epi16(_mm256_castsi256_si128(high), _mm256_extracti128_si256(high, 1));
    _mm_storeu_si128((__m128i *)p, _mm_unpacklo_epi64(eight, others));
}

INLINE F splat(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
INLINE I splat(int32_t x) { return {_mm256_set1_epi32(x), _mm256_set1_epi32(x)}; }
INLINE F splat_at(const float *p) { return splat(*p); }
INLINE I splat_at(const int8_t *p) {
    int32_t x;
    memcpy(&x, p, 4);
    return splat(x);
}

// A compiler computes what these need before them, and the rest after: else it makes many products first, for which
// there are no registers.
INLINE __m256i in_turn(__m256i sums) {
    asm("" : "+x"(sums));
    return sums;
}
INLINE F in_turn(F sums) {
    asm volatile("" : "+x"(sums.a), "+x"(sums.b));
    return sums;
}

INLINE F operator+(F x, F y) { return {_mm256_add_ps(x.a, y.a), _mm256_add_ps(x.b, y.b)}; }
INLINE F operator-(F x, F y) { return {_mm256_sub_ps(x.a, y.a), _mm256_sub_ps(x.b, y.b)}; }
INLINE F operator*(F x, F y) { return {_mm256_mul_ps(x.a, y.a), _mm256_mul_ps(x.b, y.b)}; }
INLINE F operator/(F x, F y) { return {_mm256_div_ps(x.a, y.a), _mm256_div_ps(x.b, y.b)}; }
INLINE F fma(F x, F y, F z) { return {_mm256_fmadd_ps(x.a, y.a, z.a), _mm256_fmadd_ps(x.b, y.b, z.b)}; }
INLINE F max(F x, F y) {
    return {_mm256_max_ps(x.a, y.a), _mm256_max_ps(x.b, y.b)};
}  // y where one is NaN; likewise min
INLINE F min(F x, F y) { return {_mm256_min_ps(x.a, y.a), _mm256_min_ps(x.b, y.b)}; }
INLINE F rounded(F x) { return {_mm256_round_ps(x.a, 8), _mm256_round_ps(x.b, 8)}; }  // to nearest, ties to even
INLINE F where_less(F x, F y, F then, F otherwise) {
    return {_mm256_blendv_ps(otherwise.a, then.a, _mm256_cmp_ps(x.a, y.a, _CMP_LT_OQ)),
            _mm256_blendv_ps(otherwise.b, then.b, _mm256_cmp_ps(x.b, y.b, _CMP_LT_OQ))};
}
INLINE F where_nan(F x, F then, F otherwise) {
    return {_mm256_blendv_ps(otherwise.a, then.a, _mm256_cmp_ps(x.a, x.a, _CMP_UNORD_Q)),
            _mm256_blendv_ps(otherwise.b, then.b, _mm256_cmp_ps(x.b, x.b, _CMP_UNORD_Q))};
}

INLINE I operator+(I x, I y) { return {_mm256_add_epi32(x.a, y.a), _mm256_add_epi32(x.b, y.b)}; }
INLINE I operator-(I x, I y) { return {_mm256_sub_epi32(x.a, y.a), _mm256_sub_epi32(x.b, y.b)}; }
INLINE I operator&(I x, I y) { return {_mm256_and_si256(x.a, y.a), _mm256_and_si256(x.b, y.b)}; }
INLINE I choose_bits(I mask, I x, I y) {  // x where 1
    return {_mm256_or_si256(_mm256_and_si256(mask.a, x.a), _mm256_andnot_si256(mask.a, y.a)),
            _mm256_or_si256(_mm256_and_si256(mask.b, x.b), _mm256_andnot_si256(mask.b, y.b))};
}
INLINE I larger_unsigned(I x, I y) { return {_mm256_max_epu32(x.a, y.a), _mm256_max_epu32(x.b, y.b)}; }
INLINE int32_t sum_of_lanes(I x) {
    __m256i eight = _mm256_add_epi32(x.a, x.b);
    __m128i four = _mm_add_epi32(_mm256_castsi256_si128(eight), _mm256_extracti128_si256(eight, 1));
    four = _mm_add_epi32(four, _mm_shuffle_epi32(four, 0x4e));
    return _mm_cvtsi128_si32(_mm_add_epi32(four, _mm_shuffle_epi32(four, 0xb1)));
}
INLINE int32_t largest_of_lanes(I x) {
    __m256i eight = _mm256_max_epi32(x.a, x.b);
    __m128i four = _mm_max_epi32(_mm256_castsi256_si128(eight), _mm256_extracti128_si256(eight, 1));
    four = _mm_max_epi32(four, _mm_shuffle_epi32(four, 0x4e));
    return _mm_cvtsi128_si32(_mm_max_epi32(four, _mm_shuffle_epi32(four, 0xb1)));
}
template <int BITS>
INLINE I shift_left(I x) {
    return {_mm256_slli_epi32(x.a, BITS), _mm256_slli_epi32(x.b, BITS)};
}
template <int BITS>
INLINE I shift_right(I x) {
    return {_mm256_srli_epi32(x.a, BITS), _mm256_srli_epi32(x.b, BITS)};
}
INLINE I lanes_from(int32_t first) {
    __m256i low = _mm256_set_epi32(7, 6, 5, 4, 3, 2, 1, 0), start = _mm256_set1_epi32(first);
    return {_mm256_add_epi32(low, start), _mm256_add_epi32(_mm256_add_epi32(low, _mm256_set1_epi32(8)), start)};
}
INLINE __m256 is_within(__m256i x, __m256i start, __m256i end) {
    return _mm256_castsi256_ps(_mm256_andnot_si256(_mm256_cmpgt_epi32(start, x), _mm256_cmpgt_epi32(end, x)));
}
INLINE F where_within(I x, I start, I end, F then, F otherwise) {  // start <= x < end
    return {_mm256_blendv_ps(otherwise.a, then.a, is_within(x.a, start.a, end.a)),
            _mm256_blendv_ps(otherwise.b, then.b, is_within(x.b, start.b, end.b))};
}

INLINE I bits_of(F x) { return {_mm256_castps_si256(x.a), _mm256_castps_si256(x.b)}; }
INLINE F float_of(I x) { return {_mm256_castsi256_ps(x.a), _mm256_castsi256_ps(x.b)}; }
INLINE I to_int(F x) { return {_mm256_cvttps_epi32(x.a), _mm256_cvttps_epi32(x.b)}; }  // of whole numbers
INLINE F to_float(I x) { return {_mm256_cvtepi32_ps(x.a), _mm256_cvtepi32_ps(x.b)}; }

// Sixteen integers of eight bits, and what bits 4 INDEX .. 4 INDEX + 3 of each lane choose of them.
struct Sixteen {
    __m256i v;  // twice
};
INLINE Sixteen sixteen(const int8_t *p) { return {_mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i *)p))}; }
template <int INDEX>
INLINE __m256 chosen(__m256i x, __m256i table) {  // bytes are looked up together, those of four indices
    __m256i fours = _mm256_and_si256(INDEX % 2 ? _mm256_srli_epi32(x, 4) : x, _mm256_set1_epi8(15));
    __m256i upper = _mm256_slli_epi32(_mm256_shuffle_epi8(table, fours), 24 - INDEX / 2 * 8);
    return _mm256_cvtepi32_ps(_mm256_srai_epi32(upper, 24));
}
template <int INDEX>
INLINE F chosen(I x, Sixteen table) {
    return {chosen<INDEX>(x.a, table.v), chosen<INDEX>(x.b, table.v)};
}

// sums + in each lane four products of an unsigned byte of `weights` and a signed one of `inputs`, exact; of small ones
// below 128.
#ifdef __AVXVNNI__
enum { HAS_BYTE_PRODUCTS = 1 };
struct Quad {
    I bytes;
};
INLINE Quad quad_at(const int8_t *bytes, const int16_t *) { return {splat_at(bytes)}; }
INLINE I dot_small_bytes(I sums, I weights, I inputs) {
    return {_mm256_dpbusd_avx_epi32(sums.a, weights.a, inputs.a), _mm256_dpbusd_avx_epi32(sums.b, weights.b, inputs.b)};
}
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
INLINE __m256i dot_small_bytes(__m256i sums, __m256i weights, __m256i inputs) {  // two products fit a word
    __m256i pairs = _mm256_maddubs_epi16(weights, inputs);
    return in_turn(_mm256_add_epi32(sums, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1))));
}
INLINE I dot_small_bytes(I sums, I weights, I inputs) {
    return {dot_small_bytes(sums.a, weights.a, inputs.a), dot_small_bytes(sums.b, weights.b, inputs.b)};
}
// Of bytes below 16 eight such sums fit words, and become four products a lane once.
INLINE I add_as_words(I words, I weights, I inputs) {
    return {in_turn(_mm256_add_epi16(words.a, _mm256_maddubs_epi16(weights.a, inputs.a))),
            in_turn(_mm256_add_epi16(words.b, _mm256_maddubs_epi16(weights.b, inputs.b)))};
}
INLINE I sums_of_words(I words) {
    return {_mm256_madd_epi16(words.a, _mm256_set1_epi16(1)), _mm256_madd_epi16(words.b, _mm256_set1_epi16(1))};
}
INLINE __m256i dot_bytes(__m256i sums, __m256i weights, __m256i even, __m256i odd) {
    __m256i of_even = _mm256_madd_epi16(_mm256_and_si256(weights, _mm256_set1_epi16(255)), even);
    __m256i of_odd = _mm256_madd_epi16(_mm256_srli_epi16(weights, 8), odd);
    return in_turn(_mm256_add_epi32(sums, _mm256_add_epi32(of_even, of_odd)));
}
INLINE I dot_bytes(I sums, I weights, Quad inputs) {
    return {dot_bytes(sums.a, weights.a, inputs.even.a, inputs.odd.a),
            dot_bytes(sums.b, weights.b, inputs.even.b, inputs.odd.b)};
}
#endif
INLINE F dot_pairs(F, F, F sums) { return sums; }  // never called: there are no pairs

INLINE void transpose_eight(__m256 r[8]) {
    __m256 a[8], b[8];
#pragma GCC unroll 4
    for (int i = 0; i < 8; i += 2)
        a[i] = _mm256_unpacklo_ps(r[i], r[i + 1]), a[i + 1] = _mm256_unpackhi_ps(r[i], r[i + 1]);
#pragma GCC unroll 2
    for (int i = 0; i < 8; i += 4) {
        b[i] = _mm256_shuffle_ps(a[i], a[i + 2], 0x44), b[i + 1] = _mm256_shuffle_ps(a[i], a[i + 2], 0xee);
        b[i + 2] = _mm256_shuffle_ps(a[i + 1], a[i + 3], 0x44), b[i + 3] = _mm256_shuffle_ps(a[i + 1], a[i + 3], 0xee);
    }
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) {
        r[i] = _mm256_permute2f128_ps(b[i], b[i + 4], 0x20);
        r[i + 4] = _mm256_permute2f128_ps(b[i], b[i + 4], 0x31);
    }
}
// 16 vectors become their columns: four blocks of 8 by 8, two at a time, for which there are registers.
INLINE void transpose(F r[LANES]) {
    __m256 low_left[8], top_right[8], top_left[8], low_right[8];
#pragma GCC unroll 8
    for (int i = 0; i < 8; i++) low_left[i] = r[8 + i].a, top_right[i] = r[i].b;
    transpose_eight(low_left), transpose_eight(top_right);
#pragma GCC unroll 8
    for (int i = 0; i < 8; i++) r[i].b = low_left[i], r[8 + i].a = top_right[i];
#pragma GCC unroll 8
    for (int i = 0; i < 8; i++) top_left[i] = r[i].a, low_right[i] = r[8 + i].b;
    transpose_eight(top_left), transpose_eight(low_right);
#pragma GCC unroll 8
    for (int i = 0; i < 8; i++) r[i].a = top_left[i], r[8 + i].b = low_right[i];
}

// In the order that vec_avx.h says.
INLINE float sum_of_lanes(F x) { return sum_of_eight(_mm256_add_ps(x.a, x.b)); }
INLINE float largest_of_lanes(F x) { return largest_of_eight(_mm256_max_ps(x.a, x.b)); }
