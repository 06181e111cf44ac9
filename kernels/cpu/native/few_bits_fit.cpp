// Whether a weight of floating-point numbers is one of few bits (kernels/cpu/products/few_bits_fit.py), found from its
// numbers alone, and its packed form.
//
// Of a group of 32 inputs the scale is a distance between numbers over the integers between them: which ones is tried,
// what fitted last first, and a guess counts only when every number of the group comes out of it with the same 32 bits,
// signs of zeros included. So nothing is lost wherever the numbers came from, and a tensor fits whole or not at all.
#include "products.h"

namespace {

struct Format {
    i64 bits, least, most;
    bool has_minimum;
};
struct Guess {
    i64 reach, first;
};  // what fitted last; reach 0: nothing yet
struct Fit {
    float numbers[GROUP], scale, minimum;
    int32_t integers[GROUP];
};

float rounded_to_half(float x) { return as_float(as_half(x)); }

// Whether integers make the very bits of the numbers; fills `integers`.
bool comes_out(Fit &fit, const Format &format, float scale, float minimum) {
    F inverse = splat(scale != 0 ? 1.0f / scale : 0.0f), d = splat(scale), m = splat(minimum);
    int32_t difference[LANES];
    I differs = splat(0);
    for (int i = 0; i < GROUP; i += LANES) {
        F numbers = load(fit.numbers + i);
        F quotient = min(max((numbers - m) * inverse, splat((float)format.least)), splat((float)format.most));
        I integers = to_int(rounded(quotient));
        F whole = to_float(integers);  // never -0, which no integer is in a product
        // A product is exact. Without a minimum it keeps the sign of its zero.
        F made = format.has_minimum ? d * whole + m : d * whole;
        store(fit.integers + i, integers);
        differs = larger_unsigned(differs, bits_of(made) - bits_of(numbers));
    }
    store(difference, differs);
    for (int i = 0; i < LANES; i++)
        if (difference[i]) return false;
    fit.scale = scale, fit.minimum = minimum;
    return true;
}

// One guess. Ends are off by a rounding of float32 at most, so rounding to float16 finds the scale itself.
bool try_guess(Fit &fit, const Format &format, float low, float high, Guess guess) {
    if (format.has_minimum) {
        float scale = rounded_to_half((high - low) / (float)guess.reach);
        return comes_out(fit, format, scale, rounded_to_half(low - scale * (float)guess.first));
    }
    float extreme = high >= -low ? high : low;
    for (i64 sign = 1; sign >= -1; sign -= 2) {
        i64 integer = guess.reach * sign * (extreme >= 0 ? 1 : -1);
        if (format.least <= integer && integer <= format.most &&
            comes_out(fit, format, rounded_to_half(extreme / (float)integer), 0.0f))
            return true;
    }
    return false;
}

bool find_fit(Fit &fit, const Format &format, Guess &guess) {
    float low = fit.numbers[0], high = fit.numbers[0];
    for (float number : fit.numbers) {
        if (!(__builtin_fabsf(number) < __builtin_inff())) return false;
        low = number < low ? number : low, high = number > high ? number : high;
    }
    if (guess.reach && try_guess(fit, format, low, high, guess)) return true;
    // `reach`: integers from the lowest number to the highest, or of the largest magnitude; `first`: of the lowest.
    for (i64 reach = larger(-format.least, format.most); reach > 0; reach--)
        for (i64 first = 0; first < (format.has_minimum ? format.most - reach + 1 : 1); first++)
            if (try_guess(fit, format, low, high, {reach, first})) {
                guess = {reach, first};
                return true;
            }
    return false;
}

// A group of an output into its record.
void store_group(char *record, i64 row, const Fit &fit, const Format &format) {
    Float16 *halves = (Float16 *)record;
    halves[row] = as_half(fit.scale);
    if (format.has_minimum) halves[PANEL + row] = as_half(fit.minimum);
    char *integers = record + PANEL * 2 * (1 + format.has_minimum);
    if (format.bits == 8) {
        for (int k = 0; k < GROUP; k++) integers[k * PANEL + row] = (char)fit.integers[k];
        return;
    }
    for (int j = 0; j < GROUP / 8; j++) {
        uint32_t word = 0;
        for (int i = 0; i < 8; i++) word |= (uint32_t)(fit.integers[8 * j + i] - format.least) << 4 * i;
        memcpy(integers + (j * PANEL + row) * 4, &word, 4);
    }
}

template <class T>
bool pack(char *packed, const T *weight, i64 row_stride, i64 column_stride, i64 out_features, i64 in_features,
          const Format &format, i64 threads) {
    i64 num_groups = in_features / GROUP;
    i64 record = PANEL * 2 * (1 + format.has_minimum) + PANEL * GROUP * format.bits / 8;
    int32_t fits = 1;
    for_each(threads, (out_features + PANEL - 1) / PANEL, [&](i64 panel, i64) {
        Guess guess = {0, 0};
        Fit fit;
        i64 rows = smaller(out_features - panel * PANEL, PANEL);
        char *place = packed + panel * num_groups * record;
        if (rows < PANEL) memset(place, 0, num_groups * record);
        for (i64 row = 0; row < rows; row++)
            for (i64 g = 0; g < num_groups; g++) {
                if (!look_at(&fits)) return;
                const T *from = weight + (panel * PANEL + row) * row_stride + g * GROUP * column_stride;
                for (i64 k = 0; k < GROUP; k++) fit.numbers[k] = as_float(from[k * column_stride]);
                if (!find_fit(fit, format, guess)) __atomic_store_n(&fits, 0, __ATOMIC_SEQ_CST);
                else store_group(place + g * record, row, fit, format);
            }
    });
    return fits;
}

}  // namespace

// Fills `packed`; 0 where the weight does not fit. Strides in numbers, of `element`.
EXPORT i64 octavo_pack_few_bits(char *packed, i64 element, const void *weight, i64 row_stride, i64 column_stride,
                                i64 out_features, i64 in_features, i64 bits, i64 least, i64 has_minimum, i64 threads) {
    Format format = {bits, least, least + (1 << bits) - 1, has_minimum != 0};
    if (element == FLOAT32)
        return pack(packed, (const float *)weight, row_stride, column_stride, out_features, in_features, format,
                    threads);
    return pack(packed, (const Bfloat16 *)weight, row_stride, column_stride, out_features, in_features, format,
                threads);
}
