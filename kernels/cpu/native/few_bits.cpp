// Products with weights of few bits that say exactly what float32 numbers they are (kernels/cpu/products/few_bits.py):
//
//     w = fl(d q + m)  or  w = d q,     d, m float16, q an integer of 4 or 8 bits
//
// A record has 48 outputs and 32 inputs: d [48], m [48] where the format has minima, then q as words of 8 inputs
// i32[4, 48], or as bytes i8[32, 48]. An integer of 4 bits becomes float32 by one permutation of a register that holds
// all sixteen of them, one of 8 bits is widened and converted; then a fused multiply-add, or a product, gives the very
// bits of the weight. Rows are multiplied by these numbers where they are made. Where there are more rows than a tile
// has, the first of them write the numbers of a piece of the panel out, and the others stream it, which gives the same
// sums: they run over the inputs in order in both.
#include "products.h"

namespace {

const i64 STEP = 8, MOST_ROWS = HAS_WIDE_REGISTERS ? 8 : 2;
const i64 PIECE = 192;        // inputs that are written out at a time: 36 KiB, in the first cache level
const i64 SOON_BYTES = 8192;  // how far up to MOST_ROWS rows ask ahead, from panel to panel

template <int BITS, bool HAS_MINIMUM>
struct Format {
    enum {
        bits = BITS,
        has_minimum = HAS_MINIMUM,
        integers = PANEL * 2 * (1 + HAS_MINIMUM),  // bytes before them
        record = integers + PANEL * GROUP * BITS / 8,
        step = PANEL * STEP * BITS / 8,
    };
};
using FourBits = Format<4, false>;
using FourBitsAndMinimum = Format<4, true>;
using EightBits = Format<8, false>;

// The numbers of input `i` of a step, 16 outputs.
template <class Few>
INLINE F integers_of(const char *step, int i, int v) {
    if constexpr (Few::bits == 8) return to_float(widen((const int8_t *)(step + i * PANEL + v * LANES)));
    I words = load((const int32_t *)(step + v * LANES * 4));
    const float least = Few::has_minimum ? 0 : -8;
    switch (i) {
        case 0: return of_four_bits(words, least);
        case 1: return of_four_bits(shift_right<4>(words), least);
        case 2: return of_four_bits(shift_right<8>(words), least);
        case 3: return of_four_bits(shift_right<12>(words), least);
        case 4: return of_four_bits(shift_right<16>(words), least);
        case 5: return of_four_bits(shift_right<20>(words), least);
        case 6: return of_four_bits(shift_right<24>(words), least);
        default: return of_four_bits(shift_right<28>(words), least);
    }
}

// C [ROWS, 48] = S + x . W over `groups` groups. `out`: where W is written as float32 [inputs, 48], or 0.
template <class Few, int ROWS, bool WRITES>
void tile(const char *x, i64 x_stride, const char *record, i64 groups, const float *s, i64 s_stride, float *c,
          i64 c_stride, i64 ahead, float *out) {
    F sums[ROWS][VECTORS];
#pragma GCC unroll 8
    for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 3
        for (int v = 0; v < VECTORS; v++) sums[r][v] = load(s + r * s_stride + v * LANES);
    for (i64 g = 0; g < groups; g++, record += Few::record) {
        F scales[VECTORS], minima[VECTORS];
#pragma GCC unroll 3
        for (int v = 0; v < VECTORS; v++) {
            scales[v] = load((const Float16 *)record + v * LANES);
            if (Few::has_minimum) minima[v] = load((const Float16 *)record + PANEL + v * LANES);
        }
        for (int j = 0; j < GROUP / STEP; j++, x += STEP * 4) {
            const char *step = record + Few::integers + j * Few::step;
            for (int i = 0; i < Few::record / (GROUP / STEP); i += CACHE_LINE) {
                if (WRITES) prefetch_second_level(step + ahead + i);
                else prefetch(step + ahead + i);
            }
#pragma GCC unroll 8
            for (int i = 0; i < STEP; i++) {
                F weights[VECTORS];
#pragma GCC unroll 3
                for (int v = 0; v < VECTORS; v++) {
                    F integers = integers_of<Few>(step, i, v);
                    weights[v] = Few::has_minimum ? fma(scales[v], integers, minima[v]) : scales[v] * integers;
                    if (WRITES) store(out + v * LANES, weights[v]);
                }
                if (WRITES) out += PANEL;
#pragma GCC unroll 8
                for (int r = 0; r < ROWS; r++) {
                    F factor = splat_at((const float *)(x + r * x_stride) + i);
#pragma GCC unroll 3
                    for (int v = 0; v < VECTORS; v++) sums[r][v] = fma(factor, weights[v], sums[r][v]);
                }
            }
        }
    }
#pragma GCC unroll 8
    for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 3
        for (int v = 0; v < VECTORS; v++) store(c + r * c_stride + v * LANES, sums[r][v]);
}

template <class Few, int ROWS>
void tile_of(const PanelWork &work) {
    if (work.rows == ROWS)
        tile<Few, ROWS, false>(work.x, work.x_stride, work.weight, work.depth / GROUP, work.start, 0, work.sums,
                               work.sums_stride, SOON_BYTES, 0);
    else if constexpr (ROWS > 1) tile_of<Few, ROWS - 1>(work);
}

template <class Few>
void add_panel(const PanelWork &work) {
    if (work.rows <= MOST_ROWS) return tile_of<Few, MOST_ROWS>(work);
    // Sums wait for the next piece side by side: the first cache level has no place for 32 lines that lie 12 KiB apart.
    i64 size = smaller(work.depth, PIECE) * PANEL;
    float *numbers = (float *)scratch(OF_PANEL, (size + work.rows * PANEL) * 4), *waiting = numbers + size;
    i64 ahead = work.has_next ? panel_bytes(Few::bits == 8     ? WEIGHT_8_BITS
                                            : Few::has_minimum ? WEIGHT_4_BITS_AND_MINIMUM
                                                               : WEIGHT_4_BITS,
                                            work.depth)
                              : 0;
    for (i64 k = 0; k < work.depth; k += PIECE) {
        i64 piece = smaller(work.depth - k, PIECE);
        bool is_last = k + piece == work.depth;
        const float *s = k ? waiting : work.start;
        float *c = is_last ? work.sums : waiting;
        i64 s_stride = k ? PANEL : 0, c_stride = is_last ? work.sums_stride : PANEL;
        const char *x = work.x + k * 4;
        tile<Few, MOST_ROWS, true>(x, work.x_stride, work.weight + k / GROUP * Few::record, piece / GROUP, s, s_stride,
                                   c, c_stride, ahead, numbers);
        add_floats(WEIGHT_FLOAT32,
                   {x + MOST_ROWS * work.x_stride, work.x_stride, work.rows - MOST_ROWS, piece, (const char *)numbers,
                    s + MOST_ROWS * s_stride, c + MOST_ROWS * c_stride, c_stride, false, s_stride});
    }
}

}  // namespace

void add_few_bits(i64 kind, const PanelWork &work) {
    if (kind == WEIGHT_8_BITS) add_panel<EightBits>(work);
    else if (kind == WEIGHT_4_BITS) add_panel<FourBits>(work);
    else add_panel<FourBitsAndMinimum>(work);
}

i64 panel_bytes(i64 kind, i64 depth) {
    switch (kind) {
        case WEIGHT_FLOAT32: return depth * PANEL * 4;
        case WEIGHT_BFLOAT16: return depth * PANEL * 2;
        case WEIGHT_PAIRS: return depth / 2 * PANEL * 4;
        case WEIGHT_8_BITS: return depth / GROUP * EightBits::record;
        case WEIGHT_4_BITS:
        case INT4: return depth / GROUP * FourBits::record;
        case WEIGHT_4_BITS_AND_MINIMUM:
        case INT4_AND_MINIMUM: return depth / GROUP * FourBitsAndMinimum::record;
        default: return groups_of(depth) * GROUP * PANEL;
    }
}
