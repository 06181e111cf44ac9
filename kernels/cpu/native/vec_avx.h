// What `vec_avx2.h` and `vec_avx512.h` have in common.
#pragma once
#include <immintrin.h>

// 16 numbers of eight bits as float16 of the same sign, exponent and mantissa, which are 256th of them.
INLINE __m256i halves_of(const E4m3 *p) {
    __m256i words = _mm256_slli_epi16(_mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i *)p)), 7);
    return _mm256_and_si256(words, _mm256_set1_epi16((int16_t)0xbf80));
}

// Of 16 lanes their sum or the largest is in one order: lane i with i + 8, then with i + 4, i + 2 and i + 1. These are
// the last three.
INLINE float sum_of_eight(__m256 x) {
    __m128 four = _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
    __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
}
INLINE float largest_of_eight(__m256 x) {
    __m128 four = _mm_max_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
    __m128 two = _mm_max_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_max_ss(two, _mm_movehdup_ps(two)));
}
