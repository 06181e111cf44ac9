// Products of quantised rows (quantized.cpp) with weights in records (records.h), whatever format they came in.
//
//     total[r, o] += (scale[o, g] * sum_i code[o, i] q[r, i]) * step[r, h] + offset[o, g] * (step[r, h] * sum_i q[r, i])
//
// over pieces of 32 inputs, the groups h of a row, or of 16 where a group g of the weight is no multiple of 32. Sums
// within a piece are exact, as integers; each is multiplied by its scale, and added to the total by one fused
// multiply-add, and so is the offset. Pieces come in order, whatever the tile: a row has the same bits in any company.
//
// The instruction for four products and their sum takes codes unsigned. Those that count from below zero come so much
// higher, and sums start from what that adds, which is known when a row is quantised.
#include "records.h"

namespace {

const i64 MOST_ROWS = 4;       // of a tile
const i64 NARROW_ROWS = 2;     // up to which few registers take all columns at once
const i64 SOON_BYTES = 4096;   // how far tiles of fewer rows ask ahead of what they read
const i64 HALF = GROUP / 2, QUADS_OF_HALF = HALF / 4;
const i64 WORD_LINE = PANEL * 4;  // bytes

// The bytes of quad i of 16 inputs, 16 outputs; 2^LEAST is what they are too high, where that is not 0.
template <int LEAST_BITS>
struct FourBits {
    enum { LEAST = LEAST_BITS };
    static INLINED I read(const char *half, int i) {
        I word = load((const int32_t *)(half + i / 2 * WORD_LINE));
        return (i % 2 ? shift_right<4>(word) : word) & splat(0x0f0f0f0f);
    }
};
struct SixBits {
    enum { LEAST = 5 };
    static INLINED I read(const char *half, int i) {
        I high = load((const int32_t *)(half + 2 * WORD_LINE));
        I placed = i == 0 ? shift_left<4>(high) : i == 1 ? shift_left<2>(high) : i == 2 ? high : shift_right<2>(high);
        return FourBits<0>::read(half, i) | (placed & splat(0x30303030));
    }
};
struct EightBits {
    enum { LEAST = 7 };
    static INLINED I read(const char *half, int i) { return load((const int32_t *)(half + i * WORD_LINE)); }
};

struct Work {
    const Records &records;
    const RecordLayout &layout;
    const char *panel;
    i64 num_groups;
    const float *bias;  // of the panel
};

// Up to MOST_ROWS rows by COLUMNS vectors of outputs, from `lane` on. With each piece so many lines of `next` are
// prefetched, or what lies SOON_BYTES ahead.
template <class Codes, int PIECE, int ROWS, int COLUMNS>
void tile(const Work &work, const Group *groups, i64 lane, float *out, i64 out_stride, const char *next, i64 lines) {
    const RecordLayout &layout = work.layout;
    const bool has_offsets = work.records.second != NO_OFFSET;
    const i64 depth = work.num_groups * GROUP, half_bytes = layout.step * HALF / 8;
    F totals[ROWS][COLUMNS];
#pragma GCC unroll 4
    for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 3
        for (int v = 0; v < COLUMNS; v++) totals[r][v] = load(work.bias + lane + v * LANES);
    const char *record = work.panel;
    for (i64 k = 0; k < depth;) {
        const char *line = record + layout.head, *half = line + layout.lines + lane * 4;
        for (const i64 end = smaller(k + layout.inputs, depth); k < end; line += layout.line) {
            F scales[COLUMNS], offsets[COLUMNS];
            if (has_offsets) read_line<true>(work.records, record, line, lane, scales, offsets);
            else read_line<false>(work.records, record, line, lane, scales, offsets);
            for (const i64 end_of_line = smaller(k + layout.group, end); k < end_of_line; k += PIECE) {
                const Group *group = groups + k / GROUP;
                const int32_t *minus_sum = PIECE == GROUP ? &group->minus_sum : &group->minus_half[k % GROUP / HALF];
                const int8_t *numbers = group->numbers + k % GROUP;
                const i64 row = work.num_groups;
                if (lines) {
                    for (i64 i = 0; i < lines; i++, next += CACHE_LINE) prefetch_second_level(next);
                } else if (ROWS < MOST_ROWS && lane == 0) {
                    for (i64 i = 0; i < PIECE / HALF * half_bytes; i += CACHE_LINE) prefetch(half + SOON_BYTES + i);
                }
                I dots[ROWS][COLUMNS];
#pragma GCC unroll 4
                for (int r = 0; r < ROWS; r++) {
                    I start = splat(0);
                    if (Codes::LEAST) start = shift_left<Codes::LEAST>(splat(*at(minus_sum, r * row * sizeof(Group))));
#pragma GCC unroll 3
                    for (int v = 0; v < COLUMNS; v++) dots[r][v] = start;
                }
#pragma GCC unroll 2
                for (int h = 0; h < PIECE / HALF; h++, half += half_bytes) {
#pragma GCC unroll 4
                    for (int i = 0; i < QUADS_OF_HALF; i++) {
                        I codes[COLUMNS];
#pragma GCC unroll 3
                        for (int v = 0; v < COLUMNS; v++) codes[v] = Codes::read(half + v * CACHE_LINE, i);
#pragma GCC unroll 4
                        for (int r = 0; r < ROWS; r++) {
                            I inputs = splat_at(at(numbers, r * row * sizeof(Group)) + h * HALF + i * 4);
#pragma GCC unroll 3
                            for (int v = 0; v < COLUMNS; v++) dots[r][v] = dot_bytes(dots[r][v], codes[v], inputs);
                        }
                    }
                }
#pragma GCC unroll 4
                for (int r = 0; r < ROWS; r++) {
                    const Group &of_row = group[r * row];
#pragma GCC unroll 3
                    for (int v = 0; v < COLUMNS; v++)
                        totals[r][v] = fma(to_float(dots[r][v]) * scales[v], splat_at(&of_row.scale), totals[r][v]);
                    if (!has_offsets) continue;
                    F sum = PIECE == GROUP ? splat_at(&of_row.sum)
                                           : splat(of_row.scale * -(float)*at(minus_sum, r * row * sizeof(Group)));
#pragma GCC unroll 3
                    for (int v = 0; v < COLUMNS; v++) totals[r][v] = fma(offsets[v], sum, totals[r][v]);
                }
            }
        }
        record = half - lane * 4;
    }
#pragma GCC unroll 4
    for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 3
        for (int v = 0; v < COLUMNS; v++) store(out + r * out_stride + lane + v * LANES, totals[r][v]);
}

template <class Codes, int PIECE, int COLUMNS, int ROWS>
void tile_of(i64 rows, const Work &work, const Group *groups, i64 lane, float *out, i64 out_stride, const char *next,
             i64 lines) {
    if (rows == ROWS) tile<Codes, PIECE, ROWS, COLUMNS>(work, groups, lane, out, out_stride, next, lines);
    else if constexpr (ROWS > 1)
        tile_of<Codes, PIECE, COLUMNS, ROWS - 1>(rows, work, groups, lane, out, out_stride, next, lines);
}

// A panel by all rows, out [rows, 48]. `next`: the bytes that follow, which all tiles prefetch together; or 0.
template <class Codes, int PIECE>
void multiply_panel(const Work &work, const Group *groups, i64 rows, float *out, i64 out_stride, const char *next) {
    i64 bytes = work.layout.panel_bytes(work.num_groups * GROUP), pieces = work.num_groups * (GROUP / PIECE);
    i64 tiles = larger(rows / MOST_ROWS, 1), lines = 0;
    if (next && pieces) lines = (bytes / CACHE_LINE + tiles * pieces - 1) / (tiles * pieces);
    const char *end = next + bytes;
    for (i64 row = 0; row < rows; row += MOST_ROWS) {
        i64 count = smaller(rows - row, MOST_ROWS), some = rows >= MOST_ROWS && next < end ? lines : 0;
        const Group *from = groups + row * work.num_groups;
        float *to = out + row * out_stride;
        if (HAS_WIDE_REGISTERS) {
            tile_of<Codes, PIECE, VECTORS, MOST_ROWS>(count, work, from, 0, to, out_stride, next, some);
        } else if (count <= NARROW_ROWS) {
            tile_of<Codes, PIECE, VECTORS, NARROW_ROWS>(count, work, from, 0, to, out_stride, next, some);
        } else {
            for (i64 lane = 0; lane < PANEL; lane += LANES)
                tile_of<Codes, PIECE, 1, MOST_ROWS>(count, work, from, lane, to, out_stride, next, lane ? 0 : some);
        }
        next += pieces * some * CACHE_LINE;
    }
}

template <class Codes>
void multiply_by_pieces(const Work &work, const Group *groups, i64 rows, float *out, i64 out_stride, const char *next) {
    if (work.layout.group % GROUP == 0) multiply_panel<Codes, GROUP>(work, groups, rows, out, out_stride, next);
    else multiply_panel<Codes, HALF>(work, groups, rows, out, out_stride, next);
}

}  // namespace

void multiply_rounded_records(const Product &product, const Group *groups, i64 rows, const char *weight, i64 column,
                              i64 element, void *out, i64 out_stride, bool has_next) {
    const Records &records = product.records;
    RecordLayout layout(records);
    i64 num_groups = groups_of(product.num_in), count = smaller(product.num_out - column, PANEL);
    float bias[PANEL] = {};
    if (product.bias) memcpy(bias, product.bias + column, count * 4);
    bool is_whole = count == PANEL && element == FLOAT32;
    float *sums = is_whole ? (float *)out : (float *)scratch(OF_PANEL, rows * PANEL * 4);
    i64 stride = is_whole ? out_stride : (i64)PANEL;
    const char *next = has_next ? weight + layout.panel_bytes(num_groups * GROUP) : 0;
    Work work = {records, layout, weight, num_groups, bias};
    if (records.codes == CODES_UINT4) multiply_panel<FourBits<0>, GROUP>(work, groups, rows, sums, stride, next);
    else if (records.codes == CODES_INT4) multiply_panel<FourBits<3>, GROUP>(work, groups, rows, sums, stride, next);
    else if (records.codes == CODES_INT6) multiply_by_pieces<SixBits>(work, groups, rows, sums, stride, next);
    else if (records.codes == CODES_QUADS) multiply_by_pieces<EightBits>(work, groups, rows, sums, stride, next);
    if (!is_whole) write_sums(sums, rows, count, element, out, out_stride);
}
