// What is done to each row alone; see rows.cpp. An element is that of `products.h`; strides are in elements.
#pragma once
#include "products.h"

struct Norm {
    const void *weight;
    i64 size;
    float eps, weight_offset;
};
// out = y / sqrt(mean(y^2) + eps) * weight,  y = x, or x + residual, which becomes y; out may be x.
void norm_row(i64 element, const Norm &norm, void *out, const void *x, void *residual);
// The same in place, of each of several vectors one after the other (heads); nothing without a weight.
void norm_in_place(i64 element, const Norm &norm, void *heads, i64 num_heads);
enum Activation { SILU, GELU, GELU_TANH };
// out [size] = activation(gate) * up,  x = gate [size], then up [size]
void activate_row(i64 element, i64 activation, void *out, const void *x, i64 size);
// (x1, x2) <- (x1 cos - x2 sin, x2 cos + x1 sin): first and second half of the first `turned` elements of each head.
void rotate_row(i64 element, void *heads, i64 num_heads, i64 head_size, const float *cos_sin, i64 turned);

struct Cache {
    void *keys, *values;  // [blocks, num_kv_heads, block_size, head_size]
    i64 element;          // FLOAT32, BFLOAT16 or FLOAT16
    i64 num_blocks, num_kv_heads, block_size, head_size;
};
enum { FLOAT16 = 2 };
// Key and value of a token to its slot; nowhere if that is not in the cache.
void store_token(i64 element, const void *key, const void *value, const Cache &cache, i64 slot);
