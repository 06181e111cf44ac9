// Order among numbers: the k-th largest, and a sort whose largest come first.
#pragma once
#include "vec.h"

template <class T>
INLINE void swap(T &a, T &b) {
    T c = a;
    a = b, b = c;
}

// Of `size` numbers without NaN, whose order is lost; 1 <= k <= size. Hoare's selection, with the middle of three as
// the pivot.
static inline float kth_largest(float *values, i64 size, i64 k) {
    i64 first = 0, last = size - 1, wanted = size - k;
    while (first < last) {
        float a = values[first], b = values[(first + last) / 2], c = values[last];
        float least = a < b ? a : b, most = a < b ? b : a;
        float pivot = c < least ? least : c > most ? most : c;
        i64 low = first, high = last;
        while (low <= high) {
            while (values[low] < pivot) low++;
            while (values[high] > pivot) high--;
            if (low <= high) swap(values[low++], values[high--]);
        }
        if (wanted <= high) last = high;
        else if (wanted >= low) first = low;
        else break;  // between the two parts everything equals the pivot
    }
    return values[wanted];
}

// A number that rises as `value` rises and, among equal ones, as `position` < 2^32 falls.
INLINE i64 sort_key(float value, i64 position) {
    value += 0.0f;  // -0.0 equals 0.0
    int32_t bits;
    memcpy(&bits, &value, sizeof bits);
    i64 rising = bits >= 0 ? bits : -(i64)(bits & 0x7fffffff);
    return rising * (1LL << 32) + (0xffffffff - position);
}
INLINE i64 position_of(i64 key) { return 0xffffffff - (key & 0xffffffff); }

// Lets the key at `place` sink in a heap with the smallest on top.
INLINE void sift(i64 *keys, i64 place, i64 size) {
    i64 key = keys[place];
    for (i64 child; (child = 2 * place + 1) < size; place = child) {
        if (child + 1 < size && keys[child + 1] < keys[child]) child++;
        if (keys[child] >= key) break;
        keys[place] = keys[child];
    }
    keys[place] = key;
}

// The largest first: Williams' heap sort.
static inline void sort_falling(i64 *keys, i64 size) {
    for (i64 start = size / 2; start-- > 0;) sift(keys, start, size);
    for (i64 end = size - 1; end > 0; end--) {
        swap(keys[0], keys[end]);
        sift(keys, 0, end);
    }
}
