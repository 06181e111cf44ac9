// Products with tiles (tiles.h): pairs of bfloat16, and bytes of quantised rows.
//
// Sums of bytes are exact, and so the same as without tiles. A sum of bfloat16 is one chain over steps of 32 inputs,
// within a step first even and odd inputs by themselves: another order than that of `dot_pairs`. For this reason one
// row is multiplied by tiles, too, as one among thousands is.
#include "products.h"
#include "tiles.h"

#include <errno.h>
#include <sys/syscall.h>
#include <unistd.h>

namespace {

const i64 STEP_LINES = 16, LINE = PANEL * 4;  // of pairs: lines of a step, bytes of a line
const i64 DEPTH = 128;                        // lines that all rows are multiplied by before the next: 24 KB stay close
const i64 SOON_BYTES = 4096;                  // how far ahead rows of one tile prefetch

// C [rows, 48] = S + x . W over `lines` of a panel, for up to 16 rows; strides in bytes. With each step so many bytes
// are prefetched of what is multiplied `soon`.
void add_rows(i64 rows, const char *x, i64 x_stride, const char *w, i64 lines, const float *s, i64 s_stride, float *c,
              i64 c_stride, const char *soon, i64 bytes_a_step) {
    shape_tiles(rows, STEP_LINES);
    tile_load<0>(s, s_stride), tile_load<1>(s + LANES, s_stride), tile_load<2>(s + 2 * LANES, s_stride);
    for (; lines >= STEP_LINES; lines -= STEP_LINES, w += STEP_LINES * LINE, x += TILE_BYTES) {
        for (const char *end = soon + bytes_a_step; soon < end; soon += CACHE_LINE) prefetch_second_level(soon);
        multiply_pairs(x, x_stride, w);
    }
    if (lines) {  // filled up with zeros: nothing behind a row, or a panel, is read
        alignas(CACHE_LINE) char last_x[TILE_ROWS * TILE_BYTES] = {}, last_w[STEP_LINES * LINE] = {};
        for (i64 row = 0; row < rows; row++) memcpy(last_x + row * TILE_BYTES, x + row * x_stride, lines * 4);
        memcpy(last_w, w, lines * LINE);
        multiply_pairs(last_x, TILE_BYTES, last_w);
    }
    store_tile_sums(c, c_stride);
}

// ---- bytes ----------------------------------------------------------------------------------------------------------
const i64 GROUPS = 8;  // whose sums, 24 KB, are scaled together
const i64 HALF = 8;    // rows whose totals stay in registers

typedef int32_t Sums[TILE_ROWS][PANEL];

// The sums of a group.
void multiply_group(const Group *groups, i64 num_groups, const char *w, i64 panel_stride, Sums &sums) {
    tile_load<ROW_TILE>(groups->numbers, num_groups * (i64)sizeof(Group));
    tile_load<WEIGHT_TILE>(w, CACHE_LINE);
    tile_load<WEIGHT_TILE + 1>(w + panel_stride, CACHE_LINE);
    tile_load<WEIGHT_TILE + 2>(w + 2 * panel_stride, CACHE_LINE);
    tile_zero<0>(), tile_zero<1>(), tile_zero<2>();
    tile_dot_bytes<0, ROW_TILE, WEIGHT_TILE>();
    tile_dot_bytes<1, ROW_TILE, WEIGHT_TILE + 1>();
    tile_dot_bytes<2, ROW_TILE, WEIGHT_TILE + 2>();
    store_tile_sums(sums[0], sizeof sums[0]);
}

// totals [8, 48] += sums of `count` groups, each scaled, in order.
void add_groups(const Group *groups, i64 num_groups, i64 count, const Sums *sums, i64 first_row, F totals[][VECTORS]) {
    for (i64 g = 0; g < count; g++)
#pragma GCC unroll 8
        for (i64 r = 0; r < HALF; r++) {
            const Group &group = groups[(first_row + r) * num_groups + g];
            F scale = splat_at(&group.scale);
            I start = shift_left<7>(splat(group.minus_sum));  // weights lie 128 too high
#pragma GCC unroll 3
            for (int v = 0; v < VECTORS; v++) {
                F sum = to_float(load(sums[g][first_row + r] + v * LANES) + start);
                totals[r][v] = fma(sum, scale, totals[r][v]);
            }
        }
}

}  // namespace

void add_pairs_by_tiles(const PanelWork &work) {
    i64 lines = work.depth / 2, x_stride = work.x_stride, sums_stride = PANEL * 4;
    // One tile of rows reads memory as fast as it comes, and goes on into the next panel. Several find the panel in the
    // cache, and share the prefetching of the next.
    i64 num_tiles = (work.rows + TILE_ROWS - 1) / TILE_ROWS, at_once = num_tiles <= 1 ? larger(lines, 1) : DEPTH;
    i64 bytes_a_step = STEP_LINES * LINE / larger(num_tiles, 1) / CACHE_LINE * CACHE_LINE;
    if (num_tiles > 1) bytes_a_step += CACHE_LINE;  // rounded up
    for (i64 k = 0; k < lines || k == 0; k += at_once) {
        i64 count = smaller(lines - k, at_once), start_stride = k ? sums_stride : work.start_stride * 4;
        const float *start = k ? work.sums : work.start;
        const char *weight = work.weight + k * LINE, *end = weight + (lines + count) * LINE;  // of the same in the next
        const char *soon = num_tiles <= 1 ? weight + SOON_BYTES : weight + lines * LINE;
        for (i64 row = 0; row < work.rows; row += TILE_ROWS) {
            bool is_soon = num_tiles <= 1 || (work.has_next && soon < end);
            add_rows(smaller(work.rows - row, TILE_ROWS), work.x + k * 4 + row * x_stride, x_stride, weight, count,
                     at(start, row * start_stride), start_stride, at(work.sums, row * sums_stride), sums_stride, soon,
                     is_soon ? bytes_a_step : 0);
            soon += count / STEP_LINES * bytes_a_step;
        }
    }
}

template <class T>
void multiply_bytes_by_tiles(const Group *groups, i64 rows, i64 num_groups, const char *weight, const float *scale,
                             const float *bias, T *out, i64 out_stride) {
    Sums *sums = (Sums *)scratch(OF_PANEL, GROUPS * (i64)sizeof(Sums));
    i64 panel_stride = num_groups * BYTES_OF_GROUP;
    shape_tiles(TILE_ROWS, QUADS);
    for (i64 row = 0; row < rows; row += TILE_ROWS, groups += TILE_ROWS * num_groups, out += TILE_ROWS * out_stride) {
        F totals[2][HALF][VECTORS];
        for (auto &half : totals)
            for (auto &line : half)
                for (F &total : line) total = splat(0.0f);
        for (i64 g = 0; g < num_groups; g += GROUPS) {
            i64 count = smaller(num_groups - g, GROUPS);
            for (i64 i = 0; i < count; i++)
                multiply_group(groups + g + i, num_groups, weight + (g + i) * BYTES_OF_GROUP, panel_stride, sums[i]);
            for (i64 half = 0; half < 2; half++)
                add_groups(groups + g, num_groups, count, sums, half * HALF, totals[half]);
        }
        for (i64 r = 0; r < TILE_ROWS; r++)
            for (int v = 0; v < VECTORS; v++)
                store(out + r * out_stride + v * LANES,
                      fma(totals[r / HALF][r % HALF][v], load(scale + v * LANES), load(bias + v * LANES)));
    }
}
template void multiply_bytes_by_tiles(const Group *, i64, i64, const char *, const float *, const float *, float *,
                                      i64);
template void multiply_bytes_by_tiles(const Group *, i64, i64, const char *, const float *, const float *, Bfloat16 *,
                                      i64);

namespace {

// Whether small numbers, whose sums are exact, come out right: pairs of 5 rows and 70 inputs, bytes of 16 and 64.
bool are_tiles_right() {
    const i64 ROWS = 5, DEPTH = 70, NUM_GROUPS = 2;
    auto x_of = [](i64 row, i64 k) { return (int)((row * 7 + k * 5) % 11) - 5; };
    auto w_of = [](i64 k, i64 column) { return (int)((k * 3 + column * 13) % 17) - 8; };
    auto bfloat16_of = [](int number) {  // of few bits: nothing is rounded
        float x = (float)number;
        uint32_t bits;
        memcpy(&bits, &x, 4);
        return Bfloat16{(uint16_t)(bits >> 16)};
    };
    Bfloat16 x[ROWS][DEPTH], w[DEPTH / 2][PANEL][2];
    float start[PANEL], sums[ROWS][PANEL] = {};
    for (i64 k = 0; k < DEPTH; k++) {
        for (i64 row = 0; row < ROWS; row++) x[row][k] = bfloat16_of(x_of(row, k));
        for (i64 column = 0; column < PANEL; column++) w[k / 2][column][k % 2] = bfloat16_of(w_of(k, column));
    }
    for (i64 column = 0; column < PANEL; column++) start[column] = (float)column;
    add_pairs_by_tiles({(const char *)x, DEPTH * 2, ROWS, DEPTH, (const char *)w, start, sums[0], false});

    Group groups[TILE_ROWS][NUM_GROUPS] = {};
    uint8_t bytes[VECTORS][NUM_GROUPS][QUADS][LANES][4];
    float scale[PANEL], zeros[PANEL] = {}, out[TILE_ROWS][PANEL] = {};
    for (i64 k = 0; k < NUM_GROUPS * GROUP; k++) {
        for (i64 row = 0; row < TILE_ROWS; row++) {
            Group &group = groups[row][k / GROUP];
            group.numbers[k % GROUP] = (int8_t)x_of(row, k), group.scale = 1.0f, group.minus_sum -= x_of(row, k);
        }
        for (i64 column = 0; column < PANEL; column++) {
            scale[column] = 1.0f;
            bytes[column / LANES][k / GROUP][k % GROUP / 4][column % LANES][k % 4] = (uint8_t)(w_of(k, column) + 128);
        }
    }
    multiply_bytes_by_tiles(groups[0], TILE_ROWS, NUM_GROUPS, (const char *)bytes, scale, zeros, out[0], PANEL);
    release_tiles();

    auto sum_of = [&](i64 row, i64 column, i64 depth) {
        int sum = 0;
        for (i64 k = 0; k < depth; k++) sum += x_of(row, k) * w_of(k, column);
        return (float)sum;
    };
    bool are_right = true;
    for (i64 column = 0; column < PANEL; column++) {
        for (i64 row = 0; row < ROWS; row++)
            are_right &= sums[row][column] == (float)column + sum_of(row, column, DEPTH);
        for (i64 row = 0; row < TILE_ROWS; row++)
            are_right &= out[row][column] == sum_of(row, column, NUM_GROUPS * GROUP);
    }
    return are_right;
}

}  // namespace

// Asks the system for tiles, for all threads of the process, and tries them: 0 where they can be used, else the error
// number of the system, or -1 where a product comes out wrong. To be called before any product; 0 without tiles.
EXPORT i64 octavo_begin_tiles() {
#if defined(__AMX_TILE__)
    const long REQUEST_PERMISSION = 0x1023, TILE_DATA = 18;
    if (syscall(SYS_arch_prctl, REQUEST_PERMISSION, TILE_DATA)) return errno;
#endif
    return !HAS_TILES || are_tiles_right() ? 0 : -1;
}
