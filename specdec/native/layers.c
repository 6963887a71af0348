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

/* float32; bfloat16; bfloat16 by two inputs, for rows in bfloat16; and both of these coded, by two inputs. */
enum Kind { FULL, HALF, PAIRS, CODED, CODED_PAIRS };
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

typedef struct { /* a weight whose high byte has no code; it lies as a zero */
    int32_t output, input;
    float value;
} Odd;

typedef struct {
    const void *weight;     /* [panels][inputs][PANEL], zeros up to a whole PAIR; coded [panels][inputs / 2][CODE_BYTES] */
    const float *bias;      /* [outputs] or NULL */
    const uint8_t *highs;   /* [CODES] of coded ones, of which the first is 0 */
    const Odd *odd;         /* by panels, and of one by inputs */
    const int64_t *odd_end; /* [panels] where a panel's end */
    int64_t inputs, outputs, kind;
    int64_t tiles; /* rows are multiplied by tiles */
} Product;

typedef struct {
    Product qkv, out, gate_up, down;
    const float *first_norm, *second_norm; /* [hidden] */
    const float *head_norm;                /* [query_heads + key_heads, head_dim] or NULL */
    const float *out_norm, *down_norm;     /* [hidden], of what is added to the stream, or NULL */
    float first_epsilon, second_epsilon, head_epsilon, out_epsilon, down_epsilon, scale;
    float cap;     /* of attention's scores, by a tanh; 0 for none */
    int32_t turns; /* which cosines and sines */
} Layer;

typedef struct {
    int64_t hidden, query_heads, key_heads, head_dim, inner;
    int64_t half; /* the model computes in bfloat16: the stream between layers and the cache are rounded to it */
    int64_t gelu; /* the MLP's gate is a GELU, by its tanh, and no SiLU */
    int64_t tiles; /* attention multiplies by tiles, where it can */
} Shape;

typedef struct {
    void *keys, *values; /* [key_heads, stride, head_dim] */
    int64_t size, stride, window; /* ring size; slots held; 0 for no window */
} Slots;

typedef struct { /* one sequence's rows */
    int64_t length, first, rows; /* committed tokens; the tree's rows before this block, and of it */
    const int32_t *parents, *depths; /* [first + rows] */
    const Slots *slots; /* its own, of each layer */
} Block;

typedef struct {
    const float *cosines, *sines; /* [rows or positions, head_dim]; the sines' first half negated */
} Turns;

typedef struct { /* the rows of all blocks, one block's after the other's */
    int64_t rows, count, keys; /* blocks; most keys that a row may see */
    const Block *blocks;
    const Turns *turns; /* by a layer's number of them */
    int64_t by_row;     /* these are the rows', one after the other, and not of positions 0, 1, 2, ... */
    const int64_t *tokens;    /* [rows], for rows that begin here; ... */
    const Product *embedding; /* ... and what they are embedded by */
} Rows;

typedef struct { /* the last norm and the head */
    Product product;
    const float *norm; /* [hidden] */
    float epsilon;
} Head;

INLINE int64_t padded(int64_t n) { return (n + PAIR - 1) / PAIR * PAIR; }
INLINE floats spread(float x) { return x - (floats){0}; }

INLINE floats load(const void *from, int64_t at, int half) {
    if (!half) return *(const floats *)((const float *)from + at);
    const uint16_t *first = (const uint16_t *)from + at;
#if LANES == 16 /* one instruction, where gcc makes five of the last line */
    return (floats)((ints)_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)first)) << 16);
#elif defined(__AVX2__)
    return (floats)((ints)_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)first)) << 16);
#else
    return (floats)(__builtin_convertvector(*(const halves *)first, ints) << 16);
#endif
}

INLINE float widen(uint16_t half) {
    uint32_t bits = (uint32_t)half << 16;
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

INLINE uint16_t narrow(float value) { /* to the nearest bfloat16, ties to even */
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    if ((bits & 0x7fffffff) > 0x7f800000) return 0x7fc0; /* NaN */
    return (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}

/* `to` may be `from`: what is written lies before what is still to be read. */
static void narrow_all(const float *from, void *to, int64_t count) {
    int64_t i = 0;
    for (; i + LANES <= count; i += LANES) {
        floats value = load(from, i, 0);
        words bits = (words)value, number = (words)(value == value);
        bits = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
        *(halves *)((uint16_t *)to + i) = __builtin_convertvector((bits & number) | (0x7fc0 & ~number), halves);
    }
    for (; i < count; i++) {
        uint16_t half = narrow(from[i]);
        memcpy((char *)to + i * sizeof half, &half, sizeof half);
    }
}

/* Lanes of a, and where one bit of their number is set of b; CROSS turns that bit of the number of the lane it takes. */
#define PICK(n, x) ((n) & x ? LANES + (n) : (n))
#if LANES == 16
#define BLEND(a, b, x) \
    __builtin_shufflevector(a, b, PICK(0, x), PICK(1, x), PICK(2, x), PICK(3, x), PICK(4, x), PICK(5, x), PICK(6, x), \
                            PICK(7, x), PICK(8, x), PICK(9, x), PICK(10, x), PICK(11, x), PICK(12, x), PICK(13, x), \
                            PICK(14, x), PICK(15, x))
#define CROSS(a, b, x) \
    __builtin_shufflevector(a, b, PICK(0, x) ^ x, PICK(1, x) ^ x, PICK(2, x) ^ x, PICK(3, x) ^ x, PICK(4, x) ^ x, \
                            PICK(5, x) ^ x, PICK(6, x) ^ x, PICK(7, x) ^ x, PICK(8, x) ^ x, PICK(9, x) ^ x, \
                            PICK(10, x) ^ x, PICK(11, x) ^ x, PICK(12, x) ^ x, PICK(13, x) ^ x, PICK(14, x) ^ x, \
                            PICK(15, x) ^ x)
#define EACH_BIT(step) step(8) step(4) step(2) step(1)
#else
#define BLEND(a, b, x) \
    __builtin_shufflevector(a, b, PICK(0, x), PICK(1, x), PICK(2, x), PICK(3, x), PICK(4, x), PICK(5, x), PICK(6, x), \
                            PICK(7, x))
#define CROSS(a, b, x) \
    __builtin_shufflevector(a, b, PICK(0, x) ^ x, PICK(1, x) ^ x, PICK(2, x) ^ x, PICK(3, x) ^ x, PICK(4, x) ^ x, \
                            PICK(5, x) ^ x, PICK(6, x) ^ x, PICK(7, x) ^ x)
#define EACH_BIT(step) step(4) step(2) step(1)
#endif
#define TURN(v, x) CROSS(v, v, x)
#define FOLD(x) v += TURN(v, x);
#define RAISE(x) v = larger(v, TURN(v, x));

INLINE floats larger(floats a, floats b) {
    ints first = a > b;
    return (floats)(((ints)a & first) | ((ints)b & ~first));
}

INLINE float total(floats v) {
    EACH_BIT(FOLD)
    return v[0];
}

INLINE floats largest(floats v) { /* in all lanes */
    EACH_BIT(RAISE)
    return v;
}

INLINE floats exponential(floats x) { /* e^x to two units in the last place; 0 below -87 */
    ints live = x > spread(-87.f);
    x = -larger(-larger(x, spread(-87.f)), spread(-88.f));
    floats n = x * 1.44269504f + spread(12582912.f); /* 1.5 * 2^23: the integer nearest lands in the low bits */
    ints power = (ints)n - (ints)spread(12582912.f);
    n -= spread(12582912.f);
    floats r = x - n * 0.693359375f + n * 2.12194440e-4f;
    floats p = r * (1.f / 5040) + 1.f / 720;
    p = p * r + 1.f / 120;
    p = p * r + 1.f / 24;
    p = p * r + 1.f / 6;
    p = p * r + .5f;
    p = (p * r + 1.f) * r + 1.f;
    return (floats)(((ints)p + (power << 23)) & live);
}

/* Whether rows are in bfloat16, too. */
INLINE int paired(const int kind) { return kind == PAIRS || kind == CODED_PAIRS; }

/* sum + a * b; of pairs, each holds two bfloat16 in a float's place, and both products are added. */
INLINE floats add_times(floats sum, floats a, floats b, const int kind) {
#ifdef __AVX512BF16__
    if (paired(kind)) return (floats)_mm512_dpbf16_ps((__m512)sum, (__m512bh)a, (__m512bh)b);
#endif
    (void)kind;
    return sum + a * b;
}

/* The same with one float, or a pair, for all lanes. */
INLINE floats accumulate(floats sum, floats weight, const float *x, const int kind) {
    if (!paired(kind)) return add_times(sum, weight, spread(*x), kind);
    int32_t two;
    memcpy(&two, x, sizeof two);
    return add_times(sum, weight, (floats)(two - (ints){0}), kind);
}

/* Bytes of a panel that a step of a product reads. */
INLINE int bytes_of(const int kind) {
    return kind >= CODED ? CODE_BYTES : kind == HALF ? 2 * PANEL : 4 * PANEL;
}

#if LANES == 16 && defined(__AVX512BW__)
#define READS_CODES 1
/* A panel's weights of two inputs, an output's side by side. */
INLINE void decode(const char *from, __m512i highs, floats weight[2]) {
    const __m512i low = _mm512_loadu_si512(from), sides = _mm512_set_epi64(4, 4, 4, 4, 0, 0, 0, 0);
    __m512i high = _mm512_broadcast_i64x4(_mm256_loadu_si256((const __m256i *)(from + LOWS)));
    high = _mm512_srlv_epi64(high, sides);
#ifdef __AVX512VBMI__
    high = _mm512_permutexvar_epi8(high, highs); /* by six bits, of which two do not matter */
#else
    high = _mm512_shuffle_epi8(highs, _mm512_and_si512(high, _mm512_set1_epi8(CODES - 1)));
#endif
    weight[0] = (floats)_mm512_unpacklo_epi8(low, high);
    weight[1] = (floats)_mm512_unpackhi_epi8(low, high);
}
#else
#define READS_CODES 0
#endif

/* What to multiply: `steps` inputs, or pairs of them, of a strip of outputs. */
typedef struct {
    const float *x;     /* [rows, x_stride], of which inputs, or pairs of them */
    float *y;
    const uint8_t *highs;
    const char *weight; /* the first panel's; the next one's is `apart` bytes on */
    const char *soon;   /* what is needed next of one panel, or of both, `soon_apart` bytes apart; or NULL */
    int64_t soon_step;  /* bytes of it that are asked for at a step */
    float *wide;        /* [panels][STRETCH][PANEL] gets the weights in float32, or in pairs; or NULL */
    int64_t x_stride, y_stride, apart, soon_apart, steps;
    int64_t onto; /* y is added to */
    int64_t lead; /* steps before it is read that a weight is asked for; `steps` where all that is asked for is `soon` */
} Task;

/* How near weights are brought, and how many bytes ahead of a panel's reading, at most. Into the second cache, a stretch
 * ahead, as the first has no room for as much. AMD's processors are told that weights are needed once, and little ahead:
 * then they are read faster, and more of other things stays in the caches meanwhile. */
#if LANES == 16 && (defined(__znver3__) || defined(__znver4__) || defined(__znver5__)) /* as compilers call them */
enum { LOCALITY = 0, LEAD = 5120 };
#else
enum { LOCALITY = 2, LEAD = 4 * STRETCH * PANEL };
#endif

/* Ask for what is needed soon. */
INLINE void ask(const char *soon, int64_t apart, const int lines) {
#pragma GCC unroll 2
    for (int at = 0; at < 64 * lines; at += 64) {
        __builtin_prefetch(soon + at, 0, LOCALITY);
        if (apart) __builtin_prefetch(soon + at + apart, 0, LOCALITY);
    }
}

/* Sums += x, from row to row, times vectors [from, to) of the weight's steps [begin, end). Meanwhile `step` bytes a step are
 * asked for from `soon` on, and `apart` bytes behind that, of as many panels as `asks` says; if it is less than 0, of the
 * first unless `soon` is NULL, and of the second unless `apart` is 0. */
INLINE void multiply_steps(const Task *t, const float *const x[FEW], floats sums[FEW][VECTORS], int64_t begin, int64_t end,
                           const char *soon, int64_t step, int64_t apart, const int rows, const int from, const int to,
                           const int kind, const int asks) {
    const int panels = (to - from) * LANES / PANEL, enough = LANES == 16 || !panels;
    const int lines = panels ? (bytes_of(kind) + 63) / 64 : 1, inputs = kind == CODED ? 2 : 1;
    const char *panel[2] = {t->weight, t->weight + t->apart};
    float *wide = t->wide;
#if READS_CODES
    const __m512i highs = kind < CODED ? _mm512_setzero_si512()
                                       : _mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i *)t->highs));
#endif
    for (int64_t i = begin; i < end; i++) {
        /* A compiler reads nothing past this, so that with registers enough the weights are read before it, and kept;
         * otherwise after it, and read anew for every row. */
        if ((asks < 0 ? soon != NULL : asks) && !enough) ask(soon + (i - begin) * step, asks == 1 ? 0 : apart, lines);
        floats weight[2][VECTORS]; /* of one step's inputs */
#if READS_CODES
        if (kind >= CODED)
            for (int one = 0; one < panels; one++) decode(panel[one] + i * CODE_BYTES, highs, weight[0] + 2 * one);
#endif
#pragma GCC unroll 4
        for (int v = from; v < to; v++) {
            const int one = v * LANES / PANEL, at = v * LANES % PANEL;
            if (kind < CODED) weight[0][v] = load(panel[one], i * PANEL + at, kind == HALF);
            if (kind == CODED) {
                weight[1][v] = (floats)((words)weight[0][v] & 0xffff0000);
                weight[0][v] = (floats)((words)weight[0][v] << 16);
            }
#if LANES == 8 && defined(__AVX2__) /* or gcc reads them anew for each row */
            if (enough) __asm__("" : "+x"(weight[0][v]));
#endif
            if ((kind == HALF || kind >= CODED) && wide)
                for (int side = 0; side < inputs; side++)
                    *(floats *)(wide + (one * STRETCH + i * inputs + side) * PANEL + at) = weight[side][v];
        }
        if ((asks < 0 ? soon != NULL : asks) && enough) ask(soon + (i - begin) * step, asks == 1 ? 0 : apart, lines);
#pragma GCC unroll 8
        for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
            for (int v = from; v < to; v++)
#pragma GCC unroll 2
                for (int side = 0; side < inputs; side++) {
                    const float *input = x[r] + i * inputs + side;
                    sums[r][v] = accumulate(sums[r][v], weight[side][v], input, kind);
                }
    }
}

/* Vectors [from, to) of y [rows, STRIP] = x [rows, steps] times the weight, or += that. */
INLINE void multiply(const Task *t, const int rows, const int from, const int to, const int kind) {
    const float *x[FEW];
    floats sums[FEW][VECTORS];
#pragma GCC unroll 8
    for (int r = 0; r < rows; r++) {
        x[r] = t->x + r * t->x_stride;
#pragma GCC unroll 4
        for (int v = from; v < to; v++) sums[r][v] = (floats){0};
    }
    for (int next = 0; next < 2; next++) { /* what is asked for is the rest of these panels, and then what comes next */
        const int64_t begin = next ? t->steps - t->lead : 0, end = next ? t->steps : t->steps - t->lead;
        const int64_t step = next ? t->soon_step : bytes_of(kind), apart = next ? t->soon_apart : t->apart;
        const char *soon = next ? t->soon : t->weight + t->lead * step;
        if (next && soon && from) soon += t->steps * step;
/* Of float32, the loop is so short that a test in it is felt; of the others, gcc then runs out of registers. */
#define STEPS(asks) multiply_steps(t, x, sums, begin, end, soon, step, apart, rows, from, to, kind, asks)
        if (kind != FULL) STEPS(-1);
        else if (!soon) STEPS(0);
        else if (apart) STEPS(2);
        else STEPS(1);
    }
#pragma GCC unroll 8
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
        for (int v = from; v < to; v++) {
            floats *y = (floats *)(t->y + r * t->y_stride + v * LANES);
            if (t->onto) *y += sums[r][v];
            else *y = sums[r][v];
        }
}

/* How often rows in registers pass over a strip's weights; bfloat16 needs registers to be widened in. */
INLINE int passes_of(const int64_t rows, const int kind) {
    return LANES == 8 && rows > (kind == HALF ? 2 : 3) ? 2 : 1;
}

#define ROWS(n)                                                                 \
    case n:                                                                     \
        if (LANES == 16 && panels == 1) multiply(t, n, 0, VECTORS / 2, kind);   \
        else multiply(t, n, 0, VECTORS / passes_of(n, kind), kind);             \
        if (passes_of(n, kind) > 1) multiply(t, n, VECTORS / 2, VECTORS, kind); \
        return;

/* Of a strip so many panels. */
INLINE void multiply_any(const Task *t, int64_t rows, const int panels, const int kind) {
    switch (rows) {
        ROWS(1) ROWS(2) ROWS(3) ROWS(4) ROWS(5) ROWS(6)
    }
}

/* Floats from row to row of what is multiplied: an odd number of cache lines, or rows of 4096 inputs, say, would all lie
 * in the same place of a cache. */
INLINE int64_t apart_by(int64_t inputs) { return ((inputs + 15) / 16 | 1) * 16; }

/* Floats of a row that is multiplied: inputs, or pairs of them. */
INLINE int64_t units_of(const Product *p) {
    return paired(p->kind) ? p->inputs / 2 : p->inputs;
}

/* Where the odd weights of a panel begin. */
INLINE int64_t odd_from(const Product *p, int64_t panel) { return p->odd && panel ? p->odd_end[panel - 1] : 0; }

/* A strip's y [rows, y_stride] += a group's rows times the odd weights of panels [first, last). */
static void add_odd(const Product *p, int64_t first, int64_t last, const float *x, float *y, int64_t y_stride,
                    int64_t rows) {
    const int64_t x_stride = apart_by(p->inputs);
    const int pairs = paired(p->kind);
    for (int64_t at = odd_from(p, first); at < odd_from(p, last); at++) {
        const Odd *o = p->odd + at;
        const float *input = x + (o->input >> pairs); /* or a pair of them */
        const uint32_t mask = pairs ? 0xffff0000 : ~0u;
        const int shift = pairs && o->input % 2 == 0 ? 16 : 0;
        for (int64_t r = 0; r < rows; r++) {
            uint32_t bits;
            float value;
            memcpy(&bits, input + r * x_stride, sizeof bits);
            bits = bits << shift & mask;
            memcpy(&value, &bits, sizeof value);
            y[r * y_stride + o->output % STRIP] += o->value * value;
        }
    }
}

/* Outputs of a strip; the last ones may have fewer than others, or none. */
INLINE int64_t outputs_of(const Product *p, int64_t strip) {
    const int64_t left = p->outputs - strip * STRIP;
    return left < 0 ? 0 : left < STRIP ? left : STRIP;
}

/* Rows [begin, end) of a strip's y get the bias of outputs [first, last). */
static void add_bias(const Product *p, float *y, int64_t y_stride, int64_t begin, int64_t end, int64_t first,
                     int64_t last) {
    if (last > p->outputs) last = p->outputs;
    for (int64_t r = begin; p->bias && r < end; r++)
        for (int64_t o = first; o < last; o++) y[r * y_stride + o % STRIP] += p->bias[o];
}

/* The weights of a strip from one of its panels on, and so many bytes from panel to panel. */
typedef struct {
    const char *weight;
    int64_t apart;
} Strip;

INLINE Strip strip_of(const Product *p, int64_t strip, int64_t first) {
    const int64_t steps = p->kind == CODED ? units_of(p) / 2 : units_of(p), apart = steps * bytes_of(p->kind);
    return (Strip){(const char *)p->weight + (strip * (STRIP / PANEL) + first) * apart, apart};
}

/* A strip's y [rows, y_stride] += groups [begin, end) of all rows times the weights of its `panels`, from the `first` on,
 * a stretch of inputs at a time, while the first ones of strip `then` are asked for, unless it is none. */
INLINE void multiply_panels(const Product *p, const float *x, float *y, int64_t y_stride, int64_t rows, int64_t strip,
                            int64_t first, const int panels, int64_t begin, int64_t end, int onto, Strip then) {
    const int64_t groups = (rows + FEW - 1) / FEW, size = bytes_of(p->kind), panel = strip * (STRIP / PANEL) + first;
    const int64_t taken = p->kind == CODED ? 2 : 1; /* floats of x at a step */
    const int64_t steps = units_of(p) / taken, stretches = (steps * taken + STRETCH - 1) / STRETCH;
    const int64_t x_stride = apart_by(p->inputs);
    Strip own = strip_of(p, strip, first);
    if (panels < STRIP / PANEL) own.apart = 0;
    const int keeps = p->kind == HALF ? end - begin > 1 : p->kind >= CODED && end - begin > MANY;
    float wide[STRIP * STRETCH] __attribute__((aligned(64)));
    int64_t passes = 0;
    for (int64_t g = begin; g < end; g++) passes += passes_of(rows * (g + 1) / groups - rows * g / groups, p->kind);
    const int64_t shares = passes < SHARES ? passes : SHARES; /* passes that ask, so that memory never waits for one */
    for (int64_t s = 0; s < stretches; s++) {
        int64_t from = steps * s / stretches, to = steps * (s + 1) / stretches, pass = 0;
        const Strip soon = s + 1 < stretches ? (Strip){own.weight + to * size, own.apart} : then;
        for (int64_t g = begin; g < end; g++) {
            int64_t row = rows * g / groups, count = rows * (g + 1) / groups - row, kind = p->kind;
            Task task = {.x = x + row * x_stride + from * taken, .x_stride = x_stride,
                         .y = y + row * y_stride + first * PANEL,
                         .weight = own.weight + from * size, .highs = p->highs, .apart = own.apart, .steps = to - from,
                         .y_stride = y_stride, .soon_step = size / shares, .lead = to - from, .onto = onto || s};
            if (passes == 1 && task.lead > LEAD / size) task.lead = LEAD / size;
            if (soon.weight && pass < panels * shares)
                task.soon = soon.weight + pass / shares * soon.apart + pass % shares * task.steps * task.soon_step;
            if (panels > 1 && passes == 1) task.soon_apart = soon.apart;
            pass += passes_of(count, kind);
            if (keeps && g == begin) task.wide = wide;
            if (keeps && g > begin) {
                kind = paired(kind) ? PAIRS : FULL;
                task.weight = (const char *)wide;
                task.apart = sizeof wide / panels;
                task.steps *= taken;
            }
            if (kind == FULL) multiply_any(&task, count, panels, FULL);
            else if (kind == HALF) multiply_any(&task, count, panels, HALF);
            else if (kind == PAIRS) multiply_any(&task, count, panels, PAIRS);
#if READS_CODES
            else if (kind == CODED) multiply_any(&task, count, panels, CODED);
            else multiply_any(&task, count, panels, CODED_PAIRS);
#endif
            if (s + 1 == stretches)
                add_odd(p, panel, panel + panels, x + row * x_stride, y + row * y_stride, y_stride, count);
        }
    }
    if (begin < end)
        add_bias(p, y, y_stride, rows * begin / groups, rows * end / groups, panel * PANEL, (panel + panels) * PANEL);
}

static void multiply_strip(const Product *p, const float *x, float *y, int64_t y_stride, int64_t rows, int64_t strip,
                           int64_t begin, int64_t end, int onto, Strip then) {
    multiply_panels(p, x, y, y_stride, rows, strip, 0, STRIP / PANEL, begin, end, onto, then);
}

/* One panel of a strip, times a group that is all rows. */
static void multiply_panel(const Product *p, const float *x, float *y, int64_t y_stride, int64_t rows, int64_t strip,
                           int64_t panel, int onto, Strip then) {
    multiply_panels(p, x, y, y_stride, rows, strip, panel, 1, 0, 1, onto, then);
}

#if HAS_TILES
/* Tiles are registers of 16 rows of 64 bytes, by which 16 rows of 32 inputs, in bfloat16, are multiplied with 16 outputs
 * at once: 16 rows in less time than memory needs for the weights. A row's sums run in one order whatever rows it is with.
 * A row in float32 goes in as three, of eight bits of each number, whose sum it is: no product is rounded. (What is below
 * 1.2e-38 counts as zero.) A process may use tiles once specdec_tiles has said so, and is killed for it before. */
enum { TILE = 16, STEP = 32, STEP_BYTES = 2 * STEP * PANEL };
/* Bytes that are asked for ahead of what is read; and groups of rows whose sums are kept, while the weights that they share
 * are in the cache. */
enum { AHEAD = 4096, CROWD = 16 };
#define FENCE __asm__ volatile("" ::: "memory") /* a compiler does not know what tiles read and write */
#define EACH_SUM(act, sum)                 \
    do {                                   \
        act(0, sum, 4 * STRIP);            \
        act(1, sum + TILE, 4 * STRIP);     \
        act(2, sum + 2 * TILE, 4 * STRIP); \
        act(3, sum + 3 * TILE, 4 * STRIP); \
    } while (0)

typedef struct { /* as the processor wants to be told */
    uint8_t palette, start, none[14];
    uint16_t bytes[TILE];
    uint8_t rows[TILE];
} Shapes;

INLINE int parts_of(const Product *p) { return p->kind == CODED ? 3 : 1; }

/* Tiles 0 to 3 have so many rows' sums, 4 rows, 5 to 7 weights. */
static void shape_tiles(int64_t rows) {
    Shapes shapes = {.palette = 1};
    for (int tile = 0; tile < 8; tile++) {
        shapes.rows[tile] = tile < 5 ? rows : TILE;
        shapes.bytes[tile] = 4 * TILE;
    }
    _tile_loadconfig(&shapes);
}

/* Sums += rows, [rows][STEP], times a step's weights of a strip, `apart` bytes from panel to panel, of which each is
 * [STEP / 2][PANEL][2]. */
INLINE void multiply_step(const char *x, const char *weight, int64_t apart) {
    _tile_loadd(4, x, 2 * STEP);
    _tile_loadd(5, weight, 4 * PANEL);
    _tile_loadd(6, weight + 4 * TILE, 4 * PANEL);
    _tile_dpbf16ps(0, 4, 5);
    _tile_dpbf16ps(1, 4, 6);
    _tile_loadd(7, weight + apart, 4 * PANEL);
    _tile_loadd(5, weight + apart + 4 * TILE, 4 * PANEL);
    _tile_dpbf16ps(2, 4, 7);
    _tile_dpbf16ps(3, 4, 5);
}

/* A panel in codes, as far as it is read: its bytes from the first step on, and the next ones of its odd weights. */
typedef struct {
    const char *from;
    const Odd *odd, *last;
} Panel;

/* A step's weights, [STEP / 2][PANEL][2]. */
INLINE void decode_step(Panel *panel, int64_t step, __m512i highs, char *to) {
    const char *from = panel->from + step * STEP / 2 * CODE_BYTES;
#pragma GCC unroll 16
    for (int pair = 0; pair < STEP / 2; pair++) {
        floats weight[2];
        if (pair % 2 == 0) ask(from + pair * CODE_BYTES + AHEAD, 0, 2 * CODE_BYTES / 64);
        decode(from + pair * CODE_BYTES, highs, weight);
        _mm512_store_si512(to + pair * 4 * PANEL, (__m512i)weight[0]);
        _mm512_store_si512(to + pair * 4 * PANEL + 4 * TILE, (__m512i)weight[1]);
    }
    for (; panel->odd < panel->last && panel->odd->input / STEP == step; panel->odd++) {
        const int64_t pair = panel->odd->input % STEP / 2, side = panel->odd->input % 2, own = panel->odd->output % PANEL;
        ((uint16_t *)to)[2 * (pair * PANEL + own) + side] = narrow(panel->odd->value);
    }
}

/* As multiply_strip, of up to CROWD groups; `x` is what gather_tiles made of the rows, and tiles are shaped for *shaped. */
static void multiply_tiles(const Product *p, const char *x, float *y, int64_t y_stride, int64_t rows, int64_t strip,
                           int64_t begin, int64_t end, int onto, int64_t *shaped) {
    enum { PANELS = STRIP / PANEL };
    const int coded = p->kind >= CODED, parts = parts_of(p), several = end - begin > 1;
    const int64_t most = TILE / parts, groups = (rows + most - 1) / most, steps = p->inputs / STEP;
    const int64_t stretches = several ? (p->inputs + STRETCH - 1) / STRETCH : 1;
    const int64_t kept = several ? STRETCH / STEP : 1; /* steps that are decoded for more than one group */
    const char *weight = (const char *)p->weight + strip * PANELS * steps * (coded ? STEP / 2 * CODE_BYTES : STEP_BYTES);
    const int64_t apart = coded ? STEP_BYTES : steps * STEP_BYTES; /* of panels that are multiplied */
    __m512i highs = _mm512_setzero_si512();
    Panel panel[PANELS];
    char wide[STRETCH / STEP * PANELS * STEP_BYTES] __attribute__((aligned(64)));
    float sums[CROWD][TILE * STRIP] __attribute__((aligned(64)));
    if (coded) highs = _mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i *)p->highs));
    for (int64_t n = 0, first = strip * PANELS; coded && n < PANELS; n++) {
        panel[n].from = weight + n * steps * STEP / 2 * CODE_BYTES;
        panel[n].odd = p->odd + odd_from(p, first + n), panel[n].last = p->odd + odd_from(p, first + n + 1);
    }
    for (int64_t s = 0; s < stretches; s++) {
        const int64_t from = steps * s / stretches, to = steps * (s + 1) / stretches;
        for (int64_t g = begin; g < end; g++) {
            const int64_t row = rows * g / groups, count = rows * (g + 1) / groups - row;
            const char *own = x + (row * steps + from * count) * parts * 2 * STEP;
            float *sum = sums[g - begin];
            if (count != *shaped) shape_tiles((*shaped = count) * parts);
            if (s) EACH_SUM(_tile_loadd, sum);
            else {
                _tile_zero(0);
                _tile_zero(1);
                _tile_zero(2);
                _tile_zero(3);
            }
            for (int64_t i = from; i < to; i++, own += count * parts * 2 * STEP) {
                char *decoded = wide + (i - from) % kept * PANELS * STEP_BYTES;
                const char *these = coded ? decoded : weight + i * STEP_BYTES;
                for (int n = 0; coded && g == begin && n < PANELS; n++)
                    decode_step(panel + n, i, highs, decoded + n * STEP_BYTES);
                if (!coded && g == begin) ask(these + AHEAD, apart, STEP_BYTES / 64);
                FENCE;
                multiply_step(own, these, apart);
            }
            EACH_SUM(_tile_stored, sum);
            FENCE;
            if (s + 1 < stretches) continue;
            for (int64_t r = 0; r < count; r++)
                for (int v = 0; v < VECTORS; v++) {
                    floats whole = {0};
                    for (int part = parts; part-- > 0;) whole += load(sum, (r * parts + part) * STRIP + v * LANES, 0);
                    float *total = y + (row + r) * y_stride + v * LANES;
                    if (onto) whole += load(total, 0, 0);
                    *(floats *)total = whole;
                }
        }
    }
    add_bias(p, y, y_stride, rows * begin / groups, rows * end / groups, strip * STRIP, (strip + 1) * STRIP);
}

/* `count` rows of x, from `row` on, go to their place as [inputs / STEP][count][parts][STEP] in bfloat16. */
static void gather_tiles(const Product *p, const float *x, char *grouped, int64_t row, int64_t count) {
    const int parts = parts_of(p);
    char *to = grouped + row * p->inputs * parts * 2;
    for (int64_t i = 0; i < p->inputs; i += STEP)
        for (int64_t r = 0; r < count; r++) {
            const int64_t at = (row + r) * apart_by(p->inputs) + i;
            floats low = load(x, at, 0), high = load(x, at + LANES, 0);
            for (int part = 0; part < parts; part++) {
                floats first = low, second = high;
                if (parts > 1) { /* infinity has no rest */
                    first = (floats)((words)low & 0xffff0000), second = (floats)((words)high & 0xffff0000);
                    low = (floats)((ints)(low - first) & (low != first));
                    high = (floats)((ints)(high - second) & (high != second));
                }
                _mm512_storeu_si512(to + ((i / STEP * count + r) * parts + part) * 2 * STEP,
                                    (__m512i)_mm512_cvtne2ps_pbh((__m512)second, (__m512)first));
            }
        }
}

#define release_tiles() _tile_release()
#else
enum { TILE = FEW, CROWD = 1 };
#define parts_of(p) 1
#define gather_tiles(p, x, grouped, row, count) (void)(grouped)
#define multiply_tiles(p, x, y, y_stride, rows, strip, begin, end, onto, shaped) (void)(shaped)
#define release_tiles() (void)0
#endif

static void store(void *to, int64_t at, const float *from, int64_t count, int half) {
    if (!half) memcpy((float *)to + at, from, count * sizeof(float));
    else narrow_all(from, (uint16_t *)to + at, count);
}

/* A row that a product reads, once it is there: in bfloat16, of pairs. */
INLINE int reads_pairs(const Product *p) { return paired(p->kind) && !(HAS_TILES && p->tiles); }
INLINE void ready(const Product *p, float *x) {
    if (reads_pairs(p)) narrow_all(x, x, p->inputs);
}

/* y [rows, y_stride] = x [rows, apart_by(inputs)], each `ready`, times the weight, plus the bias; `onto` y, or else in its
 * place. `grouped` has room for it as tiles are filled. `next`, unless it is NULL, is multiplied by next.
 * Unless `out` is NULL, y goes there [rows, outputs], in bfloat16 if `half`, and is itself [threads, rows, STRIP] only. */
static void product(const Product *p, const Product *next, const float *x, float *grouped, float *y, int64_t y_stride,
                    int64_t rows, int onto, void *out, int half, const Team *team) {
    const int tiles = HAS_TILES && p->tiles;
    const int64_t most = tiles ? TILE / parts_of(p) : FEW;
    const int64_t groups = (rows + most - 1) / most, me = team->me, count = team->count;
    /* What threads share: groups of rows of a strip, or of a single group its panels, as a weight may have few strips. */
    const int64_t panels = tiles || out || groups > 1 ? 1 : STRIP / PANEL, each = groups * panels;
    const int64_t all = padded(p->outputs) / STRIP * each;
    if (tiles) { /* what is multiplied at once lies side by side */
        SHARED(g, groups) gather_tiles(p, x, (char *)grouped, rows * g / groups, rows * (g + 1) / groups - rows * g / groups);
        meet(team);
    }
    int64_t shaped = 0;
    for (int64_t at = all * me / count, last = all * (me + 1) / count, begin, end; at < last; at += end - begin) {
        begin = at % each;
        end = each - begin < last - at ? each : begin + last - at;
        if (tiles && end - begin > CROWD) end = begin + CROWD;
        const int64_t strip = at / each, stride = out ? STRIP : y_stride;
        float *own = out ? y + me * rows * STRIP : y + strip * STRIP;
        if (tiles) multiply_tiles(p, (const char *)grouped, own, stride, rows, strip, begin, end, onto, &shaped);
        else {
            Strip then = {0}; /* where this thread goes on */
            if (at + end - begin < last) then = strip_of(p, strip + 1, 0);
            else if (next) {
                const int64_t there = padded(next->outputs) / STRIP * each * me / count;
                then = strip_of(next, there / each, there % panels);
            }
            if (end - begin < panels) multiply_panel(p, x, own, stride, rows, strip, begin, onto, then);
            else multiply_strip(p, x, own, stride, rows, strip, begin / panels, end / panels, onto, then);
        }
        for (int64_t r = rows * begin / groups; out && r < rows * end / groups; r++)
            store(out, r * p->outputs + strip * STRIP, own + r * STRIP, outputs_of(p, strip), half);
    }
    if (tiles) release_tiles();
    meet(team);
}

/* y = x * weight / rms(x), over `size` values. */
static void norm(const float *x, const float *weight, float *y, int64_t size, float epsilon) {
    floats squares = {0};
    int64_t whole = size / LANES * LANES;
    for (int64_t i = 0; i < whole; i += LANES) {
        floats v = load(x, i, 0);
        squares += v * v;
    }
    float sum = total(squares);
    for (int64_t i = whole; i < size; i++) sum += x[i] * x[i];
    float by = 1.f / sqrtf(sum / size + epsilon);
    for (int64_t i = 0; i < whole; i += LANES) *(floats *)(y + i) = load(x, i, 0) * by * load(weight, i, 0);
    for (int64_t i = whole; i < size; i++) y[i] = x[i] * by * weight[i];
}

static void rotate(float *head, const float *cosines, const float *sines, int64_t size) {
    int64_t half = size / 2;
    for (int64_t i = 0; i < half; i++) {
        float low = head[i], high = head[i + half];
        head[i] = low * cosines[i] + high * sines[i];
        head[i + half] = high * cosines[i + half] + low * sines[i + half];
    }
}

/* The slots that tree row `row` sees, in the order of their positions; returns how many. `slots` holds those of
 * committed positions from *begun on already. */
static int64_t path(const Block *b, const Slots *s, int64_t row, int32_t *slots, int64_t *begun) {
    int64_t first = b->length + b->depths[row] - s->window + 1;
    int64_t from = !s->window || first < 0 ? 0 : first < b->length ? first : b->length;
    if (from != *begun) {
        int64_t slot = from % s->size;
        for (int64_t p = 0; p < b->length - from; p++) {
            slots[p] = (int32_t)slot;
            if (++slot == s->size) slot = 0;
        }
        *begun = from;
    }
    int64_t own = 0, count = b->length - from;
    for (int64_t r = row; r >= 0 && (!s->window || b->depths[row] - b->depths[r] < s->window); r = b->parents[r]) own++;
    count += own;
    for (int64_t r = row, place = count; own > 0; own--, r = b->parents[r])
        slots[--place] = (int32_t)((b->length + r) % s->size);
    for (int64_t rest = count; rest < count + LANES; rest++) slots[rest] = slots[count - 1]; /* read, and weighed 0 */
    return count;
}

/* The same for a row below the one before it, whose `count` slots lie before; without a window. */
static int64_t onward(const Block *b, const Slots *s, int64_t row, int32_t *slots, int64_t room, int64_t count) {
    memcpy(slots, slots - room, count * sizeof *slots);
    for (int64_t rest = count++; rest < count + LANES; rest++) slots[rest] = (int32_t)((b->length + row) % s->size);
    return count;
}

/* Scores to shares, in place; zeros up to a whole block. */
static void soften(float *scores, int64_t count) {
    floats most = spread(-INFINITY), sum = {0};
    for (int64_t rest = count; rest % LANES; rest++) scores[rest] = -INFINITY;
    for (int64_t s = 0; s < count; s += LANES) most = larger(load(scores, s, 0), most);
    most = largest(most);
    for (int64_t s = 0; s < count; s += LANES) {
        floats e = exponential(load(scores, s, 0) - most);
        *(floats *)(scores + s) = e;
        sum += e;
    }
    float by = 1.f / total(sum);
    for (int64_t s = 0; s < count; s += LANES) *(floats *)(scores + s) *= by;
}

/* What the query heads of one key head see, for a few rows: queries, times the scale, and outputs [rows, stride], heads
 * side by side. A unit is a head of a row; they are numbered row by row. */
typedef struct {
    const float *query;
    float *output, *scores; /* scores [units, room], which become shares */
    const char *keys, *values;
    const char *soon[2];  /* what is read next, from such slots, while keys are read and while values are, or NULL */
    const int32_t *slots; /* [rows, room] */
    int64_t rows, heads, dim, room, query_stride, output_stride, count[2 * TOGETHER];
    int64_t chain; /* each row is below the one before it: they see the last one's slots, in this order */
    float cap;
    enum Kind kind; /* FULL: all in float32; HALF: keys and values in bfloat16; PAIRS: queries and shares as well */
} Seen;

/* Whether queries and shares are rounded to bfloat16, as keys and values are, so that pairs of them are multiplied. */
INLINE int attends_in_pairs(const Shape *m) {
#ifdef __AVX512BF16__
    return m->half && m->head_dim % (2 * LANES) == 0;
#else
    (void)m;
    return 0;
#endif
}

/* Whether pairs of them are multiplied by tiles. */
INLINE int attends_in_tiles(const Shape *m) { return HAS_TILES && m->tiles && m->half && m->head_dim % (2 * LANES) == 0; }

/* Rows that attend at once, so that what they see is read once. */
INLINE int64_t together(const Shape *m) { return attends_in_tiles(m) ? 2 * TOGETHER : TOGETHER; }

/* A block of LANES keys or values, and how many rows see it, one after the other. */
typedef struct {
    const char *at[LANES];
    int64_t rows;
} Keys;

/* The block that a row sees in its slots from `s` on. */
static void look_up(Keys *keys, const Seen *a, const char *from, int64_t row, int64_t s) {
    const int32_t *slots = a->slots + row * a->room + s;
    int64_t end = row + 1;
    for (; end < a->rows && s < a->count[end]; end++)
        if (memcmp(slots, slots + (end - row) * a->room, LANES * sizeof *slots)) break;
    keys->rows = end - row;
    for (int k = 0; k < LANES; k++) keys->at[k] = from + slots[k] * a->dim * (a->kind == FULL ? 4 : 2);
}

typedef struct {
    floats of[UNITS];
} Sums;

/* A key times the queries of some units. */
INLINE Sums times(const Keys *block, const float *const query[UNITS], int64_t dim, const int key, const int units,
                  const int kind) {
    Sums sums = {{{0}}};
    if (kind == PAIRS) dim /= 2;
    for (int64_t d = 0; d < dim; d += LANES) {
        floats own = load(block->at[key], d, kind == HALF);
        for (int u = 0; u < units; u++) sums.of[u] = add_times(sums.of[u], load(query[u], d, 0), own, kind);
    }
    return sums;
}

/* Their totals, for keys one after the other: of two keys, of four, and so on, in their lanes. */
#define LEVEL(name, below, x)                                                                                         \
    INLINE Sums name(const Keys *block, const float *const query[UNITS], int64_t dim, const int key, const int units, \
                     const int kind) {                                                                                \
        Sums a = below(block, query, dim, key, units, kind);                                                          \
        const Sums b = below(block, query, dim, key + x, units, kind);                                                \
        for (int u = 0; u < units; u++) a.of[u] = BLEND(a.of[u], b.of[u], x) + CROSS(a.of[u], b.of[u], x);            \
        return a;                                                                                                     \
    }
LEVEL(twos_of, times, 1)
LEVEL(fours_of, twos_of, 2)
#if LANES == 16
LEVEL(eights_of, fours_of, 4)
LEVEL(totals_of, eights_of, 8)
#else
LEVEL(totals_of, fours_of, 4)
#endif

INLINE floats capped(const Seen *a, floats scores) { /* by a tanh */
    return a->cap - 2 * a->cap / (1.f + exponential(scores * (2 / a->cap)));
}

/* Scores of some units for a block's keys. */
INLINE void score(const Seen *a, const Keys *block, const float *const query[UNITS], float *scores, const int units,
                  const int kind) {
    const int64_t dim = a->dim;
    Sums sums = dim == 64    ? totals_of(block, query, 64, 0, units, kind) /* most models', known to a compiler */
                : dim == 128 ? totals_of(block, query, 128, 0, units, kind)
                             : totals_of(block, query, dim, 0, units, kind);
    for (int u = 0; u < units; u++) {
        floats own = sums.of[u];
        if (a->cap) own = capped(a, own);
        *(floats *)(scores + u * a->room) = own;
    }
}

/* `width` vectors of some units' outputs, from `d` on, get a block's values by their shares. */
INLINE void mix_some(const Keys *block, float *const output[UNITS], const float *shares, int64_t room, int64_t d,
                     const int width, const int units, const int kind) {
    floats sums[UNITS][2][WIDE] = {{{{0}}}}; /* two by turns, as an addition takes longer than a load */
#pragma GCC unroll 1 /* or gcc reads all values first, and has no registers for them */
    for (int k = 0; k < LANES; k += 2)
        for (int turn = 0; turn < 2; turn++)
            for (int v = 0; v < width; v++) {
                floats value = load(block->at[k + turn], d + v * LANES, kind == HALF);
                for (int u = 0; u < units; u++) sums[u][turn][v] += value * shares[u * room + k + turn];
            }
    for (int u = 0; u < units; u++)
        for (int v = 0; v < width; v++) *(floats *)(output[u] + d + v * LANES) += sums[u][0][v] + sums[u][1][v];
}

#ifdef __AVX512BF16__
/* A half of the 32 values of which unpacking two vectors of them with others made the low ones and the high ones. */
INLINE floats repack(floats low, floats high, int half) {
    const __m512i first = _mm512_set_epi32(23, 22, 21, 20, 7, 6, 5, 4, 19, 18, 17, 16, 3, 2, 1, 0);
    return (floats)_mm512_permutex2var_ps((__m512)low, _mm512_add_epi32(first, _mm512_set1_epi32(8 * half)), (__m512)high);
}

/* The same in pairs of keys, whose values are brought side by side first; shares are in bfloat16, too. */
INLINE void mix_pairs(const Keys *block, float *const output[UNITS], const float *shares, int64_t room, int64_t d,
                      const int width, const int units) {
    floats sums[UNITS][WIDE] = {{{0}}};
#pragma GCC unroll 1
    for (int k = 0; k < LANES; k += 2)
        for (int v = 0; v < width; v += 2) {
            const __m512i one = _mm512_loadu_si512(block->at[k] + 2 * (d + v * LANES));
            const __m512i other = _mm512_loadu_si512(block->at[k + 1] + 2 * (d + v * LANES));
            const floats low = (floats)_mm512_unpacklo_epi16(one, other);
            const floats high = (floats)_mm512_unpackhi_epi16(one, other);
            for (int u = 0; u < units; u++) {
                sums[u][v] = accumulate(sums[u][v], low, shares + u * room + k / 2, PAIRS);
                sums[u][v + 1] = accumulate(sums[u][v + 1], high, shares + u * room + k / 2, PAIRS);
            }
        }
    for (int u = 0; u < units; u++)
        for (int v = 0; v < width; v += 2)
            for (int half = 0; half < 2; half++)
                *(floats *)(output[u] + d + (v + half) * LANES) += repack(sums[u][v], sums[u][v + 1], half);
}
#endif

/* Outputs of some units get a block's values by their shares. */
INLINE void mix(const Seen *a, const Keys *block, float *const output[UNITS], const float *shares, const int units,
                const int kind) {
    int64_t d = 0;
#ifdef __AVX512BF16__
    if (kind == PAIRS) {
        for (; d + WIDE * LANES <= a->dim; d += WIDE * LANES) mix_pairs(block, output, shares, a->room, d, WIDE, units);
        for (; d < a->dim; d += 2 * LANES) mix_pairs(block, output, shares, a->room, d, 2, units);
    }
#endif
    for (; d + WIDE * LANES <= a->dim; d += WIDE * LANES)
        mix_some(block, output, shares, a->room, d, WIDE, units, kind);
    for (; d < a->dim; d += LANES) mix_some(block, output, shares, a->room, d, 1, units, kind);
}

#define EACH_KIND(n, act)                                                  \
    case n:                                                                \
        if (a->kind == FULL) act(a, block, own, scores, n, FULL);          \
        else if (a->kind == HALF) act(a, block, own, scores, n, HALF);     \
        else act(a, block, own, scores, n, PAIRS);                         \
        return;

static void score_any(const Seen *a, const Keys *block, const float *const own[UNITS], float *scores, int64_t units) {
    switch (units) { EACH_KIND(1, score) EACH_KIND(2, score) EACH_KIND(3, score) }
}

static void mix_any(const Seen *a, const Keys *block, float *const own[UNITS], const float *scores, int64_t units) {
    switch (units) { EACH_KIND(1, mix) EACH_KIND(2, mix) EACH_KIND(3, mix) }
}

/* All blocks of the keys, or of the values, each for all units that see it while it is in the CPU's cache. Meanwhile as much
 * of what is read next is asked for, which weights drove out of the caches. */
static void each_block(const Seen *a, int64_t longest, int mixes) {
    const int64_t size = a->kind == PAIRS && !mixes ? a->dim / 2 : a->dim; /* floats of a unit */
    const int64_t bytes = a->dim * (a->kind == FULL ? 4 : 2);              /* of a key or value */
    Keys block;
    for (int64_t s = 0; s < longest; s += LANES)
        for (int64_t r = 0; r < a->rows; r += block.rows) {
            block.rows = 1;
            if (s >= a->count[r]) continue;
            look_up(&block, a, mixes ? a->values : a->keys, r, s);
            if (r == 0 && a->soon[mixes]) {
                const char *soon = a->soon[mixes] + a->slots[s] * bytes;
                for (const char *end = soon + LANES * bytes; soon < end; soon += 64) __builtin_prefetch(soon);
            }
            int64_t row = r, head = 0;
            for (int64_t unit = r * a->heads, end = unit + block.rows * a->heads, count; unit < end; unit += count) {
                const float *query[UNITS];
                float *output[UNITS], *scores = a->scores + unit * a->room + s / (a->kind == PAIRS && mixes ? 2 : 1);
                count = end - unit < UNITS ? end - unit : UNITS;
                for (int u = 0; u < count; u++) {
                    query[u] = a->query + row * a->query_stride + head * size;
                    output[u] = a->output + row * a->output_stride + head * size;
                    if (++head == a->heads) head = 0, row++;
                }
                if (mixes) mix_any(a, &block, output, scores, count);
                else score_any(a, &block, query, scores, count);
            }
        }
}

static void attend(const Seen *a) {
    int64_t longest = 0;
    for (int64_t r = 0; r < a->rows; r++) longest = a->count[r] > longest ? a->count[r] : longest;
    each_block(a, longest, 0);
    for (int64_t r = 0; r < a->rows; r++) {
        for (int64_t h = 0; h < a->heads; h++) {
            float *own = a->scores + (r * a->heads + h) * a->room;
            soften(own, a->count[r]);
            if (a->kind == PAIRS) narrow_all(own, own, (a->count[r] + LANES - 1) / LANES * LANES);
        }
        memset(a->output + r * a->output_stride, 0, a->heads * a->dim * sizeof(float));
    }
    each_block(a, longest, 1);
}

#if HAS_TILES
/* By tiles, 16 queries times 16 keys are one product. A unit's scores and sums run in one order whatever units are beside
 * it: over a head's values, and over blocks of so many keys of its path. Values are brought side by side, by two keys, for
 * so many blocks at once. */
enum { BLOCK = 32, SPAN = 8 };

/* Rows to columns. */
INLINE void transpose(floats v[TILE]) {
#define SWAP(x)                                        \
    for (int i = 0; i < TILE; i++)                     \
        if (!(i & x)) {                                \
            const floats t = CROSS(v[i], v[i + x], x); \
            v[i] = BLEND(v[i], t, x);                  \
            v[i + x] = BLEND(t, v[i + x], x);          \
        }
    EACH_BIT(SWAP)
#undef SWAP
}

/* Floats that rows need who attend by tiles: queries, what comes of them, some keys, and values of a span. */
INLINE int64_t room_for_tiles(const Shape *m) {
    const int64_t units = (together(m) * (m->query_heads / m->key_heads) + TILE - 1) / TILE * TILE;
    return attends_in_tiles(m) ? m->head_dim * (units / 2 + units + TILE / 2 + SPAN * BLOCK / 2) : 0;
}

/* Units' queries to [units / TILE][dim / STEP][STEP / 2][TILE], of pairs. */
static void gather_queries(const Seen *a, float *to) {
    const int64_t units = a->rows * a->heads;
    for (int64_t first = 0; first < units; first += TILE)
        for (int64_t d = 0; d < a->dim / 2; d += TILE, to += TILE * TILE) {
            floats pairs[TILE];
            for (int64_t u = 0; u < TILE; u++) {
                const int64_t unit = first + u < units ? first + u : units - 1;
                pairs[u] = load(a->query, unit / a->heads * a->query_stride + unit % a->heads * (a->dim / 2) + d, 0);
            }
            transpose(pairs);
            for (int i = 0; i < TILE; i++) *(floats *)(to + i * TILE) = pairs[i];
        }
}

/* Scores of units [first, end) for the keys in `slots` [from, to), of which `count` are seen. */
static void score_tiles(const Seen *a, const float *queries, int64_t first, int64_t end, const int32_t *slots,
                        int64_t from, int64_t to, int64_t count, char *beside) {
    const int64_t size = 2 * a->dim;
    float found[TILE * TILE] __attribute__((aligned(64)));
    if (to > count) to = count;
    for (int64_t s = from; s < to; s += TILE) {
        const char *keys = a->keys + slots[s] * size;
        if (s + TILE > count || slots[s + TILE - 1] - slots[s] != TILE - 1) { /* they do not lie side by side */
            for (int64_t k = 0; k < TILE; k++)
                memcpy(beside + k * size, a->keys + slots[s + k < count ? s + k : count - 1] * size, size);
            keys = beside;
            FENCE;
        }
        for (int64_t tile = first / TILE; tile * TILE < end; tile++) {
            const float *query = queries + tile * TILE * a->dim / 2;
            _tile_zero(0);
            for (int64_t d = 0; d < a->dim; d += STEP) {
                _tile_loadd(4, keys + 2 * d, size);
                _tile_loadd(5, query + d / STEP * TILE * TILE, 4 * TILE);
                _tile_dpbf16ps(0, 4, 5);
            }
            _tile_stored(0, found, 4 * TILE);
            FENCE;
            floats own[TILE];
            for (int i = 0; i < TILE; i++) own[i] = load(found, i * TILE, 0);
            transpose(own);
            for (int64_t u = 0; u < TILE; u++) {
                const int64_t unit = tile * TILE + u;
                if (unit < first || unit >= end) continue;
                if (a->cap) own[u] = capped(a, own[u]);
                *(floats *)(a->scores + unit * a->room + s) = own[u];
            }
        }
    }
}

/* `width` tiles of some units' sums, [dim] each, get `blocks` blocks of values by their shares. */
INLINE void mix_blocks(const float *shares, int64_t stride, const char *values, int64_t blocks, int64_t dim,
                       float *sums, const int width) {
    _tile_loadd(0, sums, 4 * dim);
    _tile_loadd(1, sums + TILE, 4 * dim);
    if (width > 2) {
        _tile_loadd(2, sums + 2 * TILE, 4 * dim);
        _tile_loadd(3, sums + 3 * TILE, 4 * dim);
    }
    for (int64_t b = 0; b < blocks; b++, shares += BLOCK / 2, values += 2 * BLOCK * dim) {
        _tile_loadd(4, shares, stride);
        _tile_loadd(5, values, 4 * TILE);
        _tile_dpbf16ps(0, 4, 5);
        _tile_loadd(6, values + TILE * TILE * 4, 4 * TILE);
        _tile_dpbf16ps(1, 4, 6);
        if (width == 2) continue;
        _tile_loadd(7, values + 2 * TILE * TILE * 4, 4 * TILE);
        _tile_dpbf16ps(2, 4, 7);
        _tile_loadd(5, values + 3 * TILE * TILE * 4, 4 * TILE);
        _tile_dpbf16ps(3, 4, 5);
    }
    _tile_stored(0, sums, 4 * dim);
    _tile_stored(1, sums + TILE, 4 * dim);
    if (width > 2) {
        _tile_stored(2, sums + 2 * TILE, 4 * dim);
        _tile_stored(3, sums + 3 * TILE, 4 * dim);
    }
}

/* Sums of units [first, end), [dim] each, get the values in `slots` [from, to), of which `count` are seen. */
static void mix_tiles(const Seen *a, float *sums, int64_t first, int64_t end, const int32_t *slots, int64_t from,
                      int64_t to, int64_t count, char *beside) {
    const int64_t dim = a->dim, size = 2 * dim;
    for (int64_t s = from, blocks; s < to; s += blocks * BLOCK) {
        blocks = (to - s + BLOCK - 1) / BLOCK;
        if (blocks > SPAN) blocks = SPAN;
        char *pair = beside;
        for (int64_t b = 0; b < blocks; b++, pair += (dim - TILE) * 4 * TILE)
            for (int64_t k = s + b * BLOCK; k < s + (b + 1) * BLOCK; k += 2, pair += 4 * TILE) {
                const char *one = a->values + slots[k < count ? k : count - 1] * size;
                const char *other = a->values + slots[k + 1 < count ? k + 1 : count - 1] * size;
                for (int64_t d = 0; d < dim; d += STEP) {
                    const __m512i v = _mm512_loadu_si512(one + 2 * d), w = _mm512_loadu_si512(other + 2 * d);
                    _mm512_storeu_si512(pair + d * 4 * TILE, _mm512_unpacklo_epi16(v, w));
                    _mm512_storeu_si512(pair + d * 4 * TILE + 4 * TILE * TILE, _mm512_unpackhi_epi16(v, w));
                }
            }
        FENCE;
        for (int64_t u = first, n; u < end; u += n) {
            n = end - u < TILE ? end - u : TILE;
            shape_tiles(n);
            for (int64_t d = 0; d < dim; d += 2 * STEP) {
                const float *shares = a->scores + u * a->room + s / 2;
                const char *values = beside + d * 4 * TILE;
                float *sum = sums + u * dim + d;
                if (d + STEP < dim) mix_blocks(shares, 4 * a->room, values, blocks, dim, sum, 4);
                else mix_blocks(shares, 4 * a->room, values, blocks, dim, sum, 2);
            }
        }
        FENCE;
    }
}

/* Whether values of slots are all numbers, so that what weighs 0 adds 0. */
static int all_finite(const Seen *a, const int32_t *slots, int64_t from, int64_t to) {
    const __m512i exponent = _mm512_set1_epi16(0x7f80);
    __mmask32 odd = 0;
    for (int64_t s = from; s < to; s++)
        for (int64_t d = 0; d < a->dim; d += STEP) {
            const __m512i own = _mm512_loadu_si512(a->values + (slots[s] * a->dim + d) * 2);
            odd |= _mm512_cmpeq_epi16_mask(_mm512_and_si512(own, exponent), exponent);
        }
    return !odd;
}

/* Rows attend by tiles; `rest` is room_for_tiles. What all of them see, they see at once, block by block, and then each
 * the rest of its own path. Those of a chain see the same all along, where the last ones weigh 0 for the first rows. */
static void attend_tiles(const Seen *a, float *rest) {
    const int64_t dim = a->dim, units = a->rows * a->heads, tiles = (units + TILE - 1) / TILE;
    float *queries = rest, *sums = queries + tiles * TILE * dim / 2;
    char *beside = (char *)(sums + tiles * TILE * dim);
    const int64_t final = a->rows - 1;
    int64_t longest = 0, shortest = a->count[0], common;
    for (int64_t r = 0; r < a->rows; r++) {
        longest = a->count[r] > longest ? a->count[r] : longest;
        shortest = a->count[r] < shortest ? a->count[r] : shortest;
    }
    const int64_t whole = (longest + BLOCK - 1) / BLOCK * BLOCK;
    const int32_t *last = a->slots + (a->chain ? 0 : final * a->room);
    if (a->chain) common = all_finite(a, last, shortest, longest) ? whole : shortest / BLOCK * BLOCK;
    else
        for (common = 0; common + BLOCK <= shortest; common += BLOCK)
            for (int64_t r = 0; r < final; r++)
                if (memcmp(last + common, a->slots + r * a->room + common, BLOCK * sizeof *last)) goto apart;
apart:
    gather_queries(a, queries);
    FENCE;
    shape_tiles(TILE);
    score_tiles(a, queries, 0, units, last, 0, common, a->count[final], beside);
    for (int64_t r = 0; r < a->rows; r++)
        score_tiles(a, queries, r * a->heads, (r + 1) * a->heads, a->chain ? last : a->slots + r * a->room, common,
                    a->count[r], a->count[r], beside);
    for (int64_t unit = 0; unit < units; unit++) {
        float *own = a->scores + unit * a->room;
        soften(own, a->count[unit / a->heads]);
        const int64_t ready = (a->count[unit / a->heads] + LANES - 1) / LANES * LANES;
        narrow_all(own, own, ready);
        memset((uint16_t *)own + ready, 0, (whole - ready) * sizeof(uint16_t));
    }
    memset(sums, 0, units * dim * sizeof *sums);
    FENCE;
    mix_tiles(a, sums, 0, units, last, 0, common, a->count[final], beside);
    for (int64_t r = 0; r < a->rows; r++)
        mix_tiles(a, sums, r * a->heads, (r + 1) * a->heads, a->chain ? last : a->slots + r * a->room, common, a->count[r],
                  a->count[r], beside);
    for (int64_t unit = 0; unit < units; unit++) {
        float *output = a->output + unit / a->heads * a->output_stride + unit % a->heads * dim;
        for (int64_t d = 0; d < dim; d += TILE) {
            const int64_t low = unit * dim + d / STEP * STEP;
            *(floats *)(output + d) = repack(load(sums, low, 0), load(sums, low + TILE, 0), d % STEP != 0);
        }
    }
}
#else
#define room_for_tiles(m) 0
#define attend_tiles(a, rest) (void)0
#endif

/* Of a row's scores; not a number of pages, or rows would stand in each other's way in the cache. */
static int64_t room_for(int64_t keys) { return padded(keys + 2 * LANES) + LANES; }

/* Floats that a worker needs to attend. */
static int64_t room_for_attention(const Shape *m, int64_t keys) {
    return room_for(keys) * together(m) * (m->query_heads / m->key_heads + 1) + room_for_tiles(m);
}

/* Normed, rotated and scaled queries, and keys of one row, in place; keys and values to their slot. */
static void store_row(const Shape *m, const Layer *l, const Slots *s, float *row, int64_t slot, const float *cosines,
                      const float *sines) {
    const int64_t dim = m->head_dim, turned = m->query_heads + m->key_heads;
    for (int64_t h = 0; h < turned; h++) {
        if (l->head_norm) norm(row + h * dim, l->head_norm + h * dim, row + h * dim, dim, l->head_epsilon);
        rotate(row + h * dim, cosines, sines, dim);
    }
    for (int64_t i = 0; i < m->query_heads * dim; i++) row[i] *= l->scale;
    if (attends_in_pairs(m)) narrow_all(row, row, m->query_heads * dim);
    for (int64_t h = 0; h < m->key_heads; h++) {
        store(s->keys, (h * s->stride + slot) * dim, row + (m->query_heads + h) * dim, dim, m->half);
        store(s->values, (h * s->stride + slot) * dim, row + (turned + h) * dim, dim, m->half);
    }
}

/* Rows of a block, as often as it has pieces of queries; keys that one of them sees, about; and how many of them are done
 * with so much of the `work` on them all. */
INLINE int64_t items_of(const Shape *m, const Block *b, int64_t pieces) { return m->key_heads * pieces * b->rows; }
INLINE int64_t keys_of(const Block *b) { return b->length + b->first + b->rows + LANES; }
INLINE int64_t share(int64_t work, int64_t each, int64_t items) {
    return work < 0 ? 0 : work / each < items ? work / each : items;
}

/* Store the rows' keys and values of layer n, then mix: qkv [rows, stride] to mixed [rows, apart_by(query_heads * head_dim)].
 * Rows that attend together are of one block, as their keys are. */
static void attention(const Shape *m, const Layer *l, const Rows *all, int64_t n, float *qkv, int64_t stride,
                      float *mixed, float *scratch, const Team *team) {
    const int64_t dim = m->head_dim, group = m->query_heads / m->key_heads, size = m->half ? 2 : 4;
    const enum Kind kind = attends_in_pairs(m) ? PAIRS : m->half ? HALF : FULL;
    const int64_t mixed_stride = apart_by(m->query_heads * dim);
    const Turns turns = all->turns[l->turns];
    SHARED(row, all->rows) {
        const Block *b = all->blocks;
        int64_t r = row; /* of its own block */
        while (r >= b->rows) r -= b++->rows;
        const Slots *s = b->slots + n;
        const int64_t at = all->by_row ? row : b->length + b->depths[b->first + r];
        store_row(m, l, s, qkv + row * stride, (b->length + b->first + r) % s->size, turns.cosines + at * dim,
                  turns.sines + at * dim);
    }
    meet(team);
    const int64_t room = room_for(all->keys), most = together(m);
    const int64_t pieces = all->rows == 1 ? group : 1, heads = group / pieces; /* of a key head's queries, for one row */
    int64_t work = 0; /* what is read, by the keys of all rows' pieces */
    for (const Block *b = all->blocks; b < all->blocks + all->count; b++) work += items_of(m, b, pieces) * keys_of(b);
    float *scores = scratch + team->me * room_for_attention(m, all->keys);
    int32_t *slots = (int32_t *)(scores + room * most * group);
    int64_t from = 0, before = 0; /* rows and work of the blocks before */
    const char *read = NULL;      /* the latest item's keys */
    for (const Block *b = all->blocks; b < all->blocks + all->count; from += b++->rows) {
        const Slots *s = b->slots + n;
        const int64_t items = items_of(m, b, pieces), each = s->stride * dim * size; /* bytes of a key head */
        int64_t begun[2 * TOGETHER], item = share(work * team->me / team->count - before, keys_of(b), items);
        const int64_t end = share(work * (team->me + 1) / team->count - before, keys_of(b), items);
        for (int r = 0; r < most; r++) begun[r] = -1;
        for (int64_t count; item < end; item += count) {
            const int64_t r = item % b->rows, head = item / b->rows * heads, at = head / group * each;
            count = b->rows - r < end - item ? b->rows - r : end - item;
            if (count > most) count = most;
            const int64_t after = item + count;
            const char *keys = (const char *)s->keys + at, *values = (const char *)s->values + at;
            const char *next = after < items ? (const char *)s->keys + after / b->rows * heads / group * each
                               : b + 1 < all->blocks + all->count ? b[1].slots[n].keys : keys;
            Seen seen = {.keys = keys, .values = values,
                         .soon = {keys == read ? NULL : values, keys == next ? NULL : next},
                         .query = qkv + (from + r) * stride + head * dim / (kind == PAIRS ? 2 : 1),
                         .output = mixed + (from + r) * mixed_stride + head * dim,
                         .scores = scores, .slots = slots, .dim = dim, .heads = heads, .room = room,
                         .rows = count, .query_stride = stride,
                         .output_stride = mixed_stride, .cap = l->cap, .kind = kind};
            if (attends_in_tiles(m)) {
                seen.chain = !s->window;
                for (int64_t row = b->first + r + 1; row < b->first + r + seen.rows; row++)
                    seen.chain &= b->parents[row] == row - 1;
                for (int64_t i = seen.chain ? seen.rows - 1 : 0, own = 0; i < seen.rows; i++, own++)
                    seen.count[i] = path(b, s, b->first + r + i, slots + own * room, begun + own);
                for (int64_t i = 0; seen.chain && i < seen.rows; i++)
                    seen.count[i] = seen.count[seen.rows - 1] - (seen.rows - 1 - i);
                attend_tiles(&seen, (float *)(slots + room * most));
                continue;
            }
            for (int64_t i = 0; i < seen.rows; i++) {
                const int64_t row = b->first + r + i;
                if (i && !s->window && b->parents[row] == row - 1)
                    seen.count[i] = onward(b, s, row, slots + i * room, room, seen.count[i - 1]);
                else seen.count[i] = path(b, s, row, slots + i * room, begun + i);
            }
            attend(&seen);
            read = keys;
        }
        before += items * keys_of(b);
    }
    if (attends_in_tiles(m)) release_tiles();
    meet(team);
    if (!reads_pairs(&l->out)) return;
    SHARED(row, all->rows) ready(&l->out, mixed + row * mixed_stride);
    meet(team);
}

/* Floats that a row of `count` inputs takes as tiles are filled. */
INLINE int64_t gathered(int64_t count) { return HAS_TILES ? count + (count + 1) / 2 : 0; }

/* Scratch of so many floats, to be given back. One is kept for the next call, up to a size: else the system would take back
 * its pages after every forward of many rows, and clear new ones for the next. */
static float *kept;
#ifdef __SANITIZE_ADDRESS__ /* what is kept may be longer than what was asked for, and hide a look past its end */
enum { KEPT = 0 };
#else
enum { KEPT = 32 << 20 };
#endif

static float *take_scratch(int64_t count) {
    const size_t size = (size_t)(count / 16 + 2) * 64; /* and a cache line before it says this */
    float *found = __atomic_exchange_n(&kept, NULL, __ATOMIC_ACQUIRE);
    if (found && *(size_t *)found < size) free(found), found = NULL;
    if (!found && !(found = aligned_alloc(64, size))) return NULL;
    *(size_t *)found = size;
    return found + 16;
}

static void give_scratch(float *scratch) {
    scratch -= 16;
    if (*(size_t *)scratch <= KEPT) scratch = __atomic_exchange_n(&kept, scratch, __ATOMIC_RELEASE);
    free(scratch);
}

INLINE float value_of(const void *values, int64_t i, int half) {
    return half ? widen(((const uint16_t *)values)[i]) : ((const float *)values)[i];
}

static void widen_all(const void *from, float *to, int64_t count, int half) {
    for (int64_t i = 0; i < count; i++) to[i] = value_of(from, i, half);
}

INLINE const void *row_of(const void *rows, int64_t row, int64_t size, int half) {
    return (const char *)rows + row * size * (half ? 2 : 4);
}

/* The largest of values [first, end), or NaN where one of them is that. */
INLINE float highest(const void *values, int64_t first, int64_t end, const int half) {
    floats most[VECTORS], odd = {0};
    for (int v = 0; v < VECTORS; v++) most[v] = spread(-INFINITY);
    for (; first + STRIP <= end; first += STRIP)
        for (int v = 0; v < VECTORS; v++) {
            floats own = load(values, first + v * LANES, half);
            most[v] = larger(own, most[v]);
            odd = (floats)((ints)odd | (own != own)); /* all bits set are NaN, too */
        }
    for (int v = 1; v < VECTORS; v++) most[0] = larger(most[v], most[0]);
    float best = largest(most[0])[0], sum = total(odd);
    for (; first < end; first++) {
        float own = value_of(values, first, half);
        if (own > best) best = own;
        if (own != own) sum = own;
    }
    return sum != sum ? sum : best;
}

/* Whether a comes before b where the largest come first; NaN is larger than every number. */
INLINE int before(float a, float b) { return a > b || (a != a && b == b); }

/* Puts the places of values [first, end) in among `known` ones of the `count` largest, the largest first, of equal ones
 * the first; none that comes after a value of `least`. Returns how many are known. */
INLINE int64_t rise(const void *values, int64_t first, int64_t end, float least, int64_t known, int64_t count,
                    int64_t *best, const int half) {
    if (known == count) least = value_of(values, best[count - 1], half);
    for (int64_t i = first; i < end; i++) {
        float value = value_of(values, i, half);
        if (known == count ? !before(value, least) : before(least, value)) continue;
        int64_t at = known < count ? known++ : count - 1;
        for (; at > 0 && before(value, value_of(values, best[at - 1], half)); at--) best[at] = best[at - 1];
        best[at] = i;
        if (known == count) least = value_of(values, best[count - 1], half);
    }
    return known;
}

/* specdec_top of one row. As many blocks as there are places to find hold a value that is no less than the least of the
 * largest blocks' own largest ones: no block below that, and no value, is looked at again. */
INLINE void top(const void *row, int64_t size, int64_t count, int64_t *best, const int half) {
    const int64_t width = (size / BLOCKS / STRIP + 1) * STRIP, blocks = (size + width - 1) / width;
    float most[BLOCKS], least = -INFINITY;
    for (int64_t b = 0; b < blocks; b++)
        most[b] = highest(row, b * width, b * width + width < size ? b * width + width : size, half);
    if (count <= blocks) {
        rise(most, 0, blocks, least, 0, count, best, 0);
        least = most[best[count - 1]];
    }
    for (int64_t b = 0, known = 0; b < blocks; b++)
        if (!before(least, most[b]))
            known = rise(row, b * width, b * width + width < size ? b * width + width : size, least, known, count, best,
                         half);
}

/* The places of the `count` largest of each row's `size` values, the largest first, of equal ones the first, to `best`
 * [rows, count], and these values to `found`, if that is not NULL. The rows are those `wanted` of `values`; where it is
 * NULL, the first ones. */
void specdec_top(const void *values, const int64_t *wanted, int64_t rows, int64_t size, int half, int64_t count,
                 int64_t *best, float *found) {
    for (int64_t r = 0; r < rows; r++, best += count) {
        const void *row = row_of(values, wanted ? wanted[r] : r, size, half);
        if (half) top(row, size, count, best, 1);
        else top(row, size, count, best, 0);
        for (int64_t n = 0; found && n < count; n++) *found++ = value_of(row, best[n], half);
    }
}

/* The first of the largest values; -1 where that is no finite number, or one of them is none. */
static int64_t peak(const void *values, int64_t count, int half) {
    float best = -INFINITY;
    int64_t first = 0;
    for (int64_t i = 0, end; i < count; i = end) {
        end = i + PEAK < count ? i + PEAK : count;
        float most = half ? highest(values, i, end, 1) : highest(values, i, end, 0);
        if (most != most) return -1;
        if (most > best) best = most, first = i;
    }
    if (!(fabsf(best) < INFINITY)) return -1;
    while (value_of(values, first, half) != best) first++;
    return first;
}

static int draw(const void *scores, int64_t count, int half, float by, uint64_t key, int64_t likeliest);

/* Rows `wanted` (all `count`, where it is NULL) of `hidden` through the last norm, and on to `logits` [count, outputs]
 * and each one's `best` token, or -1 where they are no distribution. `normed`, unless it is NULL, gets all `rows`
 * after the norm. All in the model's dtype. The places of the `tops` largest logits of each row, and these, go to `most`
 * and `found` [count, tops], as of specdec_top, while they are still at hand; so does the draw of each row for which `by`
 * is more than 0, as of specdec_draw, to `drawn`, unless it is NULL. */
static void read_head(const Shape *m, const Head *head, const void *hidden, int64_t rows, void *normed,
                      const int64_t *wanted, int64_t count, void *logits, int64_t *best, int64_t tops, int64_t *most,
                      float *found, const float *by, const uint64_t *keys, int64_t *drawn, float *scratch, const Team *team) {
    const Product *p = &head->product;
    const int64_t size = m->hidden, half = m->half;
    float *x = scratch, *grouped = x + count * apart_by(size), *sums = grouped + count * gathered(size);
    float *all = sums + team->count * count * STRIP;
    if (normed)
        SHARED(r, rows) {
            widen_all(row_of(hidden, r, size, half), all + r * size, size, half);
            norm(all + r * size, head->norm, all + r * size, size, head->epsilon);
            store(normed, r * size, all + r * size, size, half);
        }
    SHARED(r, count) {
        float *own = x + r * apart_by(size);
        widen_all(row_of(hidden, wanted ? wanted[r] : r, size, half), own, size, half);
        norm(own, head->norm, own, size, head->epsilon);
        for (int64_t i = 0; half && i < size; i++) own[i] = widen(narrow(own[i]));
        ready(p, own);
    }
    meet(team);
    product(p, NULL, x, grouped, sums, STRIP, count, 0, logits, half, team);
    SHARED(r, count) {
        const void *own = row_of(logits, r, p->outputs, half);
        if (tops) {
            specdec_top(own, NULL, 1, p->outputs, half, tops, most + r * tops, found + r * tops);
            best[r] = fabsf(found[r * tops]) < INFINITY ? most[r * tops] : -1;
        } else best[r] = peak(own, p->outputs, half);
        if (drawn) drawn[r] = by[r] > 0 ? draw(own, p->outputs, half, by[r], keys[r], best[r]) : -1;
    }
}

/* Floats that it needs. */
static int64_t room_for_head(const Shape *m, int64_t rows, const void *normed, int64_t count, int threads) {
    return (normed ? rows : 0) * m->hidden + count * (apart_by(m->hidden) + gathered(m->hidden) + threads * STRIP);
}

/* The stream [rows, width] gets x [rows, inputs] times the weight, normed first where there is a weight for that;
 * `apart` has the stream's size. Of the stream a thread knows its share of the rows. */
static void add_product(const Product *p, const Product *next, const float *x, float *grouped, const float *weight,
                        float epsilon, float *stream, float *apart, int64_t width, int64_t rows, const Team *team) {
    if (!weight) {
        product(p, next, x, grouped, stream, width, rows, 1, NULL, 0, team);
        return;
    }
    product(p, next, x, grouped, apart, width, rows, 0, NULL, 0, team);
    SHARED(r, rows) {
        norm(apart + r * width, weight, apart + r * width, p->outputs, epsilon);
        for (int64_t i = 0; i < p->outputs; i++) stream[r * width + i] += apart[r * width + i];
    }
}

/* Where among the bytes of two inputs an output's low byte of the first one lies; its code as well. */
INLINE int64_t place_of(int64_t output) { /* as decode takes a panel's two vectors from the halves of every 16 bytes */
    return output % 16 / 4 * 16 + output / 16 * 8 + output % 4 * 2;
}

/* y [inputs] gets a row of a weight, of which the values that have no code are zeros. */
INLINE void copy_row(const Product *p, int64_t number, void *y, const int kind, const int half) {
    const int64_t own = number % PANEL, place = place_of(own), steps = kind < PAIRS ? p->inputs : p->inputs / 2;
    const char *panel = (const char *)p->weight + number / PANEL * steps * bytes_of(kind);
    for (int64_t i = 0; i < p->inputs; i++) {
        if (kind == FULL) {
            ((float *)y)[i] = ((const float *)panel)[i * PANEL + own];
            continue;
        }
        uint16_t value;
        if (kind == HALF) value = ((const uint16_t *)panel)[i * PANEL + own];
        else if (kind == PAIRS) value = ((const uint16_t *)panel)[(i / 2 * PANEL + own) * 2 + i % 2];
        else {
            const uint8_t *step = (const uint8_t *)panel + i / 2 * CODE_BYTES;
            const int code = step[LOWS + place % PANEL + i % 2] >> (place < PANEL ? 0 : 4) & (CODES - 1);
            value = step[place + i % 2] | p->highs[code] << 8;
        }
        if (half) ((uint16_t *)y)[i] = value;
        else ((float *)y)[i] = widen(value);
    }
}

/* y [inputs], in bfloat16 or float32, gets a row of a weight. */
static void look_up_row(const Product *p, int64_t number, void *y, int half) {
    const int64_t panel = number / PANEL;
#define COPY(kind) half ? copy_row(p, number, y, kind, 1) : copy_row(p, number, y, kind, 0)
    if (p->kind == FULL) copy_row(p, number, y, FULL, 0);
    else if (p->kind == HALF) COPY(HALF);
    else if (p->kind == PAIRS) COPY(PAIRS);
    else COPY(CODED);
#undef COPY
    for (int64_t at = odd_from(p, panel); at < odd_from(p, panel + 1); at++) {
        if (p->odd[at].output != number) continue;
        if (half) ((uint16_t *)y)[p->odd[at].input] = narrow(p->odd[at].value);
        else ((float *)y)[p->odd[at].input] = p->odd[at].value;
    }
}

/* `hidden` [rows, m->hidden], or where it is NULL what the rows' tokens are embedded as, through layers [first, last), to
 * `out`, all in the model's dtype. Where there are `taps`, taps[n], unless it is NULL, gets what goes into layer n. Unless
 * `head` is NULL, read_head comes next. Returns 0, or 1 where there is no memory left, or 2 where there is no such token. */
int specdec_run_layers(const Shape *m, const Layer *layers, const Rows *all, const void *hidden, void *out,
                       void *const *taps, int64_t first, int64_t last, const Head *head, void *final,
                       const int64_t *wanted, int64_t count, void *logits, int64_t *best, int64_t tops, int64_t *most,
                       float *found, const float *by, const uint64_t *keys, int64_t *drawn, int threads) {
    const int64_t rows = all->rows, width = padded(m->hidden), size = m->hidden, half = m->half;
    const int64_t heads = padded((m->query_heads + 2 * m->key_heads) * m->head_dim), mix = m->query_heads * m->head_dim;
    const int64_t wide = padded(2 * m->inner);
    const int64_t seen = apart_by(size), mixed_stride = apart_by(mix), inner = apart_by(m->inner);
    const int64_t attending = room_for_attention(m, all->keys) * threads;
    const int64_t widest = m->inner > mix ? m->inner > size ? m->inner : size : mix > size ? mix : size;
    const int64_t reading = head ? room_for_head(m, rows, final, count, threads) : 0;
    for (int64_t r = 0; !hidden && r < rows; r++)
        if (all->tokens[r] < 0 || all->tokens[r] >= all->embedding->outputs) return 2;
    float *scratch = take_scratch(
        rows * (2 * width + seen + heads + mixed_stride + wide + inner + gathered(widest)) + attending + reading);
    if (!scratch) return 1;
    float *stream = scratch, *apart = stream + rows * width, *normed = apart + rows * width, *qkv = normed + rows * seen;
    float *mixed = qkv + rows * heads, *gates = mixed + rows * mixed_stride, *active = gates + rows * wide;
    float *grouped = active + rows * inner, *rest = grouped + rows * gathered(widest), *read = rest + attending;
    AS_TEAM {
        SHARED(r, rows) {
            if (hidden) widen_all(row_of(hidden, r, size, half), stream + r * width, size, half);
            else look_up_row(all->embedding, all->tokens[r], stream + r * width, 0);
        }
        for (int64_t n = first; n < last; n++) {
            const Layer *l = layers + n;
            SHARED(r, rows) {
                float *own = stream + r * width;
                for (int64_t i = 0; half && i < size; i++) own[i] = widen(narrow(own[i])); /* a walk may begin here */
                if (taps && taps[n]) store(taps[n], r * size, own, size, half);
                norm(own, l->first_norm, normed + r * seen, size, l->first_epsilon);
                ready(&l->qkv, normed + r * seen);
            }
            meet(team);
            product(&l->qkv, &l->out, normed, grouped, qkv, heads, rows, 0, NULL, 0, team);
            attention(m, l, all, n, qkv, heads, mixed, rest, team);
            add_product(&l->out, &l->gate_up, mixed, grouped, l->out_norm, l->out_epsilon, stream, apart, width, rows, team);
            SHARED(r, rows) {
                norm(stream + r * width, l->second_norm, normed + r * seen, size, l->second_epsilon);
                ready(&l->gate_up, normed + r * seen);
            }
            meet(team);
            product(&l->gate_up, &l->down, normed, grouped, gates, wide, rows, 0, NULL, 0, team);
            SHARED(r, rows) {
                const float *gate = gates + r * wide, *up = gate + m->inner;
                float *own = active + r * inner;
                for (int64_t i = 0; i + LANES <= m->inner; i += LANES) {
                    floats g = load(gate, i, 0), bent = g;
                    if (m->gelu) bent = g * (1.5957691f + 0.07135481f * g * g); /* 2 sqrt(2 / pi) (g + 0.044715 g^3) */
                    *(floats *)(own + i) = g / (1.f + exponential(-bent)) * load(up, i, 0);
                }
                ready(&l->down, own);
            }
            meet(team);
            const Product *next = n + 1 < last ? &l[1].qkv : head ? &head->product : NULL;
            add_product(&l->down, next, active, grouped, l->down_norm, l->down_epsilon, stream, apart, width, rows, team);
        }
        SHARED(r, rows) store(out, r * size, stream + r * width, size, half);
        meet(team);
        if (head)
            read_head(m, head, out, rows, final, wanted, count, logits, best, tops, most, found, by, keys, drawn, read, team);
    }
    give_scratch(scratch);
    return 0;
}

/* y [rows, outputs] = onto, or 0 where it is NULL, plus x [rows, inputs] times one weight; in bfloat16 or float32.
 * Returns 0, or 1 where there is no memory left. */
int specdec_product(const Product *p, const void *x, const void *onto, void *y, int64_t rows, int half, int threads) {
    const int64_t width = padded(p->outputs), seen = apart_by(p->inputs);
    float *scratch = take_scratch(rows * (seen + gathered(p->inputs) + width));
    if (!scratch) return 1;
    float *grouped = scratch + rows * seen, *sums = grouped + rows * gathered(p->inputs);
    AS_TEAM {
        SHARED(r, rows) {
            widen_all(row_of(x, r, p->inputs, half), scratch + r * seen, p->inputs, half);
            ready(p, scratch + r * seen);
            if (onto) widen_all(row_of(onto, r, p->outputs, half), sums + r * width, p->outputs, half);
        }
        meet(team);
        product(p, NULL, scratch, grouped, sums, width, rows, onto != NULL, NULL, 0, team);
        SHARED(r, rows) store(y, r * p->outputs, sums + r * width, p->outputs, half);
    }
    give_scratch(scratch);
    return 0;
}

/* Medusa's heads. Each head's state is what was brought, and gets SiLU(block's product) after every block. */
typedef struct {
    const Product *blocks; /* the first one's, of all heads at once, and then every further one's, head by head */
    const Product *ends;   /* to the logits: one for all heads, or each head's own; or NULL, where these are the states */
    int64_t layers, heads, size, own;
} Heads;

/* A row brings its `hidden` state [size] and, where the first block reads more than that, what is `embedded` [rows, size]
 * of its root, which is scaled to a mean square of 1. Of each row `found` gets [heads, outputs] logits or [heads, size]
 * states; all in bfloat16 or float32. Returns as specdec_product. */
int specdec_guess(const Heads *h, const void *const *hidden, const void *embedded, int64_t rows, void *const *found,
                  int half, int threads) {
    const int64_t size = h->size, heads = h->heads, all = rows * heads, seen = h->blocks->inputs;
    const int64_t line = apart_by(size), first = apart_by(seen); /* of rows that are multiplied */
    const int64_t wide = padded(heads * size), width = h->ends ? padded(h->ends->outputs) : 0;
    const int64_t most = rows * gathered(seen) > all * gathered(size) ? rows * gathered(seen) : all * gathered(size);
    float *scratch = take_scratch(rows * (first + line + wide) + all * (line + width) + most);
    if (!scratch) return 1;
    float *brought = scratch, *states = brought + rows * first; /* [heads, rows, line], as a head's own products read it */
    float *read = states + all * line, *more = read + rows * line, *logits = more + rows * wide;
    float *grouped = logits + all * width;
    AS_TEAM {
        SHARED(r, rows) {
            float *own = brought + r * first, *root = own + size, squares = 0;
            widen_all(hidden[r], own, size, half);
            for (int64_t k = 0; k < heads; k++) memcpy(states + (k * rows + r) * line, own, size * sizeof *own);
            if (seen > size) {
                widen_all(row_of(embedded, r, size, half), root, size, half);
                for (int64_t i = 0; i < size; i++) squares += root[i] * root[i];
                const float by = 1.f / sqrtf(squares / size + FLT_EPSILON);
                for (int64_t i = 0; i < size; i++) root[i] *= by;
            }
            ready(h->blocks, own);
        }
        meet(team);
        for (int64_t n = 0; n < h->layers; n++)
            for (int64_t k = 0; k < heads; k++) {
                const Product *p = n ? h->blocks + 1 + (n - 1) * heads + k : h->blocks;
                float *own = states + k * rows * line, *from = n ? read : brought;
                const int64_t stride = n ? padded(size) : wide;
                if (n) { /* pairs round it, which the state is not */
                    SHARED(r, rows) {
                        memcpy(from + r * line, own + r * line, line * sizeof *own);
                        ready(p, from + r * line);
                    }
                    meet(team);
                }
                if (n || !k) product(p, NULL, from, grouped, more, stride, rows, 0, NULL, 0, team);
                SHARED(r, rows) {
                    const float *added = more + r * stride + (n ? 0 : k * size);
                    int64_t i = 0;
                    for (float *to = own + r * line; i + LANES <= size; i += LANES) {
                        const floats bent = load(added, i, 0);
                        *(floats *)(to + i) += bent / (1.f + exponential(-bent));
                    }
                    for (; i < size; i++) own[r * line + i] += added[i] / (1.f + expf(-added[i]));
                }
                meet(team);
            }
        if (h->ends) {
            SHARED(r, all) ready(h->ends + (h->own ? r / rows : 0), states + r * line);
            meet(team);
        }
        for (int64_t k = 0; h->ends && k < (h->own ? heads : 1); k++) {
            const int64_t count = h->own ? rows : all;
            product(h->ends + k, NULL, states + k * rows * line, grouped, logits + k * rows * width, width, count, 0, NULL,
                    0, team);
        }
        SHARED(r, rows)
            for (int64_t k = 0; k < heads; k++) {
                const float *own = h->ends ? logits + (k * rows + r) * width : states + (k * rows + r) * line;
                const int64_t count = h->ends ? h->ends->outputs : size;
                store(found[r], k * count, own, count, half);
            }
    }
    give_scratch(scratch);
    return 0;
}

/* How often each high byte occurs among `count` bfloat16 values. */
void specdec_count_highs(const uint16_t *values, int64_t count, int64_t *found) {
    int64_t some[4][256] = {0}; /* so that one count need not wait for another of the same byte */
    for (int64_t i = 0; i < count; i++) some[i % 4][values[i] >> 8]++;
    for (int i = 0; i < 256; i++) found[i] = some[0][i] + some[1][i] + some[2][i] + some[3][i];
}

/* Codes a bfloat16 weight [outputs, inputs] by the high bytes of `p`, whose other fields are set but for what is
 * written: the weight, the odd ones and their ends, for which there is room. */
void specdec_code(const Product *p, const uint16_t *values, uint8_t *weight, Odd *odd, int64_t *odd_end) {
    const int64_t panels = padded(p->outputs) / PANEL;
    uint8_t codes[256] = {0};
    for (int i = 1; i < CODES; i++) codes[p->highs[i]] = i;
    int64_t known = 0;
    for (int64_t panel = 0; panel < panels; odd_end[panel++] = known) {
        uint8_t *to = weight + panel * p->inputs / 2 * CODE_BYTES;
        memset(to, 0, p->inputs / 2 * CODE_BYTES);
        for (int64_t i = 0; i < p->inputs; i++)
            for (int64_t o = 0; o < PANEL && panel * PANEL + o < p->outputs; o++) {
                const uint16_t value = values[(panel * PANEL + o) * p->inputs + i];
                const int64_t place = place_of(o) + i % 2;
                uint8_t *step = to + i / 2 * CODE_BYTES;
                if (value >> 8 && !codes[value >> 8])
                    odd[known++] = (Odd){(int32_t)(panel * PANEL + o), (int32_t)i, widen(value)};
                else {
                    step[place] = value & 255;
                    step[LOWS + place % PANEL] |= codes[value >> 8] << (place < PANEL ? 0 : 4);
                }
            }
    }
}

/* y [count, inputs], in bfloat16 or float32, gets the weight's rows by their numbers. Returns 0, or 1 where there is no
 * such row. */
int specdec_look_up(const Product *p, const int64_t *numbers, int64_t count, void *y, int half) {
    for (int64_t r = 0; r < count; r++) {
        if (numbers[r] < 0 || numbers[r] >= p->outputs) return 1;
        look_up_row(p, numbers[r], (char *)y + r * p->inputs * (half ? sizeof(uint16_t) : sizeof(float)), half);
    }
    return 0;
}

/* In each of `lists` of `size` slots the slots `from`, ascending, go to those from `first` on, which is no later: each is
 * read before it is written. Positions beyond the last slot begin anew at the first. */
void specdec_move(char *slots, int64_t lists, int64_t size, int64_t bytes, const int64_t *from, int64_t first,
                  int64_t count) {
    for (int64_t l = 0; l < lists; l++, slots += size * bytes)
        for (int64_t n = 0; n < count; n++)
            memcpy(slots + (first + n) % size * bytes, slots + from[n] % size * bytes, bytes);
}

/* Whether one of a strip of values is above `least`, or no number. */
INLINE int reaches(const void *values, int64_t at, float least, const int half) {
    ints above = {0};
    for (int v = 0; v < VECTORS; v++) above |= ~(load(values, at + v * LANES, half) <= least);
    return total((floats)((ints)spread(1.f) & above)) > 0;
}

/* SplitMix64's hash, in [0, 2^53), and the Gumbel number that it is; both as in specdec/sampling.py. */
#define HASH(x) \
    (x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9, x = (x ^ x >> 27) * 0x94D049BB133111EB, (x ^ x >> 31) >> 11)
static const uint64_t golden = 0x9E3779B97F4A7C15;
enum { HASHES = LANES / 2 }; /* a register's: of longer vectors gcc makes single numbers */
typedef uint64_t hashes __attribute__((vector_size(8 * HASHES)));
typedef int64_t signed_hashes __attribute__((vector_size(8 * HASHES))); /* which are compared by one instruction */
typedef double doubles __attribute__((vector_size(8 * HASHES)));

/* No less than a finite Gumbel number: with u = (hash + .5) / 2^53 that is -log(-log u) < -log(1 - u), which the bits of
 * 2^53 - hash bound. */
INLINE double most_gumbel(uint64_t hash) { return (__builtin_clzll((1ull << 53) - hash) - 9) * 0.6931471805599454; }

INLINE double gumbel(uint64_t hash) { return -log(-log(((double)hash + .5) * 0x1p-53)); }

/* specdec_draw, where the token with the largest score is known. */
static int draw(const void *scores, int64_t count, int half, float by, uint64_t key, int64_t likeliest) {
    if (likeliest < 0) return -1;
    uint64_t x = key + (likeliest + 1) * golden;
    double bar = gumbel(HASH(x)) + value_of(scores, likeliest, half) / by, best = -INFINITY, second = best;
    int64_t winner = 0;
    hashes states;
    for (int i = 0; i < HASHES; i++) states[i] = key + (i + 1) * golden;
    for (int64_t i = 0, end; i < count; i = end) {
        signed_hashes most = {0};
        for (int v = 0; v < STRIP / HASHES; v++, states += HASHES * golden) { /* at the end for tokens that there are not */
            hashes many = states;
            signed_hashes own = (signed_hashes)HASH(many), larger = own > most;
            most = (own & larger) | (most & ~larger);
        }
        int64_t largest = 0;
        for (int n = 0; n < HASHES; n++) largest = most[n] > largest ? most[n] : largest;
        /* Below this a score does not reach the best sum so far, with the largest number of the strip; and some more,
         * for rounding. */
        double missing = bar - most_gumbel(largest);
        float least = by * (missing - .01 - 1e-6 * fabs(missing));
        end = i + STRIP < count ? i + STRIP : count;
        if (end - i == STRIP && !reaches(scores, i, least, half)) continue;
        for (int64_t n = i; n < end; n++) {
            float score = value_of(scores, n, half);
            if (!(score > least)) continue;
            x = key + (n + 1) * golden;
            uint64_t hash = HASH(x);
            if (most_gumbel(hash) + score / by < bar - .01) continue; /* most, for which logarithms are dear */
            double sum = gumbel(hash) + score / by;
            second = sum > best ? best : sum > second ? sum : second;
            if (sum > best) best = sum, winner = n;
        }
        if (best > bar) bar = best;
    }
    return best - second > 1e-9 && isfinite(best) ? (int)winner : -1;
}

/* The token with the largest sum of its score, divided `by` a number, and its Gumbel number under a key. -1 where the
 * caller has to find it: the scores are no distribution, or two sums are nearer than what logarithms may be apart
 * elsewhere. */
int specdec_draw(const void *scores, int64_t count, int half, float by, uint64_t key) {
    return draw(scores, count, half, by, key, peak(scores, count, half));
}

/* Of the mean of some distributions the `count` tokens with the largest sums of the logarithm of their share and their
 * Gumbel number under a key, the largest first, of equal ones the first, to `best`, and the sums to `sums`; both have
 * room for all the tokens. Returns how many there are. A distribution is sizes[n] distinct tokens, whose scores, largest
 * first, divided `by` a number are logarithms of shares; they lie one behind the other. */
int64_t specdec_rank(const int64_t *tokens, const float *scores, const int64_t *sizes, int64_t number, double by,
                     uint64_t key, int64_t count, int64_t *best, double *sums) {
    int64_t size = 0, known = 0;
    for (int64_t n = 0, others; n < number; tokens += sizes[n], scores += sizes[n], n++) {
        double whole = 0;
        others = size;
        for (int64_t i = 0; i < sizes[n]; i++) whole += exp(((double)scores[i] - scores[0]) / by);
        for (int64_t i = 0, at; i < sizes[n]; i++) {
            for (at = 0; at < others && best[at] != tokens[i];) at++;
            if (at == others) at = size++, best[at] = tokens[i], sums[at] = 0;
            sums[at] += exp(((double)scores[i] - scores[0]) / by) / (whole * number);
        }
    }
    for (int64_t i = 0; i < size; i++) { /* in the same room: no more are kept than were looked at */
        if (!(sums[i] > 0)) continue;
        uint64_t x = key + (best[i] + 1) * golden;
        int64_t token = best[i];
        double sum = gumbel(HASH(x)) + log(sums[i]);
        if (known == count && sum <= sums[count - 1]) continue;
        int64_t at = known < count ? known++ : count - 1;
        for (; at > 0 && sum > sums[at - 1]; at--) best[at] = best[at - 1], sums[at] = sums[at - 1];
        best[at] = token, sums[at] = sum;
    }
    return known;
}

INLINE doubles logarithm(doubles x) { /* of a positive number; to 2e-12 */
    const signed_hashes low = (signed_hashes)((doubles){0} + 0.7071067811865476);
    signed_hashes power = ((signed_hashes)x - low) >> 52; /* 2^power times [1 / sqrt 2, sqrt 2) */
    doubles m = (doubles)((signed_hashes)x - (power << 52)) - 1, t = m / (m + 2), square = t * t;
    doubles p = square * (2. / 13) + 2. / 11;
    p = p * square + 2. / 9;
    p = p * square + 2. / 7;
    p = p * square + 2. / 5;
    p = p * square + 2. / 3;
    return (p * square + 2) * t + __builtin_convertvector(power, doubles) * 0.6931471805599453;
}

/* Of each row's `size` logits the `count` largest, the largest first, and their shares of a softmax over all of them. A
 * logit is a score times `scale` and, where there are keys, the Gumbel number that the row's key gives to its token times
 * `noise`. The tokens, ascending, are 0, 1, 2, ... where they are NULL. Returns as specdec_run_layers. */
int specdec_chances(const void *scores, int64_t rows, int64_t size, int half, float scale, float noise,
                    const uint64_t *keys, const int64_t *tokens, int64_t count, int64_t *best, float *chances) {
    float *logits = take_scratch(size);
    if (!logits) return 1;
    for (int64_t r = 0; r < rows; r++, best += count, chances += count) {
        const void *row = row_of(scores, r, size, half);
        widen_all(row, logits, size, half);
        const float base = highest(logits, 0, size, 0); /* taken off, so that noise is not rounded to a large number */
        for (int64_t i = 0; i < size; i++) logits[i] = (logits[i] - base) * scale;
        for (int64_t i = 0; keys && i < size; i += HASHES) {
            const int64_t there = i + HASHES < size ? HASHES : size - i;
            hashes x = {0};
            for (int64_t n = 0; n < HASHES; n++) x[n] = tokens && n < there ? (uint64_t)tokens[i + n] : (uint64_t)(i + n);
            x = keys[r] + (x + 1) * golden;
            doubles u = (__builtin_convertvector((signed_hashes)HASH(x), doubles) + .5) * 0x1p-53;
            doubles own = -logarithm(-logarithm(u));
            for (int64_t n = 0; n < there; n++) logits[i + n] += noise * (float)own[n];
        }
        top(logits, size, count, best, 0);
        const float most = logits[best[0]];
        floats sums = {0};
        int64_t i = 0;
        for (; i + LANES <= size; i += LANES) sums += exponential(load(logits, i, 0) - most);
        float sum = total(sums);
        for (; i < size; i++) sum += expf(logits[i] - most);
        for (int64_t n = 0; n < count; n++) chances[n] = expf(logits[best[n]] - most) / sum;
    }
    give_scratch(logits);
    return 0;
}

/* Whether this machine multiplies pairs. */
int specdec_pairs(void) {
#ifdef __AVX512BF16__
    return 1;
#else
    return 0;
#endif
}

/* Whether it reads coded weights. */
int specdec_codes(void) { return READS_CODES; }

/* Whether this machine has tiles and the system lends them to this process, from now on. */
int specdec_tiles(void) {
#if HAS_TILES
    enum { REQUEST = 0x1023, TILE_DATA = 18 }; /* ARCH_REQ_XCOMP_PERM */
    return !syscall(SYS_arch_prctl, REQUEST, TILE_DATA);
#else
    return 0;
#endif
}
