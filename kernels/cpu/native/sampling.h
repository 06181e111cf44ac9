// Rows of logits, of which tokens are drawn: what the files of sampling share.
//
// Logits are float32 [rows, vocab_size]. They are looked at by chunks of 64 tokens, the last of which may be shorter.
// Most rows need few of their logits: whoever knows the chunks' largest skips the chunks that hold nothing for it. What
// each operation has to give is said in `kernels.oracles.reference_sampling`, its bits the same at every level.
#pragma once
#include "doubles.h"
#include "threads.h"

const i64 CHUNK = 64;
const float INFINITE = __builtin_inff();

INLINE i64 chunks_of(i64 vocab_size) { return (vocab_size + CHUNK - 1) / CHUNK; }
INLINE bool is_finite(float x) { return __builtin_fabsf(x) < INFINITE; }  // nor NaN

struct Row {
    const float *logits;
    i64 size;
    const float *maxima;  // of its chunks
    float largest;

    i64 num_chunks() const { return chunks_of(size); }
    i64 end_of(i64 chunk) const { return smaller((chunk + 1) * CHUNK, size); }
};

// `run(row)` for each row, by as many threads as they are worth.
template <class Do>
static inline void for_each_row(i64 rows, i64 vocab_size, i64 threads, Do run) {
    for_each(threads_for(rows * vocab_size, threads), rows, [&](i64 row, i64) { run(row); });
}

// The first `count` of 16 logits, all where it is more, none where it is less than 1; -inf for the others.
INLINE F load_logits(const float *x, i64 count) {
    if (count >= LANES) return load(x);
    float part[LANES];
    store(part, splat(-INFINITE));
    if (count > 0) memcpy(part, x, count * sizeof(float));
    return load(part);
}

// Memory that vectors go to and come from: those that lie on two cache lines take several times as long.
#define ALIGNED alignas(CACHE_LINE)

// `chunk` of a row, in `copy` with -inf behind it where the row ends within.
INLINE const float *whole_chunk(const Row &row, i64 chunk, float copy[CHUNK]) {
    const float *x = row.logits + chunk * CHUNK;
    i64 count = row.size - chunk * CHUNK;
    if (count >= CHUNK) return x;
    for (i64 i = 0; i < CHUNK; i += LANES) store(copy + i, load_logits(x + i, count - i));
    return copy;
}

// How much a token weighs: e^((logit - largest) / temperature), and 0 for logits below `smallest`.
struct Weigher {
    D largest, smallest, inverse_temperature;

    Weigher(float largest, float smallest, double inverse_temperature)
        : largest(splat((double)largest)),
          smallest(splat((double)smallest)),
          inverse_temperature(splat(inverse_temperature)) {}

    INLINED D of_eight(const float *x) const {
        D value = doubles_of(x);
        return where_at_least(value, smallest, exp_of((value - largest) * inverse_temperature), splat(0.0));
    }
    void of_chunk(const float *x, double weights[CHUNK]) const {
        for (i64 i = 0; i < CHUNK; i += DOUBLES) store(weights + i, of_eight(x + i));
    }
};
