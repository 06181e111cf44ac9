// Random numbers, and the tokens that they draw.
//
// Weights are summed chunk by chunk, each chunk in the same order whatever the batch: a draw looks for its chunk among
// the sums and then for its token in that chunk. Samples of the same row share the sums.
#include "sampling.h"

namespace {

// In [0, 1), of 53 bits. Philox4x32-10: see `kernels.oracles.reference_sampling.uniforms`.
double uniform(uint64_t seed, uint64_t sequence_index, uint64_t position) {
    uint32_t c0 = (uint32_t)position, c1 = position >> 32;
    uint32_t c2 = (uint32_t)sequence_index, c3 = sequence_index >> 32;
    uint32_t k0 = (uint32_t)seed, k1 = seed >> 32;
    for (int round = 0; round < 10; round++) {
        uint64_t product0 = (uint64_t)0xD2511F53 * c0, product1 = (uint64_t)0xCD9E8D57 * c2;
        c0 = (uint32_t)(product1 >> 32) ^ c1 ^ k0, c1 = (uint32_t)product1;
        c2 = (uint32_t)(product0 >> 32) ^ c3 ^ k1, c3 = (uint32_t)product0;
        k0 += 0x9E3779B9, k1 += 0xBB67AE85;
    }
    return (double)(((uint64_t)(c0 >> 5) << 26) + (c1 >> 6)) * 0x1p-53;
}

// The first of `size` numbers, which do not fall, that is more than `target`, or not less; `size` where none is.
template <class T>
i64 first_above(const T *numbers, i64 size, T target, bool is_equal_enough) {
    i64 low = 0, high = size;
    while (low < high) {
        i64 middle = (low + high) / 2;
        if (numbers[middle] > target || (is_equal_enough && numbers[middle] == target)) high = middle;
        else low = middle + 1;
    }
    return low;
}

// The first token whose logit is the largest.
i64 find_largest(const Row &row) {
    i64 chunk = 0;
    while (row.maxima[chunk] < row.largest) chunk++;
    i64 token_id = chunk * CHUNK;
    while (row.logits[token_id] < row.largest) token_id++;
    return token_id;
}

// The weights of a row's tokens, summed up to the end of each chunk.
struct Sums {
    const Row &row;
    const Weigher weigher;
    double *sums;  // [chunks]

    // Of chunks whose largest is not below `smallest`; eight sums side by side, then these.
    void make(float smallest) const {
        ALIGNED float copy[CHUNK];
        ALIGNED double lanes[DOUBLES];
        double total = 0;
        for (i64 chunk = 0; chunk < row.num_chunks(); chunk++) {
            if (row.maxima[chunk] >= smallest) {
                const float *x = whole_chunk(row, chunk, copy);
                D of_lanes = weigher.of_eight(x);
                for (i64 i = DOUBLES; i < CHUNK; i += DOUBLES) of_lanes = of_lanes + weigher.of_eight(x + i);
                store(lanes, of_lanes);
                for (double lane : lanes) total += lane;
            }
            sums[chunk] = total;
        }
    }

    // The first token up to which the weights exceed `number` < 1 of all of them: a number below 1 times the total is
    // below the total in float64 as well.
    i64 draw(double number) const {
        i64 last_chunk = row.num_chunks() - 1;
        double target = number * sums[last_chunk];
        i64 chunk = smaller(first_above(sums, last_chunk + 1, target, false), last_chunk);
        ALIGNED float copy[CHUNK];
        ALIGNED double weights[CHUNK];
        weigher.of_chunk(whole_chunk(row, chunk, copy), weights);
        double total = chunk > 0 ? sums[chunk - 1] : 0;
        i64 token_id = chunk * CHUNK;
        for (i64 i = chunk * CHUNK; i < row.end_of(chunk) && !(total > target); i++) {
            double weight = weights[i - chunk * CHUNK];
            if (weight > 0) token_id = i;  // stays, should one sum after the other round to less than the chunk's
            total += weight;
        }
        return token_id;
    }
};

}  // namespace

EXPORT void octavo_uniforms(double *numbers, const i64 *seeds, const i64 *sequence_indices, const i64 *positions,
                            i64 count) {
    for (i64 i = 0; i < count; i++) numbers[i] = uniform(seeds[i], sequence_indices[i], positions[i]);
}

// Sample n comes from rows[n], which do not fall.
EXPORT void octavo_draw_tokens(i64 *token_ids, const float *logits, const float *maxima, const float *largest,
                               const float *smallest, const float *temperature, const i64 *rows, const i64 *seeds,
                               const i64 *sequence_indices, const i64 *positions, i64 num_rows, i64 vocab_size,
                               i64 num_samples, i64 threads) {
    i64 num_chunks = chunks_of(vocab_size);
    for_each_row(num_rows, vocab_size, threads, [&](i64 i) {
        i64 first = first_above(rows, num_samples, i, true), end = first_above(rows, num_samples, i, false);
        if (first == end) return;
        Row row = {logits + i * vocab_size, vocab_size, maxima + i * num_chunks, largest[i]};
        if (!is_finite(row.largest) || temperature[i] == 0) {
            i64 token_id = is_finite(row.largest) ? find_largest(row) : 0;
            for (i64 n = first; n < end; n++) token_ids[n] = token_id;
            return;
        }
        Weigher weigher(row.largest, smallest[i], 1 / (double)temperature[i]);
        Sums sums = {row, weigher, (double *)scratch(OF_ITEM, num_chunks * sizeof(double))};
        sums.make(smallest[i]);
        for (i64 n = first; n < end; n++)
            token_ids[n] = sums.draw(uniform(seeds[n], sequence_indices[n], positions[n]));
    });
}
