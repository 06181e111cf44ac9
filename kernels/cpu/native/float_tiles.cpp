// Products with weights kept as float32, bfloat16 or pairs of bfloat16: tiles of rows whose sums stay in registers
// while a panel streams by.
//
//     packed [panels, in, 48]           float32 or bfloat16
//     packed [panels, in / 2, 48, 2]    pairs: two inputs of an output side by side, as one instruction multiplies them
//
// A processor with 32 registers of 16 numbers takes 8 rows by the panel's 48 columns at a time. One with 16 registers
// of 8 has no place for that: it takes 6 rows by 16 columns, three times. Every sum runs over the inputs in order, one
// fused multiply-add after the other, whatever tile it is in.
#include "products.h"

namespace {

const i64 MOST_ROWS = HAS_WIDE_REGISTERS ? 8 : 6;
const i64 WIDE_ROWS = HAS_WIDE_REGISTERS ? 8 : 2;  // of which a tile has all columns
const i64 DEPTH = 2048;             // lines of a panel that all rows meet before the next: in the second cache level
const i64 NARROW_BYTES = 12 << 10;  // the same of narrow tiles, which go through lines often: in the first
const i64 SOON_BYTES = 4096;        // how far ahead one row prefetches
const i64 PIECE = 64;               // lines of bfloat16 that are widened at a time: in the first cache level

struct Float32Weight {
    enum { LINE = PANEL * 4, VECTOR = LANES * 4, INPUTS = 1 };
    static F read(const char *w) { return load((const float *)w); }
    static F add(F x, F w, F sum) { return fma(x, w, sum); }
};
struct Bfloat16Weight {
    enum { LINE = PANEL * 2, VECTOR = LANES * 2, INPUTS = 1 };
    static F read(const char *w) { return load((const Bfloat16 *)w); }
    static F add(F x, F w, F sum) { return fma(x, w, sum); }
};
struct PairWeight {
    enum { LINE = PANEL * 4, VECTOR = LANES * 4, INPUTS = 2 };
    static F read(const char *w) { return load((const float *)w); }
    static F add(F x, F w, F sum) { return dot_pairs(x, w, sum); }
};

// C [ROWS, 16 COLUMNS] = S + x . W over `depth` lines of the panel. With each line `step` bytes are prefetched, from
// `soon` on.
template <class Weight, int ROWS, int COLUMNS>
void tile(const char *x, i64 x_stride, const char *w, i64 depth, const float *s, i64 s_stride, float *c,
          const char *soon, i64 step) {
    F sums[ROWS][COLUMNS];
#pragma GCC unroll 8
    for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 3
        for (int v = 0; v < COLUMNS; v++) sums[r][v] = load(s + r * s_stride + v * LANES);
    auto add_line = [&]() INLINED {
        F weights[COLUMNS];
#pragma GCC unroll 3
        for (int v = 0; v < COLUMNS; v++) weights[v] = Weight::read(w + v * Weight::VECTOR);
#pragma GCC unroll 3
        for (int i = 0; i < COLUMNS * Weight::VECTOR; i += CACHE_LINE) {
            if (ROWS == 1) prefetch_second_level(soon + i);  // memory is the bound, and more lines can be under way
            else prefetch(soon + i);
        }
#pragma GCC unroll 8
        for (int r = 0; r < ROWS; r++) {
            F factor = splat_at((const float *)(x + r * x_stride));
#pragma GCC unroll 3
            for (int v = 0; v < COLUMNS; v++) sums[r][v] = Weight::add(factor, weights[v], sums[r][v]);
        }
        w += Weight::LINE, x += 4, soon += step;
    };
    if constexpr (COLUMNS < VECTORS) {
        // Two lines a turn: with so few products a line counting them is felt, most where another thread of the core
        // takes its share of instructions.
#pragma GCC unroll 2
        for (i64 k = 0; k < depth; k++) add_line();
    } else
        for (i64 k = 0; k < depth; k++) add_line();
#pragma GCC unroll 8
    for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 3
        for (int v = 0; v < COLUMNS; v++) store(c + r * PANEL + v * LANES, sums[r][v]);
}

// Tiles of about as many rows each; a narrow third of the lines meets all of them before the next third. Each tile
// prefetches its part of what is next, `line` bytes for each of these: memory would be idle during all but the first.
template <class Weight>
void stream(i64 rows, const char *x, i64 x_stride, const char *w, i64 depth, const float *s, i64 s_stride, float *c,
            const char *soon, i64 line = Weight::LINE) {
    constexpr int COLUMNS = HAS_WIDE_REGISTERS ? VECTORS : 1;
    if (rows <= WIDE_ROWS)
        return with_number<WIDE_ROWS>(rows, [&](auto number) {
            tile<Weight, decltype(number)::value, VECTORS>(x, x_stride, w, depth, s, s_stride, c, soon, line);
        });
    i64 tiles = (rows + MOST_ROWS - 1) / MOST_ROWS, few = rows / tiles, num_longer = rows % tiles;
    i64 step = (line / VECTORS * COLUMNS + tiles - 1) / tiles;
    for (int v = 0; v < VECTORS; v += COLUMNS, w += COLUMNS * Weight::VECTOR)
        for (i64 i = 0, row = 0, count; i < tiles; i++, row += count, soon += depth * step) {
            count = few + (i < num_longer);
            with_number<MOST_ROWS>(count, [&](auto number) {
                tile<Weight, decltype(number)::value, COLUMNS>(x + row * x_stride, x_stride, w, depth,
                                                               s + row * s_stride + v * LANES, s_stride,
                                                               c + row * PANEL + v * LANES, soon, step);
            });
        }
}

template <class Weight>
void add_panel(const PanelWork &work) {
    i64 lines = work.depth / Weight::INPUTS;
    i64 at_once = HAS_WIDE_REGISTERS || work.rows <= WIDE_ROWS ? DEPTH : NARROW_BYTES / Weight::LINE;
    for (i64 k = 0; k < lines || k == 0; k += at_once) {
        i64 count = smaller(lines - k, at_once);
        // One tile of all columns reads memory as fast as it comes. Else lines are read many times, and found in the
        // cache, while as many that lie behind them are prefetched: of this panel, or of the next.
        i64 ahead = count * Weight::LINE;
        if (work.rows <= WIDE_ROWS && work.start_stride == 0) ahead = SOON_BYTES;
        else if (k + count == lines && !work.has_next) ahead = 0;
        const char *w = work.weight + k * Weight::LINE;
        stream<Weight>(work.rows, work.x + k * 4, work.x_stride, w, count, k ? work.sums : work.start,
                       k ? (i64)PANEL : work.start_stride, work.sums, w + ahead);
    }
}

// Many rows meet bfloat16 widened to float32: once for all of them, a piece of the panel at a time. Up to two tiles, and
// where registers are few, were not clearly faster with it. A Zen 5 is slower with it, and takes the level with pairs.
const bool WIDENS_ONCE = HAS_WIDE_REGISTERS && !HAS_FAST_PAIRS;
void add_widened(const PanelWork &work) {
    float *numbers = (float *)scratch(OF_PANEL, smaller(work.depth, PIECE) * PANEL * 4);
    for (i64 k = 0; k < work.depth || k == 0; k += PIECE) {
        i64 count = smaller(work.depth - k, PIECE), size = count * PANEL;
        const Bfloat16 *w = (const Bfloat16 *)work.weight + k * PANEL;
        for (i64 i = 0; i < size; i += LANES) store(numbers + i, load(w + i));
        bool is_last = k + count == work.depth && !work.has_next;
        stream<Float32Weight>(work.rows, work.x + k * 4, work.x_stride, (const char *)numbers, count,
                              k ? work.sums : work.start, k ? (i64)PANEL : work.start_stride, work.sums,
                              (const char *)(is_last ? w : w + size), Bfloat16Weight::LINE);
    }
}

}  // namespace

void add_floats(i64 kind, const PanelWork &work) {
    if (kind == WEIGHT_FLOAT32) add_panel<Float32Weight>(work);
    else if (kind == WEIGHT_BFLOAT16 && WIDENS_ONCE && work.rows > 2 * MOST_ROWS) add_widened(work);
    else if (kind == WEIGHT_BFLOAT16) add_panel<Bfloat16Weight>(work);
    else if (HAS_TILES) add_pairs_by_tiles(work);
    else if (HAS_PAIRS) add_panel<PairWeight>(work);
}

// Whether bfloat16 rows by pairs of bfloat16 have a product here.
EXPORT i64 octavo_multiplies_pairs() { return MULTIPLIES_PAIRS; }
