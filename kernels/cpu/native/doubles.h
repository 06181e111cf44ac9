// Vectors of 8 numbers of float64, for sums over a vocabulary, which float32 would round too much.
//
// The same words as in `vec.h`, for every kind of processor here: one AVX-512 register, two of AVX2, or the compiler's
// own vectors. Sums are fused where `fma` says so and functions are made of these words alone, not of libm, whose last
// bits differ from machine to machine: results have the same bits everywhere.
#pragma once
#include "vec.h"

const i64 DOUBLES = 8;

#if defined(__AVX512F__)
struct D {
    __m512d v;
};
INLINE D load(const double *p) { return {_mm512_loadu_pd(p)}; }
INLINE void store(double *p, D x) { _mm512_storeu_pd(p, x.v); }
INLINE D doubles_of(const float *p) { return {_mm512_cvtps_pd(_mm256_loadu_ps(p))}; }
INLINE void store_whole(int32_t *p, D x) { _mm256_storeu_si256((__m256i *)p, _mm512_cvttpd_epi32(x.v)); }
INLINE D splat(double x) { return {_mm512_set1_pd(x)}; }
INLINE D operator+(D a, D b) { return {_mm512_add_pd(a.v, b.v)}; }
INLINE D operator-(D a, D b) { return {_mm512_sub_pd(a.v, b.v)}; }
INLINE D operator*(D a, D b) { return {_mm512_mul_pd(a.v, b.v)}; }
INLINE D fma(D a, D b, D c) { return {_mm512_fmadd_pd(a.v, b.v, c.v)}; }
INLINE D max(D a, D b) { return {_mm512_max_pd(a.v, b.v)}; }  // b where one is NaN; likewise min
INLINE D min(D a, D b) { return {_mm512_min_pd(a.v, b.v)}; }
INLINE D where_at_least(D a, D b, D then, D otherwise) {
    return {_mm512_mask_blend_pd(_mm512_cmp_pd_mask(a.v, b.v, _CMP_GE_OQ), otherwise.v, then.v)};
}
// 2^n of the integer that the lowest bits of x are.
INLINE D power_of_low_bits(D x) {
    __m512i exponent = _mm512_add_epi64(_mm512_castpd_si512(x.v), _mm512_set1_epi64(1023));
    return {_mm512_castsi512_pd(_mm512_slli_epi64(exponent, 52))};
}
#elif defined(__AVX2__)
struct D {
    __m256d a, b;
};
INLINE D load(const double *p) { return {_mm256_loadu_pd(p), _mm256_loadu_pd(p + 4)}; }
INLINE void store(double *p, D x) { _mm256_storeu_pd(p, x.a), _mm256_storeu_pd(p + 4, x.b); }
INLINE D doubles_of(const float *p) { return {_mm256_cvtps_pd(_mm_loadu_ps(p)), _mm256_cvtps_pd(_mm_loadu_ps(p + 4))}; }
INLINE void store_whole(int32_t *p, D x) {
    _mm_storeu_si128((__m128i *)p, _mm256_cvttpd_epi32(x.a));
    _mm_storeu_si128((__m128i *)p + 1, _mm256_cvttpd_epi32(x.b));
}
INLINE D splat(double x) { return {_mm256_set1_pd(x), _mm256_set1_pd(x)}; }
INLINE D operator+(D x, D y) { return {_mm256_add_pd(x.a, y.a), _mm256_add_pd(x.b, y.b)}; }
INLINE D operator-(D x, D y) { return {_mm256_sub_pd(x.a, y.a), _mm256_sub_pd(x.b, y.b)}; }
INLINE D operator*(D x, D y) { return {_mm256_mul_pd(x.a, y.a), _mm256_mul_pd(x.b, y.b)}; }
INLINE D fma(D x, D y, D z) { return {_mm256_fmadd_pd(x.a, y.a, z.a), _mm256_fmadd_pd(x.b, y.b, z.b)}; }
INLINE D max(D x, D y) { return {_mm256_max_pd(x.a, y.a), _mm256_max_pd(x.b, y.b)}; }
INLINE D min(D x, D y) { return {_mm256_min_pd(x.a, y.a), _mm256_min_pd(x.b, y.b)}; }
INLINE D where_at_least(D x, D y, D then, D otherwise) {
    return {_mm256_blendv_pd(otherwise.a, then.a, _mm256_cmp_pd(x.a, y.a, _CMP_GE_OQ)),
            _mm256_blendv_pd(otherwise.b, then.b, _mm256_cmp_pd(x.b, y.b, _CMP_GE_OQ))};
}
INLINE __m256d power_of_low_bits(__m256d x) {
    __m256i exponent = _mm256_add_epi64(_mm256_castpd_si256(x), _mm256_set1_epi64x(1023));
    return _mm256_castsi256_pd(_mm256_slli_epi64(exponent, 52));
}
INLINE D power_of_low_bits(D x) { return {power_of_low_bits(x.a), power_of_low_bits(x.b)}; }
#else
typedef double Doubles __attribute__((vector_size(64)));
typedef uint64_t Longs __attribute__((vector_size(64)));
struct D {
    Doubles v;
};
INLINE D load(const double *p) {
    D x;
    memcpy(&x, p, sizeof x);
    return x;
}
INLINE void store(double *p, D x) { memcpy(p, &x, sizeof x); }
static D doubles_of(const float *p) {
    D x;
    for (int i = 0; i < DOUBLES; i++) x.v[i] = p[i];
    return x;
}
static void store_whole(int32_t *p, D x) {
    for (int i = 0; i < DOUBLES; i++) p[i] = (int32_t)x.v[i];
}
INLINE D splat(double x) { return {x - Doubles{}}; }
INLINE D operator+(D a, D b) { return {a.v + b.v}; }
INLINE D operator-(D a, D b) { return {a.v - b.v}; }
INLINE D operator*(D a, D b) { return {a.v * b.v}; }
static D fma(D a, D b, D c) {
    for (int i = 0; i < DOUBLES; i++) c.v[i] = __builtin_fma(a.v[i], b.v[i], c.v[i]);
    return c;
}
INLINE D max(D a, D b) { return {a.v > b.v ? a.v : b.v}; }
INLINE D min(D a, D b) { return {a.v < b.v ? a.v : b.v}; }
INLINE D where_at_least(D a, D b, D then, D otherwise) { return {a.v >= b.v ? then.v : otherwise.v}; }
INLINE D power_of_low_bits(D x) { return {(Doubles)(((Longs)x.v + 1023) << 52)}; }
#endif

// e^x for x <= 0 within 2 ulp, 0 below -708 and of NaN: the Taylor series to the 13th term around the nearest n ln 2.
// Half of ln 2 to the 14th, over 14!, is below 2^-57.
INLINE D exp_of(D x) {
    const D lowest = splat(-708.0);
    const D rounder = splat(6755399441055744.0);  // 1.5 * 2^52: adding it leaves the nearest integer in the low bits
    D inside = max(x, lowest);
    D shifted = fma(inside, splat(1.4426950408889634), rounder), n = shifted - rounder;
    D r = fma(n, splat(-0.693147180369123816490), inside);  // the upper 32 bits of ln 2, so that the product is exact
    r = fma(n, splat(-1.90821492927058770002e-10), r);
    D p = splat(1.6059043836821613e-10);  // 1 / 13!
    p = fma(p, r, splat(2.08767569878681e-09));
    p = fma(p, r, splat(2.505210838544172e-08));
    p = fma(p, r, splat(2.755731922398589e-07));
    p = fma(p, r, splat(2.7557319223985893e-06));
    p = fma(p, r, splat(2.48015873015873e-05));
    p = fma(p, r, splat(0.0001984126984126984));
    p = fma(p, r, splat(0.001388888888888889));
    p = fma(p, r, splat(0.008333333333333333));
    p = fma(p, r, splat(0.041666666666666664));
    p = fma(p, r, splat(0.16666666666666666));
    p = fma(p, r, splat(0.5));
    D power = (fma(p * r, r, r) + splat(1.0)) * power_of_low_bits(shifted);
    return where_at_least(x, lowest, power, splat(0.0));
}
INLINE double exp_of(double x) {
    double lanes[DOUBLES];
    store(lanes, exp_of(splat(x)));
    return lanes[0];
}

// ln x within 2 ulp for normal x > 0: x = 2^n m, m from sqrt(1/2) to sqrt(2), ln m = 2 (s + s^3/3 + ... + s^21/21) with
// s = (m - 1) / (m + 1).
INLINE double log_of(double x) {
    const i64 ROOT_OF_HALF = 0x3fe6a09e667f3bcd;  // its bits
    i64 bits;
    memcpy(&bits, &x, sizeof bits);
    i64 n = (bits - ROOT_OF_HALF) >> 52;
    bits -= (i64)((uint64_t)n << 52);
    double m;
    memcpy(&m, &bits, sizeof m);
    double s = (m - 1) / (m + 1), square = s * s, series = 0;
    for (int k = 21; k >= 3; k -= 2) series = (series + 2.0 / k) * square;
    double small = s * series + (double)n * 1.90821492927058770002e-10;
    return (double)n * 0.693147180369123816490 + (2 * s + small);
}
