// The words of `vec.h` in plain C++: what each of them means, and code for processors that have no file of their own.
#pragma once

enum { HAS_WIDE_REGISTERS = 0, HAS_PAIRS = 0 };

struct F { float lane[LANES]; };
struct I { int32_t lane[LANES]; };
#define OVER_LANES(TYPE, WHAT) ({ TYPE result; for (int i = 0; i < LANES; i++) result.lane[i] = WHAT; result; })

INLINE float float_of_bits(uint32_t bits) { float x; memcpy(&x, &bits, 4); return x; }
INLINE float wide(Float16 x) {
    uint32_t sign = (uint32_t)(x.bits & 0x8000) << 16, exponent = x.bits >> 10 & 31, fraction = x.bits & 1023;
    if (exponent == 31) return float_of_bits(sign | 0x7f800000 | fraction << 13);
    float size = exponent ? float_of_bits((exponent + 112) << 23 | fraction << 13) : (float)fraction * 5.9604644775390625e-8f;
    return sign ? -size : size;
}
INLINE Float16 half(float x) {  // to nearest, ties to even
    uint32_t bits; memcpy(&bits, &x, 4);
    uint16_t sign = bits >> 16 & 0x8000;
    uint32_t size = bits & 0x7fffffff;
    if (size > 0x7f800000) return {(uint16_t)(sign | 0x7e00)};
    if (size >= 0x477ff000) return {(uint16_t)(sign | 0x7c00)};
    if (size < 0x38800000) {  // a denormal number, in units of 2^-24: adding 0.5 rounds to them
        float sum = float_of_bits(size) + 0.5f;
        uint32_t units; memcpy(&units, &sum, 4);
        return {(uint16_t)(sign | (units - 0x3f000000))};
    }
    return {(uint16_t)(sign | (size - 0x38000000 + 0xfff + (size >> 13 & 1)) >> 13)};
}

INLINE F load(const float *p) { return OVER_LANES(F, p[i]); }
INLINE F load(const Float16 *p) { return OVER_LANES(F, wide(p[i])); }
INLINE I load(const int32_t *p) { return OVER_LANES(I, p[i]); }
INLINE void store(float *p, F x) { memcpy(p, &x, sizeof x); }
INLINE void store(Float16 *p, F x) { for (int i = 0; i < LANES; i++) p[i] = half(x.lane[i]); }
INLINE void store(int32_t *p, I x) { memcpy(p, &x, sizeof x); }
INLINE I widen(const Bfloat16 *p) { return OVER_LANES(I, p[i].bits); }
INLINE void narrow(Bfloat16 *p, I x) { for (int i = 0; i < LANES; i++) p[i].bits = (uint16_t)x.lane[i]; }
INLINE I widen(const int8_t *p) { return OVER_LANES(I, p[i]); }
INLINE void narrow(int8_t *p, I x) { for (int i = 0; i < LANES; i++) p[i] = (int8_t)x.lane[i]; }

INLINE F splat(float x) { return OVER_LANES(F, x); }
INLINE I splat(int32_t x) { return OVER_LANES(I, x); }
INLINE F splat_at(const float *p) { return splat(*p); }
INLINE I splat_at(const int8_t *p) { int32_t x; memcpy(&x, p, 4); return splat(x); }

INLINE F operator+(F a, F b) { return OVER_LANES(F, a.lane[i] + b.lane[i]); }
INLINE F operator-(F a, F b) { return OVER_LANES(F, a.lane[i] - b.lane[i]); }
INLINE F operator*(F a, F b) { return OVER_LANES(F, a.lane[i] * b.lane[i]); }
INLINE F operator/(F a, F b) { return OVER_LANES(F, a.lane[i] / b.lane[i]); }
INLINE F fma(F a, F b, F c) { return OVER_LANES(F, __builtin_fmaf(a.lane[i], b.lane[i], c.lane[i])); }
INLINE F max(F a, F b) { return OVER_LANES(F, a.lane[i] > b.lane[i] ? a.lane[i] : b.lane[i]); }  // b where one is NaN
INLINE F min(F a, F b) { return OVER_LANES(F, a.lane[i] < b.lane[i] ? a.lane[i] : b.lane[i]); }
INLINE F rounded(F x) { return OVER_LANES(F, __builtin_rintf(x.lane[i])); }  // to nearest, ties to even
INLINE F where_less(F a, F b, F then, F otherwise) { return OVER_LANES(F, a.lane[i] < b.lane[i] ? then.lane[i] : otherwise.lane[i]); }
INLINE F where_nan(F x, F then, F otherwise) { return OVER_LANES(F, x.lane[i] != x.lane[i] ? then.lane[i] : otherwise.lane[i]); }

INLINE I operator+(I a, I b) { return OVER_LANES(I, (int32_t)((uint32_t)a.lane[i] + (uint32_t)b.lane[i])); }
INLINE I operator-(I a, I b) { return OVER_LANES(I, (int32_t)((uint32_t)a.lane[i] - (uint32_t)b.lane[i])); }
INLINE I operator&(I a, I b) { return OVER_LANES(I, a.lane[i] & b.lane[i]); }
INLINE I larger_unsigned(I a, I b) { return OVER_LANES(I, (uint32_t)a.lane[i] > (uint32_t)b.lane[i] ? a.lane[i] : b.lane[i]); }
template <int BITS> INLINE I shift_left(I x) { return OVER_LANES(I, (int32_t)((uint32_t)x.lane[i] << BITS)); }
template <int BITS> INLINE I shift_right(I x) { return OVER_LANES(I, (int32_t)((uint32_t)x.lane[i] >> BITS)); }
INLINE I lanes_from(int32_t first) { return OVER_LANES(I, first + i); }
INLINE F where_within(I x, I start, I end, F then, F otherwise) {  // start <= x < end
    return OVER_LANES(F, start.lane[i] <= x.lane[i] && x.lane[i] < end.lane[i] ? then.lane[i] : otherwise.lane[i]);
}

INLINE I bits_of(F x) { I y; memcpy(&y, &x, sizeof y); return y; }
INLINE F float_of(I x) { F y; memcpy(&y, &x, sizeof y); return y; }
INLINE I to_int(F x) {  // of whole numbers; of what none is, as x86 does
    return OVER_LANES(I, x.lane[i] >= -2147483648.0f && x.lane[i] < 2147483648.0f ? (int32_t)x.lane[i] : INT32_MIN);
}
INLINE F to_float(I x) { return OVER_LANES(F, (float)x.lane[i]); }

// The integers that the lowest four bits of each lane stand for, 0 .. 15, and so much more.
INLINE F of_four_bits(I x, float least) { return OVER_LANES(F, (float)(x.lane[i] & 15) + least); }

// sums + in each lane four products of an unsigned byte of `weights` and a signed one of `inputs`, exact.
INLINE I dot_bytes(I sums, I weights, I inputs) {
    for (int i = 0; i < LANES; i++)
        for (int shift = 0; shift < 32; shift += 8)
            sums.lane[i] += (int32_t)((uint32_t)weights.lane[i] >> shift & 255) * (int8_t)((uint32_t)inputs.lane[i] >> shift);
    return sums;
}
INLINE F dot_pairs(F, F, F sums) { return sums; }  // never called: there are no pairs

// 16 vectors become their columns.
INLINE void transpose(F r[LANES]) {
    for (int i = 0; i < LANES; i++)
        for (int j = 0; j < i; j++) {
            float x = r[i].lane[j];
            r[i].lane[j] = r[j].lane[i], r[j].lane[i] = x;
        }
}
