// The smallest logit that a row's filters keep, without sorting the row.
//
// min-p is a difference to the largest logit. top-k: the k-th largest of the chunks' maxima bounds the k-th largest
// logit from below, because each of k chunks has a logit that large; the few logits above it are selected from. top-p:
// weights go into bins by their distance to the largest logit, which never falls as logits fall; only the bin in which
// the sum passes top-p is sorted. Chunks without a logit that is kept so far are skipped.
#include "sampling.h"
#include "selection.h"

namespace {

const i64 BINS = 2048;
const double BINS_PER_NAT = 48;  // the last takes what is more than 42 below the largest: less than e^-42 of its weight

struct Workspace {
    double *bins;       // [BINS]
    i64 *keys;          // [vocab_size]
    float *candidates;  // [vocab_size], in the same place
    float *of_chunks;   // [chunks]
};

Workspace workspace_for(i64 vocab_size) {
    double *bins = (double *)scratch(OF_ITEM, BINS * 8 + vocab_size * 8 + chunks_of(vocab_size) * 4);
    i64 *keys = (i64 *)(bins + BINS);
    return {bins, keys, (float *)keys, (float *)(keys + vocab_size)};
}

// The k-th largest logit; `bound`, where fewer than k are that large.
float top_k_bound(const Row &row, float bound, i64 k, const Workspace &work) {
    i64 num_chunks = row.num_chunks();
    if (k < num_chunks) {
        memcpy(work.of_chunks, row.maxima, num_chunks * sizeof(float));
        float kth = kth_largest(work.of_chunks, num_chunks, k);
        bound = kth > bound ? kth : bound;
    }
    i64 num_candidates = 0;
    for (i64 chunk = 0; chunk < num_chunks; chunk++) {
        if (!(row.maxima[chunk] >= bound)) continue;
        for (i64 i = chunk * CHUNK; i < row.end_of(chunk); i++) {
            work.candidates[num_candidates] = row.logits[i];  // overwritten by the next, unless it is counted
            num_candidates += row.logits[i] >= bound;
        }
    }
    return num_candidates < k ? bound : kth_largest(work.candidates, num_candidates, k);
}

// The bins of 64 logits; within bounds for any numbers.
INLINE void find_bins(int32_t bins[CHUNK], const float *x, float largest, double inverse_temperature) {
    for (i64 i = 0; i < CHUNK; i += DOUBLES) {
        D distance = (splat((double)largest) - doubles_of(x + i)) * splat(inverse_temperature) * splat(BINS_PER_NAT);
        store_whole(bins + i, max(min(distance, splat(BINS - 1.0)), splat(0.0)));
    }
}

// The smallest logit before which less than `top_p` of the weight of logits >= `bound` stands.
float top_p_bound(const Row &row, float bound, double inverse_temperature, float top_p, const Workspace &work) {
    const Weigher weigher(row.largest, bound, inverse_temperature);
    ALIGNED double weights[CHUNK];
    ALIGNED int32_t bins_of[CHUNK];
    ALIGNED float copy[CHUNK];
    memset(work.bins, 0, BINS * sizeof(double));
    for (i64 chunk = 0; chunk < row.num_chunks(); chunk++) {
        if (!(row.maxima[chunk] >= bound)) continue;
        const float *x = whole_chunk(row, chunk, copy);
        weigher.of_chunk(x, weights);
        find_bins(bins_of, x, row.largest, inverse_temperature);
        for (i64 i = 0; i < CHUNK; i++) work.bins[bins_of[i]] += weights[i];
    }
    double total = 0, before = 0;
    for (i64 bin = 0; bin < BINS; bin++) total += work.bins[bin];
    double limit = top_p * total;
    i64 passing = 0;
    for (; passing < BINS - 1 && before + work.bins[passing] < limit; passing++) before += work.bins[passing];

    i64 num_keys = 0;
    for (i64 chunk = 0; chunk < row.num_chunks(); chunk++) {
        if (!(row.maxima[chunk] >= bound)) continue;
        const float *x = whole_chunk(row, chunk, copy);
        find_bins(bins_of, x, row.largest, inverse_temperature);
        for (i64 i = 0; i < row.end_of(chunk) - chunk * CHUNK; i++) {
            work.keys[num_keys] = sort_key(x[i], chunk * CHUNK + i);  // as above
            num_keys += x[i] >= bound && bins_of[i] == passing;
        }
    }
    if (!num_keys) return bound;  // which is above the largest
    sort_falling(work.keys, num_keys);
    float last_kept = row.logits[position_of(work.keys[0])];
    for (i64 i = 0; i < num_keys && before < limit; i++) {
        last_kept = row.logits[position_of(work.keys[i])];
        before += exp_of(((double)last_kept - row.largest) * inverse_temperature);
    }
    return last_kept;
}

}  // namespace

// In the order min-p, top-k, top-p; -inf at temperature 0, and where the largest is not finite.
EXPORT void octavo_kept_range(float *smallest, const float *logits, const float *maxima, const float *largest,
                              const float *temperature, const float *min_p, const i64 *top_k, const float *top_p,
                              i64 rows, i64 vocab_size, i64 threads) {
    for_each_row(rows, vocab_size, threads, [&](i64 i) {
        Row row = {logits + i * vocab_size, vocab_size, maxima + i * chunks_of(vocab_size), largest[i]};
        float bound = -INFINITE;
        if (temperature[i] != 0 && is_finite(row.largest)) {
            Workspace work = workspace_for(vocab_size);
            double exact_temperature = temperature[i];
            if (min_p[i] > 0) bound = (float)(row.largest + exact_temperature * log_of(min_p[i]));
            if (0 < top_k[i] && top_k[i] < vocab_size) {
                float kth = top_k_bound(row, bound, top_k[i], work);
                bound = kth > bound ? kth : bound;
            }
            if (top_p[i] < 1) {
                float last = top_p_bound(row, bound, 1 / exact_temperature, top_p[i], work);
                bound = last > bound ? last : bound;
            }
        }
        smallest[i] = bound;
    });
}
