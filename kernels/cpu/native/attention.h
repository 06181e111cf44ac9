// Paged attention; see attention.cpp.
#pragma once
#include "rows.h"

struct Attention {  // of a layer; strides in elements
    i64 element;
    void *out;
    i64 out_stride;
    const void *query;
    i64 query_stride, num_heads;
    Cache cache;
    const int32_t *block_tables;
    i64 tables_stride;
    const int32_t *seq_lens, *query_starts;
    i64 num_sequences;
    const float *slopes;  // of ALiBi, one a head; or 0
    i64 window;           // 0: none
    float scale, soft_cap;
    const float *sinks;  // one a head: a score that takes its share of the weights; or 0
};

// Query tokens that meet tiles of keys together: up to 32, or 64, of one sequence, fewer where many heads have the same
// keys; the single new tokens of sequences next to each other whose first blocks are the same ones; or one such
// token, for a segment of its keys.
struct QueryTile {
    i64 sequence, num_sequences, token, count, shared_keys;
    i64 segment, num_segments;  // of the keys, and how many tiles next to each other belong together; 0: it meets all
    i64 part, first_part;       // where its result waits for those of the others, and where the first of them does
};
// What a token has of its segments until all are done; of one layer at a time.
struct Parts {
    float *numbers;     // a line for each part and query head
    int32_t *num_done;  // likewise, of which the first part and head of an item count; zeros between layers
};

i64 most_tiles(const Attention &attention);
i64 cut_tiles(const Attention &attention, QueryTile *tiles);  // how many
// Of `attend` before slices are put together: more threads would find nothing to do.
i64 attention_items(const Attention &attention, i64 num_tiles, i64 threads);
i64 bytes_of_parts(const Attention &attention);
Parts make_parts(const Attention &attention, void *memory);                                         // of so many bytes
void attend(Team &team, const Attention &attention, const QueryTile *tiles, i64 num_tiles, Parts);  // one phase
