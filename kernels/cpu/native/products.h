// Products of rows with packed weights, whichever way these are kept; see products.cpp.
#pragma once
#include "threads.h"
#include "tiles.h"

// At the level that AMD's processors take. Intel's have tiles beside, and products of pairs alone are slow there.
enum { HAS_FAST_PAIRS = HAS_PAIRS && !HAS_TILES };
enum { MULTIPLIES_PAIRS = HAS_PAIRS || HAS_TILES };  // of bfloat16, one way or the other

enum Element { FLOAT32, BFLOAT16 };  // of rows
// How a weight is kept. Of the first four numbers say exactly what the weight is, and rows are not rounded; PAIRS are
// of bfloat16, for rows of bfloat16; of the rest rows are quantised as they come.
enum Kind { WEIGHT_FLOAT32, WEIGHT_BFLOAT16, WEIGHT_RECORDS, WEIGHT_PAIRS, INT8, ROUNDED_RECORDS };

// What records consist of (records.h): 0 .. 15, -8 .. 7, doubled, bytes, 1 / 256; and for rounded rows alone -32 .. 31
// and bytes in quads. Those of rounded rows are UINT4, INT4 and these two.
enum Codes { CODES_UINT4, CODES_INT4, CODES_E2M1, CODES_INT8, CODES_E4M3, CODES_INT6, CODES_QUADS };
enum Scale { SCALE_FLOAT16, SCALE_FLOAT32, SCALE_FACTOR };
enum Offset { NO_OFFSET, OFFSET_FLOAT16, ZERO, OFFSET_FACTOR };  // of ZERO the offset is -scale zero
struct Records {
    i64 codes, scale, offset;
    i64 group;  // inputs that share a scale: a multiple of 32 for codes of four bits, of 16 for others
};

const i64 PANEL = 48;  // outputs of a panel, which a thread multiplies at a time
const i64 VECTORS = PANEL / LANES;
const i64 GROUP = 32;  // inputs of a row that share a scale where rows are quantised

struct Product {
    i64 kind;
    const char *weight;
    const float *scale;  // of INT8, one an output
    const float *bias;   // or 0
    i64 num_in, num_out;
    Records records;      // of WEIGHT_RECORDS and ROUNDED_RECORDS
    const i64 *order;     // or 0; which input of a row the weight's are for, in turn
    const Product *next;  // or 0; of the same rows, prepared alike: its outputs lie behind these
};
INLINE i64 outputs_of(const Product &product) {
    i64 count = 0;
    for (const Product *part = &product; part; part = part->next) count += part->num_out;
    return count;
}

INLINE i64 element_bytes(i64 element) { return element == FLOAT32 ? 4 : 2; }

enum { PHASES_OF_PRODUCT = 2 };
// Bytes that `multiply` needs for so many rows.
i64 workspace_bytes(const Product &product, i64 element, i64 rows);
// out [rows, outputs_of(product)] = x [rows, num_in] W^T + bias, by all threads of a team; strides in elements.
void multiply(Team &team, const Product &product, i64 element, void *out, i64 out_stride, const void *x, i64 x_stride,
              i64 rows, char *workspace);

// What a thread does with a panel: sums[r, c] = start[c] + sum_k x[r, k] W[48 panel + c, k], in float32. Sums [rows,
// 48] lie side by side: a cache has no place for many lines that are a multiple of 4 KiB apart, as rows of outputs
// often are. The stride is in bytes for x, and in numbers for start, which may be a line for each row; `has_next`: the
// panel behind is likely to come next.
struct PanelWork {
    const char *x;
    i64 x_stride, rows, depth;
    const char *weight;  // of the panel
    const float *start;
    float *sums;
    bool has_next;
    i64 start_stride = 0;
};
// Rows of bfloat16 as records are multiplied by where pairs of them are: of each group of 32 inputs the pairs, of each
// eight inputs i and i + 4; and their sums, of all and of each half. Rows of a panel's work are then of these.
struct PairGroup {
    uint16_t pairs[GROUP];
    float sum, half[2];
};
void prepare_pairs(const Bfloat16 *x, const i64 *order, i64 size, PairGroup *groups);
void add_few_bits_by_pairs(const Records &records, const PanelWork &work);
i64 panel_bytes(const Product &product);
void add_floats(i64 kind, const PanelWork &work);
void add_few_bits(const Records &records, const PanelWork &work);
void add_pairs_by_tiles(const PanelWork &work);

// Quantised rows: of each group of 32 inputs the numbers, in the order of `int8_weight.QUAD_ORDER`, what they are
// scaled by, their sum so scaled, and -1 times their sum: of all, and of each half. Where no instruction multiplies
// bytes, they are there as words, too, in the order in which words are multiplied.
struct Group {
    int8_t numbers[GROUP];
    int16_t words[HAS_BYTE_PRODUCTS ? 0 : GROUP];
    float scale, sum;
    int32_t minus_sum, minus_half[2];
};
INLINE Quad quad_of(const Group &group, i64 first) { return quad_at(group.numbers + first, group.words + first); }
// A group of INT8, of 16 outputs: its lines, of four inputs each, and its bytes.
const i64 QUADS = GROUP / 4, BYTES_OF_GROUP = QUADS * CACHE_LINE;
INLINE i64 groups_of(i64 num_in) { return (num_in + GROUP - 1) / GROUP; }
void quantize_row(i64 element, const void *x, i64 size, Group *groups);
// A panel of quantised weights, which begins with output `column`, by all rows.
void multiply_quantized(const Product &product, const Group *groups, i64 rows, const char *weight, i64 column,
                        i64 element, void *out, i64 out_stride, bool has_next);
void multiply_rounded_records(const Product &product, const Group *groups, i64 rows, const char *weight, i64 column,
                              i64 element, void *out, i64 out_stride, bool has_next);
// Of INT8, a whole panel by rows that are multiples of 16, by tiles.
template <class T>
void multiply_bytes_by_tiles(const Group *groups, i64 rows, i64 num_groups, const char *weight, const float *scale,
                             const float *bias, T *out, i64 out_stride);
// Sums [rows, 48] to the first `width` columns of out.
void write_sums(const float *sums, i64 rows, i64 width, i64 element, void *out, i64 out_stride);
