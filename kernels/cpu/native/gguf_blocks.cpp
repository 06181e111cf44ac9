// Blocks of a GGUF file as codes, scales and offsets (worker_svc/models/quantized/gguf_blocks.py says what is where,
// and makes the same with torch). Everything is exact: a scale of a group is a product of float16 and a small integer.
#include "products.h"

namespace {

enum { Q4_0, Q8_0, Q4_K, Q5_K, Q6_K };

struct Weight {  // the place of a block in what is made of its weight; offset: 0 where there is none
    uint8_t *codes;
    float *scale, *offset;
};

float half_at(const uint8_t *block) {
    Float16 half;
    memcpy(&half, block, 2);
    return as_float(half);
}

// Eight scales and offsets of 32 inputs, whose six bits each lie in 12 bytes behind d and dmin.
void read_scales(const uint8_t *block, const Weight &to) {
    float d = half_at(block), dmin = half_at(block + 2);
    const uint8_t *low = block + 4, *middle = block + 8, *high = block + 12;
    for (int i = 0; i < 4; i++) {
        to.scale[i] = d * (float)(low[i] & 63), to.scale[4 + i] = d * (float)((high[i] & 15) | low[i] >> 6 << 4);
        to.offset[i] = -(dmin * (float)(middle[i] & 63));
        to.offset[4 + i] = -(dmin * (float)(high[i] >> 4 | middle[i] >> 6 << 4));
    }
}

// Twice `count` codes: the low halves of `count` bytes, then the high ones. Compilers make vectors of this and of the next,
// as nothing that is written is read.
void read_nibbles(const uint8_t *__restrict bytes, uint8_t *__restrict codes, int count) {
    for (int i = 0; i < count; i++) codes[i] = bytes[i] & 15;
    for (int i = 0; i < count; i++) codes[count + i] = bytes[i] >> 4;
}

// 128 codes from 32 below zero on: the low halves of 64 bytes, then the high ones, each beside two bits of 32 bytes.
void read_six_bits(const uint8_t *__restrict low, const uint8_t *__restrict high, uint8_t *__restrict codes) {
    for (int i = 0; i < 32; i++) {
        codes[i] = (uint8_t)(((low[i] & 15) | (high[i] & 3) << 4) - 32);
        codes[32 + i] = (uint8_t)(((low[32 + i] & 15) | (high[i] >> 2 & 3) << 4) - 32);
        codes[64 + i] = (uint8_t)((low[i] >> 4 | (high[i] >> 4 & 3) << 4) - 32);
        codes[96 + i] = (uint8_t)((low[32 + i] >> 4 | high[i] >> 6 << 4) - 32);
    }
}

void read_block(i64 kind, const uint8_t *block, const Weight &to) {
    if (kind == Q4_0) {
        to.scale[0] = half_at(block);
        read_nibbles(block + 2, to.codes, 16);
    } else if (kind == Q8_0) {
        to.scale[0] = half_at(block);
        memcpy(to.codes, block + 2, 32);
    } else if (kind == Q6_K) {
        float d = half_at(block + 208);
        for (int i = 0; i < 16; i++) to.scale[i] = d * (float)(int8_t)block[192 + i];
        for (int half = 0; half < 2; half++)
            read_six_bits(block + 64 * half, block + 128 + 32 * half, to.codes + 128 * half);
    } else {
        read_scales(block, to);
        const uint8_t *bytes = block + (kind == Q4_K ? 16 : 48);
        for (int chunk = 0; chunk < 4; chunk++) read_nibbles(bytes + 32 * chunk, to.codes + 64 * chunk, 32);
        if (kind == Q4_K) return;
        for (int group = 0; group < 8; group++)
            for (int i = 0; i < 32; i++) to.codes[32 * group + i] |= (uint8_t)((block[16 + i] >> group & 1) << 4);
    }
}

}  // namespace

// All blocks of some outputs, one output after the other.
EXPORT void octavo_read_blocks(i64 kind, const uint8_t *blocks, uint8_t *codes, float *scale, float *offset,
                               i64 num_blocks, i64 threads) {
    const i64 AT_ONCE = 256, block_bytes[] = {18, 34, 144, 176, 210}, groups[] = {1, 1, 8, 8, 16};
    i64 size = kind <= Q8_0 ? 32 : 256, num_groups = groups[kind];
    for_each(threads, (num_blocks + AT_ONCE - 1) / AT_ONCE, [&](i64 item, i64) {
        for (i64 i = item * AT_ONCE; i < smaller((item + 1) * AT_ONCE, num_blocks); i++)
            read_block(kind, blocks + i * block_bytes[kind],
                       {codes + i * size, scale + i * num_groups, offset ? offset + i * num_groups : 0});
    });
}
