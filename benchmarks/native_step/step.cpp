// All layers of a Llama-like model in one call: what `kernels.cpu.layers` does, in C++ with intrinsics.
//
// Weights lie in panels of 16 outputs, of each a line of 64 bytes after the other:
//   float32  [panel][in][16]        bfloat16  [panel][in / 2][16][2]        int8 + 128  [panel][in / 4][16][4]
// A tile is ROWS rows of x by 2 panels in registers. Each output is one chain of sums in the order of the inputs, so a
// row's numbers depend on nothing but that row. gate and up take turns, panel by panel.
#include <immintrin.h>
#include <pthread.h>
#include <sched.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <math.h>

typedef __m512 V;
enum Kind { FLOAT32 = 0, BFLOAT16_WEIGHT = 1, BFLOAT16 = 2, INT8 = 3 };
enum { LANES = 16, GROUP = 32, KEYS = 64 };

struct Product {
    int64_t kind, num_in, num_out;
    const void *weight;
    const float *scale;
};
struct Layer {
    const float *input_norm, *mlp_norm;
    float *key_cache, *value_cache;
    Product qkv, out, mlp_in, mlp_out;
};
struct Step {
    int64_t rows, num_sequences, num_layers, hidden, intermediate, num_heads, num_kv_heads, head_size, block_size;
    int64_t max_blocks;
    const int64_t *positions, *slots;
    const int32_t *block_tables, *seq_lens, *query_starts;
    const float *cos_sin;  // [positions][head_size]: cosines, then sines
    float *residual;       // [rows][hidden]
    double eps;
};

// ---- threads: a team goes through phases together; items of a phase are dealt out one by one -------------------------
struct alignas(64) Counter { int64_t next; char pad[56]; int64_t done; };
struct Team { int threads; Counter *counters; };

static inline int64_t take(Team &team, int64_t phase) {
    return __atomic_fetch_add(&team.counters[phase].next, 1, __ATOMIC_RELAXED);
}
static inline void meet(Team &team, int64_t phase) {
    int64_t *done = &team.counters[phase].done;
    if (__atomic_add_fetch(done, 1, __ATOMIC_ACQ_REL) == team.threads) return;
    for (int64_t spins = 0; __atomic_load_n(done, __ATOMIC_ACQUIRE) < team.threads; spins++) {
        if (spins < 20000) _mm_pause(); else sched_yield();
    }
}

// ---- products ----------------------------------------------------------------------------------------------------------
template <int ROWS> struct Floats {  // x float32, weights float32
    static inline void multiply(const float *x, int64_t stride, const char *w, int64_t panel_bytes, int64_t depth, V acc[ROWS][2]) {
        for (int64_t k = 0; k < depth; k++, w += 64) {
            V w0 = _mm512_loadu_ps(w), w1 = _mm512_loadu_ps(w + panel_bytes);
            if (ROWS == 1) { _mm_prefetch(w + 2048, _MM_HINT_T0); _mm_prefetch(w + panel_bytes + 2048, _MM_HINT_T0); }
#pragma GCC unroll 12
            for (int r = 0; r < ROWS; r++) {
                V b = _mm512_set1_ps(x[r * stride + k]);
                acc[r][0] = _mm512_fmadd_ps(b, w0, acc[r][0]);
                acc[r][1] = _mm512_fmadd_ps(b, w1, acc[r][1]);
            }
        }
    }
};
static inline V low(__m512i w) { return _mm512_castsi512_ps(_mm512_slli_epi32(w, 16)); }
static inline V high(__m512i w) { return _mm512_castsi512_ps(_mm512_and_si512(w, _mm512_set1_epi32((int)0xffff0000))); }
template <int ROWS> struct WideFloats {  // x float32, weights bfloat16
    static inline void multiply(const float *x, int64_t stride, const char *w, int64_t panel_bytes, int64_t depth, V acc[ROWS][2]) {
        for (int64_t k = 0; k < depth; k += 2, w += 64) {
            __m512i w0 = _mm512_loadu_si512(w), w1 = _mm512_loadu_si512(w + panel_bytes);
            if (ROWS == 1) { _mm_prefetch(w + 2048, _MM_HINT_T0); _mm_prefetch(w + panel_bytes + 2048, _MM_HINT_T0); }
            V a0 = low(w0), a1 = low(w1);
#pragma GCC unroll 12
            for (int r = 0; r < ROWS; r++) {
                V b = _mm512_set1_ps(x[r * stride + k]);
                acc[r][0] = _mm512_fmadd_ps(b, a0, acc[r][0]);
                acc[r][1] = _mm512_fmadd_ps(b, a1, acc[r][1]);
            }
            a0 = high(w0), a1 = high(w1);
#pragma GCC unroll 12
            for (int r = 0; r < ROWS; r++) {
                V b = _mm512_set1_ps(x[r * stride + k + 1]);
                acc[r][0] = _mm512_fmadd_ps(b, a0, acc[r][0]);
                acc[r][1] = _mm512_fmadd_ps(b, a1, acc[r][1]);
            }
        }
    }
};
template <int ROWS> struct Pairs {  // x bfloat16, weights bfloat16
    static inline void multiply(const uint16_t *x, int64_t stride, const char *w, int64_t panel_bytes, int64_t depth, V acc[ROWS][2]) {
        for (int64_t k = 0; k < depth; k += 2, w += 64) {
            __m512bh w0 = (__m512bh)_mm512_loadu_ps(w), w1 = (__m512bh)_mm512_loadu_ps(w + panel_bytes);
            if (ROWS == 1) { _mm_prefetch(w + 2048, _MM_HINT_T0); _mm_prefetch(w + panel_bytes + 2048, _MM_HINT_T0); }
#pragma GCC unroll 12
            for (int r = 0; r < ROWS; r++) {
                int32_t pair; memcpy(&pair, x + r * stride + k, 4);
                __m512bh b = (__m512bh)_mm512_set1_epi32(pair);
                acc[r][0] = _mm512_dpbf16_ps(acc[r][0], b, w0);
                acc[r][1] = _mm512_dpbf16_ps(acc[r][1], b, w1);
            }
        }
    }
};
// Rows of int8 in groups of 32 inputs: the numbers, then a scale and -128 times their sum a group.
struct Group { int8_t numbers[GROUP]; float scale; int32_t start; };
template <int ROWS> struct Bytes {
    static inline void multiply(const Group *x, int64_t stride, const char *w, int64_t panel_bytes, int64_t depth, V acc[ROWS][2]) {
        for (int64_t g = 0; g < depth / GROUP; g++) {
            __m512i sums[ROWS][2];
#pragma GCC unroll 12
            for (int r = 0; r < ROWS; r++) sums[r][0] = sums[r][1] = _mm512_set1_epi32(x[r * stride + g].start);
            if (ROWS == 1) for (int i = 0; i < 8; i++) {
                _mm_prefetch(w + 2048 + 64 * i, _MM_HINT_T0); _mm_prefetch(w + panel_bytes + 2048 + 64 * i, _MM_HINT_T0);
            }
#pragma GCC unroll 8
            for (int q = 0; q < GROUP / 4; q++, w += 64) {
                __m512i w0 = _mm512_loadu_si512(w), w1 = _mm512_loadu_si512(w + panel_bytes);
#pragma GCC unroll 12
                for (int r = 0; r < ROWS; r++) {
                    int32_t quad; memcpy(&quad, x[r * stride + g].numbers + 4 * q, 4);
                    __m512i b = _mm512_set1_epi32(quad);
                    sums[r][0] = _mm512_dpbusd_epi32(sums[r][0], w0, b);
                    sums[r][1] = _mm512_dpbusd_epi32(sums[r][1], w1, b);
                }
            }
#pragma GCC unroll 12
            for (int r = 0; r < ROWS; r++) {
                V scale = _mm512_set1_ps(x[r * stride + g].scale);
                acc[r][0] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(sums[r][0]), scale, acc[r][0]);
                acc[r][1] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(sums[r][1]), scale, acc[r][1]);
            }
        }
    }
};

static inline V exp_ps(V x) {
    x = _mm512_max_ps(x, _mm512_set1_ps(-87.0f));
    V n = _mm512_roundscale_ps(_mm512_mul_ps(x, _mm512_set1_ps(1.44269504f)), 0);
    V r = _mm512_fnmadd_ps(n, _mm512_set1_ps(0.693359375f), x);
    r = _mm512_fnmadd_ps(n, _mm512_set1_ps(-2.12194440e-4f), r);
    V p = _mm512_set1_ps(1.9875691500e-4f);
    const float c[] = {1.3981999507e-3f, 8.3334519073e-3f, 4.1665795894e-2f, 1.6666665459e-1f, 5.0000001201e-1f};
    for (float each : c) p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(each));
    p = _mm512_add_ps(_mm512_fmadd_ps(p, _mm512_mul_ps(r, r), r), _mm512_set1_ps(1.0f));
    return _mm512_scalef_ps(p, n);
}

enum Into { STORE, ADD, GATE };  // what becomes of a product: a row of its own, added to the residual, silu(gate) * up

template <class Tile, int ROWS, class X>
static inline void tile(const Product &p, const X *x, int64_t x_stride, int64_t panel, float *out, int64_t out_stride, Into into) {
    V acc[ROWS][2];
#pragma GCC unroll 12
    for (int r = 0; r < ROWS; r++) acc[r][0] = acc[r][1] = _mm512_setzero_ps();
    int64_t bytes = p.kind == FLOAT32 ? 4 : p.kind == INT8 ? 1 : 2, panel_bytes = p.num_in * LANES * bytes;
    Tile::multiply(x, x_stride, (const char *)p.weight + panel * panel_bytes, panel_bytes, p.num_in, acc);
    V s0 = _mm512_set1_ps(1.0f), s1 = s0;
    if (p.kind == INT8) s0 = _mm512_loadu_ps(p.scale + panel * LANES), s1 = _mm512_loadu_ps(p.scale + (panel + 1) * LANES);
#pragma GCC unroll 12
    for (int r = 0; r < ROWS; r++) {
        V a = acc[r][0], b = acc[r][1];
        if (p.kind == INT8) a = _mm512_mul_ps(a, s0), b = _mm512_mul_ps(b, s1);
        if (into == GATE) {
            V silu = _mm512_div_ps(a, _mm512_add_ps(_mm512_set1_ps(1.0f), exp_ps(_mm512_sub_ps(_mm512_setzero_ps(), a))));
            _mm512_storeu_ps(out + r * out_stride + panel / 2 * LANES, _mm512_mul_ps(silu, b));
        } else {
            float *to = out + r * out_stride + panel * LANES;
            if (into == ADD) a = _mm512_add_ps(_mm512_loadu_ps(to), a), b = _mm512_add_ps(_mm512_loadu_ps(to + LANES), b);
            _mm512_storeu_ps(to, a), _mm512_storeu_ps(to + LANES, b);
        }
    }
}

template <template <int> class Tile, int MOST, class X>
static void tiles(const Product &p, const X *x, int64_t x_stride, int64_t rows, int64_t panel, float *out, int64_t out_stride, Into into) {
    int64_t row = 0;
    for (; row + MOST <= rows; row += MOST) tile<Tile<MOST>, MOST>(p, x + row * x_stride, x_stride, panel, out + row * out_stride, out_stride, into);
    if (MOST > 8) for (; row + 8 <= rows; row += 8) tile<Tile<8>, 8>(p, x + row * x_stride, x_stride, panel, out + row * out_stride, out_stride, into);
    for (; row + 4 <= rows; row += 4) tile<Tile<4>, 4>(p, x + row * x_stride, x_stride, panel, out + row * out_stride, out_stride, into);
    for (; row + 2 <= rows; row += 2) tile<Tile<2>, 2>(p, x + row * x_stride, x_stride, panel, out + row * out_stride, out_stride, into);
    for (; row < rows; row += 1) tile<Tile<1>, 1>(p, x + row * x_stride, x_stride, panel, out + row * out_stride, out_stride, into);
}

static int64_t row_bytes(int64_t kind, int64_t depth) {
    return kind == INT8 ? depth / GROUP * (int64_t)sizeof(Group) : depth * (kind == BFLOAT16 ? 2 : 4);
}
static const int64_t ROWS_AT_ONCE = 120;  // whose inputs stay in the second cache level

static void multiply(Team &team, int64_t phase, const Product &p, const char *x, int64_t rows, float *out, int64_t out_stride, Into into) {
    int64_t pairs = p.num_out / (2 * LANES), blocks = (rows + ROWS_AT_ONCE - 1) / ROWS_AT_ONCE, step = row_bytes(p.kind, p.num_in);
    for (int64_t item; (item = take(team, phase)) < pairs * blocks;) {
        int64_t row = item / pairs * ROWS_AT_ONCE, panel = item % pairs * 2;
        int64_t count = rows - row < ROWS_AT_ONCE ? rows - row : ROWS_AT_ONCE;
        const char *from = x + row * step;
        float *to = out + row * out_stride;
        switch (p.kind) {
            case FLOAT32: tiles<Floats, 12>(p, (const float *)from, p.num_in, count, panel, to, out_stride, into); break;
            case BFLOAT16_WEIGHT: tiles<WideFloats, 12>(p, (const float *)from, p.num_in, count, panel, to, out_stride, into); break;
            case BFLOAT16: tiles<Pairs, 12>(p, (const uint16_t *)from, p.num_in, count, panel, to, out_stride, into); break;
            case INT8: tiles<Bytes, 6>(p, (const Group *)from, p.num_in / GROUP, count, panel, to, out_stride, into); break;
        }
    }
    meet(team, phase);
}

// ---- rows: norm, and a row as a product of this kind takes it -----------------------------------------------------------
static void as_inputs(int64_t kind, const float *row, int64_t size, char *to) {
    if (kind == BFLOAT16) {
        for (int64_t i = 0; i < size; i += LANES)
            _mm256_storeu_si256((__m256i *)(to + 2 * i), (__m256i)_mm512_cvtneps_pbh(_mm512_loadu_ps(row + i)));
    } else if (kind == INT8) {
        Group *groups = (Group *)to;
        for (int64_t g = 0; g < size / GROUP; g++) {
            V a = _mm512_loadu_ps(row + g * GROUP), b = _mm512_loadu_ps(row + g * GROUP + LANES);
            float most = _mm512_reduce_max_ps(_mm512_max_ps(_mm512_abs_ps(a), _mm512_abs_ps(b)));
            float scale = most / 127.0f, inverse = most > 0 ? 127.0f / most : 0.0f;
            __m512i i = _mm512_cvtps_epi32(_mm512_mul_ps(a, _mm512_set1_ps(inverse)));
            __m512i j = _mm512_cvtps_epi32(_mm512_mul_ps(b, _mm512_set1_ps(inverse)));
            _mm_storeu_si128((__m128i *)groups[g].numbers, _mm512_cvtsepi32_epi8(i));
            _mm_storeu_si128((__m128i *)(groups[g].numbers + 16), _mm512_cvtsepi32_epi8(j));
            groups[g].scale = scale;
            groups[g].start = -128 * _mm512_reduce_add_epi32(_mm512_add_epi32(i, j));
        }
    } else if ((const char *)row != to) memcpy(to, row, size * 4);
}
static void norm(int64_t kind, const float *row, const float *weight, int64_t size, double eps, float *between, char *to) {
    V sum = _mm512_setzero_ps();
    for (int64_t i = 0; i < size; i += LANES) { V v = _mm512_loadu_ps(row + i); sum = _mm512_fmadd_ps(v, v, sum); }
    float factor = (float)(1.0 / sqrt(_mm512_reduce_add_ps(sum) / (double)size + eps));
    bool direct = kind == FLOAT32 || kind == BFLOAT16_WEIGHT;
    float *out = direct ? (float *)to : between;
    for (int64_t i = 0; i < size; i += LANES)
        _mm512_storeu_ps(out + i, _mm512_mul_ps(_mm512_mul_ps(_mm512_loadu_ps(row + i), _mm512_set1_ps(factor)), _mm512_loadu_ps(weight + i)));
    if (!direct) as_inputs(kind, out, size, to);
}

// ---- attention ---------------------------------------------------------------------------------------------------------
static void rotate(float *head, const float *angles, int64_t size) {
    int64_t half = size / 2;
    for (int64_t i = 0; i < half; i += LANES) {
        V a = _mm512_loadu_ps(head + i), b = _mm512_loadu_ps(head + half + i);
        V c = _mm512_loadu_ps(angles + i), s = _mm512_loadu_ps(angles + half + i);
        _mm512_storeu_ps(head + i, _mm512_fnmadd_ps(b, s, _mm512_mul_ps(a, c)));
        _mm512_storeu_ps(head + half + i, _mm512_fmadd_ps(a, s, _mm512_mul_ps(b, c)));
    }
}
// The sums of 16 vectors, one a lane.
static inline V sums_of(V v[16]) {
    for (int i = 0; i < 8; i++) v[i] = _mm512_add_ps(_mm512_unpacklo_ps(v[2 * i], v[2 * i + 1]), _mm512_unpackhi_ps(v[2 * i], v[2 * i + 1]));
    for (int i = 0; i < 4; i++) {
        __m512d a = _mm512_castps_pd(v[2 * i]), b = _mm512_castps_pd(v[2 * i + 1]);
        v[i] = _mm512_add_ps(_mm512_castpd_ps(_mm512_unpacklo_pd(a, b)), _mm512_castpd_ps(_mm512_unpackhi_pd(a, b)));
    }
    for (int i = 0; i < 2; i++) v[i] = _mm512_add_ps(_mm512_shuffle_f32x4(v[2 * i], v[2 * i + 1], 0x88), _mm512_shuffle_f32x4(v[2 * i], v[2 * i + 1], 0xdd));
    V s = _mm512_add_ps(_mm512_shuffle_f32x4(v[0], v[1], 0x88), _mm512_shuffle_f32x4(v[0], v[1], 0xdd));
    return s;
}
template <int PARTS>  // head_size / 16
static void attend(const Step &s, const Layer &layer, const float *qkv, int64_t width, int64_t row, int64_t sequence, int64_t kv_head, int64_t seen, float *out) {
    const int64_t size = PARTS * LANES, group = s.num_heads / s.num_kv_heads;
    const int32_t *table = s.block_tables + sequence * s.max_blocks;
    const float scale = 1.0f / sqrtf((float)size);
    for (int64_t g = 0; g < group; g++) {
        const float *query = qkv + row * width + (kv_head * group + g) * size;
        V q[PARTS], acc[PARTS];
        for (int i = 0; i < PARTS; i++) q[i] = _mm512_mul_ps(_mm512_loadu_ps(query + i * LANES), _mm512_set1_ps(scale)), acc[i] = _mm512_setzero_ps();
        float most = -1e30f; V total = _mm512_setzero_ps();
        alignas(64) float p[KEYS];
        for (int64_t start = 0; start < seen; start += KEYS) {
            int64_t count = seen - start < KEYS ? seen - start : KEYS, tiles16 = (count + 15) / 16;
            V top = _mm512_set1_ps(-1e30f), scores[KEYS / 16];
            for (int64_t t = 0; t < tiles16; t++) {
                const float *keys = layer.key_cache + ((int64_t)table[(start + 16 * t) / 16] * s.num_kv_heads + kv_head) * 16 * size;
                V parts[16];
#pragma GCC unroll 16
                for (int k = 0; k < 16; k++) {
                    V sum = _mm512_mul_ps(q[0], _mm512_loadu_ps(keys + k * size));
                    for (int i = 1; i < PARTS; i++) sum = _mm512_fmadd_ps(q[i], _mm512_loadu_ps(keys + k * size + i * LANES), sum);
                    parts[k] = sum;
                }
                V sum = sums_of(parts);
                int64_t left = count - 16 * t;
                __mmask16 mask = left >= 16 ? 0xffff : (__mmask16)((1 << left) - 1);
                scores[t] = _mm512_mask_blend_ps(mask, _mm512_set1_ps(-1e30f), sum);
                top = _mm512_max_ps(top, scores[t]);
            }
            float now = fmaxf(most, _mm512_reduce_max_ps(top));
            V shrink = exp_ps(_mm512_set1_ps(most - now));
            total = _mm512_mul_ps(total, shrink);
            for (int i = 0; i < PARTS; i++) acc[i] = _mm512_mul_ps(acc[i], shrink);
            most = now;
            for (int64_t t = 0; t < tiles16; t++) {
                int64_t left = count - 16 * t;
                __mmask16 mask = left >= 16 ? 0xffff : (__mmask16)((1 << left) - 1);
                V e = _mm512_maskz_mov_ps(mask, exp_ps(_mm512_sub_ps(scores[t], _mm512_set1_ps(now))));
                total = _mm512_add_ps(total, e);
                _mm512_store_ps(p + 16 * t, e);
            }
            for (int64_t t = 0; t < tiles16; t++) {
                const float *values = layer.value_cache + ((int64_t)table[(start + 16 * t) / 16] * s.num_kv_heads + kv_head) * 16 * size;
                int64_t here = count - 16 * t < 16 ? count - 16 * t : 16;
                for (int64_t k = 0; k < here; k++) {
                    V w = _mm512_set1_ps(p[16 * t + k]);
                    for (int i = 0; i < PARTS; i++) acc[i] = _mm512_fmadd_ps(w, _mm512_loadu_ps(values + k * size + i * LANES), acc[i]);
                }
            }
        }
        V inverse = _mm512_set1_ps(1.0f / _mm512_reduce_add_ps(total));
        for (int i = 0; i < PARTS; i++) _mm512_storeu_ps(out + row * s.num_heads * size + (kv_head * group + g) * size + i * LANES, _mm512_mul_ps(acc[i], inverse));
    }
}
static void store(const Step &s, const Layer &layer, float *qkv, int64_t width, int64_t row) {
    int64_t size = s.head_size, heads = s.num_heads, kv = s.num_kv_heads;
    const float *angles = s.cos_sin + s.positions[row] * size;
    for (int64_t h = 0; h < heads + kv; h++) rotate(qkv + row * width + h * size, angles, size);
    int64_t block = s.slots[row] / 16, place = s.slots[row] % 16;
    for (int64_t h = 0; h < kv; h++) {
        int64_t at = ((block * kv + h) * 16 + place) * size;
        memcpy(layer.key_cache + at, qkv + row * width + (heads + h) * size, size * 4);
        memcpy(layer.value_cache + at, qkv + row * width + (heads + kv + h) * size, size * 4);
    }
}

// ---- a thread's way through all layers ---------------------------------------------------------------------------------
struct Workspace { char *inputs, *wide_inputs; float *qkv, *attended, *activated; };
enum { PHASES = 9 };

static void run(Team &team, const Step &s, const Layer *layers, Workspace &w, float *between) {
    const int64_t rows = s.rows, heads = s.num_heads * s.head_size, width = heads + 2 * s.num_kv_heads * s.head_size;
    for (int64_t l = 0; l < s.num_layers; l++) {
        const Layer &layer = layers[l];
        int64_t phase = l * PHASES;
        int64_t step = row_bytes(layer.qkv.kind, s.hidden);
        for (int64_t r; (r = take(team, phase)) < rows;)
            norm(layer.qkv.kind, s.residual + r * s.hidden, layer.input_norm, s.hidden, s.eps, between, w.inputs + r * step);
        meet(team, phase);
        multiply(team, phase + 1, layer.qkv, w.inputs, rows, w.qkv, width, STORE);
        for (int64_t r; (r = take(team, phase + 2)) < rows;) store(s, layer, w.qkv, width, r);
        meet(team, phase + 2);
        for (int64_t item; (item = take(team, phase + 3)) < rows * s.num_kv_heads;) {
            int64_t row = item / s.num_kv_heads, sequence = 0;
            while (s.query_starts[sequence + 1] <= row) sequence++;
            int64_t seen = s.seq_lens[sequence] - (s.query_starts[sequence + 1] - row) + 1;
            if (s.head_size == 64) attend<4>(s, layer, w.qkv, width, row, sequence, item % s.num_kv_heads, seen, w.attended);
            else attend<8>(s, layer, w.qkv, width, row, sequence, item % s.num_kv_heads, seen, w.attended);
        }
        meet(team, phase + 3);
        step = row_bytes(layer.out.kind, heads);
        const char *inputs = (const char *)w.attended;
        if (layer.out.kind >= BFLOAT16) {
            for (int64_t r; (r = take(team, phase + 4)) < rows;) as_inputs(layer.out.kind, w.attended + r * heads, heads, w.inputs + r * step);
            meet(team, phase + 4);
            inputs = w.inputs;
        }
        multiply(team, phase + 5, layer.out, inputs, rows, s.residual, s.hidden, ADD);
        step = row_bytes(layer.mlp_in.kind, s.hidden);
        for (int64_t r; (r = take(team, phase + 6)) < rows;)
            norm(layer.mlp_in.kind, s.residual + r * s.hidden, layer.mlp_norm, s.hidden, s.eps, between, w.inputs + r * step);
        meet(team, phase + 6);
        multiply(team, phase + 7, layer.mlp_in, w.inputs, rows, w.activated, s.intermediate, GATE);
        inputs = (const char *)w.activated;
        if (layer.mlp_out.kind >= BFLOAT16) {
            step = row_bytes(layer.mlp_out.kind, s.intermediate);
            Counter &counter = team.counters[s.num_layers * PHASES + l];
            for (int64_t r; (r = __atomic_fetch_add(&counter.next, 1, __ATOMIC_RELAXED)) < rows;)
                as_inputs(layer.mlp_out.kind, w.activated + r * s.intermediate, s.intermediate, w.wide_inputs + r * step);
            meet(team, s.num_layers * PHASES + l);
            inputs = w.wide_inputs;
        }
        multiply(team, phase + 8, layer.mlp_out, inputs, rows, s.residual, s.hidden, ADD);
    }
}

struct Job { Team *team; const Step *step; const Layer *layers; Workspace *workspace; };
static struct { Job job; int64_t number; int64_t finished; int threads; pthread_t ids[64]; } pool;

static void work(const Job &job) {
    float *between = (float *)aligned_alloc(64, (job.step->hidden * 4 + 63) / 64 * 64);
    run(*job.team, *job.step, job.layers, *job.workspace, between);
    free(between);
}
static void *help(void *) {
    for (int64_t seen = 0;;) {
        for (int64_t spins = 0; __atomic_load_n(&pool.number, __ATOMIC_ACQUIRE) == seen; spins++) {
            if (spins < 200000) _mm_pause(); else { struct timespec *t = 0; (void)t; sched_yield(); }
        }
        seen++;
        work(pool.job);
        __atomic_add_fetch(&pool.finished, 1, __ATOMIC_ACQ_REL);
    }
    return 0;
}
static char *take_memory(int64_t bytes) { return (char *)aligned_alloc(64, (bytes + 64 + 63) / 64 * 64); }

extern "C" void octavo_start(int threads) {
    for (pool.threads = pool.threads ? pool.threads : 1; pool.threads < threads; pool.threads++) pthread_create(&pool.ids[pool.threads], 0, help, 0);
}
extern "C" void octavo_run(const Step *step, const Layer *layers) {
    static Workspace w; static int64_t kept_rows; static Counter *counters; static int64_t kept_counters;
    int64_t rows = step->rows, heads = step->num_heads * step->head_size;
    if (rows > kept_rows) {
        int64_t widest = step->hidden > heads ? step->hidden : heads;
        w = {take_memory(rows * widest * 4), take_memory(rows * step->intermediate * 4),
             (float *)take_memory(rows * (heads + 2 * step->num_kv_heads * step->head_size) * 4),
             (float *)take_memory(rows * heads * 4), (float *)take_memory(rows * step->intermediate * 4)};
        kept_rows = rows;
    }
    int64_t num = step->num_layers * (PHASES + 1);
    if (num > kept_counters) counters = (Counter *)aligned_alloc(64, num * sizeof(Counter)), kept_counters = num;
    memset(counters, 0, num * sizeof(Counter));
    Team team = {pool.threads, counters};
    pool.job = {&team, step, layers, &w};
    pool.finished = 0;
    __atomic_add_fetch(&pool.number, 1, __ATOMIC_ACQ_REL);
    work(pool.job);
    while (__atomic_load_n(&pool.finished, __ATOMIC_ACQUIRE) < pool.threads - 1) _mm_pause();
}
