/* Machine: instruction sets, sizes that follow from them, and the team of threads that runs a forward. */

/* Decoder layers like Llama's, and Gemma's, on a CPU: a step's rows through any run of layers in one call.
 *
 * Weights lie in panels of PANEL outputs, input by input, so that a product is one stream through memory whatever its
 * rows: a stretch of it is read from memory once for all of them. A weight is float32, or bfloat16 where that holds it
 * exactly, and of bfloat16 twelve bits lie in memory where that is enough: they are coded.
 *
 * What a row computes does not depend on the rows beside it, its own sequence's or another's: every sum runs in one
 * order, over inputs and over the row's own path of keys. So a tree's accepted rows are, bit for bit, those of plain
 * decoding, and a sequence's those that it has by itself.
 */
#include <float.h>
#include <math.h>
#include <sched.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#ifdef _OPENMP
#include <omp.h>
#endif
#ifdef __AVX2__
#include <immintrin.h>
#endif
#if defined(__x86_64__) || defined(__i386__)
#define PAUSE() __builtin_ia32_pause()
#elif defined(__aarch64__)
#define PAUSE() __asm__ volatile("yield")
#else
#define PAUSE() (void)0
#endif
#if defined(__AMX_BF16__) && defined(__AVX512BF16__) && defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#define HAS_TILES 1
#else
#define HAS_TILES 0
#endif

#ifdef __AVX512F__ /* registers hold 24 sums of 16 values beside the weights that they share: 6 rows of 4 vectors */
#define LANES 16
enum { FEW = 6, SHARES = 1 };
#else /* 12 sums of 8 values: 3 rows of 4 vectors, or 6 of two and then of the other two, for which less is read */
#define LANES 8
enum { FEW = 6, SHARES = 4 };
#endif
enum { MANY = 12 }; /* groups of rows; for as many, decoding weights again and again is more work than keeping them */
/* A strip is what rows in registers are multiplied with: one panel or two, side by side. */
enum { PANEL = 32, PAIR = 2 * PANEL, VECTORS = 4, STRIP = VECTORS * LANES, STRETCH = 192, TOGETHER = 8 };
/* Values of which the largest is found at once: a peak's; and how many such blocks there are of a row, at most. */
enum { PEAK = 256, BLOCKS = 1024 };
/* Heads of rows that attend at once, so that what they see is read once, and vectors of each that are
 * mixed at once. */
enum { UNITS = 3, WIDE = LANES / 4 };
enum { PATIENCE = 4096 }; /* looks for who is late before a thread lets others have its processor */

/* float32; bfloat16; bfloat16 by two inputs, for rows in bfloat16; both of these coded, by two inputs; and quantised blocks,
 * for rows that are rounded to 16-bit integers, for rows as they are, or for rows that are rounded to bytes. */
#define KINDS(kind) kind(FULL) kind(HALF) kind(PAIRS) kind(CODED) kind(CODED_PAIRS) kind(QUANTISED) kind(EXACT_QUANTISED) \
    kind(INT8_QUANTISED)
#define KIND_ITSELF(kind) kind,
enum Kind { KINDS(KIND_ITSELF) };
/* A bfloat16's high byte, its sign and all but one bit of its exponent, is one of few in nearly all of a weight: its
 * code tells which of these. Of two inputs a panel has the low bytes, and then the codes, two in a byte. */
enum { CODES = 16, LOWS = 2 * PANEL, CODE_BYTES = LOWS + LOWS / 2 };

typedef float floats __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef int32_t ints __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef uint32_t words __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef uint16_t halves __attribute__((vector_size(2 * LANES), aligned(2), may_alias));
#define INLINE static inline __attribute__((always_inline))
/* A forward is run by one team of threads, which share each loop and meet behind it. OpenMP's own barrier calls the system
 * each time, which takes longer than the waiting; it is left to those who are more than there are processors. */
typedef struct {
    int arrived __attribute__((aligned(64))), round __attribute__((aligned(64)));
} Meeting;

typedef struct {
    Meeting *meeting;
    int64_t me, count, processors;
} Team;

#ifdef _OPENMP
#define TEAM_OF(meeting) {(meeting), omp_get_thread_num(), omp_get_num_threads(), omp_get_num_procs()}
#else
#define TEAM_OF(meeting) {(meeting), 0, 1, 1}
#endif
/* A block that `threads` run, each with a `team` of its own place in it. */
#define AS_TEAM                                                         \
    Meeting meeting = {0};                                              \
    _Pragma("omp parallel num_threads(threads) if (threads > 1)")       \
        for (Team own_ = TEAM_OF(&meeting), *team = &own_; team; team = NULL)
/* This thread's share of so many. */
#define SHARED(i, all) \
    for (int64_t i = (all) * team->me / team->count, i##_end = (all) * (team->me + 1) / team->count; i < i##_end; i++)

/* Wait for the others. */
static void meet(const Team *team) {
    Meeting *m = team->meeting;
    if (team->count == 1) return;
    if (team->count > team->processors) {
        _Pragma("omp barrier")
        return;
    }
    const int round = __atomic_load_n(&m->round, __ATOMIC_RELAXED);
    if (__atomic_add_fetch(&m->arrived, 1, __ATOMIC_ACQ_REL) == team->count) {
        __atomic_store_n(&m->arrived, 0, __ATOMIC_RELAXED);
        __atomic_store_n(&m->round, round + 1, __ATOMIC_RELEASE);
        return;
    }
    for (int tries = 0; __atomic_load_n(&m->round, __ATOMIC_ACQUIRE) == round; tries += tries < PATIENCE)
        if (tries < PATIENCE) PAUSE();
        else sched_yield(); /* somebody has no processor, perhaps */
}
