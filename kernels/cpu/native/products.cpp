// out = x W^T + bias, with W packed once; for one row as for thousands.
//
// A panel of 48 outputs is what a thread multiplies at a time: by some rows whose inputs stay in the second cache
// level. Every sum starts with the bias and runs over the inputs in order, one fused multiply-add after the other.
// Those of quantised rows are exact within a group, and groups are added in order (quantized.cpp says where the bias
// comes in). So a row's result depends neither on the other rows nor on the number of threads nor, unless pairs of
// bfloat16 are multiplied, on how the weight is kept: bit for bit. Sums are float32, and rounded once where rows are
// bfloat16.
#include "records.h"

namespace {

const i64 ROWS_BYTES = 512 << 10;  // of x that are multiplied before the next: they stay in the second cache level

bool is_quantized(i64 kind) { return kind >= INT8; }
bool takes_float32(i64 kind) { return kind < WEIGHT_PAIRS; }

bool meets_pairs(const Product &product, i64 element) {
    bool meets = MULTIPLIES_PAIRS && element == BFLOAT16;
    for (const Product *part = &product; part; part = part->next) meets &= part->kind == WEIGHT_RECORDS;
    return meets;
}

// Bytes from a row to the next as kernels take them.
i64 prepared_bytes(const Product &product, i64 element) {
    if (meets_pairs(product, element)) return groups_of(product.num_in) * (i64)sizeof(PairGroup);
    if (is_quantized(product.kind)) return groups_of(product.num_in) * (i64)sizeof(Group);
    bool is_taken_as_it_is = !takes_float32(product.kind) || (element == FLOAT32 && !product.order);
    return is_taken_as_it_is ? 0 : product.num_in * 4;
}

template <class T>
void to_floats(const T *x, const i64 *order, i64 size, float *to) {
    if (order)
        for (i64 i = 0; i < size; i++) to[i] = as_float(x[order[i]]);
    else each_vector(size, [&](i64 i, i64 count) INLINED { store_some(to + i, load_some(x + i, count), count); });
}

void prepare_row(const Product &product, i64 element, const void *x, void *to) {
    i64 size = product.num_in;
    if (meets_pairs(product, element)) return prepare_pairs((const Bfloat16 *)x, product.order, size, (PairGroup *)to);
    if (is_quantized(product.kind) && !product.order) return quantize_row(element, x, size, (Group *)to);
    float *numbers = is_quantized(product.kind) ? (float *)scratch(OF_ITEM, size * 4) : (float *)to;
    if (element == FLOAT32) to_floats((const float *)x, product.order, size, numbers);
    else to_floats((const Bfloat16 *)x, product.order, size, numbers);
    if (is_quantized(product.kind)) quantize_row(FLOAT32, numbers, size, (Group *)to);
}

// Rows of floating-point numbers that an item has.
i64 rows_at_once(const Product &product) { return ROWS_BYTES / (4 * larger(product.num_in, 1)) / 16 * 16 + 16; }

i64 panels_of(const Product &product) { return (product.num_out + PANEL - 1) / PANEL; }
i64 panels_of_all(const Product &product) {
    i64 count = 0;
    for (const Product *part = &product; part; part = part->next) count += panels_of(*part);
    return count;
}

// Which part of a product has this panel of all, and where.
struct PanelPlace {
    const Product *part;
    i64 panel, column;  // of the part
    i64 out_column;

    PanelPlace(const Product &product, i64 panel) : part(&product), panel(panel), out_column(0) {
        for (; this->panel >= panels_of(*part); part = part->next)
            this->panel -= panels_of(*part), out_column += part->num_out;
        column = this->panel * PANEL, out_column += column;
    }
    const char *weight() const { return part->weight + panel * panel_bytes(*part); }
    bool is_last() const { return panel + 1 == panels_of(*part); }
};

// One panel and some rows.
struct FloatItem {
    const Product &product;
    i64 element;
    char *out;
    i64 out_stride;
    const char *x;
    i64 x_stride, rows, rows_at_once, num_panels;

    void operator()(i64 item, i64 end) const {
        PanelPlace place(product, item % num_panels);
        const Product &part = *place.part;
        i64 row = item / num_panels * rows_at_once, count = smaller(rows - row, rows_at_once);
        i64 width = smaller(part.num_out - place.column, PANEL);
        float start[PANEL] = {};
        if (part.bias) memcpy(start, part.bias + place.column, width * 4);
        float *sums = (float *)scratch(OF_ITEM, count * PANEL * 4);
        PanelWork work = {x + row * x_stride, x_stride, count, part.num_in,
                          place.weight(),     start,    sums,  !place.is_last() && item + 1 < end};
        if (meets_pairs(product, element)) add_few_bits_by_pairs(part.records, work);
        else if (part.kind == WEIGHT_RECORDS) add_few_bits(part.records, work);
        else add_floats(part.kind, work);
        char *to = out + (row * out_stride + place.out_column) * element_bytes(element);
        write_sums(sums, count, width, element, to, out_stride);
    }
};

}  // namespace

i64 panel_bytes(const Product &product) {
    i64 depth = product.num_in;
    switch (product.kind) {
        case WEIGHT_FLOAT32: return depth * PANEL * 4;
        case WEIGHT_BFLOAT16: return depth * PANEL * 2;
        case WEIGHT_PAIRS: return depth / 2 * PANEL * 4;
        case INT8: return groups_of(depth) * GROUP * PANEL;
        default: return RecordLayout(product.records).panel_bytes(groups_of(depth) * GROUP);
    }
}

void write_sums(const float *sums, i64 rows, i64 width, i64 element, void *out, i64 out_stride) {
    for (i64 row = 0; row < rows; row++)
        each_vector(width, [&](i64 i, i64 count) INLINED {
            F values = load(sums + row * PANEL + i);
            if (element == FLOAT32) store_some((float *)out + row * out_stride + i, values, count);
            else store_some((Bfloat16 *)out + row * out_stride + i, values, count);
        });
}

i64 workspace_bytes(const Product &product, i64 element, i64 rows) { return rows * prepared_bytes(product, element); }
EXPORT i64 octavo_workspace_bytes(const Product *product, i64 element, i64 rows) {
    return workspace_bytes(*product, element, rows);
}

void multiply(Team &team, const Product &product, i64 element, void *out, i64 out_stride, const void *x, i64 x_stride,
              i64 rows, char *workspace) {
    i64 stride = x_stride * element_bytes(element), prepared = prepared_bytes(product, element),
        size = element_bytes(element);
    const char *from = (const char *)x;
    share(team, prepared ? rows : 0,
          [&](i64 row, i64) { prepare_row(product, element, from + row * stride, workspace + row * prepared); });
    if (prepared) from = workspace, stride = prepared;
    i64 num_panels = panels_of_all(product);
    if (!is_quantized(product.kind)) {
        i64 at_once = rows_at_once(product);
        FloatItem item = {product, element, (char *)out, out_stride, from, stride, rows, at_once, num_panels};
        share(team, (rows + at_once - 1) / at_once * num_panels, item);
        return;
    }
    share(team, rows ? num_panels : 0, [&](i64 panel, i64 end) {
        PanelPlace place(product, panel);
        multiply_quantized(*place.part, (const Group *)from, rows, place.weight(), place.column, element,
                           (char *)out + place.out_column * size, out_stride, !place.is_last() && panel + 1 < end);
    });
}

EXPORT void octavo_multiply(const Product *product, i64 element, void *out, i64 out_stride, const void *x, i64 x_stride,
                            i64 rows, i64 threads) {
    char *workspace = (char *)scratch(OF_CALL, workspace_bytes(*product, element, rows));
    i64 at_once = is_quantized(product->kind) ? larger(rows, 1) : rows_at_once(*product);
    i64 items = (rows + at_once - 1) / at_once * panels_of_all(*product);
    threads = smaller(threads, larger(rows, items));  // no phase has more
    in_parallel(threads, PHASES_OF_PRODUCT, [&](Team &team) {
        team.work = ON_PRODUCTS;
        multiply(team, *product, element, out, out_stride, x, x_stride, rows, workspace);
    });
}
