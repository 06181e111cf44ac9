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
};

// Query tokens that meet tiles of keys together: up to 32, or 64, of one sequence, or the single new tokens of sequences next
// to each other whose first blocks are the same ones.
struct QueryTile {
    i64 sequence, num_sequences, token, count, shared_keys;
};

i64 most_tiles(const Attention &attention);
i64 cut_tiles(const Attention &attention, QueryTile *tiles);                                 // how many
void attend(Team &team, const Attention &attention, const QueryTile *tiles, i64 num_tiles);  // one phase
