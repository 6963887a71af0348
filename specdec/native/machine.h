/* Machine: instruction sets, the sizes that follow from them, and the team of threads that runs a forward pass. */

/* Decoder layers like those of Llama and Gemma on a CPU: one call runs a step's rows through any range of layers.
 *
 * Weights are stored in panels of PANEL outputs, input by input, so that a product reads memory in one stream, and
 * reads each stretch once for all rows. A weight is float32, or bfloat16 or float16 where these hold it exactly. A
 * bfloat16 weight is coded in twelve bits where these are enough.
 *
 * The result of a row does not depend on the rows beside it, whether they are its own sequence's or another's:
 * every sum runs in one order, over inputs and over the keys of the row's own path. So the accepted rows of a tree
 * equal plain decoding's rows bit for bit, and a sequence's rows in a batch equal those that it has alone.
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
#ifdef __SSE2__
#include <cpuid.h>
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
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

/* Whether there is an instruction for a * b + c, rounded once. */
#if defined(__FMA__) || defined(__AVX512F__) || defined(__aarch64__)
#define FUSES 1
#else
#define FUSES 0
#endif
/* Rows whose sums are in registers at once: MOST_ROWS of a panel's weights, TWIN of those of two panels; FEW of a
 * block's, FEW_CODED of them where codes are extracted as well, HALVING of them by half of a panel. */
#ifdef __AVX512F__ /* 28 sums of 16 values, beside the weights: 14 rows of the 2 vectors of a panel */
#define LANES 16
enum { MOST_ROWS = 14, TWIN = 6, FEW = 6, FEW_CODED = 4, HALVING = 6 };
#elif defined(__AVX2__) || defined(__aarch64__)
/* 12 sums of 8 values: 3 rows of 4 vectors, or 6 rows of two vectors and then two more, which reads less */
#define LANES 8
#ifdef __AVX2__
enum { MOST_ROWS = 6, TWIN = 0, FEW = 6, FEW_CODED = 6, HALVING = 6 };
#else
enum { MOST_ROWS = 6, TWIN = 0, FEW = 6, FEW_CODED = 4, HALVING = 3 };
#endif
#else /* a vector is two registers, and there are 16: more rows would only take the compiler minutes */
#define LANES 8
enum { MOST_ROWS = 2, TWIN = 0, FEW = 2, FEW_CODED = 1, HALVING = 3 };
#endif
/* Rows whose sums are kept in one place while a stretch of a panel's weights, which they share, is in the cache. */
enum { CROWDED = 84 };
enum { SHARES = 4 };   /* passes over a stretch that prefetch the next one, at most */
enum { WIDENS = LANES == 8 }; /* whether widening costs so much that many rows do it once */
enum { CACHED = 16 << 20 }; /* bytes of weights that stay in the caches from pass to pass */
/* A strip is one panel or two, side by side. */
enum { PANEL = 32, PAIR = 2 * PANEL, VECTORS = 4, STRIP = VECTORS * LANES, STRETCH = 192, TOGETHER = 8 };
enum { STRETCH_BYTES = 4 * PANEL * STRETCH }; /* of a panel, at most */
/* Values of a block whose maximum is computed at once, and the most such blocks of a row. */
enum { PEAK = 256, BLOCKS = 1024 };
/* Heads of rows that attend at once, so that their keys are read once, and vectors of each head's values that are added
 * at once. */
enum { UNITS = 3, WIDE = LANES / 4 };
/* Units of rows that attend together, at most, if these are more rows than TOGETHER: their scores lie in the caches. */
enum { ABREAST = 48 };
/* Units that a block of keys or values is laid out anew for, at least; of which these many are scored at once. */
enum { WORTH_TURNING = 2 * UNITS + 1, TURNED = LANES == 16 ? 12 : 6 };
enum { AHEAD = 4096 }; /* bytes by which blocks and tiles of weights are prefetched */
enum { PATIENCE = 4096 }; /* spins at a barrier before a thread yields its processor */

/* Kinds of weights: float32; bfloat16; float16; bfloat16 in pairs of inputs, for rows in bfloat16; both kinds of bfloat16
 * coded, in pairs of inputs; quantised blocks for rows rounded to 16-bit integers, for unrounded rows, and for rows rounded
 * to bytes. */
#define KINDS(kind) kind(FULL) kind(HALF) kind(FLOAT16) kind(PAIRS) kind(CODED) kind(CODED_PAIRS) kind(QUANTISED) \
    kind(EXACT_QUANTISED) kind(INT8_QUANTISED)
#define KIND_ITSELF(kind) kind,
enum Kind { KINDS(KIND_ITSELF) };
/* A bfloat16's high byte is its sign and all but one bit of its exponent; nearly all weights share a few of them,
 * and a code is an index of these. For two inputs, a panel has the low bytes, and then the codes, two in a byte. */
enum { CODES = 16, LOWS = 2 * PANEL, CODE_BYTES = LOWS + LOWS / 2 };

typedef float floats __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef int32_t ints __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef uint32_t words __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef uint16_t halves __attribute__((vector_size(2 * LANES), aligned(2), may_alias));
#define INLINE static inline __attribute__((always_inline))
/* One team of threads runs a forward pass: the threads share each loop and meet behind it. OpenMP's barrier calls
 * the system each time, which takes longer than the wait itself; it serves only where threads outnumber processors. */
typedef struct {
    int arrived __attribute__((aligned(64))), round __attribute__((aligned(64)));
} Meeting;

/* How a thread rounds, and whether it takes small numbers for zero: what the host has set must not decide bits. */
#ifdef __SSE2__
typedef uint32_t Rounding;
INLINE Rounding rounding(void) { return _mm_getcsr(); }
INLINE void set_rounding(Rounding state) { _mm_setcsr(state); }
enum { TO_NEAREST = 0x1f80 };
#elif defined(__aarch64__)
typedef uint64_t Rounding;
INLINE Rounding rounding(void) {
    Rounding state;
    __asm__ volatile("mrs %0, fpcr" : "=r"(state) : : "memory");
    return state;
}
INLINE void set_rounding(Rounding state) { __asm__ volatile("msr fpcr, %0" : : "r"(state) : "memory"); }
enum { TO_NEAREST = 0 };
#else
typedef int Rounding;
INLINE Rounding rounding(void) { return 0; }
INLINE void set_rounding(Rounding state) { (void)state; }
enum { TO_NEAREST = 0 };
#endif
INLINE Rounding round_to_nearest(void) {
    const Rounding host = rounding();
    set_rounding(TO_NEAREST);
    return host;
}
INLINE void restore_rounding(const Rounding *host) { set_rounding(*host); }
/* Rounds to nearest until the function returns. */
#define ROUNDS_TO_NEAREST \
    __attribute__((cleanup(restore_rounding))) const Rounding host_rounding = round_to_nearest(); \
    (void)host_rounding

typedef struct {
    Meeting *meeting;
    int64_t me, count, processors;
    int64_t cached; /* whether weights are in the caches */
    Rounding host;
} Team;

INLINE Team *join(Team *own) {
    own->host = round_to_nearest();
    return own;
}
INLINE Team *leave(Team *own) {
    set_rounding(own->host);
    return NULL;
}

#ifdef _OPENMP
#define TEAM_OF(meeting) {(meeting), omp_get_thread_num(), omp_get_num_threads(), omp_get_num_procs(), 0, 0}
#else
#define TEAM_OF(meeting) {(meeting), 0, 1, 1, 0, 0}
#endif
/* Begins a block that `threads` threads run; each has a `team` with its own index. */
#define AS_TEAM                                                         \
    Meeting meeting = {0};                                              \
    _Pragma("omp parallel num_threads(threads) if (threads > 1)")       \
        for (Team own_ = TEAM_OF(&meeting), *team = join(&own_); team; team = leave(team))
/* A loop over this thread's share of `all` items. */
#define SHARED(i, all) \
    for (int64_t i = (all) * team->me / team->count, i##_end = (all) * (team->me + 1) / team->count; i < i##_end; i++)

/* Waits for all threads of the team. */
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
        else sched_yield(); /* another thread may lack a processor */
}
