// Records (records.h) put together from what their weight's outputs have row by row, and scales found to be factors
// (kernels/cpu/products/quantized_records.py).
#include "records.h"

namespace {

// One of the things that a record has for each output: `columns` numbers of `bytes` an output in all, some of them in
// each whole record. Parts of one section take turns, column by column.
struct Part {
    i64 section, values, bytes, columns, of_record;
};
const i64 MOST_PARTS = 2;  // of a section: of scales, and of offsets

// A column of a panel's outputs, `stride` numbers apart.
template <class T>
void put_column(char *packed, const char *values, i64 stride) {
    T lanes[PANEL];
    for (i64 lane = 0; lane < PANEL; lane++) lanes[lane] = ((const T *)values)[lane * stride];
    memcpy(packed, lanes, sizeof lanes);
}

// A cache line of each output, side by side: in memory outputs may lie so far apart that one cache line drives another
// one out.
struct Tile {
    char bytes[PANEL][CACHE_LINE];

    // So many bytes of some outputs, whose first are at `from`; zeros behind the last output.
    void fill(const char *from, i64 stride, i64 rows, i64 count) {
        if (rows < PANEL) memset(bytes, 0, sizeof bytes);
        for (i64 row = 0; row < rows; row++) memcpy(bytes[row], from + row * stride, count);
    }
    void put(char *packed, i64 place, i64 size) const {
        const char *values = bytes[0] + place;
        if (size == 1) put_column<int8_t>(packed, values, CACHE_LINE);
        else if (size == 2) put_column<int16_t>(packed, values, CACHE_LINE / 2);
        else put_column<int32_t>(packed, values, CACHE_LINE / 4);
    }
};

char *put_section(char *packed, const Part *parts, i64 num_parts, i64 first_row, i64 rows, i64 record, bool is_last) {
    i64 first = record * parts->of_record, count = is_last ? parts->columns - first : parts->of_record;
    Tile tiles[MOST_PARTS];
    for (i64 column = first, next; column < first + count; column = next) {
        next = smaller(column + CACHE_LINE / 4, first + count);
        for (i64 i = 0; i < num_parts; i++) {
            i64 stride = parts[i].columns * parts[i].bytes;
            const char *from = (const char *)parts[i].values + first_row * stride + column * parts[i].bytes;
            tiles[i].fill(from, stride, rows, (next - column) * parts[i].bytes);
        }
        for (i64 some = column; some < next; some++)
            for (i64 i = 0; i < num_parts; packed += PANEL * parts[i++].bytes)
                tiles[i].put(packed, (some - column) * parts[i].bytes, parts[i].bytes);
    }
    return packed;
}

// The numbers of a group as one float16 times bytes, the first of them that fits; false where none does.
bool find_base(Float16 *base, int8_t *factors, const float *numbers, i64 count, const int32_t *largest_factors,
               i64 num_largest) {
    float x[LANES] = {}, made[LANES], largest = 0;
    memcpy(x, numbers, count * sizeof(float));
    base->bits = 0;
    for (i64 i = 0; i < count; i++) {
        largest = __builtin_fabsf(x[i]) > __builtin_fabsf(largest) ? x[i] : largest;
        factors[i] = 0;
    }
    if (largest == 0) {  // no number is larger: all are zeros, or some are NaN
        for (i64 i = 0; i < count; i++)
            if (x[i] != 0) return false;
        return true;
    }
    for (i64 i = 0; i < num_largest; i++) {
        Float16 halves[LANES];
        store(halves, splat(largest / (float)largest_factors[i]));
        F one = load(halves);
        F several = min(max(rounded(load(x) / one), splat(-128.0f)), splat(127.0f));
        store(made, several * one);
        bool fits = true;
        for (i64 k = 0; k < LANES; k++) fits &= made[k] == x[k];
        if (!fits) continue;
        int32_t integers[LANES];
        store(integers, to_int(several));
        for (i64 k = 0; k < count; k++) factors[k] = (int8_t)integers[k];
        *base = halves[0];
        return true;
    }
    return false;
}

// Of eight bytes, the first of them lowest, those of even number.
uint32_t even_bytes(uint64_t x) {
    x &= 0x00ff00ff00ff00ff, x = (x | x >> 8) & 0x0000ffff0000ffff;
    return (uint32_t)(x | x >> 16);
}

// Sixteen codes, a byte each.
void put_words(i64 kind, const char *codes, uint32_t *words) {
    uint64_t eight[2];
    memcpy(eight, codes, sizeof eight);
    uint32_t quads[] = {even_bytes(eight[0]), even_bytes(eight[0] >> 8), even_bytes(eight[1]),
                        even_bytes(eight[1] >> 8)};
    if (kind == CODES_QUADS) {
        for (int i = 0; i < 4; i++) words[i] = quads[i] ^ 0x80808080;
    } else if (kind == CODES_INT6) {  // + 32, in the six bits that count
        for (uint32_t &quad : quads) quad = (quad ^ 0x20202020) & 0x3f3f3f3f;
        for (int i = 0; i < 3; i++) words[i] = quads[i] | (quads[3] >> (4 - 2 * i) & 0x03030303) << 6;
    } else {
        for (int i = 0; i < 2; i++) words[i] = quads[2 * i] | quads[2 * i + 1] << 4;
    }
}

}  // namespace

// Codes as records have those of an output, one after the other: of four bits, INT6 and QUADS; sixteen times `count`.
EXPORT void octavo_put_words(i64 kind, const char *codes, uint32_t *words, i64 count, i64 threads) {
    const i64 AT_ONCE = 4096, words_of_16 = kind == CODES_QUADS ? 4 : kind == CODES_INT6 ? 3 : 2;
    for_each(threads, (count + AT_ONCE - 1) / AT_ONCE, [&](i64 item, i64) {
        for (i64 i = item * AT_ONCE; i < smaller((item + 1) * AT_ONCE, count); i++)
            put_words(kind, codes + i * 16, words + i * words_of_16);
    });
}

// Fills `packed`: so many whole records a panel, and one of what is left where something is. Addresses, columns and
// sizes of the parts, section after section.
EXPORT void octavo_pack_records(char *packed, const void *parts, i64 num_parts, i64 out_features, i64 whole_records,
                                i64 has_rest, i64 panel_bytes, i64 threads) {
    const Part *all = (const Part *)parts;
    for_each(threads, (out_features + PANEL - 1) / PANEL, [&](i64 panel, i64) {
        char *place = packed + panel * panel_bytes;
        i64 first_row = panel * PANEL, rows = smaller(out_features - first_row, PANEL);
        for (i64 record = 0; record < whole_records + has_rest; record++)
            for (i64 first = 0, end; first < num_parts; first = end) {
                for (end = first + 1; end < num_parts && all[end].section == all[first].section;) end++;
                place = put_section(place, all + first, end - first, first_row, rows, record, record == whole_records);
            }
    });
}

// `count` numbers in a row, up to 16, as bytes times a float16: 0 where some are not, to the bit but for the sign of a
// zero. `largest_factors`: what the largest of a group may be, in the order in which these are tried.
EXPORT i64 octavo_find_factors(void *bases, int8_t *factors, const float *numbers, i64 num_groups, i64 count,
                               const int32_t *largest_factors, i64 num_largest, i64 threads) {
    const i64 AT_ONCE = 4096;
    int32_t fits = 1;
    for_each(threads, (num_groups + AT_ONCE - 1) / AT_ONCE, [&](i64 item, i64) {
        for (i64 group = item * AT_ONCE; group < smaller((item + 1) * AT_ONCE, num_groups); group++) {
            if (!look_at(&fits)) return;
            if (!find_base((Float16 *)bases + group, factors + group * count, numbers + group * count, count,
                           largest_factors, num_largest))
                __atomic_store_n(&fits, 0, __ATOMIC_SEQ_CST);
        }
    });
    return fits;
}
