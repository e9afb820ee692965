// Counts what malloc gives to a process that preloads this file, and notes every block from a size on.
//
// A block is what malloc really hands out (malloc_usable_size), so the sum of all blocks is exact. `live` is
// that sum, `small` the part of it in blocks that are too small to be noted. The notes lie in memory of their
// own, which is reserved at once and touched only as it fills; once it is full, the oldest make room.
//
// From a moment on that Python chooses, a block is refused (NULL, errno ENOMEM) that would make a sum larger than a
// limit: the sum of all blocks, or of those that some libraries ask for, which carry a mark behind their last byte.
// Small blocks are never refused: C++ that cannot get 40 bytes ends the process instead of telling anybody, and what
// is too much is refused with the next tensor.

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

typedef struct {
    uint64_t low, high;
    uint64_t shortest;
} Code;

typedef struct {
    int64_t asked;
    uint64_t mark;  // of this address alone, so that no other block has it by chance
} Tail;

enum { SHORTEST = 1024, SHORTEST_REFUSED = 4096, MOST_CODES = 8 };

static const uint64_t MARK = 0x756e697061722e6dULL;

static atomic_int counting = 1;  // from the first block on, so that live is never below 0
static _Atomic int64_t live, small, peak;
static _Atomic int64_t noted;
static _Atomic int64_t limit = INT64_MAX;
static _Atomic int64_t refusals;
static _Atomic int64_t marked;  // what was asked for of all blocks that have a mark
static int64_t room;
static Note *notes;
static Code codes[MOST_CODES];  // of libraries whose blocks count toward the limit
static _Atomic int number_of_codes;
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

// Whether a block counts toward the limit apart from others, and so gets a mark.
static int marks(void *caller, size_t asked) {
    int known = atomic_load_explicit(&number_of_codes, memory_order_acquire);
    for (int i = 0; i < known; i++) {
        if ((uint64_t)caller >= codes[i].low && (uint64_t)caller < codes[i].high) {
            return asked >= codes[i].shortest;
        }
    }
    return 0;
}

// Whether so many bytes more are beyond the limit; if they are, errno says so.
static int refused(size_t more, int with_mark) {
    int64_t most = atomic_load_explicit(&limit, memory_order_relaxed);
    if (most == INT64_MAX || more < SHORTEST_REFUSED || !atomic_load_explicit(&counting, memory_order_relaxed)) {
        return 0;
    }
    int apart = atomic_load_explicit(&number_of_codes, memory_order_relaxed) > 0;
    int64_t now = apart ? atomic_load(&marked) : atomic_load(&live);
    if ((apart && !with_mark) || (more <= INT64_MAX / 2 && now + (int64_t)more <= most)) {
        return 0;
    }
    atomic_fetch_add(&refusals, 1);
    errno = ENOMEM;
    return 1;
}

static Tail *tail_of(void *block) {
    size_t usable = malloc_usable_size(block) & ~(size_t)7;  // blocks begin at multiples of 16
    return usable < sizeof(Tail) ? NULL : (Tail *)((char *)block + usable - sizeof(Tail));
}

static void mark(void *block, size_t asked) {
    Tail *tail = block != NULL ? tail_of(block) : NULL;
    if (tail != NULL) {
        *tail = (Tail){(int64_t)asked, (uint64_t)block ^ MARK};
        atomic_fetch_add(&marked, (int64_t)asked);
    }
}

// Take the mark from a block; return what was asked for of it, or 0 if it had none.
static int64_t unmark(void *block) {
    if (block == NULL || atomic_load_explicit(&number_of_codes, memory_order_relaxed) == 0) {
        return 0;
    }
    Tail *tail = tail_of(block);
    if (tail == NULL || tail->mark != ((uint64_t)block ^ MARK)) {
        return 0;
    }
    tail->mark = 0;
    atomic_fetch_sub(&marked, tail->asked);
    return tail->asked;
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

static void *given(size_t border, size_t size, void *caller) {
    int with_mark = marks(caller, size);
    if (refused(size, with_mark)) {
        return NULL;
    }
    size_t whole = with_mark ? size + sizeof(Tail) + 8 : size;
    void *block = whole < size ? NULL : border ? __libc_memalign(border, whole) : __libc_malloc(whole);
    if (with_mark) {
        mark(block, size);
    }
    return came(block, size, caller);
}

void *malloc(size_t size) { return given(0, size, __builtin_return_address(0)); }

void *calloc(size_t number, size_t size) {
    size_t all;
    if (!__builtin_mul_overflow(number, size, &all) && refused(all, 0)) {
        return NULL;
    }
    return came(__libc_calloc(number, size), number * size, __builtin_return_address(0));
}

void free(void *block) {
    unmark(block);
    goes(block);  // before: afterwards the address may be another thread's
    __libc_free(block);
}

void *realloc(void *block, size_t size) {
    int64_t before = block != NULL ? (int64_t)malloc_usable_size(block) : 0;
    if (size > (size_t)before && refused(size - (size_t)before, 0)) {
        return NULL;  // the old one stays
    }
    int64_t asked = unmark(block);
    goes(block);
    void *grown = __libc_realloc(block, size);
    if (grown == NULL && block != NULL && size > 0 && atomic_load_explicit(&counting, memory_order_relaxed)) {
        count(block, before, (size_t)before, __builtin_return_address(0));  // refused: the old one stays
        if (asked) {
            mark(block, (size_t)asked);
        }
    }
    return came(grown, size, __builtin_return_address(0));
}

void *memalign(size_t border, size_t size) { return given(border, size, __builtin_return_address(0)); }

void *aligned_alloc(size_t border, size_t size) { return given(border, size, __builtin_return_address(0)); }

int posix_memalign(void **to, size_t border, size_t size) {
    if (border % sizeof(void *) != 0 || (border & (border - 1)) != 0 || border == 0) {
        return EINVAL;
    }
    int before = errno;  // which posix_memalign does not change
    void *block = given(border, size, __builtin_return_address(0));
    if (block == NULL) {
        errno = before;
        return ENOMEM;
    }
    *to = block;
    return 0;
}

// What Python calls.

int64_t unipar_meter_live(void) { return live; }

int64_t unipar_meter_small(void) { return small; }

int64_t unipar_meter_noted(void) { return noted; }

// The most since this was last asked.
int64_t unipar_meter_peak(void) { return atomic_exchange(&peak, atomic_load(&live)); }

// Refuse blocks that would make the sum larger than this, from now on.
void unipar_meter_limit(int64_t most) { atomic_store(&limit, most); }

// Count only blocks of so many bytes or more that code between these addresses asks for, from now on, toward the limit;
// 0 if there is no room.
int unipar_meter_mark(uint64_t low, uint64_t high, uint64_t shortest) {
    int known = number_of_codes;
    if (known == MOST_CODES) {
        return 0;
    }
    codes[known] = (Code){low, high, shortest};
    atomic_store_explicit(&number_of_codes, known + 1, memory_order_release);
    return 1;
}

int64_t unipar_meter_marked(void) { return marked; }

// How many blocks were refused.
int64_t unipar_meter_refusals(void) { return refusals; }

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
