// Counts what malloc gives to a process that preloads this file, and notes every block from a size on.
//
// A block is what malloc really hands out (malloc_usable_size), so the sum of all blocks is exact. `live` is
// that sum, `small` the part of it in blocks that are too small to be noted. The notes lie in memory of their
// own, which is reserved at once and touched only as it fills; once it is full, the oldest make room.

#define _GNU_SOURCE
#include <errno.h>
#include <malloc.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

extern void *__libc_malloc(size_t);
extern void *__libc_calloc(size_t, size_t);
extern void *__libc_realloc(void *, size_t);
extern void *__libc_memalign(size_t, size_t);
extern void __libc_free(void *);

typedef struct {
    uint64_t address;
    uint64_t caller;  // who called malloc; 0 where a block goes
    int64_t size;     // below 0 where it goes
    int64_t live;     // after it, as one thread sees it
    int64_t small;
    int64_t thread;
    int64_t asked;  // what the caller wanted of it; 0 where it goes
} Note;

enum { SHORTEST = 1024 };

static atomic_int counting = 1;  // from the first block on, so that live is never below 0
static _Atomic int64_t live, small, peak;
static _Atomic int64_t noted;
static int64_t room;
static Note *notes;
static __thread int64_t self __attribute__((tls_model("initial-exec")));

static void count(void *block, int64_t size, size_t asked, void *caller) {
    int64_t length = size < 0 ? -size : size;
    int64_t few = length < SHORTEST ? atomic_fetch_add(&small, size) + size : atomic_load(&small);
    int64_t now = atomic_fetch_add(&live, size) + size;
    int64_t most = atomic_load_explicit(&peak, memory_order_relaxed);
    while (now > most && !atomic_compare_exchange_weak(&peak, &most, now)) {
    }
    if (length < SHORTEST || notes == NULL) {
        return;
    }
    if (self == 0) {
        self = syscall(SYS_gettid);
    }
    int64_t at = atomic_fetch_add(&noted, 1) & (room - 1);
    notes[at] = (Note){(uint64_t)block, (uint64_t)caller, size, now, few, self, (int64_t)asked};
}

static void *came(void *block, size_t asked, void *caller) {
    if (block != NULL && atomic_load_explicit(&counting, memory_order_relaxed)) {
        count(block, (int64_t)malloc_usable_size(block), asked, caller);
    }
    return block;
}

static void goes(void *block) {
    if (block != NULL && atomic_load_explicit(&counting, memory_order_relaxed)) {
        count(block, -(int64_t)malloc_usable_size(block), 0, NULL);
    }
}

void *malloc(size_t size) { return came(__libc_malloc(size), size, __builtin_return_address(0)); }

void *calloc(size_t number, size_t size) {
    return came(__libc_calloc(number, size), number * size, __builtin_return_address(0));
}

void free(void *block) {
    goes(block);  // before: afterwards the address may be another thread's
    __libc_free(block);
}

void *realloc(void *block, size_t size) {
    int64_t before = block != NULL ? (int64_t)malloc_usable_size(block) : 0;
    goes(block);
    void *grown = __libc_realloc(block, size);
    if (grown == NULL && block != NULL && size > 0 && atomic_load_explicit(&counting, memory_order_relaxed)) {
        count(block, before, (size_t)before, __builtin_return_address(0));  // refused: the old one stays
    }
    return came(grown, size, __builtin_return_address(0));
}

void *memalign(size_t border, size_t size) {
    return came(__libc_memalign(border, size), size, __builtin_return_address(0));
}

void *aligned_alloc(size_t border, size_t size) {
    return came(__libc_memalign(border, size), size, __builtin_return_address(0));
}

int posix_memalign(void **given, size_t border, size_t size) {
    if (border % sizeof(void *) != 0 || (border & (border - 1)) != 0 || border == 0) {
        return EINVAL;
    }
    void *block = __libc_memalign(border, size);
    if (block == NULL) {
        return ENOMEM;
    }
    *given = came(block, size, __builtin_return_address(0));
    return 0;
}

// What Python calls.

int64_t unipar_meter_live(void) { return live; }

int64_t unipar_meter_small(void) { return small; }

int64_t unipar_meter_noted(void) { return noted; }

// The most since this was last asked.
int64_t unipar_meter_peak(void) { return atomic_exchange(&peak, atomic_load(&live)); }

// Begin to note blocks, `most` of them, a power of 2; where the notes lie, or 0.
uint64_t unipar_meter_note(int64_t most) {
    void *made = mmap(NULL, (size_t)most * sizeof(Note), PROT_READ | PROT_WRITE,
                      MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (made == MAP_FAILED) {
        return 0;
    }
    room = most;
    notes = made;
    return (uint64_t)made;
}

// For good: blocks that came while nobody counted could not be told from others.
void unipar_meter_end(void) { atomic_store(&counting, 0); }
