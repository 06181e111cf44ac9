// What tests and benchmarks ask of this library: whether phases begin one after the other, how fast memory is, and how
// many multiply-adds there are a second where nothing is read.
#include "threads.h"

// `times` [phases, items] counts how often each item was done; returns how often one of the phase before was not done
// when an item began, or more items were announced than there are. Item 1 of phase 1 and thread `late` lose some time.
EXPORT i64 octavo_count_phases(i64 *times, i64 num_phases, i64 num_items, i64 threads, i64 late, i64 looks) {
    i64 wrong = 0;
    auto lose_time = [&] {
        for (i64 i = 0; i < looks; i++) __atomic_load_n(&wrong, __ATOMIC_SEQ_CST);
    };
    in_parallel(threads, num_phases, [&](Team &team) {
        if (team.thread == late) lose_time();
        for (i64 phase = 0; phase < num_phases; phase++)
            share(team, num_items, [&](i64 item, i64 end) {
                for (i64 i = 0; phase && i < num_items; i++)
                    if (times[(phase - 1) * num_items + i] != 1) __atomic_add_fetch(&wrong, 1, __ATOMIC_SEQ_CST);
                if (phase == 1 && item == 1) lose_time();
                if (item >= end || end > num_items) __atomic_add_fetch(&wrong, 1, __ATOMIC_SEQ_CST);
                times[phase * num_items + item]++;
            });
    });
    return wrong;
}

// Reads so many bytes, a multiple of 64, by all threads, and asks for them so many bytes ahead; a number made of them.
EXPORT float octavo_read_memory(const char *start, i64 bytes, i64 threads, i64 ahead) {
    const i64 PIECE = 1 << 20;
    float sums[1024] = {};
    in_parallel(smaller(threads, 1024), 1, [&](Team &team) {
        F totals[4] = {splat(0.0f), splat(0.0f), splat(0.0f), splat(0.0f)};
        share(team, (bytes + PIECE - 1) / PIECE, [&](i64 piece, i64) {
            const char *end = start + smaller(bytes, (piece + 1) * PIECE);
            int turn = 0;
            for (const char *line = start + piece * PIECE; line < end; line += CACHE_LINE, turn = (turn + 1) % 4) {
                prefetch(line + ahead);
                totals[turn] = totals[turn] + load((const float *)line);
            }
        });
        sums[team.thread] = sum_of_lanes((totals[0] + totals[1]) + (totals[2] + totals[3]));
    });
    float total = 0;
    for (float sum : sums) total += sum;
    return total;
}

// `items` of work: a multiply-add to each of some sums that registers hold, so many times. There are more sums than an
// instruction takes cycles, so that none waits for another. Returns how many numbers were multiplied: what they sum up
// to.
EXPORT i64 octavo_multiply_add(i64 items, i64 times, i64 threads) {
    enum { SUMS = HAS_WIDE_REGISTERS ? 12 : 6 };
    i64 totals[1024] = {}, total = 0;
    float one = 1;
    __asm__ volatile("" : "+m"(one));  // any number, for all that the compiler knows
    in_parallel(smaller(threads, 1024), 1, [&](Team &team) {
        share(team, items, [&](i64, i64) {
            F sums[SUMS], factor = splat_at(&one);
            for (int s = 0; s < SUMS; s++) sums[s] = splat(0.0f);
            for (i64 i = 0; i < times; i++)
#pragma GCC unroll 12
                for (int s = 0; s < SUMS; s++) sums[s] = fma(factor, factor, sums[s]);
            for (int s = 1; s < SUMS; s++) sums[0] = sums[0] + sums[s];
            totals[team.thread] += (i64)sum_of_lanes(sums[0]);
        });
    });
    for (i64 of_thread : totals) total += of_thread;
    return total;
}
