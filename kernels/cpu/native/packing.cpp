// Weights [out_features, in_features], row by row, in the layouts that products read: panels of 48 outputs
// (kernels/cpu/products/packed_weight.py), and eight bits (kernels/int8_weight.py). An item is a panel.
#include "products.h"

namespace {

// Sixteen elements as they lie in memory, one in each lane; of fewer the rest are zeros.
INLINE F raw(const float *p) { return load(p); }
INLINE F raw(const Bfloat16 *p) { return float_of(widen(p)); }
INLINE void put(float *p, F x) { store(p, x); }
INLINE void put(Bfloat16 *p, F x) { narrow(p, bits_of(x)); }
template <class T>
INLINE F raw_some(const T *p, i64 count) {
    if (count == LANES) return raw(p);
    T part[LANES] = {};
    memcpy(part, p, count * sizeof(T));
    return raw(part);
}

// 16 rows by 16 inputs of a weight, turned: 16 outputs of each input. T: what they are read as, P: kept as. The lower
// halves of float32 that bfloat16 has no place for are gathered in `lost`.
template <class T, class P>
INLINE void pack_square(P *packed, const T *weight, i64 row_stride, i64 rows, i64 inputs, I &lost) {
    F lines[LANES];
    for (i64 r = 0; r < LANES; r++) {
        lines[r] = r < rows ? raw_some(weight + r * row_stride, inputs) : splat(0.0f);
        if (sizeof(T) > sizeof(P)) {
            lost = larger_unsigned(lost, bits_of(lines[r]) & splat(0xffff));
            lines[r] = float_of(shift_right<16>(bits_of(lines[r])));
        }
    }
    transpose(lines);
    for (i64 k = 0; k < inputs; k++) put(packed + k * PANEL, lines[k]);
}

template <class T, class P>
bool pack_panels(P *packed, const T *weight, i64 row_stride, i64 out_features, i64 in_features, i64 threads) {
    int32_t has_lost = 0;
    for_each(threads, (out_features + PANEL - 1) / PANEL, [&](i64 panel, i64) {
        if (look_at(&has_lost)) return;
        I lost = splat(0);
        i64 first = panel * PANEL;
        for (i64 lane = 0; lane < PANEL; lane += LANES)  // 16 rows to their ends: a processor foresees few more
            for (i64 k = 0; k < in_features; k += LANES)
                pack_square(packed + first * in_features + k * PANEL + lane, weight + (first + lane) * row_stride + k,
                            row_stride, out_features - first - lane, smaller(in_features - k, LANES), lost);
        if (largest_of_lanes(lost)) __atomic_store_n(&has_lost, 1, __ATOMIC_SEQ_CST);
    });
    return !has_lost;
}

const i64 BYTES_PANEL = 16, QUAD = 4, ZERO = 128;

// The largest size of a row's numbers; NaN where one is.
template <class T>
float largest_size(const T *row, i64 size) {
    I largest = splat(0);
    each_vector(size, [&](i64 i, i64 count) INLINED {
        largest = larger_unsigned(largest, bits_of(load_some(row + i, count)) & splat(0x7fffffff));
    });
    int32_t bits = largest_of_lanes(largest);
    float found;
    memcpy(&found, &bits, 4);
    return found;
}

// One output of a panel, `lane` of 16: its numbers over the scale, rounded to nearest, ties to even.
template <class T>
void quantize_output(int8_t *panel, i64 lane, const T *row, i64 size, float scale) {
    const F divisor = splat(scale >= 1.17549435e-38f || scale != scale ? scale : 1.17549435e-38f);
    int8_t quads[LANES];
    each_vector(size, [&](i64 i, i64 count) INLINED {
        store_quads(quads, to_int(rounded(load_some(row + i, count) / divisor)));
        for (i64 quad = 0; quad < LANES / QUAD; quad++) {
            uint32_t bytes;
            memcpy(&bytes, quads + quad * QUAD, QUAD);
            bytes ^= 0x80808080;  // + 128 each
            memcpy(panel + (i / QUAD + quad) * BYTES_PANEL * QUAD + lane * QUAD, &bytes, QUAD);
        }
    });
}

template <class T>
void quantize_panels(int8_t *packed, float *scale, const T *weight, i64 row_stride, i64 out_features, i64 in_features,
                     i64 threads) {
    i64 panel_bytes = groups_of(in_features) * GROUP * BYTES_PANEL;
    for_each(threads, (out_features + BYTES_PANEL - 1) / BYTES_PANEL, [&](i64 panel, i64) {
        int8_t *place = packed + panel * panel_bytes;
        i64 first = panel * BYTES_PANEL, rows = smaller(out_features - first, BYTES_PANEL);
        if (rows < BYTES_PANEL || in_features % GROUP) memset(place, ZERO, panel_bytes);
        for (i64 lane = 0; lane < rows; lane++) {
            const T *row = weight + (first + lane) * row_stride;
            scale[first + lane] = largest_size(row, in_features) / 127.0f;
            quantize_output(place, lane, row, in_features, scale[first + lane]);
        }
    });
}

}  // namespace

// Panels of numbers of `element`, or as bfloat16 (`narrows`) those of float32: 0 where these do not fit. The stride
// in numbers; past the last output all are zeros.
EXPORT i64 octavo_pack_panels(void *packed, i64 narrows, i64 element, const void *weight, i64 row_stride,
                              i64 out_features, i64 in_features, i64 threads) {
    if (element == BFLOAT16)
        return pack_panels((Bfloat16 *)packed, (const Bfloat16 *)weight, row_stride, out_features, in_features,
                           threads);
    if (narrows)
        return pack_panels((Bfloat16 *)packed, (const float *)weight, row_stride, out_features, in_features, threads);
    return pack_panels((float *)packed, (const float *)weight, row_stride, out_features, in_features, threads);
}

// A weight quantised to eight bits with a scale an output, packed. The stride in numbers.
EXPORT void octavo_quantize_eight_bits(void *packed, float *scale, i64 element, const void *weight, i64 row_stride,
                                       i64 out_features, i64 in_features, i64 threads) {
    if (element == FLOAT32)
        quantize_panels((int8_t *)packed, scale, (const float *)weight, row_stride, out_features, in_features, threads);
    else
        quantize_panels((int8_t *)packed, scale, (const Bfloat16 *)weight, row_stride, out_features, in_features,
                        threads);
}
