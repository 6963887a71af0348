/* Products: a panel of weights at a time, times rows whose sums are in registers. */

#ifdef __AVX512BF16__
enum { HAS_PAIRS = 1 };
#else
enum { HAS_PAIRS = 0 };
#endif
/* Whether rows are in bfloat16 as well; whether weights are coded. */
INLINE int paired(const int kind) { return kind == PAIRS || kind == CODED_PAIRS; }
INLINE int coded(const int kind) { return kind == CODED || kind == CODED_PAIRS; }
/* Whether weights are 16-bit numbers, each widened by itself. */
INLINE int widened(const int kind) { return kind == HALF || kind == FLOAT16; }
INLINE int in_blocks(const Product *p) { return p->kind >= QUANTISED; }

/* sum + a * b; with pairs, each float's place holds two bfloat16, and both products are added. */
INLINE floats add_times(floats sum, floats a, floats b, const int kind) {
#ifdef __AVX512BF16__
    if (paired(kind)) return (floats)_mm512_dpbf16_ps((__m512)sum, (__m512bh)a, (__m512bh)b);
#endif
    (void)kind;
    return fused(a, b, sum);
}

/* The same with one float, or one pair, for all lanes. */
INLINE floats accumulate(floats sum, floats weight, const void *x, const int kind) {
    if (!paired(kind)) return add_times(sum, weight, spread(*(const float *)x), kind);
    int32_t two;
    memcpy(&two, x, sizeof two);
    return add_times(sum, weight, (floats)(two - (ints){0}), kind);
}

/* Bytes of a panel that one step of a product reads. */
INLINE int bytes_of(const int kind) {
    return coded(kind) ? CODE_BYTES : widened(kind) ? 2 * PANEL : 4 * PANEL;
}

#if LANES == 16 && defined(__AVX512BW__)
#define READS_CODES 1
/* Decodes a panel's weights of two inputs, side by side for each output. */
INLINE void decode(const char *from, __m512i highs, floats weight[2]) {
    const __m512i low = _mm512_loadu_si512(from), sides = _mm512_set_epi64(4, 4, 4, 4, 0, 0, 0, 0);
    __m512i high = _mm512_broadcast_i64x4(_mm256_loadu_si256((const __m256i *)(from + LOWS)));
    high = _mm512_srlv_epi64(high, sides);
#ifdef __AVX512VBMI__
    high = _mm512_permutexvar_epi8(high, highs); /* six index bits, of which two do not matter */
#else
    high = _mm512_shuffle_epi8(highs, _mm512_and_si512(high, _mm512_set1_epi8(CODES - 1)));
#endif
    weight[0] = (floats)_mm512_unpacklo_epi8(low, high);
    weight[1] = (floats)_mm512_unpackhi_epi8(low, high);
}
#else
#define READS_CODES 0
#endif

/* Steps of a panel, or of two, times a group of rows; a step is an input, a pair of inputs, or of CODED two inputs. */
typedef struct {
    const char *x; /* [rows, x_stride] bytes of inputs */
    float *y;      /* [rows, PANEL] sums; those of a second panel are `y_apart` floats further */
    const uint8_t *highs;
    const char *weight; /* a second panel's are `apart` bytes further */
    const char *soon, *beside; /* what to prefetch meanwhile, and of a second panel; or NULL */
    int64_t soon_step, parts;  /* bytes of it at each step; passes that share it, this one included */
    float *wide;               /* receives the weights, widened from 16 bits; or NULL */
    int64_t x_stride, y_apart, apart, steps;
    int64_t onto; /* whether y is added to */
} Task;

/* The most rows of a group: two decoded vectors of each of two inputs take registers of their own. */
INLINE int rows_at_once(const int kind) { return LANES == 16 && kind == CODED ? 12 : MOST_ROWS; }

/* Vectors [from, to) of the weights of a step, the even input's first. */
INLINE void read_weights(const Task *t, const char *at, floats weight[2][VECTORS], const int from, const int to,
                         const int kind) {
#if READS_CODES
    if (coded(kind)) {
        const __m512i highs = _mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i *)t->highs));
        for (int v = from; v < to; v += 2) decode(at + v / 2 * t->apart, highs, weight[0] + v);
    }
#endif
#pragma GCC unroll 4
    for (int v = from; v < to; v++) {
        const char *panel = at + v * LANES / PANEL * t->apart;
        if (kind == FLOAT16) weight[0][v] = widen_halves((const uint16_t *)panel + v * LANES % PANEL);
        else if (!coded(kind)) weight[0][v] = load(panel, v * LANES % PANEL, kind == HALF);
        if (WIDENS && widened(kind) && t->wide)
            *(floats *)(t->wide + (at - t->weight) / sizeof(uint16_t) + v * LANES) = weight[0][v];
        if (kind == CODED) {
            weight[1][v] = (floats)((words)weight[0][v] & 0xffff0000);
            weight[0][v] = (floats)((words)weight[0][v] << 16);
        }
#if LANES == 8 && defined(__AVX2__) /* or gcc reads them again for each row */
        if ((to - from) * LANES < PANEL) __asm__("" : "+x"(weight[0][v]));
#endif
    }
}

/* Vectors [from, to) of y = x times the weight; or += it. Each row's sums run over the steps in order. Each step
 * prefetches `lines` lines. */
INLINE void multiply(const Task *t, const int rows, const int from, const int to, const int kind, const int lines) {
    enum { EVERY = 3 }; /* rows with a pointer; a row or two behind them is addressed by the stride and its double */
    const int inputs = kind == CODED ? 2 : 1, size = bytes_of(kind);
    const int64_t stride = t->x_stride, step = t->soon ? t->soon_step : 0;
    const char *x[MOST_ROWS / EVERY + 1], *at = t->weight, *end = at + t->steps * size;
    /* In place of nothing, what is in the cache is prefetched, which costs nothing. */
    const char *soon = t->soon ? t->soon : t->weight, *beside = t->beside ? t->beside : t->weight;
    floats sums[MOST_ROWS][VECTORS];
#pragma GCC unroll 16
    for (int r = 0; r < rows; r++) {
        if (r % EVERY == 0) x[r / EVERY] = t->x + r * stride;
#pragma GCC unroll 4
        for (int v = from; v < to; v++) sums[r][v] = (floats){0};
    }
    for (; at < end; at += size, soon += step, beside += step) {
#pragma GCC unroll 8
        for (int r = 0; r < rows; r += EVERY) __asm__("" : "+r"(x[r / EVERY])); /* or gcc keeps each row's address */
        floats weight[2][VECTORS];
        read_weights(t, at, weight, from, to, kind);
#pragma GCC unroll 2
        for (int line = 0; line < lines; line++) {
            __builtin_prefetch(soon + 64 * line, 0, 2);
            if (to * LANES > PANEL) __builtin_prefetch(beside + 64 * line, 0, 2);
        }
#pragma GCC unroll 16
        for (int r = 0; r < rows; r++)
#pragma GCC unroll 2
            for (int side = 0; side < inputs; side++)
#pragma GCC unroll 4
                for (int v = from; v < to; v++) {
                    const char *input = x[r / EVERY] + r % EVERY * stride + 4 * side;
                    sums[r][v] = accumulate(sums[r][v], weight[side][v], input, kind);
                }
#pragma GCC unroll 8
        for (int r = 0; r < rows; r += EVERY) x[r / EVERY] += 4 * inputs;
#if LANES == 8 && defined(__AVX2__) /* or gcc moves sums from register to register */
#pragma GCC unroll 16
        for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
            for (int v = from; v < to; v++)
                if ((to - from) * LANES < PANEL) __asm__("" : "+x"(sums[r][v]));
#endif
    }
#pragma GCC unroll 16
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
        for (int v = from; v < to; v++) {
            floats *y = (floats *)(t->y + v * LANES / PANEL * t->y_apart + r * PANEL + v * LANES % PANEL);
            if (t->onto) *y += sums[r][v];
            else *y = sums[r][v];
        }
}

/* How often a group of rows passes over a panel; widening needs registers of its own. */
INLINE int passes_of(const int rows, const int kind) {
    return LANES == 8 && rows > (widened(kind) ? 2 : 3) ? 2 : 1;
}

/* The task of the pass that follows, for what it prefetches: the next part, until all has been. */
INLINE Task later(const Task *t) {
    Task found = *t;
    if (found.soon) found.soon = --found.parts > 0 ? found.soon + found.steps * found.soon_step : NULL;
    return found;
}

#define ROWS(n)                                                                                    \
    case n:                                                                                        \
        if (n > rows_at_once(kind)) return;                                                        \
        if (passes_of(n, kind) > 1) {                                                              \
            const Task second = later(t);                                                          \
            if (t->soon) multiply(t, n, 0, PANEL / LANES / 2, kind, 1);                            \
            else multiply(t, n, 0, PANEL / LANES / 2, kind, 0);                                    \
            if (second.soon) multiply(&second, n, PANEL / LANES / 2, PANEL / LANES, kind, 1);      \
            else multiply(&second, n, PANEL / LANES / 2, PANEL / LANES, kind, 0);                  \
        } else if (LANES == 16 && size > 64 && n > 6 && t->soon_step < size)                       \
            multiply(t, n, 0, PANEL / LANES, kind, 1);                                             \
        else multiply(t, n, 0, PANEL / LANES, kind, (size + 63) / 64);                             \
        return;

#define TWINS(n)                                                     \
    case n:                                                          \
        multiply(t, n > TWIN ? TWIN : n, 0, 2 * PANEL / LANES, kind, (size + 63) / 64); \
        return;

/* Calls the version for a number of rows, of one panel; of two, for up to TWIN rows. */
INLINE void multiply_any(const Task *t, int64_t rows, int panels, const int kind) {
    const int size = bytes_of(kind);
    if (TWIN && panels > 1) {
        switch (rows) { TWINS(1) TWINS(2) TWINS(3) TWINS(4) TWINS(5) TWINS(6) }
    }
    switch (rows) {
        ROWS(1) ROWS(2) ROWS(3) ROWS(4) ROWS(5) ROWS(6) ROWS(7)
        ROWS(8) ROWS(9) ROWS(10) ROWS(11) ROWS(12) ROWS(13) ROWS(14)
    }
}

static void multiply_task(const Task *t, int64_t rows, int panels, int64_t kind) {
    if (kind == FULL) multiply_any(t, rows, panels, FULL);
    else if (kind == HALF) multiply_any(t, rows, panels, HALF);
    else if (kind == FLOAT16) multiply_any(t, rows, 1, FLOAT16);
    else if (HAS_PAIRS && kind == PAIRS) multiply_any(t, rows, panels, PAIRS);
#if READS_CODES
    else if (kind == CODED) multiply_any(t, rows, panels, CODED);
    else if (HAS_PAIRS) multiply_any(t, rows, panels, CODED_PAIRS);
#endif
}

/* Floats from row to row of x. It is an odd number of cache lines: with rows of 4096 inputs, say, all rows would
 * otherwise fall into one set of the cache. */
INLINE int64_t apart_by(int64_t inputs) { return ((inputs + 15) / 16 | 1) * 16; }

/* Floats of a row of x: inputs, or pairs of inputs. */
INLINE int64_t units_of(const Product *p) {
    return paired(p->kind) ? p->inputs / 2 : p->inputs;
}

/* Where a panel's odd weights, those without a code, begin. */
INLINE int64_t odd_from(const Product *p, int64_t panel) { return p->odd && panel ? p->odd_end[panel - 1] : 0; }

INLINE int64_t groups_of(const Product *p, int64_t rows) {
    return (rows + rows_at_once(p->kind) - 1) / rows_at_once(p->kind);
}

/* Steps of a panel, its bytes, and the floats of x that a step takes. */
INLINE int64_t taken_by(const Product *p) { return p->kind == CODED ? 2 : 1; }
INLINE int64_t steps_of(const Product *p) { return units_of(p) / taken_by(p); }
INLINE int64_t panel_bytes(const Product *p) { return steps_of(p) * bytes_of(p->kind); }
INLINE int64_t weight_bytes(const Product *p) { return in_blocks(p) ? 0 : padded(p->outputs) / PANEL * panel_bytes(p); }

/* Whether a thread's groups of rows multiply coded weights that are decoded once for all of them, to floats. */
INLINE int decodes_once(const Product *p, int64_t groups, int panels) {
    return READS_CODES && !HAS_PAIRS && p->kind == CODED && groups > 2 && panels == 1;
}

/* The weights of a panel's steps as floats, input by input. */
static void decode_steps(const Product *p, const char *from, int64_t steps, float *wide) {
#if READS_CODES
    const __m512i highs = _mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i *)p->highs));
    for (int64_t s = 0; s < steps; s++, from += CODE_BYTES, wide += 2 * PANEL) {
        floats both[2];
        decode(from, highs, both);
        for (int v = 0; v < 2; v++) {
            *(floats *)(wide + v * LANES) = (floats)((words)both[v] << 16);
            *(floats *)(wide + PANEL + v * LANES) = (floats)((words)both[v] & 0xffff0000);
        }
    }
#else
    (void)p, (void)from, (void)steps, (void)wide;
#endif
}

/* The panels that a thread reads next, for prefetching, or NULL. */
typedef struct {
    const char *first, *second;
} Ahead;

/* Sums [panels, rows, PANEL] = rows times `panels` panels, from `panel` on, a stretch of inputs at a time; with `onto`,
 * += it. The rows are groups [begin, end). `last` is what is read next. */
static void multiply_panels(const Product *p, const float *x, float *sums, int64_t rows, int64_t begin, int64_t end,
                            int64_t panel, int panels, int onto, Ahead last) {
    const int64_t groups = groups_of(p, rows), taken = taken_by(p), steps = steps_of(p), size = bytes_of(p->kind);
    const int64_t stretches = (steps * taken + STRETCH - 1) / STRETCH, stride = apart_by(p->inputs);
    const int64_t first = rows * begin / groups, all = rows * end / groups - first;
    const char *weight = (const char *)p->weight + panel * panel_bytes(p);
    const int widens = WIDENS && widened(p->kind) && end - begin > 2; /* groups: the first one keeps what it has widened */
    const int decodes = decodes_once(p, end - begin, panels);
    float wide[WIDENS || !HAS_PAIRS ? STRETCH * PANEL : 1] __attribute__((aligned(64)));
    int64_t passes = 0;
    for (int64_t g = begin; g < end; g++) passes += passes_of(rows * (g + 1) / groups - rows * g / groups, p->kind);
    for (int64_t s = 0; s < stretches; s++) {
        const int64_t from = steps * s / stretches, to = steps * (s + 1) / stretches;
        const char *here = weight + from * size, *soon = weight + to * size;
        const Ahead then = s + 1 < stretches ? (Ahead){soon, panels > 1 ? soon + panel_bytes(p) : NULL} : last;
        Task task = {.x_stride = stride * sizeof(float), .y_apart = all * PANEL, .weight = here, .wide = widens ? wide : NULL,
                     .highs = p->highs, .apart = panel_bytes(p), .steps = to - from, .onto = onto || s};
        if (prefetches(rows)) { /* some passes share it, so that memory does not wait in them */
            task.soon = then.first, task.beside = then.second;
            task.parts = passes < SHARES ? passes : SHARES;
            task.soon_step = size / task.parts;
        }
        if (decodes) {
            decode_steps(p, here, to - from, wide);
            task.weight = (const char *)wide, task.steps *= taken, task.soon_step /= taken;
        }
        for (int64_t g = begin; g < end; g++) {
            const int64_t row = rows * g / groups - first, count = rows * (g + 1) / groups - first - row;
            task.x = (const char *)(x + (first + row) * stride + from * taken);
            task.y = sums + row * PANEL;
            const int kind = decodes || (widens && g > begin) ? FULL : p->kind;
            multiply_task(&task, count, panels, kind);
            for (int pass = 0; pass < passes_of(count, kind); pass++) task = later(&task);
            if (widens) task.weight = (const char *)wide, task.wide = NULL;
        }
    }
}
