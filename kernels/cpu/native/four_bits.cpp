// A weight quantised to four bits: for each group of inputs of an output a scale and an offset, both float16.
//
//     w ~ d q + m,  q = 0 .. 15
//
// Some scales are tried, by which the group's numbers have a little less or more than fifteen steps from the least to
// the greatest. Each rounds the numbers to q; least squares gives the d and m that these q want, d and m other q, and
// these once more d and m. The best pair stays. `make_qkx2_quants` of llama.cpp (ggml-quants.c) searches likewise, with
// weights of its own for the errors; here all count alike. On SmolLM2-135M weights by magnitude made nothing better.
// Sixteen outputs are quantised at once, in the lanes of a vector.
#include "records.h"

namespace {

const i64 MOST_GROUP = 256;
const int NARROWEST = -10, WIDEST = 5;  // in tenths of a step, which a range of fifteen steps has more or fewer of

struct Fit {
    F scale, offset, error;
};

F integers_of(F x, F inverse, F offset) { return min(max(rounded((x - offset) * inverse), splat(0.0f)), splat(15.0f)); }
F rounded_to_half(F x) { return rounded_as(x, (const Float16 *)0); }
// 1 / x, and 0 of 0, where the numbers are all alike.
F inverse_of(F x) {
    F zero = splat(0.0f), size = max(x, zero - x);
    return where_less(zero, size, splat(1.0f) / x, zero);
}

// What q of 16 outputs add up to when `inverse` and `offset` round them, and what follows for scale and offset.
struct Sums {
    F q = splat(0.0f), squares = splat(0.0f), products = splat(0.0f);

    Sums(const F *x, i64 group, F inverse, F offset) {
        for (i64 k = 0; k < group; k++) {
            F integers = integers_of(x[k], inverse, offset);
            q = q + integers, squares = fma(integers, integers, squares), products = fma(integers, x[k], products);
        }
    }
};

// Of 16 outputs; x [group].
Fit fit_group(const F *x, i64 group) {
    F low = x[0], high = x[0], sum = splat(0.0f), squares = splat(0.0f);
    for (i64 k = 0; k < group; k++) {
        low = min(low, x[k]), high = max(high, x[k]);
        sum = sum + x[k], squares = fma(x[k], x[k], squares);
    }
    const F count = splat((float)group), none = splat(__builtin_nanf("")), inverse_range = inverse_of(high - low);
    Fit best = {none, none, splat(__builtin_inff())};  // none stays where a number of the group is NaN
    for (int tenths = NARROWEST; tenths <= WIDEST; tenths += 3) {
        F inverse = splat(15.0f + 0.1f * (float)tenths) * inverse_range, least = low;
        for (int turn = 0; turn < 2; turn++) {
            Sums of(x, group, inverse, least);
            F scale =
                rounded_to_half((count * of.products - of.q * sum) * inverse_of(count * of.squares - of.q * of.q));
            F offset = rounded_to_half((sum - scale * of.q) / count);
            // Sum of (scale q + offset - x)^2.
            F error = squares + scale * (scale * of.squares + splat(2.0f) * (offset * of.q - of.products)) +
                      offset * (count * offset - splat(2.0f) * sum);
            best = {where_less(error, best.error, scale, best.scale),
                    where_less(error, best.error, offset, best.offset),
                    where_less(error, best.error, error, best.error)};
            inverse = inverse_of(scale), least = offset;
        }
    }
    return best;
}

// Inputs of 16 outputs in vectors: x[k] has input k of each. Past the last output and input, the last once more.
template <class T>
void gather(const T *weight, i64 row_stride, i64 column_stride, i64 rows, i64 inputs, i64 group, F *x) {
    i64 k = 0;
    if (column_stride == 1)  // as nearly all lie
        for (; k + LANES <= smaller(inputs, group); k += LANES) {
            for (i64 lane = 0; lane < LANES; lane++)
                x[k + lane] = load(weight + smaller(lane, rows - 1) * row_stride + k);
            transpose(x + k);
        }
    float lanes[LANES];
    for (; k < group; k++) {
        const T *column = weight + smaller(k, inputs - 1) * column_stride;
        for (i64 lane = 0; lane < LANES; lane++) lanes[lane] = as_float(column[smaller(lane, rows - 1) * row_stride]);
        x[k] = load(lanes);
    }
}

// 16 outputs of a group, the first of them `lane` of the panel.
void store_group(const Cursor &at, i64 lane, const F *x, i64 inputs, const Fit &fit) {
    store((Float16 *)at.line + lane, fit.scale), store((Float16 *)at.line + PANEL + lane, fit.offset);
    F inverse = inverse_of(fit.scale);
    for (i64 k = 0; k < inputs; k += 8) {
        I words = splat(0);
        for (i64 i = 7; i >= 0; i--) words = shift_left<4>(words) + to_int(integers_of(x[k + i], inverse, fit.offset));
        store((int32_t *)(at.codes + k / 8 * at.layout.step) + lane, words);
    }
}

template <class T>
void quantize(char *packed, const T *weight, i64 row_stride, i64 column_stride, i64 out_features, i64 in_features,
              i64 group, i64 threads) {
    RecordLayout layout({CODES_UINT4, SCALE_FLOAT16, OFFSET_FLOAT16, group});
    i64 padded = groups_of(in_features) * GROUP, bytes = layout.panel_bytes(padded);
    for_each(threads, (out_features + PANEL - 1) / PANEL, [&](i64 panel, i64) {
        char *place = packed + panel * bytes;
        memset(place, 0, bytes);
        F x[MOST_GROUP];
        for (i64 lane = 0; lane < PANEL; lane += LANES) {
            i64 row = panel * PANEL + lane, rows = smaller(out_features - row, LANES);
            if (rows <= 0) break;
            for (i64 k = 0; k < in_features; k += group) {
                i64 inputs = smaller(group, padded - k);
                gather(weight + row * row_stride + k * column_stride, row_stride, column_stride, rows, in_features - k,
                       inputs, x);
                store_group(Cursor(layout, place, k), lane, x, inputs, fit_group(x, inputs));
            }
        }
    });
}

}  // namespace

// Fills `packed`, records of UINT4 with scales and offsets of float16, whose groups have up to 256 inputs. Strides in
// numbers, of `element`.
EXPORT void octavo_quantize_four_bits(char *packed, i64 element, const void *weight, i64 row_stride, i64 column_stride,
                                      i64 out_features, i64 in_features, i64 group, i64 threads) {
    if (element == FLOAT32)
        quantize(packed, (const float *)weight, row_stride, column_stride, out_features, in_features, group, threads);
    else
        quantize(packed, (const Bfloat16 *)weight, row_stride, column_stride, out_features, in_features, group,
                 threads);
}
