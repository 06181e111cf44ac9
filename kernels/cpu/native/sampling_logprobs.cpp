// Log probabilities and ranks of given tokens, and the few largest logits of a row.
#include "sampling.h"
#include "selection.h"

namespace {

// The sum of e^(x - largest), and how many logits are above `value`, in one pass. Exponentials in float32, 64 of them
// in 16 sums, which go on in float64.
double sum_of_exp(const Row &row, float value, i64 *num_above) {
    const F largest = splat(row.largest), given = splat(value), zero = splat(0.0f), one = splat(1.0f);
    D low = splat(0.0), high = splat(0.0);
    F above = zero;  // counts, which stay exact up to 2^24 a lane
    for (i64 first = 0; first < row.size; first += CHUNK) {
        F sums[CHUNK / LANES];
        for (i64 i = 0; i < CHUNK / LANES; i++) {
            F x = load_logits(row.logits + first + i * LANES, row.size - first - i * LANES);
            sums[i] = exp_of(x - largest);
            above = above + where_less(given, x, one, zero);
        }
        ALIGNED float lanes[LANES];
        store(lanes, (sums[0] + sums[1]) + (sums[2] + sums[3]));
        low = low + doubles_of(lanes), high = high + doubles_of(lanes + DOUBLES);
    }
    double totals[DOUBLES], total = 0;
    store(totals, low + high);
    for (double each : totals) total += each;
    *num_above = sum_of_lanes(to_int(above));
    return total;
}

}  // namespace

// Sample n is token_ids[n] of rows[n]; NaN and rank 1 where the row's largest is not finite.
EXPORT void octavo_token_logprobs(float *logprobs, i64 *ranks, float *log_sums, const float *logits,
                                  const float *largest, const i64 *rows, const i64 *token_ids, i64 num_samples,
                                  i64 vocab_size, i64 threads) {
    for_each_row(num_samples, vocab_size, threads, [&](i64 n) {
        Row row = {logits + rows[n] * vocab_size, vocab_size, 0, largest[rows[n]]};
        if (!is_finite(row.largest)) {
            logprobs[n] = log_sums[n] = __builtin_nanf(""), ranks[n] = 1;
            return;
        }
        float value = row.logits[token_ids[n]];
        i64 num_above;
        log_sums[n] = (float)log_of(sum_of_exp(row, value, &num_above));
        logprobs[n] = (value - row.largest) - log_sums[n];
        ranks[n] = 1 + num_above;
    });
}

// The k largest logits of each sample's row in order, of equal ones the first; token 0 and NaN where one is NaN. The
// k-th largest of the chunks' maxima bounds the k-th largest logit from below: only what reaches it is sorted.
EXPORT void octavo_top_logits(i64 *token_ids, float *values, const float *logits, const float *maxima, const i64 *rows,
                              i64 num_samples, i64 k, i64 vocab_size, i64 threads) {
    if (!k) return;  // the 0th largest of all chunks is none of them
    i64 num_chunks = chunks_of(vocab_size);
    for_each_row(num_samples, vocab_size, threads, [&](i64 n) {
        Row row = {logits + rows[n] * vocab_size, vocab_size, maxima + rows[n] * num_chunks, 0};
        bool has_nan = false;
        for (i64 chunk = 0; chunk < num_chunks; chunk++) has_nan |= row.maxima[chunk] != row.maxima[chunk];
        i64 *keys = (i64 *)scratch(OF_ITEM, vocab_size * 8 + num_chunks * 4), num_keys = 0;
        if (!has_nan) {
            float bound = -INFINITE, *of_chunks = (float *)(keys + vocab_size);
            memcpy(of_chunks, row.maxima, num_chunks * sizeof(float));
            if (k < num_chunks) bound = kth_largest(of_chunks, num_chunks, k);
            for (i64 chunk = 0; chunk < num_chunks; chunk++) {
                if (row.maxima[chunk] < bound) continue;
                for (i64 i = chunk * CHUNK; i < row.end_of(chunk); i++) {
                    keys[num_keys] = sort_key(row.logits[i], i);  // overwritten by the next, unless it is counted
                    num_keys += row.logits[i] >= bound;
                }
            }
            sort_falling(keys, num_keys);
        }
        for (i64 i = n * k; i < (n + 1) * k; i++) {
            token_ids[i] = has_nan ? 0 : position_of(keys[i - n * k]);
            values[i] = has_nan ? __builtin_nanf("") : row.logits[token_ids[i]];
        }
    });
}
