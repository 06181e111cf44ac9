// Norms, activations, rotation, low-rank adapters, and the way into the cache: formulas as in
// `kernels.oracles.reference`. Rows are independent, and each is summed in one order, 16 sums side by side and then
// these: a row's result depends on nothing else.
#include "rows.h"

namespace {

// `run` with a pointer of the rows' type.
template <class Do>
INLINE void with(i64 element, Do run) {
    if (element == FLOAT32) run((float *)0);
    else run((Bfloat16 *)0);
}

template <class T>
void norm_of(const Norm &norm, T *out, const T *x, T *residual) {
    const T *weight = (const T *)norm.weight;
    float *y = (float *)scratch(OF_ITEM, (norm.size + LANES) * 4);
    F total = splat(0.0f);
    each_vector(norm.size, [&](i64 i, i64 count) INLINED {
        F value = load_some(x + i, count);
        if (residual) {  // rounded before it is normed, as the residual that goes on is
            value = rounded_as(value + load_some(residual + i, count), residual);
            store_some(residual + i, value, count);
        }
        store(y + i, value);
        total = fma(value, value, total);
    });
    F scale = splat(1.0f / __builtin_sqrtf(sum_of_lanes(total) / (float)norm.size + norm.eps));
    each_vector(norm.size, [&](i64 i, i64 count) INLINED {
        F value = load(y + i) * scale, factor = load_some(weight + i, count);
        if (norm.weight_offset != 0) value = value * (factor + splat(norm.weight_offset));
        else value = rounded_as(value, out) * factor;
        store_some(out + i, value, count);
    });
}

template <class T>
void rotate(T *head, i64 half, const float *cos_sin) {
    each_vector(half, [&](i64 i, i64 count) INLINED {
        F first = load_some(head + i, count), second = load_some(head + half + i, count);
        F cos = load_some(cos_sin + i, count), sin = load_some(cos_sin + half + i, count);
        store_some(head + i, first * cos - second * sin, count);
        store_some(head + half + i, second * cos + first * sin, count);
    });
}

template <class T, class S>
void copy(S *to, const T *from, i64 size) {
    each_vector(size, [&](i64 i, i64 count) INLINED { store_some(to + i, load_some(from + i, count), count); });
}

template <class S>
void store_heads(i64 element, const void *key, const void *value, const Cache &cache, i64 slot) {
    i64 block = slot / cache.block_size, offset = slot % cache.block_size, size = cache.head_size;
    with(element, [&](auto *type) {
        auto keys = (decltype(type))key, values = (decltype(type))value;
        for (i64 head = 0; head < cache.num_kv_heads; head++) {
            i64 place = ((block * cache.num_kv_heads + head) * cache.block_size + offset) * size;
            copy((S *)cache.keys + place, keys + head * size, size);
            copy((S *)cache.values + place, values + head * size, size);
        }
    });
}

// gelu(x) = x (1 + erf(x / sqrt(2))) / 2;  approximately x / (1 + e^-2u), u = sqrt(2 / pi) (x + 0.044715 x^3), which is
// the usual x (1 + tanh u) / 2 with one exponential.
F gelu_of(F x, bool is_approximate) {
    if (is_approximate) {
        const float twice = 1.5957691216057308f;
        F u = splat(twice) * (x + splat(0.044715f) * x * x * x);
        return x / one_and_exp_of(splat(0.0f) - u);
    }
    float lanes[LANES];
    store(lanes, x);
    for (float &lane : lanes) lane *= (float)(0.5 * (1.0 + __builtin_erf(lane * 0.70710678118654752)));
    return load(lanes);
}

}  // namespace

void norm_row(i64 element, const Norm &norm, void *out, const void *x, void *residual) {
    with(element, [&](auto *type) { norm_of(norm, (decltype(type))out, (decltype(type))x, (decltype(type))residual); });
}

void norm_in_place(i64 element, const Norm &norm, void *heads, i64 num_heads) {
    if (!norm.weight) return;
    i64 bytes = norm.size * element_bytes(element);
    for (i64 i = 0; i < num_heads; i++) {
        char *head = (char *)heads + i * bytes;
        norm_row(element, norm, head, head, 0);
    }
}

void activate_row(i64 element, i64 activation, void *out, const void *x, i64 size) {
    with(element, [&](auto *type) {
        auto to = (decltype(type))out, gate = (decltype(type))x, up = gate + size;
        auto each = [&](auto activated) INLINED {
            each_vector(size, [&](i64 i, i64 count) INLINED {
                store_some(to + i, activated(load_some(gate + i, count)) * load_some(up + i, count), count);
            });
        };
        if (activation == SILU) each([](F x) INLINED { return silu_of(x); });
        else each([&](F x) INLINED { return gelu_of(x, activation == GELU_TANH); });
    });
}

void rotate_row(i64 element, void *heads, i64 num_heads, i64 head_size, const float *cos_sin, i64 turned) {
    with(element, [&](auto *type) {
        for (i64 head = 0; head < num_heads; head++)
            rotate((decltype(type))heads + head * head_size, turned / 2, cos_sin);
    });
}

void store_token(i64 element, const void *key, const void *value, const Cache &cache, i64 slot) {
    if (slot < 0 || slot >= cache.num_blocks * cache.block_size) return;
    if (cache.element == FLOAT32) store_heads<float>(element, key, value, cache, slot);
    else if (cache.element == BFLOAT16) store_heads<Bfloat16>(element, key, value, cache, slot);
    else store_heads<Float16>(element, key, value, cache, slot);
}

EXPORT void octavo_rms_norm(i64 element, void *out, const void *x, const void *weight, void *residual, i64 rows,
                            i64 size, float eps, float weight_offset, i64 threads) {
    Norm norm = {weight, size, eps, weight_offset};
    i64 bytes = size * element_bytes(element);
    for_each(threads_for(rows * size, threads), rows, [&](i64 row, i64) {
        norm_row(element, norm, (char *)out + row * bytes, (const char *)x + row * bytes,
                 residual ? (char *)residual + row * bytes : 0);
    });
}

EXPORT void octavo_silu_and_mul(i64 element, void *out, const void *x, i64 rows, i64 size, i64 threads) {
    i64 bytes = size * element_bytes(element);
    for_each(threads_for(rows * size, threads), rows, [&](i64 row, i64) {
        activate_row(element, SILU, (char *)out + row * bytes, (const char *)x + 2 * row * bytes, size);
    });
}

// out [rows, size] = (u + 1) g / (1 + e^(-alpha g)),  g = min(gate, limit), u = up within +-limit; NaN stays NaN.
EXPORT void octavo_clamped_swiglu(i64 element, void *out, const void *x, i64 rows, i64 size, float alpha, float limit,
                                  i64 threads) {
    for_each(threads_for(rows * size, threads), rows, [&](i64 row, i64) {
        with(element, [&](auto *type) {
            auto to = (decltype(type))out + row * size, gates = (decltype(type))x + 2 * row * size;
            const F one = splat(1.0f), most = splat(limit), least = splat(-limit), slope = splat(-alpha);
            each_vector(size, [&](i64 i, i64 count) INLINED {
                F gate = min(most, load_some(gates + i, count));
                F up = max(least, min(most, load_some(gates + size + i, count)));
                store_some(to + i, (up + one) * (gate / one_and_exp_of(slope * gate)), count);
            });
        });
    });
}

EXPORT void octavo_gelu(i64 element, void *out, const void *x, i64 rows, i64 size, i64 is_gated, i64 is_approximate,
                        i64 threads) {
    i64 bytes = size * element_bytes(element);
    for_each(threads_for(rows * size, threads), rows, [&](i64 row, i64) {
        char *to = (char *)out + row * bytes;
        const char *from = (const char *)x + row * bytes * (1 + is_gated);
        if (is_gated) return activate_row(element, is_approximate ? GELU_TANH : GELU, to, from, size);
        with(element, [&](auto *type) {
            each_vector(size, [&](i64 i, i64 count) INLINED {
                F value = gelu_of(load_some((decltype(type))from + i, count), is_approximate);
                store_some((decltype(type))to + i, value, count);
            });
        });
    });
}

// The first position that is not within so many, or -1.
EXPORT i64 octavo_position_without_angles(const i64 *positions, i64 count, i64 num_angles) {
    for (i64 i = 0; i < count; i++)
        if (positions[i] < 0 || positions[i] >= num_angles) return i;
    return -1;
}

EXPORT void octavo_rotary(i64 element, void *query, i64 query_stride, i64 num_heads, void *key, i64 key_stride,
                          i64 num_kv_heads, i64 head_size, i64 rows, const i64 *positions, const float *cos_sin,
                          i64 turned, i64 threads) {
    i64 bytes = element_bytes(element);
    for_each(threads_for(rows * (num_heads + num_kv_heads) * head_size, threads), rows, [&](i64 row, i64) {
        const float *angles = cos_sin + positions[row] * turned;
        rotate_row(element, (char *)query + row * query_stride * bytes, num_heads, head_size, angles, turned);
        rotate_row(element, (char *)key + row * key_stride * bytes, num_kv_heads, head_size, angles, turned);
    });
}

// A fraction of what the products of a step read: not worth a second thread.
EXPORT void octavo_reshape_and_cache(i64 element, const void *key, i64 key_stride, const void *value, i64 value_stride,
                                     const Cache *cache, const i64 *slots, i64 rows) {
    i64 bytes = element_bytes(element);
    for (i64 row = 0; row < rows; row++)
        store_token(element, (const char *)key + row * key_stride * bytes,
                    (const char *)value + row * value_stride * bytes, *cache, slots[row]);
}

// between [rows, rank] = x . a of the row's adapter [rank, size]; rows without one stay as they are.
EXPORT void octavo_lora_shrink(i64 element, float *between, const void *x, i64 x_stride, const float *a,
                               const int32_t *adapters, i64 rows, i64 size, i64 rank, i64 threads) {
    for_each(threads, rows, [&](i64 row, i64) {
        if (adapters[row] < 0) return;
        with(element, [&](auto *type) {
            auto from = (decltype(type))x + row * x_stride;
            for (i64 r = 0; r < rank; r++) {
                const float *line = a + (adapters[row] * rank + r) * size;
                F total = splat(0.0f);
                each_vector(size, [&](i64 i, i64 count) INLINED {
                    total = fma(load_some(from + i, count), load_some(line + i, count), total);
                });
                between[row * rank + r] = sum_of_lanes(total);
            }
        });
    });
}

// out [rows, size] += scale * between . b of the row's adapter, which lies [rank, size] in memory.
EXPORT void octavo_lora_expand(i64 element, void *out, i64 out_stride, const float *between, const float *b,
                               const int32_t *adapters, const float *scales, i64 rows, i64 size, i64 rank,
                               i64 threads) {
    for_each(threads, rows, [&](i64 row, i64) {
        if (adapters[row] < 0) return;
        with(element, [&](auto *type) {
            auto to = (decltype(type))out + row * out_stride;
            const float *lines = b + adapters[row] * rank * size;
            each_vector(size, [&](i64 i, i64 count) INLINED {
                F added = splat(0.0f);
                for (i64 r = 0; r < rank; r++)
                    added = fma(splat(between[row * rank + r]), load_some(lines + r * size + i, count), added);
                store_some(to + i, fma(splat(scales[adapters[row]]), added, load_some(to + i, count)), count);
            });
        });
    });
}
