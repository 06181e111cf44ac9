// Rows quantised to eight bits, and their products with weights of eight bits and one scale an output
// (kernels/int8_weight.py). Those with other weights are in rounded_records.cpp.
//
//     total[r, o] += scale[r, g] * (sum_i w[o, i] q[r, i] - 128 sum_i q[r, i])     w = q of the weight + 128
//     out[r, o] = total[r, o] * scale[o] + bias[o]
//
// over the groups g of 32 inputs. The instruction for four products and their sum takes one factor unsigned, hence the
// 128; what it adds too much is known when a row is quantised, and sums start from there. Sums within a group are
// exact, and groups are added in order, each by one fused multiply-add, whatever the number of rows.
//
// A row is quantised group by group: scale = max |x| / 127, q = round(x / scale). A group that holds NaN or an infinity
// gets the scale NaN, and with it everything that is computed of the row. One whose numbers are all below 1e-30 counts
// as zeros: 127 / max has to be finite.
#include "products.h"
#include "tiles.h"

namespace {

const i64 ROWS = 4;
const i64 MANY_ROWS = 8;  // from which three panels of 16 are multiplied at once; fewer go through one after the other
const i64 SOON_BYTES = 4096;               // how far ahead tiles of fewer rows prefetch
const int32_t INFINITY_BITS = 0x7f800000;  // those of NaN are larger

// 1 to 4 rows by COLUMNS panels of 16 outputs, from the first group to the number that is written. Where there are few
// sums each is begun several times, or every product would wait for the last.
template <int NUM, int COLUMNS, class T>
void tile_of_bytes(const Group *groups, i64 stride, i64 num_groups, const char *weight, i64 panel_stride,
                   const float *scale, const float *bias, T *out, i64 out_stride, const char *next, i64 next_lines) {
    const int CHAINS = NUM * COLUMNS >= 8 ? 1 : NUM * COLUMNS >= 3 ? 2 : NUM * COLUMNS == 2 ? 4 : 8;
    F totals[NUM][COLUMNS];
#pragma GCC unroll 4
    for (int r = 0; r < NUM; r++)
#pragma GCC unroll 3
        for (int p = 0; p < COLUMNS; p++) totals[r][p] = splat(0.0f);
    for (i64 g = 0; g < num_groups; g++, weight += BYTES_OF_GROUP) {
        if (NUM == ROWS) {
            for (i64 i = 0; i < next_lines; i++) prefetch_second_level(next + (g * next_lines + i) * CACHE_LINE);
        } else {
#pragma GCC unroll 3
            for (int p = 0; p < COLUMNS; p++)
#pragma GCC unroll 8
                for (int i = 0; i < QUADS; i++)
                    prefetch_second_level(weight + p * panel_stride + SOON_BYTES + i * CACHE_LINE);
        }
        I sums[NUM][COLUMNS][CHAINS];
#pragma GCC unroll 4
        for (int r = 0; r < NUM; r++)
#pragma GCC unroll 3
            for (int p = 0; p < COLUMNS; p++)
#pragma GCC unroll 8
                for (int c = 0; c < CHAINS; c++)
                    sums[r][p][c] = c ? splat(0) : shift_left<7>(splat(groups[r * stride + g].minus_sum));
#pragma GCC unroll 8
        for (int quad = 0; quad < QUADS; quad++) {
            I weights[COLUMNS];
#pragma GCC unroll 3
            for (int p = 0; p < COLUMNS; p++)
                weights[p] = load((const int32_t *)(weight + p * panel_stride + quad * CACHE_LINE));
#pragma GCC unroll 4
            for (int r = 0; r < NUM; r++) {
                Quad inputs = quad_of(groups[r * stride + g], quad * 4);
#pragma GCC unroll 3
                for (int p = 0; p < COLUMNS; p++)
                    sums[r][p][quad % CHAINS] = dot_bytes(sums[r][p][quad % CHAINS], weights[p], inputs);
            }
        }
#pragma GCC unroll 4
        for (int r = 0; r < NUM; r++)
#pragma GCC unroll 3
            for (int p = 0; p < COLUMNS; p++) {
                I sum = sums[r][p][0];
#pragma GCC unroll 8
                for (int c = 1; c < CHAINS; c++) sum = sum + sums[r][p][c];
                totals[r][p] = fma(to_float(sum), splat_at(&groups[r * stride + g].scale), totals[r][p]);
            }
    }
#pragma GCC unroll 4
    for (int r = 0; r < NUM; r++)
#pragma GCC unroll 3
        for (int p = 0; p < COLUMNS; p++)
            store(out + r * out_stride + p * LANES, fma(totals[r][p], load(scale + p * LANES), load(bias + p * LANES)));
}

// What all tiles of a panel prefetch together of the next `bytes`: so many lines a group.
i64 lines_a_group(i64 bytes, i64 rows, i64 num_groups) {
    i64 turns = (rows < ROWS ? 1 : rows / ROWS) * num_groups;
    if (!turns) return 0;  // no inputs at all
    return (bytes / CACHE_LINE + turns - 1) / turns;
}

template <int COLUMNS, class T>
void rows_by_bytes(const Group *groups, i64 rows, i64 num_groups, const char *weight, const float *scale,
                   const float *bias, T *out, i64 out_stride, bool has_next) {
    i64 stride = num_groups * BYTES_OF_GROUP, lines = has_next ? lines_a_group(COLUMNS * stride, rows, num_groups) : 0;
    const char *next = weight + COLUMNS * stride, *end = next + COLUMNS * stride;
    for (i64 row = 0; row < rows; row += ROWS) {
        i64 count = smaller(rows - row, ROWS);
        with_number<ROWS>(count, [&](auto number) {
            tile_of_bytes<decltype(number)::value, COLUMNS, T>(groups + row * num_groups, num_groups, num_groups,
                                                               weight, stride, scale, bias, out + row * out_stride,
                                                               out_stride, next, next < end ? lines : 0);
        });
        next += num_groups * lines * CACHE_LINE;
    }
}

template <class T>
void multiply_bytes(const Group *groups, i64 rows, i64 num_groups, const char *weight, const float *scale,
                    const float *bias, i64 count, T *out, i64 out_stride, bool has_next) {
    const float zeros[PANEL] = {};
    if (HAS_TILES && rows >= TILE_ROWS && count == PANEL) {
        i64 whole = rows / TILE_ROWS * TILE_ROWS;
        multiply_bytes_by_tiles(groups, whole, num_groups, weight, scale, bias ? bias : zeros, out, out_stride);
        if ((rows -= whole) == 0) return;
        groups += whole * num_groups, out += whole * out_stride;
    }
    if (HAS_WIDE_REGISTERS && rows >= MANY_ROWS && count == PANEL)
        return rows_by_bytes<VECTORS>(groups, rows, num_groups, weight, scale, bias ? bias : zeros, out, out_stride,
                                      has_next);
    for (i64 first = 0; first < count;
         first += LANES, weight += num_groups * BYTES_OF_GROUP) {  // one stream of memory a thread
        bool is_followed = first + LANES < count || has_next;
        if (first + LANES <= count) {
            rows_by_bytes<1>(groups, rows, num_groups, weight, scale + first, bias ? bias + first : zeros, out + first,
                             out_stride, is_followed);
            continue;
        }
        i64 left = count - first;  // nothing past the outputs is read or written
        float line[2][LANES] = {};
        memcpy(line[0], scale + first, left * 4);
        if (bias) memcpy(line[1], bias + first, left * 4);
        T *whole = (T *)scratch(OF_PANEL, rows * LANES * sizeof(T));
        rows_by_bytes<1>(groups, rows, num_groups, weight, line[0], line[1], whole, (i64)LANES, is_followed);
        for (i64 row = 0; row < rows; row++)
            memcpy(out + row * out_stride + first, whole + row * LANES, left * sizeof(T));
    }
}

template <class T>
void quantize(const T *x, i64 size, Group *group) {
    for (i64 first = 0; first < size; first += GROUP, group++) {
        i64 count = smaller(size - first, GROUP), low = smaller(count, LANES);
        F values[2] = {load_some(x + first, low),
                       count > LANES ? load_some(x + first + LANES, count - LANES) : splat(0.0f)};
        // As integers, the bits of magnitudes are ordered as these are, NaN above all.
        I sizes[2] = {bits_of(values[0]) & splat(0x7fffffff), bits_of(values[1]) & splat(0x7fffffff)};
        int32_t most_bits = largest_of_lanes(larger_unsigned(sizes[0], sizes[1]));
        float most;
        memcpy(&most, &most_bits, 4);
        bool is_broken = most_bits >= INFINITY_BITS, is_zero = most < 1e-30f;
        group->scale = is_broken ? __builtin_nanf("") : is_zero ? 0.0f : most / 127.0f;
        F factor = splat(is_broken || is_zero ? 0.0f : 127.0f / most);
        I numbers[2] = {to_int(rounded(values[0] * factor)), to_int(rounded(values[1] * factor))};
        store_quads(group->numbers, numbers[0]), store_quads(group->numbers + LANES, numbers[1]);
        if (!HAS_BYTE_PRODUCTS)
            for (int i = 0; i < GROUP; i++) group->words[i / 4 * 4 + i % 2 * 2 + i / 2 % 2] = group->numbers[i];
        for (int half = 0; half < 2; half++)  // of NaN no matter what: it is scaled by NaN
            group->minus_half[half] = (int32_t)(0 - (uint32_t)sum_of_lanes(numbers[half]));
        group->minus_sum = (int32_t)((uint32_t)group->minus_half[0] + (uint32_t)group->minus_half[1]);
        group->sum = group->scale * -(float)group->minus_sum;
    }
}

}  // namespace

void quantize_row(i64 element, const void *x, i64 size, Group *groups) {
    if (element == FLOAT32) quantize((const float *)x, size, groups);
    else quantize((const Bfloat16 *)x, size, groups);
}

void multiply_quantized(const Product &product, const Group *groups, i64 rows, const char *weight, i64 column,
                        i64 element, void *out, i64 out_stride, bool has_next) {
    i64 num_groups = groups_of(product.num_in), count = smaller(product.num_out - column, PANEL);
    const float *bias = product.bias ? product.bias + column : 0, *scale = product.scale ? product.scale + column : 0;
    if (product.kind == ROUNDED_RECORDS)
        multiply_rounded_records(product, groups, rows, weight, column, element, out, out_stride, has_next);
    else if (element == FLOAT32)
        multiply_bytes(groups, rows, num_groups, weight, scale, bias, count, (float *)out, out_stride, has_next);
    else multiply_bytes(groups, rows, num_groups, weight, scale, bias, count, (Bfloat16 *)out, out_stride, has_next);
}
