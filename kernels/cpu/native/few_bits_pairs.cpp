// Products of rows of bfloat16 with weights of few bits (records.h), by pairs of bfloat16:
//
//     sum_k x[k] W[o, k] = sum_g scale[o, g] (sum_{k in g} x[k] code[o, k]) + offset[o, g] (sum_{k in g} x[k])
//
// over groups of 32 inputs, or of 16 where codes have eight bits. bfloat16 has all codes, integers of up to 8 bits and
// E4M3, and no product is rounded. A word of eight codes of four bits gives four pairs, each by one table that a
// register holds: two instructions for 32 numbers.
//
// Where there are tiles (tiles.h), they multiply the pairs of a group, which are made once for all rows; what a tile
// would give of one row or two takes less time without writing pairs out, and has the same bits. Else an instruction
// multiplies each pair where it is made. Sums within a group have another order than by tiles.
#include "records.h"

namespace {

const i64 HALF = GROUP / 2;
const i64 STEP = 8, PAIRS_OF_STEP = STEP / 2;
const i64 SOON_BYTES = 8192;  // how far ahead the rows of one tile prefetch, from panel to panel

// Inputs i and i + 4 of a step of eight, 16 outputs.
struct PairsOfFourBits {
    enum { INPUTS_AT_ONCE = 32 };
    SixteenOfPairs table;
    Sixteen numbers;

    explicit PairsOfFourBits(const Records &records)
        : table(sixteen_of_pairs(CODES_OF_FOUR_BITS[records.codes])),
          numbers(sixteen(CODES_OF_FOUR_BITS[records.codes])) {}
    INLINED F read(const char *step, int i, int v) const {
        I words = load((const int32_t *)(step + v * LANES * 4));
        switch (i) {
            case 0: return chosen_pair<0>(words, table);
            case 1: return chosen_pair<1>(words, table);
            case 2: return chosen_pair<2>(words, table);
            default: return chosen_pair<3>(words, table);
        }
    }
    INLINED void read_apart(const char *step, int i, int v, F &first, F &second) const {
        I words = load((const int32_t *)(step + v * LANES * 4));
        switch (i) {
            case 0: first = chosen<0>(words, numbers), second = chosen<4>(words, numbers); break;
            case 1: first = chosen<1>(words, numbers), second = chosen<5>(words, numbers); break;
            case 2: first = chosen<2>(words, numbers), second = chosen<6>(words, numbers); break;
            default: first = chosen<3>(words, numbers), second = chosen<7>(words, numbers);
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
    INLINED void read_apart(const char *step, int i, int v, F &first, F &second) const {
        first = number(step, i, v), second = number(step, i + 4, v);
    }
};

// What a row has of the group of input `k`, its pairs from there on, and the sum of the inputs that are read at once.
template <class Codes>
struct RowPlace {
    const PairGroup &group;
    i64 half;

    RowPlace(const PanelWork &work, i64 row, i64 k)
        : group(*(const PairGroup *)(work.x + row * work.x_stride + k / GROUP * (i64)sizeof(PairGroup))),
          half(k % GROUP / HALF) {}
    const uint16_t *pairs() const { return group.pairs + half * HALF; }
    const float *sum() const { return Codes::INPUTS_AT_ONCE == GROUP ? &group.sum : group.half + half; }
};

// ---- pair by pair ---------------------------------------------------------------------------------------------------
const i64 MOST_ROWS = 8;

// Adds to the sums of ROWS rows.
template <class Codes, bool HAS_OFFSET, int ROWS>
void tile(const Records &records, const RecordLayout &layout, const PanelWork &work, i64 row, const char *soon,
          i64 soon_step) {
    const Codes codes(records);
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
        const uint16_t *pairs = RowPlace<Codes>(work, row, k).pairs();
        for (int j = 0; j < Codes::INPUTS_AT_ONCE / STEP; j++, step += layout.step, pairs += STEP) {
#pragma GCC unroll 4
            for (int i = 0; i < PAIRS_OF_STEP; i++) {
                F numbers[VECTORS];
#pragma GCC unroll 3
                for (int v = 0; v < VECTORS; v++) numbers[v] = codes.read(step, i, v);
#pragma GCC unroll 8
                for (int r = 0; r < ROWS; r++) {
                    F inputs = splat_at((const float *)::at(pairs, r * work.x_stride) + i);
#pragma GCC unroll 3
                    for (int v = 0; v < VECTORS; v++) dots[r][v] = dot_pairs(inputs, numbers[v], dots[r][v]);
                }
            }
        }
#pragma GCC unroll 8
        for (int r = 0; r < ROWS; r++) {
            F sum = splat_at(RowPlace<Codes>(work, row + r, k).sum());
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
void add_pair_by_pair(const Records &records, const PanelWork &work) {
    RecordLayout layout(records);
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

// ---- by tiles -------------------------------------------------------------------------------------------------------
const i64 PIECES = 4;  // whose pairs are made before they are multiplied, and whose sums are scaled together
const i64 ROWS_OF_TOTALS = 8;

// The inputs of a panel that are read at once: their pairs as lines of a tile have them, and what is scaled by what.
struct Piece {
    F pairs[GROUP / 2][VECTORS], scales[VECTORS], offsets[VECTORS];
};
typedef float Sums[TILE_ROWS][PANEL];
struct Pieces {
    Piece of_panel[PIECES];
    Sums sums[PIECES];
};

template <class Codes, bool HAS_OFFSET>
void read_piece(const Records &records, const Codes &codes, const Cursor &at, Piece &piece) {
    read_line<HAS_OFFSET>(records, at.record, at.line, 0, piece.scales, piece.offsets);
    const char *step = at.codes;
    for (i64 line = 0; line < Codes::INPUTS_AT_ONCE / 2; line += PAIRS_OF_STEP, step += at.layout.step) {
#pragma GCC unroll 4
        for (int i = 0; i < PAIRS_OF_STEP; i++)
#pragma GCC unroll 3
            for (int v = 0; v < VECTORS; v++) piece.pairs[line + i][v] = codes.read(step, i, v);
    }
}

// Adds to the totals of ROWS rows the sums of `count` pieces from input `k` on, in order; the first is one of a tile's.
template <class Codes, bool HAS_OFFSET, int ROWS>
void add_scaled(const PanelWork &work, const Pieces &pieces, i64 count, i64 k, i64 row) {
    F totals[ROWS][VECTORS];
    float *place = work.sums + row * PANEL;
#pragma GCC unroll 8
    for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 3
        for (int v = 0; v < VECTORS; v++) totals[r][v] = load(place + r * PANEL + v * LANES);
    for (i64 i = 0; i < count; i++, k += Codes::INPUTS_AT_ONCE) {
        const Piece &piece = pieces.of_panel[i];
        const float *sums = pieces.sums[i][row % TILE_ROWS];
#pragma GCC unroll 8
        for (int r = 0; r < ROWS; r++) {
            F sum = splat_at(RowPlace<Codes>(work, row + r, k).sum());
#pragma GCC unroll 3
            for (int v = 0; v < VECTORS; v++) {
                totals[r][v] = fma(piece.scales[v], load(sums + r * PANEL + v * LANES), totals[r][v]);
                if (HAS_OFFSET) totals[r][v] = fma(piece.offsets[v], sum, totals[r][v]);
            }
        }
    }
#pragma GCC unroll 8
    for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 3
        for (int v = 0; v < VECTORS; v++) store(place + r * PANEL + v * LANES, totals[r][v]);
}

template <class Codes, bool HAS_OFFSET>
void add_by_tiles(const Records &records, const PanelWork &work) {
    const i64 INPUTS = Codes::INPUTS_AT_ONCE;
    const Codes codes(records);
    RecordLayout layout(records);
    Pieces &pieces = *(Pieces *)scratch(OF_PANEL, sizeof(Pieces));
    Cursor at(layout, work.weight, 0);
    bool are_few = work.rows <= TILE_ROWS;
    const char *soon = work.weight + (are_few ? SOON_BYTES : layout.panel_bytes(work.depth));
    i64 soon_step = are_few || work.has_next ? layout.bytes_of(INPUTS) : 0;
    for (i64 k = 0; k < work.depth; k += PIECES * INPUTS) {
        i64 count = smaller(PIECES, (work.depth - k) / INPUTS);
        for (i64 i = 0; i < count; i++, at.advance(INPUTS)) {
            for (const char *end = soon + soon_step; soon < end; soon += CACHE_LINE) {
                if (are_few) prefetch(soon);
                else prefetch_second_level(soon);
            }
            read_piece<Codes, HAS_OFFSET>(records, codes, at, pieces.of_panel[i]);
        }
        for (i64 row = 0; row < work.rows; row += TILE_ROWS) {
            i64 rows = smaller(work.rows - row, TILE_ROWS);
            shape_tiles(rows, INPUTS / 2);
            for (i64 i = 0; i < count; i++) {
                tile_zero<0>(), tile_zero<1>(), tile_zero<2>();
                multiply_pairs(RowPlace<Codes>(work, row, k + i * INPUTS).pairs(), work.x_stride,
                               pieces.of_panel[i].pairs);
                store_tile_sums(pieces.sums[i][0], sizeof pieces.sums[i][0]);
            }
            for (i64 r = 0; r < rows; r += ROWS_OF_TOTALS)
                with_number<ROWS_OF_TOTALS>(smaller(rows - r, ROWS_OF_TOTALS), [&](auto number) {
                    add_scaled<Codes, HAS_OFFSET, decltype(number)::value>(work, pieces, count, k, row + r);
                });
        }
    }
}

// ---- few rows as tiles multiply them --------------------------------------------------------------------------------
const i64 FEWEST_OF_TILES = 3;  // fewer rows take less time here

// dots[p, r] = x[r] . codes of the p-th inputs that are read at once: the bits that tiles would give, as first and
// second inputs of pairs are added up by themselves. x [ROWS, depth]; denormal numbers have to count as 0.
template <class Codes, int ROWS>
__attribute__((noinline)) void dot_pairs_apart(const Records &records, const PanelWork &work, const float *x,
                                               float *dots) {
    const Codes codes(records);
    RecordLayout layout(records);
    Cursor at(layout, work.weight, 0);
    i64 soon_step = layout.bytes_of(Codes::INPUTS_AT_ONCE);
    const char *soon = work.weight + SOON_BYTES;
    for (i64 k = 0; k < work.depth; k += Codes::INPUTS_AT_ONCE, at.advance(Codes::INPUTS_AT_ONCE)) {
        for (const char *end = soon + soon_step; soon < end; soon += CACHE_LINE) prefetch(soon);
        F sums[ROWS][2][VECTORS];
        for (auto &of_row : sums)
            for (auto &of_half : of_row)
                for (F &sum : of_half) sum = splat(0.0f);
        const char *step = at.codes;
        for (int j = 0; j < Codes::INPUTS_AT_ONCE / STEP; j++, step += layout.step, x += STEP) {
#pragma GCC unroll 4
            for (int i = 0; i < PAIRS_OF_STEP; i++)
#pragma GCC unroll 3
                for (int v = 0; v < VECTORS; v++) {
                    F first, second;
                    codes.read_apart(step, i, v, first, second);
#pragma GCC unroll 2
                    for (int r = 0; r < ROWS; r++) {
                        const float *pair = x + r * work.depth + 2 * i;
                        sums[r][0][v] = fma(splat_at(pair), first, sums[r][0][v]);
                        sums[r][1][v] = fma(splat_at(pair + 1), second, sums[r][1][v]);
                    }
                }
        }
        for (int r = 0; r < ROWS; r++, dots += PANEL)
            for (int v = 0; v < VECTORS; v++) store(dots + v * LANES, splat(0.0f) + (sums[r][0][v] + sums[r][1][v]));
    }
}

template <class Codes, bool HAS_OFFSET, int ROWS>
void add_few_rows(const Records &records, const PanelWork &work) {
    const i64 INPUTS = Codes::INPUTS_AT_ONCE;
    i64 num_dots = work.depth / INPUTS * ROWS * PANEL;
    float *dots = (float *)scratch(OF_PANEL, (num_dots + ROWS * work.depth) * (i64)sizeof(float)), *x = dots + num_dots;
    for (i64 r = 0; r < ROWS; r++)
        for (i64 k = 0; k < work.depth; k += HALF)
            store(x + r * work.depth + k, load((const Bfloat16 *)RowPlace<Codes>(work, r, k).pairs()));
    {
        [[maybe_unused]] DenormalsAreZeros here;
        dot_pairs_apart<Codes, ROWS>(records, work, x, dots);
    }
    F totals[ROWS][VECTORS], scales[VECTORS], offsets[VECTORS];
    for (int r = 0; r < ROWS; r++)
        for (int v = 0; v < VECTORS; v++) totals[r][v] = load(work.start + v * LANES);
    RecordLayout layout(records);
    Cursor at(layout, work.weight, 0);
    for (i64 k = 0; k < work.depth; k += INPUTS, at.advance(INPUTS)) {
        read_line<HAS_OFFSET>(records, at.record, at.line, 0, scales, offsets);
        for (int r = 0; r < ROWS; r++, dots += PANEL) {
            F sum = splat_at(RowPlace<Codes>(work, r, k).sum());
            for (int v = 0; v < VECTORS; v++) {
                totals[r][v] = fma(scales[v], load(dots + v * LANES), totals[r][v]);
                if (HAS_OFFSET) totals[r][v] = fma(offsets[v], sum, totals[r][v]);
            }
        }
    }
    for (int r = 0; r < ROWS; r++)
        for (int v = 0; v < VECTORS; v++) store(work.sums + r * PANEL + v * LANES, totals[r][v]);
}

template <class Codes, bool HAS_OFFSET>
void add_panel(const Records &records, const PanelWork &work) {
    if constexpr (HAS_TILES)
        if (work.rows < FEWEST_OF_TILES)
            return with_number<FEWEST_OF_TILES - 1>(work.rows, [&](auto number) {
                add_few_rows<Codes, HAS_OFFSET, decltype(number)::value>(records, work);
            });
    for (i64 row = 0; row < work.rows; row++) memcpy(work.sums + row * PANEL, work.start, sizeof(float) * PANEL);
    if constexpr (HAS_TILES) add_by_tiles<Codes, HAS_OFFSET>(records, work);
    else if constexpr (HAS_PAIRS) add_pair_by_pair<Codes, HAS_OFFSET>(records, work);
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
