// Products of rows of bfloat16 with weights of few bits (records.h), by the instruction for pairs of bfloat16:
//
//     sum_k x[k] W[o, k] = sum_g scale[o, g] (sum_{k in g} x[k] code[o, k]) + offset[o, g] (sum_{k in g} x[k])
//
// over groups of 32 inputs, or of 16 where codes have eight bits. bfloat16 has all codes, integers of up to 8 bits and
// E4M3, and the instruction rounds no product. A word of eight codes of four bits gives four pairs, each by one
// table that a register holds: two instructions for 32 numbers.
#include "records.h"

#ifdef __AVX512BF16__
namespace {

const i64 HALF = GROUP / 2;
const i64 MOST_ROWS = 8, STEP = 8;
const i64 SOON_BYTES = 8192;  // how far ahead up to MOST_ROWS rows prefetch, from panel to panel

// Inputs i and i + 4 of a step of eight, 16 outputs.
struct PairsOfFourBits {
    enum { INPUTS_AT_ONCE = 32 };
    SixteenOfPairs table;

    explicit PairsOfFourBits(const Records &records) : table(sixteen_of_pairs(CODES_OF_FOUR_BITS[records.codes])) {}
    INLINED F read(const char *step, int i, int v) const {
        I words = load((const int32_t *)(step + v * LANES * 4));
        switch (i) {
            case 0: return chosen_pair<0>(words, table);
            case 1: return chosen_pair<1>(words, table);
            case 2: return chosen_pair<2>(words, table);
            default: return chosen_pair<3>(words, table);
        }
    }
};
template <class Byte>
struct PairsOfBytes {
    enum { INPUTS_AT_ONCE = 16 };
    explicit PairsOfBytes(const Records &) {}
    static INLINED F number(const char *step, int i, int v) {
        return load_code((const Byte *)step + i * PANEL + v * LANES);
    }
    INLINED F read(const char *step, int i, int v) const { return as_pair(number(step, i, v), number(step, i + 4, v)); }
};

// Adds to the sums of ROWS rows.
template <class Codes, bool HAS_OFFSET, int ROWS>
void tile(const Records &records, const RecordLayout &layout, const PanelWork &work, i64 row, const char *soon,
          i64 soon_step) {
    const Codes codes(records);
    const char *x = work.x + row * work.x_stride;
    float *totals = work.sums + row * PANEL;
    Cursor at(layout, work.weight, 0);
    for (i64 k = 0; k < work.depth; k += Codes::INPUTS_AT_ONCE, at.advance(Codes::INPUTS_AT_ONCE), soon += soon_step) {
        F scales[VECTORS], offsets[VECTORS], dots[ROWS][VECTORS];
        read_line<HAS_OFFSET>(records, at.record, at.line, 0, scales, offsets);
        for (i64 i = 0; i < soon_step; i += CACHE_LINE) prefetch(soon + i);
#pragma GCC unroll 8
        for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 3
            for (int v = 0; v < VECTORS; v++) dots[r][v] = splat(0.0f);
        const char *step = at.codes;
        i64 half = k % GROUP / HALF;
        const char *pairs = x + k / GROUP * (i64)sizeof(PairGroup) + half * (HALF * 2);
        for (int j = 0; j < Codes::INPUTS_AT_ONCE / STEP; j++, step += layout.step, pairs += STEP * 2) {
#pragma GCC unroll 4
            for (int i = 0; i < STEP / 2; i++) {
                F numbers[VECTORS];
#pragma GCC unroll 3
                for (int v = 0; v < VECTORS; v++) numbers[v] = codes.read(step, i, v);
#pragma GCC unroll 8
                for (int r = 0; r < ROWS; r++) {
                    F inputs = splat_at((const float *)(pairs + r * work.x_stride) + i);
#pragma GCC unroll 3
                    for (int v = 0; v < VECTORS; v++) dots[r][v] = dot_pairs(inputs, numbers[v], dots[r][v]);
                }
            }
        }
#pragma GCC unroll 8
        for (int r = 0; r < ROWS; r++) {
            const PairGroup &group = *(const PairGroup *)(x + r * work.x_stride + k / GROUP * (i64)sizeof(PairGroup));
            F sum = splat_at(Codes::INPUTS_AT_ONCE == GROUP ? &group.sum : group.half + half);
#pragma GCC unroll 3
            for (int v = 0; v < VECTORS; v++) {
                float *total = totals + r * PANEL + v * LANES;
                F added = fma(scales[v], dots[r][v], load(total));
                store(total, HAS_OFFSET ? fma(offsets[v], sum, added) : added);
            }
        }
    }
}

template <class Codes, bool HAS_OFFSET>
void add_panel(const Records &records, const PanelWork &work) {
    RecordLayout layout(records);
    for (i64 row = 0; row < work.rows; row++) memcpy(work.sums + row * PANEL, work.start, sizeof(float) * PANEL);
    i64 tiles = (work.rows + MOST_ROWS - 1) / MOST_ROWS, bytes = layout.bytes_of(Codes::INPUTS_AT_ONCE);
    i64 soon_step = tiles > 1 && !work.has_next ? 0 : (bytes + tiles - 1) / tiles;
    const char *soon = work.weight + (tiles > 1 ? layout.panel_bytes(work.depth) : SOON_BYTES);
    for (i64 row = 0; row < work.rows; row += MOST_ROWS) {
        with_number<MOST_ROWS>(smaller(work.rows - row, MOST_ROWS), [&](auto number) {
            tile<Codes, HAS_OFFSET, decltype(number)::value>(records, layout, work, row, soon, soon_step);
        });
        soon += work.depth / Codes::INPUTS_AT_ONCE * soon_step;
    }
}

}  // namespace

void add_few_bits_by_pairs(const Records &records, const PanelWork &work) {
    bool has_offset = records.offset != NO_OFFSET;
    if (records.codes == CODES_INT8 && has_offset) add_panel<PairsOfBytes<int8_t>, true>(records, work);
    else if (records.codes == CODES_INT8) add_panel<PairsOfBytes<int8_t>, false>(records, work);
    else if (records.codes == CODES_E4M3) add_panel<PairsOfBytes<E4m3>, false>(records, work);
    else if (has_offset) add_panel<PairsOfFourBits, true>(records, work);
    else add_panel<PairsOfFourBits, false>(records, work);
}

void prepare_pairs(const Bfloat16 *x, const i64 *order, i64 size, PairGroup *groups) {
    for (i64 first = 0; first < size; first += GROUP, groups++) {
        Bfloat16 here[GROUP];
        const Bfloat16 *from = x + first;
        if (order) {
            for (i64 i = 0; i < GROUP; i++) here[i] = x[order[first + i]];
            from = here;
        }
        store_pairs(groups->pairs, from);
        for (i64 half = 0; half < 2; half++) groups->half[half] = sum_of_lanes(load(from + half * HALF));
        groups->sum = groups->half[0] + groups->half[1];
    }
}
#else
void prepare_pairs(const Bfloat16 *, const i64 *, i64, PairGroup *) {}
void add_few_bits_by_pairs(const Records &, const PanelWork &) {}
#endif
