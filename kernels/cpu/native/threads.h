// Work that threads share as it comes, piece by piece.
//
// A team of threads goes through the same phases. A phase has items 0 .. n - 1. A thread takes those of its own share
// first, as they lie in memory, and then what is left of the shares of the others:
//
//     items      0 1 2 3 4 5 6 7 | 8 9 10 11 12 13 14 15     thread 1 lost its core to somebody while it had item 9:
//     thread 0   0 1 2 3 4 5 6 7  10 11 12 13 14 15          thread 0 has done all the rest before it is back
//     thread 1   8 9 ...
//
// A phase is over when its items are done, whoever did them. So nobody waits for a thread, only for an item that
// somebody is working on; a team may have fewer threads than its work was cut for, down to one that does the parts of
// all in turn. Which thread does an item must not change its result.
#pragma once
#include "vec.h"

struct Team {
    int32_t
        *counters;  // for each thread the items taken of its share, phase by phase; the items done, likewise; sleepers
    int thread, threads, phases;
    int phase;   // which comes next
    int work;    // what the next phases are, of `Work`
    i64 *spent;  // by work, nanoseconds; only of the calling thread, and 0 where nobody asks
};

// What a thread spends its time on, for `octavo_time_work`; the last counts phases in which there was something to do.
enum Work { ON_ROWS, ON_PRODUCTS, ON_ATTENTION, WAITING, PHASES, NUM_WORKS };
i64 now_ns();

enum { COUNTER_BYTES = 4 };
INLINE i64 counters_size(i64 threads, i64 phases) { return (threads + 1) * phases + 1; }
INLINE int32_t count_on(int32_t *counter, int32_t by) { return __atomic_fetch_add(counter, by, __ATOMIC_SEQ_CST); }
INLINE int32_t look_at(const int32_t *counter) { return __atomic_load_n(counter, __ATOMIC_SEQ_CST); }

void wait_for(int32_t *counter, int32_t value, int32_t *sleepers);  // until it has this value
void wake(int32_t *counter);                                        // all who wait for it

// A thread's part in the next phase: `run(item, end)` for each item that it takes, where those up to `end` are likely
// to come next. Returns when all items are done; what was written by then can be read.
template <class Do>
static inline void share(Team &team, i64 num_items, Do run) {
    int phase = team.phase++;
    int32_t *done = team.counters + team.threads * team.phases + phase,
            *sleepers = team.counters + (team.threads + 1) * team.phases;
    int32_t num_done = 0;
    i64 started = team.spent ? now_ns() : 0;
    for (int turn = 0; turn < team.threads; turn++) {
        i64 owner = (team.thread + turn) % team.threads;
        i64 first = num_items * owner / team.threads, end = num_items * (owner + 1) / team.threads;
        int32_t *taken = team.counters + owner * team.phases + phase;
        if (first == end || first + look_at(taken) >= end) continue;
        for (i64 item; (item = first + count_on(taken, 1)) < end; num_done++) run(item, end);
    }
    if (num_done && count_on(done, num_done) + num_done == num_items && look_at(sleepers)) wake(done);
    i64 ended = team.spent ? now_ns() : 0;
    if (look_at(done) != num_items) wait_for(done, (int32_t)num_items, sleepers);
    if (!team.spent) return;
    team.spent[team.work] += ended - started, team.spent[WAITING] += now_ns() - ended;
    team.spent[PHASES] += num_items > 0;
}

// `body(team)` in up to so many threads, each of which goes through up to `phases` phases; returns when all are
// through. Where other work has the helpers the calling thread does everything.
void in_parallel(i64 threads, i64 phases, void (*body)(Team &, void *), void *argument);
template <class Body>
static inline void in_parallel(i64 threads, i64 phases, Body body) {
    in_parallel(threads, phases, [](Team &team, void *argument) { (*(Body *)argument)(team); }, &body);
}
// One phase of items.
template <class Do>
static inline void for_each(i64 threads, i64 num_items, Do run) {
    in_parallel(threads < num_items ? threads : num_items, 1, [&](Team &team) { share(team, num_items, run); });
}

// Memory of the calling thread until it ends, at least so many bytes, on a cache line; what it held before is gone. One
// piece a slot: who calls another function that needs memory, too, takes another slot.
enum Slot { OF_CALL, OF_TEAM, OF_ITEM, OF_PANEL, NUM_SLOTS };
void *scratch(Slot slot, i64 bytes);

// Rows that write no more numbers than this are not worth waking a thread for.
enum { FEW_NUMBERS = 1 << 16 };
INLINE i64 threads_for(i64 numbers, i64 threads) { return numbers <= FEW_NUMBERS ? 1 : threads; }
