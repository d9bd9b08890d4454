// Bytes of tensors that a process holds, exactly: preloaded, it counts what torch's allocator for the CPU takes.
//
// That is posix_memalign, which hardly anything else calls; a block counts with its size as asked for, from whatever
// thread, until it is freed. tensor_bytes.py builds and reads it. Linux with glibc only.
#define _GNU_SOURCE
#include <errno.h>
#include <pthread.h>
#include <stdint.h>
#include <stdlib.h>

extern void *__libc_memalign(size_t, size_t);
extern void __libc_free(void *);

enum { SLOTS = 1 << 20, ALIGNED = 64 };  // blocks at one time; torch aligns to 64 at least

static struct { uintptr_t at; size_t bytes; } blocks[SLOTS];  // open addressing, linear probing
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static size_t now, most, count;

static size_t home(uintptr_t at) { return (at / ALIGNED * 0x9E3779B97F4A7C15u) >> 44; }  // of 2^20
static size_t after(size_t slot) { return (slot + 1) % SLOTS; }

static size_t find(uintptr_t at) {
    size_t slot = home(at);
    while (blocks[slot].at && blocks[slot].at != at) slot = after(slot);
    return slot;
}

static void forget(size_t slot) {  // what follows moves up, so that a search ends at the first empty slot
    now -= blocks[slot].bytes;
    count--;
    blocks[slot].at = 0;
    for (size_t next = after(slot); blocks[next].at; next = after(next)) {
        size_t from = home(blocks[next].at);
        if ((next - from) % SLOTS < (next - slot) % SLOTS) continue;
        blocks[slot] = blocks[next];
        blocks[next].at = 0;
        slot = next;
    }
}

int posix_memalign(void **found, size_t alignment, size_t bytes) {
    void *block = __libc_memalign(alignment, bytes);
    if (!block) return ENOMEM;
    if ((uintptr_t)block % ALIGNED == 0 && bytes) {
        pthread_mutex_lock(&lock);
        if (++count > SLOTS / 2) abort();
        size_t slot = find((uintptr_t)block);
        blocks[slot].at = (uintptr_t)block;
        blocks[slot].bytes = bytes;
        now += bytes;
        if (now > most) most = now;
        pthread_mutex_unlock(&lock);
    }
    *found = block;
    return 0;
}

void free(void *block) {
    if (block && (uintptr_t)block % ALIGNED == 0) {
        pthread_mutex_lock(&lock);
        size_t slot = find((uintptr_t)block);
        if (blocks[slot].at) forget(slot);
        pthread_mutex_unlock(&lock);
    }
    __libc_free(block);
}

size_t tensor_bytes_now(void) { return __atomic_load_n(&now, __ATOMIC_RELAXED); }

size_t tensor_bytes_most(void) { return __atomic_load_n(&most, __ATOMIC_RELAXED); }

void tensor_bytes_forget_most(void) {
    pthread_mutex_lock(&lock);
    most = now;
    pthread_mutex_unlock(&lock);
}
