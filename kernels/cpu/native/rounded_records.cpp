// Products of quantised rows (quantized.cpp) with weights in records (records.h), whatever format they came in.
//
//     total[r, o] += (scale[o, g] sum_i code[o, i] q[r, i]) step[r, h] + offset[o, g] (step[r, h] sum_i q[r, i])
//
// over pieces of 32 inputs, the groups h of a row, or of 16 where a group g of the weight is no multiple of 32. Sums
// within a piece are exact, as integers; each is multiplied by its scale, and added to the total by one fused
// multiply-add, and so is the offset. Pieces come in order, whatever the tile: a row has the same bits in any company.
//
// The instruction for four products and their sum takes codes unsigned. Those that count from below zero come so much
// higher, and sums start from what that adds, which is known when a row is quantised. Without that instruction there is
// one for two products and their sum, as words. Sums of codes of four bits stay words for a piece, of six for two
// quads.
#include "records.h"

namespace {

const i64 MOST_ROWS = 4;      // of a tile; others have 2 or 1
const i64 MANY_ROWS = 16;     // from which scales are made once for all tiles
const i64 NARROW_ROWS = 2;    // up to which few registers take all columns at once
const i64 SOON_BYTES = 6144;  // how far ahead tiles of fewer rows prefetch
const i64 HALF = GROUP / 2, QUADS_OF_HALF = HALF / 4;
const i64 WORD_LINE = PANEL * 4;  // bytes

// The bytes of quad i of 16 inputs, 16 outputs, BITS of each; 2^LEAST is what they are too high, where that is not 0.
template <int LEAST_BITS>
struct FourBits {
    enum { LEAST = LEAST_BITS, BITS = 4 };
    static INLINED I read(const char *half, int i) {
        I word = load((const int32_t *)(half + i / 2 * WORD_LINE));
        return (i % 2 ? shift_right<4>(word) : word) & splat(0x0f0f0f0f);
    }
};
struct SixBits {  // three words with a code in each byte, and two bits of the fourth above it
    enum { LEAST = 5, BITS = 6 };
    static INLINED I read(const char *half, int i) {
        auto word = [&](int n) INLINED { return load((const int32_t *)(half + n * WORD_LINE)); };
        if (i < 3) return word(i) & splat(0x3f3f3f3f);
        I upper = choose_bits(splat((int32_t)0xc0c0c0c0), word(0), shift_right<2>(word(1)));
        I all = choose_bits(splat((int32_t)0xf0f0f0f0), upper, shift_right<4>(word(2)));
        return shift_right<2>(all) & splat(0x3f3f3f3f);
    }
};
struct EightBits {
    enum { LEAST = 7, BITS = 8 };
    static INLINED I read(const char *half, int i) { return load((const int32_t *)(half + i * WORD_LINE)); }
};

struct PanelProduct {
    const Records &records;
    const RecordLayout &layout;
    const char *panel;
    const float *scales;  // what `read_scales` makes; 0: tiles read lines as they come to them
    i64 num_groups;
    const float *bias;  // of the panel
};
const i64 OF_GROUP = 2 * PANEL;  // numbers of a group of the weight: its scales, then its offsets

// Of all groups of a panel. Many tiles need them, and few instructions are left beside their products.
void read_scales(const Records &records, const RecordLayout &layout, const char *panel, i64 depth, float *numbers) {
    for (i64 k = 0; k < depth; panel += layout.bytes) {
        const char *line = panel + layout.head;
        for (const i64 end = smaller(k + layout.inputs, depth); k < end; k += layout.group, line += layout.line) {
            F scales[VECTORS], offsets[VECTORS];
            if (records.offset != NO_OFFSET) read_line<true>(records, panel, line, 0, scales, offsets);
            else read_line<false>(records, panel, line, 0, scales, offsets);
            for (int v = 0; v < VECTORS; v++) {
                store(numbers + v * LANES, scales[v]);
                if (records.offset != NO_OFFSET) store(numbers + PANEL + v * LANES, offsets[v]);
            }
            numbers += OF_GROUP;
        }
    }
}

// ROWS rows by COLUMNS vectors of outputs, from `lane` on, to out [ROWS, 48]. With each piece so many lines of `next`
// are prefetched.
template <class Codes, int PIECE, int ROWS, int COLUMNS, bool HAS_SCALES>
__attribute__((noinline)) void tile(const PanelProduct &work, const Group *groups, i64 lane, float *out,
                                    const char *next, i64 lines) {
    const RecordLayout layout = work.layout;
    const Records records = work.records;
    const bool has_offsets = records.offset != NO_OFFSET, ARE_WORDS = Codes::BITS == 4 && !HAS_BYTE_PRODUCTS;
    const int TOGETHER = Codes::BITS == 6 && !HAS_BYTE_PRODUCTS ? 2 : 1;  // quads whose sums stay words
    const i64 stride = work.num_groups, depth = stride * GROUP, half_bytes = layout.step * HALF / 8;
    const char *record = work.panel;
    const float *numbers = HAS_SCALES ? work.scales + lane : 0;
    const bool KEEPS_TOTALS = HAS_SCALES && HAS_WIDE_REGISTERS;
    F totals[ROWS][COLUMNS];  // with KEEPS_TOTALS; else they stay in `out`, for want of registers
    auto place = [&](int r, int v) INLINED { return out + r * PANEL + lane + v * LANES; };
#pragma GCC unroll 4
    for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 3
        for (int v = 0; v < COLUMNS; v++) {
            totals[r][v] = load(work.bias + lane + v * LANES);
            if (!KEEPS_TOTALS) store(place(r, v), totals[r][v]);
        }
    for (i64 k = 0; k < depth;) {
        const i64 end = smaller(k + layout.inputs, depth);
        const char *line = record + layout.head, *half = line + layout.lines + lane * 4;
        for (; k < end; line += layout.line, numbers += HAS_SCALES ? OF_GROUP : 0) {
            F scales[COLUMNS], offsets[COLUMNS];
            if (!HAS_SCALES && has_offsets) read_line<true>(records, record, line, lane, scales, offsets);
            else if (!HAS_SCALES) read_line<false>(records, record, line, lane, scales, offsets);
            for (const i64 end_of_line = smaller(k + layout.group, end); k < end_of_line; k += PIECE) {
                for (i64 i = 0; i < lines; i++, next += CACHE_LINE) prefetch_second_level(next);
                const i64 first = PIECE == GROUP ? 0 : k % GROUP;
                auto minus_sum = [&](int r) INLINED {
                    const Group &group = groups[r * stride];
                    return PIECE == GROUP ? group.minus_sum : group.minus_half[first / HALF];
                };
                auto start = [&](int r) INLINED {
                    return Codes::LEAST != 0 ? shift_left<Codes::LEAST>(splat(minus_sum(r))) : splat(0);
                };
                I dots[ROWS][COLUMNS];
#pragma GCC unroll 4
                for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 3
                    for (int v = 0; v < COLUMNS; v++) dots[r][v] = ARE_WORDS ? splat(0) : start(r);
#pragma GCC unroll 8
                for (int quad = 0; quad < PIECE / 4; quad += TOGETHER) {
                    const char *from = half + quad / QUADS_OF_HALF * half_bytes;
                    I codes[TOGETHER][COLUMNS];
#pragma GCC unroll 2
                    for (int i = 0; i < TOGETHER; i++)
#pragma GCC unroll 3
                        for (int v = 0; v < COLUMNS; v++)
                            codes[i][v] = Codes::read(from + v * CACHE_LINE, quad % QUADS_OF_HALF + i);
#pragma GCC unroll 4
                    for (int r = 0; r < ROWS; r++) {
                        const Group &group = groups[r * stride];
                        I small = splat_at(group.numbers + first + quad * 4);
                        Quad inputs = quad_of(group, first + quad * 4);
#pragma GCC unroll 3
                        for (int v = 0; v < COLUMNS; v++) {
                            I &dot = dots[r][v], code = codes[0][v];
                            if (ARE_WORDS) dot = add_as_words(dot, code, small);
                            else if (Codes::BITS == 8) dot = dot_bytes(dot, code, inputs);
                            else if (TOGETHER == 1) dot = dot_small_bytes(dot, code, small);
                            else {
                                I words = add_as_words(splat(0), code, small),
                                  others = splat_at(group.numbers + first + quad * 4 + 4);
                                dot = dot + sums_of_words(add_as_words(words, codes[TOGETHER - 1][v], others));
                            }
                        }
                    }
                }
                half += PIECE / HALF * half_bytes;
#pragma GCC unroll 4
                for (int r = 0; r < ROWS; r++) {
                    if (!KEEPS_TOTALS) in_order();  // totals of all rows at once would need registers that sums have
                    const Group &group = groups[r * stride];
                    F step = splat_at(&group.scale);
#pragma GCC unroll 3
                    for (int v = 0; v < COLUMNS; v++) {
                        F scale = HAS_SCALES ? load(numbers + v * LANES) : scales[v];
                        F total = KEEPS_TOTALS ? totals[r][v] : load(place(r, v));
                        I sums = ARE_WORDS ? sums_of_words(dots[r][v]) + start(r) : dots[r][v];
                        total = fma(to_float(sums) * scale, step, total);
                        if (has_offsets) {
                            F offset = HAS_SCALES ? load(numbers + PANEL + v * LANES) : offsets[v];
                            F of_row =
                                PIECE == GROUP ? splat_at(&group.sum) : splat(group.scale * -(float)minus_sum(r));
                            total = fma(offset, of_row, total);
                        }
                        if (KEEPS_TOTALS) totals[r][v] = total;
                        else store(place(r, v), total);
                    }
                }
                if (PIECE == GROUP || first) groups++;
            }
        }
        record = half - lane * 4;
    }
    if (!KEEPS_TOTALS) return;
#pragma GCC unroll 4
    for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 3
        for (int v = 0; v < COLUMNS; v++) store(place(r, v), totals[r][v]);
}

template <class Codes, int PIECE, int COLUMNS, int ROWS>
void tile_of(i64 rows, const PanelProduct &work, const Group *groups, i64 lane, float *totals, const char *next,
             i64 lines) {
    const bool MAY_HAVE_SCALES = ROWS == MOST_ROWS;
    if (rows == ROWS && MAY_HAVE_SCALES && work.scales)
        tile<Codes, PIECE, ROWS, COLUMNS, MAY_HAVE_SCALES>(work, groups, lane, totals, next, lines);
    else if (rows == ROWS) tile<Codes, PIECE, ROWS, COLUMNS, false>(work, groups, lane, totals, next, lines);
    else if constexpr (ROWS > 1)
        tile_of<Codes, PIECE, COLUMNS, ROWS / 2>(rows, work, groups, lane, totals, next, lines);
}

// A panel by all rows, out [rows, 48]. `next`: the bytes that follow, which all tiles prefetch together; or 0.
template <class Codes, int PIECE>
void multiply_panel(const PanelProduct &work, const Group *groups, i64 rows, float *out, i64 out_stride,
                    const char *next) {
    i64 bytes = work.layout.panel_bytes(work.num_groups * GROUP), pieces = work.num_groups * (GROUP / PIECE);
    i64 tiles = rows < MOST_ROWS ? 1 : rows / MOST_ROWS * (HAS_WIDE_REGISTERS ? 1 : VECTORS);
    if (rows < MOST_ROWS) next = work.panel + SOON_BYTES;
    i64 lines = next && pieces ? (bytes / CACHE_LINE + tiles * pieces - 1) / (tiles * pieces) : 0;
    i64 step = pieces * lines * CACHE_LINE;
    const char *end = next ? next + bytes : 0;
    auto lines_at = [&](const char *place) { return place < end ? lines : 0; };
    alignas(CACHE_LINE) float totals[MOST_ROWS * PANEL];
    for (i64 row = 0, count = MOST_ROWS; row < rows; row += count) {
        while (count > rows - row) count /= 2;
        const Group *from = groups + row * work.num_groups;
        if (HAS_WIDE_REGISTERS) {
            tile_of<Codes, PIECE, VECTORS, MOST_ROWS>(count, work, from, 0, totals, next, lines_at(next));
            next += step;
        } else if (count <= NARROW_ROWS) {
            tile_of<Codes, PIECE, VECTORS, NARROW_ROWS>(count, work, from, 0, totals, next, lines_at(next));
            next += step;
        } else {
            for (i64 lane = 0; lane < PANEL; lane += LANES, next += step)
                tile_of<Codes, PIECE, 1, MOST_ROWS>(count, work, from, lane, totals, next, lines_at(next));
        }
        for (i64 r = 0; r < count; r++) memcpy(out + (row + r) * out_stride, totals + r * PANEL, sizeof(float) * PANEL);
    }
}

template <class Codes>
void multiply_by_pieces(const PanelProduct &work, const Group *groups, i64 rows, float *out, i64 out_stride,
                        const char *next) {
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
    i64 depth = num_groups * GROUP, of_weight = (depth + layout.group - 1) / layout.group;
    bool has_scales = rows >= MANY_ROWS;
    float *scales = has_scales ? (float *)scratch(OF_ITEM, of_weight * OF_GROUP * 4) : 0;
    if (scales) read_scales(records, layout, weight, depth, scales);
    PanelProduct work = {records, layout, weight, scales, num_groups, bias};
    if (records.codes == CODES_UINT4) multiply_panel<FourBits<0>, GROUP>(work, groups, rows, sums, stride, next);
    else if (records.codes == CODES_INT4) multiply_panel<FourBits<3>, GROUP>(work, groups, rows, sums, stride, next);
    else if (records.codes == CODES_INT6) multiply_by_pieces<SixBits>(work, groups, rows, sums, stride, next);
    else if (records.codes == CODES_QUADS) multiply_by_pieces<EightBits>(work, groups, rows, sums, stride, next);
    if (!is_whole) write_sums(sums, rows, count, element, out, out_stride);
}
