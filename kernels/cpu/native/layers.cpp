// All layers of a Llama-like model, one after the other, in one piece of parallel work.
//
//     residual += update;  q, k, v = W_qkv norm(residual);  q, k turned by position;  k, v -> cache
//     residual += W_out attention(q, cache);  update = W_down (silu(gate) * up),  gate, up = W_inner norm(residual)
//
// Some families norm each head of q and k, or what attention and MLP give, or have another activation than silu.
//
// Threads go through the phases together; see threads.h. Every phase is what the single operation does, bit for bit.
// What is saved is the way from Python to each of them, and that of the threads into and out of each.
#include "attention.h"

namespace {

struct Layer {
    const void *input_norm;
    Product qkv;
    const float *cos_sin;
    i64 num_turned;  // elements of a head, and numbers of a line of `cos_sin`
    void *key_cache, *value_cache;
    i64 window;
    double attention_scale;
    Product attention_out;
    const void *mlp_norm;
    Product mlp_in, mlp_out;
    const void *query_norm, *key_norm, *attention_post_norm, *mlp_post_norm;  // each may be 0: none
};

struct Step {
    i64 rows, num_sequences, tables_stride, element, stored_element, mlp_rows;
    i64 hidden, num_heads, num_kv_heads, head_size, num_blocks, block_size;
    const i64 *positions, *slots;
    const int32_t *block_tables, *seq_lens, *query_starts;
    char *update, *residual, *normed, *qkv, *attended, *inner, *activated;  // rows, contiguous
    char *workspace;                                                        // of `multiply`, for any of the products
    double norm_eps, norm_weight_offset, logit_soft_cap;
    i64 activation;
};

// A product has two, norms (of which some layers have fewer), rotation, attention and gates one.
i64 phases_of_layer(const Step &step) {
    i64 mlp_parts = (step.rows + step.mlp_rows - 1) / step.mlp_rows;
    return 2 * PHASES_OF_PRODUCT + 5 + mlp_parts * (2 * PHASES_OF_PRODUCT + 1);
}

struct Pass {
    Team &team;
    const Step &step;
    i64 bytes;  // of an element

    Pass(Team &team, const Step &step) : team(team), step(step), bytes(element_bytes(step.element)) {}

    void multiply_rows(const Product &product, char *out, const char *x, i64 rows) {
        team.work = ON_PRODUCTS;
        multiply(team, product, step.element, out, outputs_of(product), x, product.num_in, rows, step.workspace);
        team.work = ON_ROWS;
    }

    Norm norm_of(const void *weight, i64 size) const {
        return {weight, size, (float)step.norm_eps, (float)step.norm_weight_offset};
    }

    // normed = norm(residual += update), where the update itself is normed first if there is a weight for it.
    void norm(const void *weight, const void *of_update) {
        Norm norm = norm_of(weight, step.hidden), before = norm_of(of_update, step.hidden);
        i64 row_bytes = step.hidden * bytes;
        share(team, step.rows, [&](i64 row, i64) {
            norm_in_place(step.element, before, step.update + row * row_bytes, 1);
            norm_row(step.element, norm, step.normed + row * row_bytes, step.update + row * row_bytes,
                     step.residual + row * row_bytes);
        });
    }

    Cache cache_of(const Layer &layer) const {
        return {layer.key_cache,   layer.value_cache, step.stored_element, step.num_blocks,
                step.num_kv_heads, step.block_size,   step.head_size};
    }

    Attention attention_of(const Layer &layer) const {
        return {step.element,
                step.attended,
                step.num_heads * step.head_size,
                step.qkv,
                outputs_of(layer.qkv),
                step.num_heads,
                cache_of(layer),
                step.block_tables,
                step.tables_stride,
                step.seq_lens,
                step.query_starts,
                step.num_sequences,
                0,
                layer.window,
                (float)layer.attention_scale,
                (float)step.logit_soft_cap,
                0};
    }

    void before_attention(const Layer &layer) {
        norm(layer.input_norm, 0);
        multiply_rows(layer.qkv, step.qkv, step.normed, step.rows);
        i64 row_bytes = outputs_of(layer.qkv) * bytes, head_bytes = step.head_size * bytes;
        Cache cache = cache_of(layer);
        Norm query_norm = norm_of(layer.query_norm, step.head_size), key_norm = norm_of(layer.key_norm, step.head_size);
        share(team, step.rows, [&](i64 row, i64) {
            char *query = step.qkv + row * row_bytes, *key = query + step.num_heads * head_bytes,
                 *value = key + step.num_kv_heads * head_bytes;
            norm_in_place(step.element, query_norm, query, step.num_heads);
            norm_in_place(step.element, key_norm, key, step.num_kv_heads);
            const float *angles = layer.cos_sin + step.positions[row] * layer.num_turned;
            rotate_row(step.element, query, step.num_heads + step.num_kv_heads, step.head_size, angles,
                       layer.num_turned);  // keys lie behind
            store_token(step.element, key, value, cache, step.slots[row]);
        });
    }

    void after_attention(const Layer &layer) {
        multiply_rows(layer.attention_out, step.update, step.attended, step.rows);
        norm(layer.mlp_norm, layer.attention_post_norm);
        i64 size = layer.mlp_out.num_in, row_bytes = size * bytes;
        for (i64 first = 0; first < step.rows; first += step.mlp_rows) {
            i64 rows = smaller(step.mlp_rows, step.rows - first), place = first * step.hidden * bytes;
            multiply_rows(layer.mlp_in, step.inner, step.normed + place, rows);
            share(team, rows, [&](i64 row, i64) {
                activate_row(step.element, step.activation, step.activated + row * row_bytes,
                             step.inner + 2 * row * row_bytes, size);
            });
            multiply_rows(layer.mlp_out, step.update + place, step.activated, rows);
        }
        if (!layer.mlp_post_norm) return;
        Norm norm = norm_of(layer.mlp_post_norm, step.hidden);
        share(team, step.rows,
              [&](i64 row, i64) { norm_in_place(step.element, norm, step.update + row * step.hidden * bytes, 1); });
    }
};

// Tiles of query tokens, which layers with the same window share.
struct Tiles {
    QueryTile *tiles;
    i64 count, window;
};
i64 kind_of(const Tiles *kinds, i64 num_kinds, i64 window) {
    i64 kind = 0;
    while (kind < num_kinds && kinds[kind].window != window) kind++;
    return kind;
}

// Panels of a layer's largest product: about as many items as a phase of few rows has, but for attention.
i64 most_panels(const Layer &layer) {
    i64 most = larger(outputs_of(layer.qkv), outputs_of(layer.attention_out));
    most = larger(most, larger(outputs_of(layer.mlp_in), outputs_of(layer.mlp_out)));
    return (most + PANEL - 1) / PANEL;
}

}  // namespace

// Stages first .. end of a step: stage i is all that lies between attention i - 1 and i, and this; the last, behind all
// attentions, has the number of layers.
EXPORT void octavo_run_layers(const Layer *layers, i64 num_layers, const Step *step, i64 first, i64 end, i64 threads) {
    if (step->rows == 0) return;
    Team nobody = {};
    Pass plan(nobody, *step);
    Attention attention = plan.attention_of(layers[0]);
    i64 most = most_tiles(attention), num_kinds = 0;
    i64 tile_bytes = num_layers * ((i64)sizeof(Tiles) + most * (i64)sizeof(QueryTile));
    Tiles *kinds = (Tiles *)scratch(OF_CALL, tile_bytes + bytes_of_parts(attention));
    QueryTile *memory = (QueryTile *)(kinds + num_layers);
    Parts parts = make_parts(attention, (char *)kinds + tile_bytes);
    i64 items = larger(step->rows, most_panels(layers[0]));
    for (i64 i = first; i < smaller(end, num_layers); i++) {
        if (kind_of(kinds, num_kinds, layers[i].window) < num_kinds) continue;
        QueryTile *tiles = memory + num_kinds * most;
        i64 count = cut_tiles(plan.attention_of(layers[i]), tiles);
        items = larger(items, attention_items(attention, count, threads));
        kinds[num_kinds++] = {tiles, count, layers[i].window};
    }
    threads = smaller(threads, items);
    in_parallel(threads, (end - first) * phases_of_layer(*step), [&](Team &team) {
        Pass pass(team, *step);
        for (i64 i = first; i < end; i++) {
            if (i > 0) pass.after_attention(layers[i - 1]);
            if (i == num_layers) break;
            pass.before_attention(layers[i]);
            const Tiles &tiles = kinds[kind_of(kinds, num_kinds, layers[i].window)];
            team.work = ON_ATTENTION;
            attend(team, pass.attention_of(layers[i]), tiles.tiles, tiles.count, parts);
            team.work = ON_ROWS;
        }
    });
}
