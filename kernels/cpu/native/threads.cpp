// The helpers of all parallel work: threads of this library's own, which look for work for a while and then sleep.
//
// `gate` says what helpers may do: its lowest bits count those inside, the next bit is set while there is work, and the
// rest is the number of the work. A helper goes in by counting itself, and the caller shuts the gate and waits until
// nobody is inside, so that no helper touches work that is over, however late it comes. A helper that loses its core
// inside, even between two items, therefore holds the caller up until it is back, once a call at most: what it would
// touch then lies on the caller's stack.
#include "threads.h"
#include "tiles.h"

#include <errno.h>
#include <limits.h>
#include <linux/futex.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdlib.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

namespace {

// How long a waiting thread looks before it sleeps: longer than most items take, and less than waking a thread costs
// where a core without work is given back to a hypervisor. Helpers look as long for the next work. Processors pause for
// 40 to 140 cycles between looks, so what ends them is the clock, which is read once in `LOOKS`.
const i64 SPIN_NS = 60000;
enum { LOOKS = 64, MOST_HELPERS = 1023 };
const uint32_t EVERY_KIND = 0xffffffff;
const i64 INSIDE = 0xffff, OPEN = 0x10000, NEXT = 0x20000;

struct {
    pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;  // of the one caller
    i64 gate;
    int32_t number, sleepers;  // of the work, for those who sleep
    int num_helpers;
    void (*body)(Team &, void *);
    void *argument;
    int32_t *counters;
    i64 counters_bytes;
    int threads, phases;
} pool;
i64 *spent_by_caller;  // where somebody asks

// A thread's part in some work.
void take_part(Team team, void (*body)(Team &, void *), void *argument) {
    team.spent = team.thread == 0 ? spent_by_caller : 0;
    body(team, argument);
    release_tiles();
}

void look_away() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#endif
}
// Whether it is so before a waiting thread should sleep.
template <class Is>
bool is_soon(Is is_so) {
    i64 began = 0;
    for (int looks = 1; !is_so(); looks++) {
        look_away();
        if (looks % LOOKS) continue;
        i64 now = now_ns();
        if (!began) began = now;
        if (now - began > SPIN_NS) return false;
    }
    return true;
}
// Sleepers are told apart in 32 kinds: helpers whose number is too high for some work are not woken for it.
void sleep_while(int32_t *place, int32_t value, uint32_t kind) {
    syscall(SYS_futex, place, FUTEX_WAIT_BITSET | FUTEX_PRIVATE_FLAG, value, 0, 0, kind);
}
void wake_kinds(int32_t *place, uint32_t kinds) {
    syscall(SYS_futex, place, FUTEX_WAKE_BITSET | FUTEX_PRIVATE_FLAG, INT_MAX, 0, 0, kinds);
}
uint32_t kind_of(int thread) { return 1u << (thread < 31 ? thread : 31); }
uint32_t kinds_below(int threads) { return threads < 32 ? (1u << threads) - 1 : EVERY_KIND; }

// Helps with the work there is, unless it is the one of number `last`: that one is counted anew.
void help_once(int thread, i64 &last) {
    i64 gate = __atomic_load_n(&pool.gate, __ATOMIC_ACQUIRE);
    do {
        if (!(gate & OPEN) || gate / NEXT == last) return;
    } while (!__atomic_compare_exchange_n(&pool.gate, &gate, gate + 1, true, __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE));
    last = gate / NEXT;
    if (thread < pool.threads)
        take_part({pool.counters, thread, pool.threads, pool.phases, 0, ON_ROWS, 0}, pool.body, pool.argument);
    __atomic_sub_fetch(&pool.gate, 1, __ATOMIC_ACQ_REL);
}

void *help(void *number) {
    pthread_setname_np(pthread_self(), "octavo-kernels");
    int thread = (int)(intptr_t)number;
    i64 last = 0;
    for (int32_t seen = 0;;) {
        is_soon([&] { return look_at(&pool.number) != seen; });
        while (look_at(&pool.number) == seen) {
            count_on(&pool.sleepers, 1);
            sleep_while(&pool.number, seen, kind_of(thread));
            count_on(&pool.sleepers, -1);
        }
        seen = look_at(&pool.number);
        help_once(thread, last);
    }
    return 0;
}

// In a child process there are no helpers any more, and the counters may have been on their way to another place.
void forget_helpers() {
    pool.lock = PTHREAD_MUTEX_INITIALIZER;
    pool.gate = 0, pool.number = 0, pool.sleepers = 0, pool.num_helpers = 0;
    pool.counters = 0, pool.counters_bytes = 0;
}

void start_helpers(int wanted) {
    static int is_prepared = 0;
    if (!is_prepared) pthread_atfork(0, 0, forget_helpers), is_prepared = 1;
    sigset_t all, before;  // signals are for threads of Python's
    sigfillset(&all);
    const int faults[] = {SIGSEGV, SIGBUS, SIGFPE, SIGILL};  // a handler tells of these, on the thread that has them
    for (int fault : faults) sigdelset(&all, fault);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    while (pool.num_helpers < wanted) {
        pthread_t helper;
        if (pthread_create(&helper, 0, help, (void *)(intptr_t)(pool.num_helpers + 1))) break;  // with those there are
        pthread_detach(helper);
        pool.num_helpers++;
    }
    pthread_sigmask(SIG_SETMASK, &before, 0);
}

void run_alone(i64 phases, void (*body)(Team &, void *), void *argument) {
    i64 bytes = counters_size(1, phases) * COUNTER_BYTES;
    int32_t *counters = (int32_t *)scratch(OF_TEAM, bytes);
    memset(counters, 0, bytes);
    take_part({counters, 0, 1, (int)phases, 0, ON_ROWS, 0}, body, argument);
}

bool make_counters(i64 size) {
    if (size * COUNTER_BYTES > pool.counters_bytes) {
        int32_t *counters = (int32_t *)realloc(pool.counters, size * COUNTER_BYTES);
        if (!counters) return false;
        pool.counters = counters, pool.counters_bytes = size * COUNTER_BYTES;
    }
    memset(pool.counters, 0, size * COUNTER_BYTES);
    return true;
}

}  // namespace

void wait_for(int32_t *counter, int32_t value, int32_t *sleepers) {
    if (is_soon([&] { return look_at(counter) == value; })) return;
    count_on(sleepers, 1);
    for (int32_t now; (now = look_at(counter)) != value;) sleep_while(counter, now, EVERY_KIND);
    count_on(sleepers, -1);
}

i64 now_ns() {
    timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * 1000000000ll + now.tv_nsec;
}

// From now on what a calling thread spends is added to `spent`, an i64 each of `Work`; 0: no more. For one caller.
EXPORT void octavo_time_work(i64 *spent) { spent_by_caller = spent; }

void wake(int32_t *counter) { wake_kinds(counter, EVERY_KIND); }

void in_parallel(i64 threads, i64 phases, void (*body)(Team &, void *), void *argument) {
    if (threads > MOST_HELPERS + 1) threads = MOST_HELPERS + 1;
    if (threads <= 1 || pthread_mutex_trylock(&pool.lock)) return run_alone(phases, body, argument);
    start_helpers((int)threads - 1);
    if (!make_counters(counters_size(threads, phases))) {
        pthread_mutex_unlock(&pool.lock);
        return run_alone(phases, body, argument);
    }
    pool.body = body, pool.argument = argument, pool.threads = (int)threads, pool.phases = (int)phases;
    __atomic_add_fetch(&pool.gate, NEXT | OPEN, __ATOMIC_ACQ_REL);
    count_on(&pool.number, 1);
    if (look_at(&pool.sleepers)) wake_kinds(&pool.number, kinds_below((int)threads));
    take_part({pool.counters, 0, (int)threads, (int)phases, 0, ON_ROWS, 0}, body, argument);
    __atomic_sub_fetch(&pool.gate, OPEN, __ATOMIC_ACQ_REL);
    i64 ended = spent_by_caller ? now_ns() : 0;
    auto is_left = [] { return !(__atomic_load_n(&pool.gate, __ATOMIC_ACQUIRE) & INSIDE); };
    if (!is_soon(is_left))
        while (!is_left()) sched_yield();
    if (spent_by_caller) spent_by_caller[WAITING] += now_ns() - ended;
    pthread_mutex_unlock(&pool.lock);
}

namespace {

struct Piece {
    void *memory;
    i64 bytes;
};

pthread_key_t of_thread;  // its pieces, that they are given back when it ends

void give_back(void *pieces) {
    for (int slot = 0; slot < NUM_SLOTS; slot++) free(((Piece *)pieces)[slot].memory);
}
void make_key() { pthread_key_create(&of_thread, give_back); }

}  // namespace

void *scratch(Slot slot, i64 bytes) {
    static pthread_once_t is_prepared = PTHREAD_ONCE_INIT;
    static thread_local Piece pieces[NUM_SLOTS];
    Piece &piece = pieces[slot];
    if (piece.bytes < bytes) {
        pthread_once(&is_prepared, make_key);
        pthread_setspecific(of_thread, pieces);
        free(piece.memory);
        piece.bytes = (bytes + bytes / 2 + CACHE_LINE - 1) / CACHE_LINE * CACHE_LINE;
        piece.memory = aligned_alloc(CACHE_LINE, piece.bytes);
        if (!piece.memory) {
            static const char text[] = "octavo: there is no memory for a CPU kernel\n";
            (void)!write(2, text, sizeof text - 1);
            abort();
        }
    }
    return piece.memory;
}
