// Passes over all logits: penalties, the largest of each chunk, the most likely token.
#include "sampling.h"

namespace {

// The larger one, NaN where one is NaN.
INLINE F larger_or_nan(F x, F y) { return where_nan(x, x, max(x, y)); }

// A chunk of `count` logits in 16 lanes, the largest of which is the chunk's; NaN in a lane that has one.
INLINE F largest_by_lane(const float *x, i64 count) {
    F first = larger_or_nan(load_logits(x, count), load_logits(x + LANES, count - LANES));
    F second =
        larger_or_nan(load_logits(x + 2 * LANES, count - 2 * LANES), load_logits(x + 3 * LANES, count - 3 * LANES));
    return larger_or_nan(first, second);
}

INLINE I load_counts(const int32_t *p, i64 count) {
    int32_t part[LANES] = {};
    memcpy(part, p, count * sizeof(int32_t));
    return load(count == LANES ? p : part);
}

// Of 16 chunks at a time, which as columns of a square take 15 operations and not 15 each.
void write_maxima(float *maxima, const float *x, i64 size) {
    i64 num_chunks = chunks_of(size);
    for (i64 start = 0; start < num_chunks; start += LANES) {
        F chunks[LANES];
        for (i64 i = 0; i < LANES; i++) {
            i64 first = (start + i) * CHUNK;
            chunks[i] = size - first >= CHUNK ? largest_by_lane(x + first, CHUNK)
                        : first < size        ? largest_by_lane(x + first, size - first)
                                              : splat(-INFINITE);
        }
        transpose(chunks);
        F largest = chunks[0];
        for (i64 i = 1; i < LANES; i++) largest = larger_or_nan(chunks[i], largest);
        store_some(maxima + start, largest, smaller(LANES, num_chunks - start));
    }
}

// The first token that has the largest logit, and that; token 0 where it is not finite.
i64 first_largest(const float *x, i64 size, float *found) {
    const i64 BLOCK = 16 * CHUNK;  // of which the best is searched for the token
    i64 token_id = 0;
    float largest = -INFINITE;
    F of_all = splat(-INFINITE);
    for (i64 start = 0; start < size; start += BLOCK) {
        i64 end = smaller(start + BLOCK, size);
        F of_block = splat(-INFINITE);
        i64 first = start;
        for (; first + CHUNK <= end; first += CHUNK)
            of_block = larger_or_nan(largest_by_lane(x + first, CHUNK), of_block);
        if (first < end) of_block = larger_or_nan(largest_by_lane(x + first, end - first), of_block);
        of_all = larger_or_nan(of_block, of_all);
        float value = largest_of_lanes(of_block);
        if (value > largest) token_id = start, largest = value;
    }
    float lanes[LANES];
    store(lanes, of_all);
    for (float lane : lanes)
        if (lane != lane) largest = lane;
    *found = largest;
    if (!is_finite(largest)) return 0;
    while (x[token_id] < largest) token_id++;
    return token_id;
}

}  // namespace

// In place: `rows` of logits by `count_rows` of counts, which say twice how often a token was generated, and 1 more
// where it stands in the prompt. Every operation rounds by itself, as in torch.
EXPORT void octavo_penalize(float *logits, i64 vocab_size, const i64 *rows, const int32_t *counts,
                            const i64 *count_rows, const float *repetition, const float *frequency,
                            const float *presence, i64 num_rows, i64 threads) {
    for_each_row(num_rows, vocab_size, threads, [&](i64 i) {
        float *x = logits + rows[i] * vocab_size;
        const int32_t *seen_of = counts + count_rows[i] * vocab_size;
        const F zero = splat(0.0f), factor = splat(repetition[i]), per_time = splat(frequency[i]);
        each_vector(vocab_size, [&](i64 k, i64 count) INLINED {
            F value = load_some(x + k, count);
            I seen = load_counts(seen_of + k, count);
            F times = to_float(shift_right<1>(seen));
            F repeated = where_less(zero, value, value / factor, value * factor);
            value = where_less(zero, to_float(seen), repeated, value) - per_time * times;
            store_some(x + k, value - where_less(zero, times, splat(presence[i]), zero), count);
        });
    });
}

// maxima [rows, chunks]: the largest of each chunk, NaN where one is NaN.
EXPORT void octavo_chunk_maxima(float *maxima, const float *logits, i64 rows, i64 vocab_size, i64 threads) {
    for_each_row(rows, vocab_size, threads, [&](i64 row) {
        write_maxima(maxima + row * chunks_of(vocab_size), logits + row * vocab_size, vocab_size);
    });
}

// Of each row the largest logit and the first token that has it; token 0 where it is not finite.
EXPORT void octavo_most_likely(i64 *token_ids, float *largest, const float *logits, i64 rows, i64 vocab_size,
                               i64 threads) {
    for_each_row(rows, vocab_size, threads, [&](i64 row) {
        token_ids[row] = first_largest(logits + row * vocab_size, vocab_size, largest + row);
    });
}
