// Tiles: eight registers of up to 16 rows of 64 bytes, and products of one with another, as Intel's AMX has them.
//
// Six functions stand for its instructions. Where a library is not compiled for AMX, they are what Intel's manual
// (volume 2, TDPBF16PS and TDPBSUD) says of each, in plain C++: so tests run all that is built on them on any machine.
// Instructions are written out, as GCC's functions for them do not tell it that they read and write memory.
#pragma once
#include "vec.h"

#if defined(__AMX_TILE__) || defined(EMULATE_TILES)
enum { HAS_TILES = 1 };
#else
enum { HAS_TILES = 0 };
#endif

const i64 TILE_ROWS = 16, TILE_BYTES = 64;

struct TileShapes {  // as LDTILECFG reads them
    uint8_t palette = 1, start_row = 0, reserved[14] = {};
    uint16_t row_bytes[16] = {};
    uint8_t rows[16] = {};
};

#if defined(__AMX_TILE__)
INLINE void tile_shape(const TileShapes &shapes) { asm volatile("ldtilecfg %0" ::"m"(shapes) : "memory"); }
INLINE void tile_release() { asm volatile("tilerelease" ::: "memory"); }
template <int TILE>
INLINE void tile_load(const void *start, i64 stride) {
    asm volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(start), "r"(stride), "i"(TILE) : "memory");
}
template <int TILE>
INLINE void tile_store(void *start, i64 stride) {
    asm volatile("tilestored %%tmm%c2, (%0,%1,1)" ::"r"(start), "r"(stride), "i"(TILE) : "memory");
}
template <int TILE>
INLINE void tile_zero() {
    asm volatile("tilezero %%tmm%c0" ::"i"(TILE));
}
template <int SUMS, int A, int B>
INLINE void tile_dot_pairs() {
    asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(SUMS), "i"(A), "i"(B));
}
template <int SUMS, int A, int B>
INLINE void tile_dot_bytes() {
    asm volatile("tdpbsud %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(SUMS), "i"(A), "i"(B));
}
#else
struct EmulatedTiles {
    TileShapes shapes;
    uint32_t tile[8][16][16];
};
inline thread_local EmulatedTiles emulated;

INLINE void tile_shape(const TileShapes &shapes) { emulated = {shapes, {}}; }
INLINE void tile_release() { emulated = {}; }
template <int TILE>
static void tile_load(const void *start, i64 stride) {
    memset(emulated.tile[TILE], 0, sizeof emulated.tile[TILE]);
    for (int row = 0; row < emulated.shapes.rows[TILE]; row++)
        memcpy(emulated.tile[TILE][row], at((const char *)start, row * stride), emulated.shapes.row_bytes[TILE]);
}
template <int TILE>
static void tile_store(void *start, i64 stride) {
    for (int row = 0; row < emulated.shapes.rows[TILE]; row++)
        memcpy(at((char *)start, row * stride), emulated.tile[TILE][row], emulated.shapes.row_bytes[TILE]);
}
template <int TILE>
INLINE void tile_zero() {
    memset(emulated.tile[TILE], 0, sizeof emulated.tile[TILE]);
}

INLINE float number_of(uint32_t bits) {  // denormal numbers count as zeros, of inputs as of results
    if (!(bits & 0x7f800000)) bits &= 0x80000000;
    float x;
    memcpy(&x, &bits, 4);
    return x;
}
INLINE uint32_t bits_of_number(float x) {
    uint32_t bits;
    memcpy(&bits, &x, 4);
    return bits & 0x7f800000 ? bits : bits & 0x80000000;
}
// sums [m, n] += products of even inputs, added up in order, + those of odd ones, likewise
template <int SUMS, int A, int B>
static void tile_dot_pairs() {
    const TileShapes &shapes = emulated.shapes;
    for (int m = 0; m < shapes.rows[SUMS]; m++)
        for (int n = 0; n < shapes.row_bytes[SUMS] / 4; n++) {
            float even = 0, odd = 0;
            for (int k = 0; k < shapes.row_bytes[A] / 4; k++) {
                uint32_t a = emulated.tile[A][m][k], b = emulated.tile[B][k][n];
                even = number_of(bits_of_number(__builtin_fmaf(number_of(a << 16), number_of(b << 16), even)));
                odd = number_of(
                    bits_of_number(__builtin_fmaf(number_of(a & 0xffff0000), number_of(b & 0xffff0000), odd)));
            }
            uint32_t &sum = emulated.tile[SUMS][m][n];
            sum = bits_of_number(number_of(sum) + number_of(bits_of_number(even + odd)));
        }
}
// sums [m, n] += four products of a signed byte of A and an unsigned one of B, for each k
template <int SUMS, int A, int B>
static void tile_dot_bytes() {
    const TileShapes &shapes = emulated.shapes;
    for (int m = 0; m < shapes.rows[SUMS]; m++)
        for (int n = 0; n < shapes.row_bytes[SUMS] / 4; n++)
            for (int k = 0; k < shapes.row_bytes[A] / 4; k++) {
                uint32_t a = emulated.tile[A][m][k], b = emulated.tile[B][k][n];
                for (int shift = 0; shift < 32; shift += 8)
                    emulated.tile[SUMS][m][n] += (uint32_t)((int8_t)(a >> shift) * (int32_t)(b >> shift & 255));
            }
}
#endif

// ---- a panel of 48 outputs ------------------------------------------------------------------------------------------
//     tile 3: rows of x         16 rows by 64 bytes    a row has 32 inputs of bfloat16, or 32 bytes of a group
//     tiles 4, 5, 6: weights    16 lines by 64 bytes   a line has 2 (or 4) inputs of 16 outputs, side by side, as all
//                                                      packed weights have them: 192 bytes (or 64) from line to line
//     tiles 0, 1, 2: sums       16 rows by 16 outputs
enum { TILES_OF_PANEL = 3, ROW_TILE = 3, WEIGHT_TILE = 4 };

// The shape of a thread's tiles, or no rows. Every thread gives them back when its work is over: as long as it has any,
// the system saves 8 KB whenever another thread gets the core.
inline thread_local i64 shaped_rows, shaped_lines;
INLINE void release_tiles() {
    if (!HAS_TILES || !shaped_rows) return;
    tile_release();
    shaped_rows = 0;
}

// The shapes for so many rows, and lines of weights, which are loaded where they are others than those before.
INLINE void shape_tiles(i64 rows, i64 lines) {
    if (rows == shaped_rows && lines == shaped_lines) return;
    alignas(CACHE_LINE) TileShapes shapes;
    for (int v = 0; v < TILES_OF_PANEL; v++) {
        shapes.rows[v] = (uint8_t)rows, shapes.row_bytes[v] = TILE_BYTES;
        shapes.rows[WEIGHT_TILE + v] = (uint8_t)lines, shapes.row_bytes[WEIGHT_TILE + v] = TILE_BYTES;
    }
    shapes.rows[ROW_TILE] = (uint8_t)rows, shapes.row_bytes[ROW_TILE] = (uint16_t)(lines * 4);
    tile_shape(shapes);
    shaped_rows = rows, shaped_lines = lines;
}

// Adds pairs of rows by the lines of weights that the shapes say, side by side, to the sums.
INLINE void multiply_pairs(const void *x, i64 x_stride, const void *weights) {
    const i64 LINE = TILES_OF_PANEL * TILE_BYTES;
    tile_load<ROW_TILE>(x, x_stride);
    tile_load<WEIGHT_TILE>(weights, LINE);
    tile_dot_pairs<0, ROW_TILE, WEIGHT_TILE>();
    tile_load<WEIGHT_TILE + 1>(at(weights, TILE_BYTES), LINE);
    tile_dot_pairs<1, ROW_TILE, WEIGHT_TILE + 1>();
    tile_load<WEIGHT_TILE + 2>(at(weights, 2 * TILE_BYTES), LINE);
    tile_dot_pairs<2, ROW_TILE, WEIGHT_TILE + 2>();
}
template <class T>
INLINE void store_tile_sums(T *sums, i64 stride) {  // in bytes
    tile_store<0>(sums, stride), tile_store<1>(sums + LANES, stride), tile_store<2>(sums + 2 * LANES, stride);
}
