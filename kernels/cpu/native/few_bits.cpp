// Products with weights of few bits that say exactly what float32 numbers they are (records.h):
//
//     w = fl(scale code + offset)     or     w = fl(scale code)
//
// where the product is exact if there is an offset. A code of four bits becomes float32 by looking up a table that a
// register holds, one of eight is widened and converted; where looking up takes more instructions, so is one of four,
// if it is an integer. Then a fused multiply-add, or a product, gives the very bits of the weight. Rows are multiplied
// by these numbers where they are made. Where there are more rows than a tile has, the first of them write the numbers
// of a piece of the panel out, and the others stream it, which gives the same sums: they run over the inputs in order
// in both.
#include "records.h"

namespace {

const i64 STEP = 8, MOST_ROWS = HAS_WIDE_REGISTERS ? 8 : 4;
const i64 PIECE = HAS_WIDE_REGISTERS ? 192 : 64;  // inputs that are written out at a time: they stay in a near cache
const i64 SOON_BYTES = 8192;                      // how far ahead up to MOST_ROWS rows prefetch, from panel to panel

// What the codes of input `i` of a step are, 16 outputs.
template <class Number>
struct FourBits {
    enum { INPUTS_AT_ONCE = 32 };  // that share a scale for certain
    Number number;

    explicit FourBits(const Records &records) : number(records) {}
    INLINED F read(const char *step, int i, int v) const {
        I words = load((const int32_t *)(step + v * LANES * 4));
        switch (i) {
            case 0: return number.template of<0>(words);
            case 1: return number.template of<1>(words);
            case 2: return number.template of<2>(words);
            case 3: return number.template of<3>(words);
            case 4: return number.template of<4>(words);
            case 5: return number.template of<5>(words);
            case 6: return number.template of<6>(words);
            default: return number.template of<7>(words);
        }
    }
};
struct FromTable {
    Sixteen table;

    explicit FromTable(const Records &records) : table(sixteen(CODES_OF_FOUR_BITS[records.codes])) {}
    template <int INDEX>
    INLINED F of(I words) const {
        return chosen<INDEX>(words, table);
    }
};
template <int LEAST>
struct FromInteger {  // from LEAST on
    explicit FromInteger(const Records &) {}
    template <int INDEX>
    INLINED F of(I words) const {
        I code = (INDEX ? shift_right<4 * INDEX>(words) : words) & splat(15);
        return to_float(LEAST ? code + splat(LEAST) : code);
    }
};
struct EightBits {
    enum { INPUTS_AT_ONCE = 16 };
    explicit EightBits(const Records &) {}
    INLINED F read(const char *step, int i, int v) const {
        return load_code((const int8_t *)step + i * PANEL + v * LANES);
    }
};
struct E4m3Bits {
    enum { INPUTS_AT_ONCE = 16 };
    explicit E4m3Bits(const Records &) {}
    INLINED F read(const char *step, int i, int v) const {
        return load_code((const E4m3 *)step + i * PANEL + v * LANES);
    }
};

// C [ROWS, 48] = S + x . W over `depth` inputs from `first` on. `out`: where W is written, float32 [inputs, 48], or 0.
template <class Codes, bool HAS_OFFSET, int ROWS, bool WRITES>
__attribute__((noinline))  // a compiler has too few registers for two of them in one function
void tile(const Records &records, const RecordLayout &layout, const PanelWork &work, i64 first, i64 depth,
          const float *s, i64 s_stride, float *c, i64 ahead, float *out) {
    const Codes codes(records);
    const char *x = work.x + first * 4;
    const i64 x_stride = work.x_stride, bytes_at_once = layout.bytes_of(Codes::INPUTS_AT_ONCE);
    F sums[ROWS][VECTORS];
#pragma GCC unroll 8
    for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 3
        for (int v = 0; v < VECTORS; v++) sums[r][v] = load(s + r * s_stride + v * LANES);
    Cursor at(layout, work.weight, first);
    const char *soon = at.codes + ahead;  // goes on without gaps, over heads and lines of records, too
    for (i64 k = 0; k < depth; k += Codes::INPUTS_AT_ONCE, at.advance(Codes::INPUTS_AT_ONCE)) {
        F scales[VECTORS], offsets[VECTORS];
        read_line<HAS_OFFSET>(records, at.record, at.line, 0, scales, offsets);
        for (i64 i = 0; i < bytes_at_once; i += CACHE_LINE) {
            if (WRITES) prefetch_second_level(soon + i);
            else prefetch(soon + i);
        }
        soon += bytes_at_once;
        const char *step = at.codes;
        for (int j = 0; j < Codes::INPUTS_AT_ONCE / STEP; j++, step += layout.step, x += STEP * 4) {
            auto multiply = [&](int i, int v) INLINED {
                F numbers = codes.read(step, i, v);
                F weight = HAS_OFFSET ? fma(scales[v], numbers, offsets[v]) : scales[v] * numbers;
                if (WRITES) store(out + i * PANEL + v * LANES, weight);
#pragma GCC unroll 8
                for (int r = 0; r < ROWS; r++)
                    sums[r][v] = fma(splat_at((const float *)(x + r * x_stride) + i), weight, sums[r][v]);
                if (ROWS <= 2) sums[0][v] = in_turn(sums[0][v]);
            };
            // Where registers are few, with those of 16 outputs at a time.
            if constexpr (HAS_WIDE_REGISTERS) {
#pragma GCC unroll 8
                for (int i = 0; i < STEP; i++)
#pragma GCC unroll 3
                    for (int v = 0; v < VECTORS; v++) multiply(i, v);
            } else {
#pragma GCC unroll 3
                for (int v = 0; v < VECTORS; v++)
#pragma GCC unroll 8
                    for (int i = 0; i < STEP; i++) multiply(i, v);
            }
            if (WRITES) out += STEP * PANEL;
        }
    }
#pragma GCC unroll 8
    for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 3
        for (int v = 0; v < VECTORS; v++) store(c + r * PANEL + v * LANES, sums[r][v]);
}

template <class Codes, bool HAS_OFFSET>
void add_panel(const Records &records, const PanelWork &work) {
    RecordLayout layout(records);
    if (work.rows <= MOST_ROWS)
        return with_number<MOST_ROWS>(work.rows, [&](auto number) {
            tile<Codes, HAS_OFFSET, decltype(number)::value, false>(records, layout, work, 0, work.depth, work.start, 0,
                                                                    work.sums, SOON_BYTES, 0);
        });
    float *numbers = (float *)scratch(OF_PANEL, smaller(work.depth, PIECE) * PANEL * 4);
    i64 ahead = work.has_next ? layout.panel_bytes(work.depth) : 0;
    for (i64 k = 0; k < work.depth; k += PIECE) {
        i64 piece = smaller(work.depth - k, PIECE);
        const float *s = k ? work.sums : work.start;
        i64 s_stride = k ? PANEL : 0;
        tile<Codes, HAS_OFFSET, MOST_ROWS, true>(records, layout, work, k, piece, s, s_stride, work.sums, ahead,
                                                 numbers);
        add_floats(WEIGHT_FLOAT32,
                   {work.x + k * 4 + MOST_ROWS * work.x_stride, work.x_stride, work.rows - MOST_ROWS, piece,
                    (const char *)numbers, s + MOST_ROWS * s_stride, work.sums + MOST_ROWS * PANEL, false, s_stride});
    }
}

}  // namespace

void add_few_bits(const Records &records, const PanelWork &work) {
    bool has_offset = records.offset != NO_OFFSET;
    if (records.codes == CODES_INT8 && has_offset) add_panel<EightBits, true>(records, work);
    else if (records.codes == CODES_INT8) add_panel<EightBits, false>(records, work);
    else if (records.codes == CODES_E4M3) add_panel<E4m3Bits, false>(records, work);
    else if (HAS_WIDE_REGISTERS && has_offset) add_panel<FourBits<FromTable>, true>(records, work);
    else if (HAS_WIDE_REGISTERS || records.codes == CODES_E2M1) add_panel<FourBits<FromTable>, false>(records, work);
    else if (has_offset) add_panel<FourBits<FromInteger<0>>, true>(records, work);
    else if (records.codes == CODES_INT4) add_panel<FourBits<FromInteger<-8>>, false>(records, work);
    else add_panel<FourBits<FromInteger<0>>, false>(records, work);
}
