// Paged attention: formula and arguments as in `kernels.oracles.reference.paged_attention`.
//
// Kwon et al. 2023 (arXiv:2309.06180) for the paged cache; Milakov and Gimelshein 2018 (arXiv:1805.02867) for the
// softmax that is computed tile by tile with a running maximum and sum. A tile of query tokens and some query heads of
// one key/value head - all of its group, or a slice where there would be fewer items than threads - make rows:
//
//     rows [tokens x heads]  q -------- . K^T of 64 keys ---> scores [rows, 64] --- softmax, running m, l ---> p
//                                                             acc [rows, head] <--- rescaled, + p . V of 64 keys
//
// A tile meets its keys in phases: what all its sequences have in common, once, then what each has of its own:
//
//     keys   0 ........... shared ........ seq_len
//     s      | phase 0: read  |  phase 1  |
//     s + 1  | once, by all   |  phase 2      |
//     s + 2  | of them        |  phase 3 |
//
// Few rows take keys and values from where they lie in the cache: 16 keys by 16 elements are loaded, transposed in
// registers and multiplied. Blocks lie anywhere, so the processor does not see the next ones coming; what is read two
// runs of 16 keys later is prefetched, to the second cache level, as more lines can be on their way to that. Within a
// block key/value heads lie side by side, and memory is quicker by larger pieces. So where there are enough items, one
// has several of these heads, which take turns at each 64 keys. Many rows share a copy of a tile: keys transposed,
// values as float32.
//
// Every row's sums run in one order: over the head's elements, over key tiles that start at multiples of 64, over their
// keys. Segments of 2,048 keys, which start at multiples of that, have a softmax each; these are put together in order
// (Dao et al. 2023, "Flash-Decoding"), so that threads can share the keys of a single token. Masked keys add exact
// zeros, as long as their values are finite. So a row's result does not depend on the rows beside it, nor on whether
// its token is computed alone, within a prompt, within a chunk or over a shared prefix: bit for bit.
#include "attention.h"

namespace {

const i64 KEYS = 64;  // of a tile
const i64 RUN = 16;   // keys that lie one after the other in the cache, where blocks are multiples of it
const i64 RUNS = KEYS / RUN;
// Keys. With 128 float32 numbers each they are 1 MB: to read that takes longer than threads wait for each other.
const i64 SEGMENT = 2048;
// Tokens of a prompt; more leaves the threads of short prompts too few. A longer one copies each key for twice as many.
const i64 QUERY_TILE = 32, LONG_QUERY = 512, TILE_OF_LONG_QUERY = 64;
const i64 SHARED_TILE = 16;  // sequences over a common prefix
const i64 MOST_ROWS = 512;   // of a tile, unless one token has more: 64 tokens of 8 heads, or 4 of 128
const int ROWS = 4;          // multiplied at once where keys lie: 4 x 4 sums and 4 vectors of keys or values
const int MANY_ROWS = HAS_WIDE_REGISTERS ? 6 : 4;  // and by a copy: 6 x 4 sums, for 10 loads
const int COLUMNS = HAS_WIDE_REGISTERS ? 4 : 1;
const i64 FEW_ROWS = 8;           // so many are quicker without a copy, though each four of them read anew
const i64 MOST_TOGETHER = 8;      // slices of an item: 32 KiB of a block with 4 KiB of each head
const i64 ITEMS_OF_THREAD = 8;    // or more, before slices share one
const float NO_MAXIMUM = -1e30f;  // of a row that has met no key: finite, as what is subtracted from scores

// ---- tiles ----------------------------------------------------------------------------------------------------------
// How many of the first `limit` keys of two sequences lie in the same blocks, in whole key tiles.
i64 common_keys(const int32_t *table, const int32_t *other, i64 limit, i64 block_size) {
    i64 keys = 0;
    for (limit = limit / KEYS * KEYS; keys < limit && table[keys / block_size] == other[keys / block_size];)
        keys += block_size;
    return smaller(keys, limit) / KEYS * KEYS;
}

i64 ceil_div(i64 count, i64 size) { return (count + size - 1) / size; }
i64 query_len(const Attention &a, i64 s) { return a.query_starts[s + 1] - a.query_starts[s]; }
i64 group_of(const Attention &a) { return a.num_heads / a.cache.num_kv_heads; }

// Tokens of a tile of so many, or fewer if their rows would be too many.
i64 tokens_of(const Attention &a, i64 most) { return smaller(most, larger(1, MOST_ROWS / group_of(a))); }
i64 tile_of(const Attention &a, i64 query_len) {
    return tokens_of(a, query_len < LONG_QUERY ? QUERY_TILE : TILE_OF_LONG_QUERY);
}

// How many sequences from s on are decoded together, and the keys that they share.
i64 members_of(const Attention &a, i64 s, i64 &shared) {
    i64 members = 1, most = tokens_of(a, SHARED_TILE);
    shared = a.seq_lens[s];
    // With a window each sequence has a first key of its own.
    while (query_len(a, s) == 1 && a.window == 0 && members < most && s + members < a.num_sequences) {
        i64 other = s + members;
        if (query_len(a, other) != 1) break;
        i64 common = common_keys(a.block_tables + s * a.tables_stride, a.block_tables + other * a.tables_stride,
                                 smaller(shared, a.seq_lens[other]), a.cache.block_size);
        // One more sequence, but not at the price of most of what the others share.
        if (common == 0 || (members > 1 && 2 * common < shared)) break;
        members++, shared = common;
    }
    return members;
}

// The position, within its sequence, of a tile's token.
i64 position_of(const Attention &a, const QueryTile &tile, i64 row) {
    i64 s = tile.sequence;
    if (tile.num_sequences > 1) return a.seq_lens[s + row] - 1;
    return a.seq_lens[s] - (a.query_starts[s + 1] - tile.token) + row;
}

// How the query heads of a key/value head are cut, each slice of which reads all keys: only where there are fewer items
// than threads, and not finer than rows are multiplied at once.
struct HeadCut {
    i64 group, size, slices;  // query heads of a key/value head, and of a slice (the last may have fewer)

    HeadCut(const Attention &a, i64 num_tiles, i64 threads) : group(group_of(a)) {
        i64 uncut = larger(1, num_tiles * a.cache.num_kv_heads), wanted = ceil_div(threads, uncut);
        size = smaller(group, ceil_div(ceil_div(group, wanted), ROWS) * ROWS);
        slices = ceil_div(group, size);
    }
};
struct Heads {  // of a slice: query heads `first` .. first + count - 1
    i64 of_keys, first, count;
};
struct Slices {  // of an item
    const QueryTile *tile;
    i64 first, end;
};

struct Keys {
    i64 sequence, first, end;
};
Keys keys_of(const Attention &a, const QueryTile &tile, i64 phase) {
    i64 s = tile.sequence;
    if (tile.num_segments) {
        Keys all = keys_of(a, {s, 1, tile.token, 1, 0, 0, 0, 0, 0}, 1);
        return {s, larger(all.first, tile.segment * SEGMENT), smaller(all.end, (tile.segment + 1) * SEGMENT)};
    }
    if (phase == 0) return {s, 0, tile.shared_keys};
    if (tile.num_sequences > 1) return {s + phase - 1, tile.shared_keys, a.seq_lens[s + phase - 1]};
    i64 position = position_of(a, tile, 0);
    return {s, a.window ? larger(0, position + 1 - a.window) / KEYS * KEYS : 0, position + tile.count};
}

// ---- where keys and values lie --------------------------------------------------------------------------------------
template <class S>
struct Place {         // of a tile of keys of a sequence and one head
    i64 first, end;    // which keys
    i64 starts[RUNS];  // elements before each run
    const S *keys, *values;
    i64 num_runs() const { return (end - first + RUN - 1) / RUN; }
};

template <class S>
Place<S> find(const Attention &a, i64 head, Keys keys) {
    const Cache &c = a.cache;
    Place<S> place = {keys.first, smaller(keys.end, keys.first + KEYS), {}, (const S *)c.keys, (const S *)c.values};
    const int32_t *table = a.block_tables + keys.sequence * a.tables_stride;
    for (i64 run = 0; run < place.num_runs(); run++) {
        i64 key = keys.first + run * RUN;
        place.starts[run] =
            ((table[key / c.block_size] * c.num_kv_heads + head) * c.block_size + key % c.block_size) * c.head_size;
    }
    return place;
}

// What is read `RUNS_AHEAD` runs after a run of keys or values: of the same, or of what comes after it.
const i64 RUNS_AHEAD = 2;
template <class S>
const S *ahead_of(i64 run, i64 count, const S *here, const i64 *starts, const S *after, const i64 *starts_after) {
    run += RUNS_AHEAD;
    return run < count ? here + starts[run] : after + starts_after[(run - count) % RUNS];
}

// ---- few rows: keys and values in place -----------------------------------------------------------------------------
// scores [NUM, 64] = q [NUM, size] . K^T, for COUNT runs of 16 keys whose sums take turns.
template <int NUM, int COUNT, class S>
void score_runs(const float *q, i64 size, const S *const *keys, const S *const *soon, float *scores) {
    F sums[COUNT][NUM];
#pragma GCC unroll 2
    for (int run = 0; run < COUNT; run++)
#pragma GCC unroll 4
        for (int r = 0; r < NUM; r++) sums[run][r] = splat(0.0f);
    for (i64 d = 0; d < size; d += LANES) {
#pragma GCC unroll 2
        for (int run = 0; run < COUNT; run++) {
            for (i64 i = 0; i < LANES * LANES * (i64)sizeof(S); i += CACHE_LINE)
                prefetch_second_level(at(soon[run] + d * RUN, i));
            F lines[LANES];
#pragma GCC unroll 16
            for (int key = 0; key < RUN; key++) lines[key] = load(keys[run] + key * size + d);
            transpose(lines);
#pragma GCC unroll 16
            for (int i = 0; i < LANES; i++)
#pragma GCC unroll 4
                for (int r = 0; r < NUM; r++)
                    sums[run][r] = fma(splat_at(q + r * size + d + i), lines[i], sums[run][r]);
        }
    }
#pragma GCC unroll 2
    for (int run = 0; run < COUNT; run++)
#pragma GCC unroll 4
        for (int r = 0; r < NUM; r++) store(scores + r * KEYS + run * RUN, sums[run][r]);
}

template <int NUM, class S>
void score_in_place(const float *q, i64 size, const Place<S> &here, const S *after, const i64 *starts_after,
                    float *scores) {
    i64 count = here.num_runs(), run = 0;
    const S *keys[2], *soon[2];
    auto look = [&](i64 number, int i) {
        keys[i] = here.keys + here.starts[number],
        soon[i] = ahead_of(number, count, here.keys, here.starts, after, starts_after);
    };
    for (; run + 2 <= count; run += 2) {
        look(run, 0), look(run + 1, 1);
        score_runs<NUM, 2>(q, size, keys, soon, scores + run * RUN);
    }
    if (run < count) {
        look(run, 0);
        score_runs<NUM, 1>(q, size, keys, soon, scores + run * RUN);
    }
}

// acc [NUM, 16 WIDTH] += p [NUM, keys] . V in some columns of one run; as many lines are prefetched from `soon` on.
template <int NUM, int WIDTH, class S>
void add_values(const float *p, const S *line, i64 size, i64 num_keys, float *acc, const S *soon) {
    F sums[NUM][WIDTH];
#pragma GCC unroll 4
    for (int r = 0; r < NUM; r++)
#pragma GCC unroll 4
        for (int v = 0; v < WIDTH; v++) sums[r][v] = load(acc + r * size + v * LANES);
    for (i64 key = 0; key < num_keys; key++, line += size, soon += WIDTH * LANES) {
#pragma GCC unroll 4
        for (int i = 0; i < WIDTH * LANES * (int)sizeof(S); i += CACHE_LINE) prefetch_second_level(at(soon, i));
        F values[WIDTH];
#pragma GCC unroll 4
        for (int v = 0; v < WIDTH; v++) values[v] = load(line + v * LANES);
#pragma GCC unroll 4
        for (int r = 0; r < NUM; r++) {
            F weight = splat_at(p + r * KEYS + key);
#pragma GCC unroll 4
            for (int v = 0; v < WIDTH; v++) sums[r][v] = fma(weight, values[v], sums[r][v]);
        }
    }
#pragma GCC unroll 4
    for (int r = 0; r < NUM; r++)
#pragma GCC unroll 4
        for (int v = 0; v < WIDTH; v++) store(acc + r * size + v * LANES, sums[r][v]);
}

template <int NUM, class S>
void add_in_place(const float *p, const Place<S> &here, i64 size, i64 num_keys, float *acc, const S *after,
                  const i64 *starts_after) {
    i64 runs = here.num_runs();
    for (i64 run = 0; run * RUN < num_keys; run++, p += RUN) {
        const S *line = here.values + here.starts[run],
                *soon = ahead_of(run, runs, here.values, here.starts, after, starts_after);
        i64 count = smaller(num_keys - run * RUN, RUN), column = 0;
        for (; column + COLUMNS * LANES <= size; column += COLUMNS * LANES)
            add_values<NUM, COLUMNS>(p, line + column, size, count, acc + column, soon + column * RUN);
        for (; column < size; column += LANES)
            add_values<NUM, 1>(p, line + column, size, count, acc + column, soon + column * RUN);
    }
}

// ---- many rows: a copy of keys and values ---------------------------------------------------------------------------
// values [64, padded], the tile's lines one after the other, filled up with zeros.
template <class S>
void copy_lines(const Attention &a, const S *cache, i64 head, Keys keys, i64 padded, float *lines) {
    const Cache &c = a.cache;
    const int32_t *table = a.block_tables + keys.sequence * a.tables_stride;
    i64 end = smaller(keys.end, keys.first + KEYS);
    for (i64 key = keys.first; key < end; key++, lines += padded) {
        const S *from =
            cache +
            ((table[key / c.block_size] * c.num_kv_heads + head) * c.block_size + key % c.block_size) * c.head_size;
        each_vector(c.head_size, [&](i64 d, i64 count) INLINED { store(lines + d, load_some(from + d, count)); });
    }
}

// keys [padded, 64] of lines [64, padded], of which `count` are there.
void turn_lines(const float *lines, i64 count, i64 padded, float *keys) {
    for (i64 first = 0; first < count; first += RUN)
        for (i64 d = 0; d < padded; d += LANES) {
            F block[LANES];
            for (i64 i = 0; i < RUN; i++) block[i] = load(lines + (first + i) * padded + d);
            transpose(block);
            for (i64 i = 0; i < LANES; i++) store(keys + (d + i) * KEYS + first, block[i]);
        }
}

// c [NUM, 16 WIDTH] = s + a [NUM, depth] . b [depth, 16 WIDTH]; sums run over depth.
template <int NUM, int WIDTH>
void add_product(const float *a, i64 a_stride, const float *b, i64 b_stride, const float *s, float *c, i64 c_stride,
                 i64 depth) {
    F sums[NUM][WIDTH];
#pragma GCC unroll 6
    for (int r = 0; r < NUM; r++)
#pragma GCC unroll 4
        for (int v = 0; v < WIDTH; v++) sums[r][v] = s ? load(s + r * c_stride + v * LANES) : splat(0.0f);
    for (i64 k = 0; k < depth; k++, b += b_stride) {
        F values[WIDTH];
#pragma GCC unroll 4
        for (int v = 0; v < WIDTH; v++) values[v] = load(b + v * LANES);
#pragma GCC unroll 6
        for (int r = 0; r < NUM; r++) {
            F factor = splat_at(a + r * a_stride + k);
#pragma GCC unroll 4
            for (int v = 0; v < WIDTH; v++) sums[r][v] = fma(factor, values[v], sums[r][v]);
        }
    }
#pragma GCC unroll 6
    for (int r = 0; r < NUM; r++)
#pragma GCC unroll 4
        for (int v = 0; v < WIDTH; v++) store(c + r * c_stride + v * LANES, sums[r][v]);
}
template <int NUM>
void add_products(const float *a, i64 a_stride, const float *b, i64 b_stride, bool goes_on, float *c, i64 c_stride,
                  i64 depth, i64 width) {
    i64 column = 0;
    for (; column + COLUMNS * LANES <= width; column += COLUMNS * LANES)
        add_product<NUM, COLUMNS>(a, a_stride, b + column, b_stride, goes_on ? c + column : 0, c + column, c_stride,
                                  depth);
    for (; column < width; column += LANES)
        add_product<NUM, 1>(a, a_stride, b + column, b_stride, goes_on ? c + column : 0, c + column, c_stride, depth);
}

// ---- softmax --------------------------------------------------------------------------------------------------------
// Of a row's 64 scores those of keys after its token, or before its window, become -inf; the others get soft cap and
// ALiBi. `distance` is the first key's position minus the token's.
void mask(float *scores, i64 distance, float slope, i64 window, float cap) {
    i64 start = window ? larger(0, 1 - window - distance) : 0, end = smaller(KEYS, 1 - distance);
    bool is_changed = cap > 0 || slope != 0;
    if (!is_changed && start <= 0 && end >= KEYS) return;
    for (i64 i = 0; i < KEYS; i += LANES) {
        F score = load(scores + i);
        I keys = lanes_from((int32_t)i);
        if (cap > 0) score = splat(cap) * tanh_of(score / splat(cap));
        if (slope != 0) score = fma(splat(slope), to_float(keys + splat((int32_t)distance)), score);
        store(scores + i,
              where_within(keys, splat((int32_t)start), splat((int32_t)end), score, splat(-__builtin_inff())));
    }
}

struct Running {
    float maximum, sum;
};

// A row's 64 scores become their weights e^(score - maximum), 0 where hidden; what the row has added up so far is
// scaled to a new maximum.
void weigh(float *scores, Running &running, float *acc, i64 width) {
    F s[RUNS];
    for (i64 i = 0; i < RUNS; i++) s[i] = load(scores + i * LANES);
    float most = largest_of_lanes(max(max(s[0], s[1]), max(s[2], s[3])));
    if (most > running.maximum) {
        float lanes[LANES];
        store(lanes, exp_of(splat(running.maximum - most)));
        F shrink = splat(lanes[0]);
        running.sum *= lanes[0], running.maximum = most;
        for (i64 d = 0; d < width; d += LANES) store(acc + d, load(acc + d) * shrink);
    }
    F maximum = splat(running.maximum);
    for (i64 i = 0; i < RUNS; i++) s[i] = exp_of(s[i] - maximum), store(scores + i * LANES, s[i]);
    running.sum += sum_of_lanes((s[0] + s[1]) + (s[2] + s[3]));
}

// ---- an item --------------------------------------------------------------------------------------------------------
struct Rows {  // of a slice
    float *q, *acc, *total_acc;
    Running *running, *total;  // of the present segment, and of those before it
    i64 *positions;
    i64 count, padded;
    float *scores, *lines, *keys;  // which slices of an item share: of the one that has its turn
};

i64 ceil_bytes(i64 bytes) { return ceil_div(bytes, CACHE_LINE) * CACHE_LINE; }
i64 bytes_of_rows(i64 count, i64 padded) {
    return ceil_bytes(count * (3 * padded * 4 + (i64)(2 * sizeof(Running)) + 8));
}
i64 bytes_of_turn(i64 count, i64 padded) { return (larger(count, ROWS) * KEYS + 2 * KEYS * padded) * 4; }

// In memory of their own and, for what they need in their turn, in memory that slices share.
Rows make_rows(const Attention &a, const QueryTile &tile, Heads heads, i64 padded, char *memory, char *turn) {
    i64 count = tile.count * heads.count, numbers = count * padded;
    Rows rows = {};
    rows.count = count, rows.padded = padded;
    rows.q = (float *)memory, rows.acc = rows.q + numbers, rows.total_acc = rows.acc + numbers;
    rows.running = (Running *)(rows.total_acc + numbers), rows.total = rows.running + count;
    rows.positions = (i64 *)(rows.total + count);
    rows.lines = (float *)turn, rows.keys = rows.lines + KEYS * padded, rows.scores = rows.keys + KEYS * padded;
    memset(rows.acc, 0, 2 * numbers * 4);  // and `total_acc` behind it
    for (i64 row = 0; row < count; row++) {
        rows.positions[row] = position_of(a, tile, row / heads.count);
        rows.running[row] = rows.total[row] = {NO_MAXIMUM, 0.0f};
    }
    return rows;
}

// total += part, each with what it has added up; a part that met no key changes nothing.
void add_part(Running &total, float *total_acc, Running part, const float *acc, i64 width) {
    if (part.sum == 0.0f) return;
    if (total.sum == 0.0f) {
        total = part;
        memcpy(total_acc, acc, width * 4);
        return;
    }
    float maximum = total.maximum > part.maximum ? total.maximum : part.maximum, factors[LANES] = {};
    factors[0] = total.maximum - maximum, factors[1] = part.maximum - maximum;
    store(factors, exp_of(load(factors)));
    total = {maximum, total.sum * factors[0] + part.sum * factors[1]};
    for (i64 d = 0; d < width; d += LANES)
        store(total_acc + d, fma(load(acc + d), splat(factors[1]), load(total_acc + d) * splat(factors[0])));
}

// A segment is over for these rows.
void end_segment(Rows &rows, i64 first_row, i64 end_row) {
    for (i64 row = first_row; row < end_row; row++) {
        float *acc = rows.acc + row * rows.padded;
        add_part(rows.total[row], rows.total_acc + row * rows.padded, rows.running[row], acc, rows.padded);
        rows.running[row] = {NO_MAXIMUM, 0.0f};
        memset(acc, 0, rows.padded * 4);
    }
}

// Element `d` of the head of a row lies at this distance.
i64 place_of(i64 stride, i64 size, const QueryTile &tile, Heads heads, i64 row) {
    return (tile.token + row / heads.count) * stride + (heads.first + row % heads.count) * size;
}

template <class T>
void read_query(const Attention &a, const QueryTile &tile, Heads heads, Rows &rows) {
    for (i64 row = 0; row < rows.count; row++) {
        const T *from = (const T *)a.query + place_of(a.query_stride, a.cache.head_size, tile, heads, row);
        each_vector(a.cache.head_size, [&](i64 d, i64 count) INLINED {
            store(rows.q + row * rows.padded + d, load_some(from + d, count) * splat(a.scale));
        });
    }
}
template <class T>
void write_out(const Attention &a, const QueryTile &tile, Heads heads, const Rows &rows) {
    for (i64 row = 0; row < rows.count; row++) {
        T *to = (T *)a.out + place_of(a.out_stride, a.cache.head_size, tile, heads, row);
        Running running = rows.total[row];
        if (a.sinks) {
            float lanes[LANES];
            store(lanes, exp_of(splat(a.sinks[heads.first + row % heads.count] - running.maximum)));
            running.sum += lanes[0];
        }
        bool is_padding = rows.positions[row] < 0;                // of a sequence without keys: zeros
        F share = splat(is_padding ? 0.0f : 1.0f / running.sum);  // NaN where all scores are -inf
        each_vector(a.cache.head_size, [&](i64 d, i64 count) INLINED {
            store_some(to + d, load(rows.total_acc + row * rows.padded + d) * share, count);
        });
    }
}

template <class S>
struct Walk {
    const Attention &a;
    const QueryTile *tiles;
    HeadCut cut;
    i64 together;  // slices of an item
    i64 padded;
    bool may_stay;
    Parts parts;

    i64 slices_of_tile() const { return a.cache.num_kv_heads * cut.slices; }
    i64 items_of_tile() const { return ceil_div(slices_of_tile(), together); }
    Heads heads_of(i64 slice) const {
        i64 head = slice / cut.slices, first = slice % cut.slices * cut.size;
        return {head, head * cut.group + first, smaller(cut.size, cut.group - first)};
    }
    Slices slices_of(i64 item) const {
        i64 first = item % items_of_tile() * together;
        return {tiles + item / items_of_tile(), first, smaller(first + together, slices_of_tile())};
    }

    void item(i64 number, i64 end) const {
        Slices all = slices_of(number), next = number + 1 < end ? slices_of(number + 1) : Slices{};
        if (all.tile->count * cut.size <= FEW_ROWS) return meet_keys(all, next);
        for (i64 slice = all.first; slice < all.end; slice++) {  // else rows of all would not stay in the cache
            Slices others = {all.tile, slice + 1, all.end};
            meet_keys({all.tile, slice, slice + 1}, slice + 1 < all.end ? others : next);
        }
    }

    // The slices take turns at each tile of keys. Others are next, or none.
    void meet_keys(Slices slices, Slices next) const {
        const QueryTile &tile = *slices.tile;
        i64 count = slices.end - slices.first, most = tile.count * cut.size;
        i64 size = bytes_of_rows(most, padded), of_turn = bytes_of_turn(most, padded);
        char *memory = (char *)scratch(OF_ITEM, of_turn + count * size);
        Rows rows[MOST_TOGETHER];
        for (i64 i = 0; i < count; i++) {
            Heads heads = heads_of(slices.first + i);
            rows[i] = make_rows(a, tile, heads, padded, memory + of_turn + i * size, memory);
            if (a.element == FLOAT32) read_query<float>(a, tile, heads, rows[i]);
            else read_query<Bfloat16>(a, tile, heads, rows[i]);
        }
        for (i64 phase = tile.shared_keys ? 0 : 1; phase <= tile.num_sequences; phase++)
            for (Keys keys = keys_of(a, tile, phase); keys.first < keys.end; keys.first += KEYS)
                for (i64 i = 0; i < count; i++) {
                    Heads heads = heads_of(slices.first + i);
                    i64 first_row = 0, end_row = rows[i].count;
                    if (phase && tile.num_sequences > 1)
                        first_row = (phase - 1) * heads.count, end_row = phase * heads.count;
                    if (keys.first && keys.first % SEGMENT == 0) end_segment(rows[i], first_row, end_row);
                    if (may_stay && end_row - first_row <= FEW_ROWS) {
                        Place<S> here = find<S>(a, heads.of_keys, keys);
                        Place<S> after = i + 1 < count ? find<S>(a, heads_of(slices.first + i + 1).of_keys, keys)
                                                       : place_after(slices, next, phase, keys, here);
                        meet_in_place(rows[i], heads, first_row, end_row, here, after);
                    } else {
                        meet_copy(rows[i], heads, first_row, end_row, keys);
                    }
                }
        for (i64 i = 0; i < count; i++) {
            Heads heads = heads_of(slices.first + i);
            end_segment(rows[i], 0, rows[i].count);
            if (tile.num_segments && !is_last_part(tile, heads, rows[i])) continue;
            if (a.element == FLOAT32) write_out<float>(a, tile, heads, rows[i]);
            else write_out<Bfloat16>(a, tile, heads, rows[i]);
        }
    }

    // Where the keys lie that come after these when all slices have met them: of this phase, of the next one, or of the
    // slices that are next; or these.
    Place<S> place_after(Slices slices, Slices next, i64 phase, Keys keys, const Place<S> &here) const {
        i64 head = heads_of(slices.first).of_keys;
        if (keys.first + KEYS < keys.end) return find<S>(a, head, {keys.sequence, keys.first + KEYS, keys.end});
        if (phase < slices.tile->num_sequences) return find<S>(a, head, keys_of(a, *slices.tile, phase + 1));
        if (!next.tile) return here;
        return find<S>(a, heads_of(next.first).of_keys, keys_of(a, *next.tile, next.tile->shared_keys ? 0 : 1));
    }

    // Leaves the total of a tile's segment with those of the others; who comes last gets them all together.
    bool is_last_part(const QueryTile &tile, Heads heads, Rows &rows) const {
        i64 first = tile.first_part;
        auto place_of_part = [&](i64 part) {
            return parts.numbers + (part * a.num_heads + heads.first) * (padded + LANES);
        };
        float *place = place_of_part(tile.part);
        for (i64 row = 0; row < rows.count; row++, place += padded + LANES) {
            memcpy(place, rows.total_acc + row * padded, padded * 4);
            memcpy(place + padded, rows.total + row, sizeof(Running));
        }
        int32_t *num_done = parts.num_done + first * a.num_heads + heads.first;
        if (count_on(num_done, 1) + 1 < tile.num_segments) return false;
        *num_done = 0;
        for (i64 row = 0; row < rows.count; row++) {
            rows.total[row] = {NO_MAXIMUM, 0.0f};
            for (i64 part = first; part < first + tile.num_segments; part++) {
                const float *numbers = place_of_part(part) + row * (padded + LANES);
                Running running;
                memcpy(&running, numbers + padded, sizeof running);
                add_part(rows.total[row], rows.total_acc + row * padded, running, numbers, padded);
            }
        }
        return true;
    }

    // Up to the last key that any of these rows sees: weights of others are 0, and would add nothing.
    static i64 keys_seen(const Rows &rows, i64 row, i64 count, i64 first, i64 end) {
        return smaller(end, rows.positions[row + count - 1] + 1) - first;
    }

    void weigh_rows(Rows &rows, Heads heads, i64 row, i64 count, i64 first_key, float *scores) const {
        for (i64 r = 0; r < count; r++, scores += KEYS) {
            float slope = a.slopes ? a.slopes[heads.first + (row + r) % heads.count] : 0.0f;
            mask(scores, first_key - rows.positions[row + r], slope, a.window, a.soft_cap);
            weigh(scores, rows.running[row + r], rows.acc + (row + r) * padded, padded);
        }
    }

    void meet_in_place(Rows &rows, Heads heads, i64 first_row, i64 end_row, const Place<S> &here,
                       const Place<S> &next) const {
        for (i64 row = first_row; row < end_row; row += ROWS) {
            i64 count = smaller(ROWS, end_row - row), num_keys = keys_seen(rows, row, count, here.first, here.end);
            if (num_keys <= 0) continue;
            const Place<S> &after = row + ROWS < end_row ? here : next;
            with_number<ROWS>(count, [&](auto number) {
                const int NUM = decltype(number)::value;
                score_in_place<NUM>(rows.q + row * padded, padded, here, here.values, here.starts, rows.scores);
                weigh_rows(rows, heads, row, count, here.first, rows.scores);
                add_in_place<NUM>(rows.scores, here, padded, num_keys, rows.acc + row * padded, after.keys,
                                  after.starts);
            });
        }
    }

    // Each step for all rows, so that keys, and then values, stay in the first cache level.
    void meet_copy(Rows &rows, Heads heads, i64 first_row, i64 end_row, Keys keys) const {
        i64 end = smaller(keys.end, keys.first + KEYS);
        auto each = [&](auto run) {
            for (i64 row = first_row; row < end_row; row += MANY_ROWS) {
                i64 count = smaller(MANY_ROWS, end_row - row), num_keys = keys_seen(rows, row, count, keys.first, end);
                if (num_keys > 0) with_number<MANY_ROWS>(count, [&](auto number) { run(number, row, num_keys); });
            }
        };
        copy_lines<S>(a, (const S *)a.cache.keys, heads.of_keys, keys, padded, rows.lines);
        turn_lines(rows.lines, end - keys.first, padded, rows.keys);
        each([&](auto number, i64 row, i64 num_keys) {
            const int NUM = decltype(number)::value;
            float *scores = rows.scores + row * KEYS;
            add_products<NUM>(rows.q + row * padded, padded, rows.keys, KEYS, false, scores, KEYS, a.cache.head_size,
                              (num_keys + LANES - 1) / LANES * LANES);
            weigh_rows(rows, heads, row, NUM, keys.first, scores);
        });
        copy_lines<S>(a, (const S *)a.cache.values, heads.of_keys, keys, padded, rows.lines);
        each([&](auto number, i64 row, i64 num_keys) {
            const int NUM = decltype(number)::value;
            add_products<NUM>(rows.scores + row * KEYS, KEYS, rows.lines, padded, true, rows.acc + row * padded, padded,
                              num_keys, padded);
        });
    }
};

template <class S>
void attend_to(Team &team, const Attention &a, const QueryTile *tiles, i64 num_tiles, Parts parts) {
    i64 padded = (a.cache.head_size + LANES - 1) / LANES * LANES;
    bool may_stay = padded == a.cache.head_size && a.cache.block_size % RUN == 0;
    HeadCut cut(a, num_tiles, team.threads);
    i64 slices = num_tiles * a.cache.num_kv_heads * cut.slices;
    i64 together = larger(1, smaller(slices / (ITEMS_OF_THREAD * team.threads), MOST_TOGETHER));
    Walk<S> walk = {a, tiles, cut, together, padded, may_stay, parts};
    share(team, num_tiles * walk.items_of_tile(), [&](i64 item, i64 end) { walk.item(item, end); });
}

}  // namespace

i64 attention_items(const Attention &a, i64 num_tiles, i64 threads) {
    return num_tiles * a.cache.num_kv_heads * HeadCut(a, num_tiles, threads).slices;
}

i64 most_tiles(const Attention &a) {
    i64 count = 0;
    for (i64 s = 0; s < a.num_sequences; s++)
        count += ceil_div(query_len(a, s), tile_of(a, query_len(a, s))) + a.seq_lens[s] / SEGMENT;
    return count;
}

i64 cut_tiles(const Attention &a, QueryTile *tiles) {
    i64 count = 0, num_parts = 0;
    for (i64 s = 0, members; s < a.num_sequences; s += members) {
        i64 shared, length = query_len(a, s);
        members = members_of(a, s, shared);
        if (members > 1) length = members;
        QueryTile tile = {s, members, a.query_starts[s], 1, members > 1 ? shared : 0, 0, 0, 0, 0};
        Keys keys = keys_of(a, tile, 1);
        i64 segment = keys.first / SEGMENT, num_segments = ceil_div(keys.end, SEGMENT) - segment;
        if (length == 1 && num_segments > 1) {
            tile.num_segments = num_segments, tile.first_part = num_parts;
            for (i64 end = segment + num_segments; segment < end; segment++) {
                tile.segment = segment, tile.part = num_parts++;
                tiles[count++] = tile;
            }
            continue;
        }
        for (i64 first = 0, most = tile_of(a, length); first < length; first += most) {
            tile.token = a.query_starts[s] + first, tile.count = smaller(most, length - first);
            tiles[count++] = tile;
        }
    }
    return count;
}

namespace {

i64 most_parts(const Attention &a) {
    i64 count = 0;
    for (i64 s = 0; s < a.num_sequences; s++)
        if (query_len(a, s) == 1 && a.seq_lens[s] > SEGMENT) count += a.seq_lens[s] / SEGMENT + 1;
    return count;
}
i64 numbers_of_parts(const Attention &a) {
    i64 padded = (a.cache.head_size + LANES - 1) / LANES * LANES;
    return most_parts(a) * a.num_heads * (padded + LANES);
}

}  // namespace

i64 bytes_of_parts(const Attention &a) { return (numbers_of_parts(a) + most_parts(a) * a.num_heads) * 4; }

Parts make_parts(const Attention &a, void *memory) {
    Parts parts = {(float *)memory, (int32_t *)memory + numbers_of_parts(a)};
    memset(parts.num_done, 0, most_parts(a) * a.num_heads * 4);
    return parts;
}

void attend(Team &team, const Attention &a, const QueryTile *tiles, i64 num_tiles, Parts parts) {
    if (a.cache.element == FLOAT32) attend_to<float>(team, a, tiles, num_tiles, parts);
    else if (a.cache.element == BFLOAT16) attend_to<Bfloat16>(team, a, tiles, num_tiles, parts);
    else attend_to<Float16>(team, a, tiles, num_tiles, parts);
}

EXPORT void octavo_paged_attention(const Attention *attention, i64 threads) {
    i64 tile_bytes = most_tiles(*attention) * (i64)sizeof(QueryTile);
    char *memory = (char *)scratch(OF_CALL, tile_bytes + bytes_of_parts(*attention));
    QueryTile *tiles = (QueryTile *)memory;
    i64 num_tiles = cut_tiles(*attention, tiles);
    Parts parts = make_parts(*attention, memory + tile_bytes);
    in_parallel(smaller(threads, attention_items(*attention, num_tiles, threads)), 1,
                [&](Team &team) { attend(team, *attention, tiles, num_tiles, parts); });
}

// For tests: how many items the former has for so many threads.
EXPORT i64 octavo_count_attention_items(const Attention *attention, i64 threads) {
    QueryTile *tiles = (QueryTile *)scratch(OF_CALL, most_tiles(*attention) * (i64)sizeof(QueryTile));
    return attention_items(*attention, cut_tiles(*attention, tiles), threads);
}
