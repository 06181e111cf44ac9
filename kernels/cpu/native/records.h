// Records: how a panel keeps numbers of few bits, whatever format they come from (kernels/cpu/products/records.py).
//
//     W[o, k] = scale[o, g] * code[o, k] + offset[o, g],     g = k / group
//
// A panel is one record after the other, each of 48 outputs and the same number of inputs, the last one of what is
// left:
//
//     f16[48], f16[48]    only of FACTOR: what the factors of its groups are of, of scales and of offsets
//     a line a group      scale [48], then what is said of offsets [48]
//     codes               four bits: i32[inputs / 8, 48], eight inputs a word; eight bits: i8[inputs, 48]
//
// For rounded rows bytes lie as one instruction multiplies them: QUADS are u8[inputs / 4, 48, 4], code + 128, of each
// eight inputs first those of even number, then those of odd. INT6 are u8[inputs / 16, 3, 48, 4]: code + 32 of the
// first three of four such quads, and above each two bits of the fourth, its highest above the first.
#pragma once
#include "products.h"

enum { INPUTS_OF_FACTORS = 256 };  // of a record of factors; of others a group is a record

struct RecordLayout {
    i64 inputs, group;
    i64 head, line, lines, step;  // bytes: before the lines, of a line, of all lines, of the codes of 8 inputs
    i64 bytes;

    explicit RecordLayout(const Records &records) : group(records.group) {
        bool has_factors = records.scale == SCALE_FACTOR;
        const i64 scale_bytes[] = {2, 4, 1}, offset_bytes[] = {0, 2, 1, 1}, bits[] = {4, 4, 4, 8, 8, 6, 8};
        inputs = has_factors ? (i64)INPUTS_OF_FACTORS : group;
        head = !has_factors ? 0 : records.offset == OFFSET_FACTOR ? PANEL * 4 : PANEL * 2;
        line = PANEL * (scale_bytes[records.scale] + offset_bytes[records.offset]);
        lines = inputs / group * line;
        step = PANEL * bits[records.codes];
        bytes = head + lines + inputs / 8 * step;
    }
    i64 panel_bytes(i64 depth) const {
        i64 rest = depth % inputs;
        return depth / inputs * bytes + (rest ? head + lines + rest / 8 * step : 0);
    }
    // About what so many inputs take, lines included.
    i64 bytes_of(i64 some) const { return (bytes * some + inputs - 1) / inputs; }
};

// The place of an input in a panel, which goes on by inputs that divide a group.
struct Cursor {
    const RecordLayout &layout;
    const char *record, *line, *codes;
    i64 left_of_group, left_of_record;

    Cursor(const RecordLayout &layout, const char *panel, i64 input) : layout(layout) {
        i64 within = input % layout.inputs;
        record = panel + input / layout.inputs * layout.bytes;
        line = record + layout.head + within / layout.group * layout.line;
        codes = record + layout.head + layout.lines + within / 8 * layout.step;
        left_of_group = layout.group - within % layout.group, left_of_record = layout.inputs - within;
    }
    INLINED void advance(i64 inputs) {
        codes += inputs / 8 * layout.step, left_of_group -= inputs, left_of_record -= inputs;
        if (left_of_record == 0) {
            record = codes, line = record + layout.head, codes = line + layout.lines;
            left_of_group = layout.group, left_of_record = layout.inputs;
        } else if (left_of_group == 0) line += layout.line, left_of_group = layout.group;
    }
};

const int8_t CODES_OF_FOUR_BITS[][LANES] = {
    // what UINT4, INT4 and E2M1 say
    {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15},
    {-8, -7, -6, -5, -4, -3, -2, -1, 0, 1, 2, 3, 4, 5, 6, 7},
    {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12},
};
INLINE F load_code(const int8_t *p) { return to_float(widen(p)); }
INLINE F load_code(const E4m3 *p) { return load(p); }
INLINE F load_byte(const char *p) { return load_code((const int8_t *)p); }

// Scales and offsets of the outputs from `lane` on, of a group in `line` of a record; exact.
template <bool HAS_OFFSET, int COLUMNS>
INLINE void read_line(const Records &records, const char *record, const char *line, i64 lane, F (&scales)[COLUMNS],
                      F (&offsets)[COLUMNS]) {
    const char *offset = line + PANEL * (records.scale == SCALE_FLOAT16 ? 2 : records.scale == SCALE_FLOAT32 ? 4 : 1);
#pragma GCC unroll 3
    for (int v = 0; v < COLUMNS; v++, lane += LANES) {
        if (records.scale == SCALE_FLOAT16) scales[v] = load((const Float16 *)line + lane);
        else if (records.scale == SCALE_FLOAT32) scales[v] = load((const float *)line + lane);
        else scales[v] = load((const Float16 *)record + lane) * load_byte(line + lane);
        if (!HAS_OFFSET) continue;
        if (records.offset == OFFSET_FLOAT16) offsets[v] = load((const Float16 *)offset + lane);
        else if (records.offset == ZERO) offsets[v] = splat(0.0f) - scales[v] * load_byte(offset + lane);
        else offsets[v] = load((const Float16 *)record + PANEL + lane) * load_byte(offset + lane);
    }
}
