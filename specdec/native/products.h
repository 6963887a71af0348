/* Products: panels of weights times rows whose sums are in registers. */

/* Whether rows are in bfloat16 as well; whether weights are coded. */
INLINE int paired(const int kind) { return kind == PAIRS || kind == CODED_PAIRS; }
INLINE int coded(const int kind) { return kind == CODED || kind == CODED_PAIRS; }
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
INLINE floats accumulate(floats sum, floats weight, const float *x, const int kind) {
    if (!paired(kind)) return add_times(sum, weight, spread(*x), kind);
    int32_t two;
    memcpy(&two, x, sizeof two);
    return add_times(sum, weight, (floats)(two - (ints){0}), kind);
}

/* Bytes of a panel that one step of a product reads. */
INLINE int bytes_of(const int kind) {
    return coded(kind) ? CODE_BYTES : kind == HALF ? 2 * PANEL : 4 * PANEL;
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

/* A product of `steps` inputs, or pairs of inputs, with a strip of outputs. */
typedef struct {
    const float *x;     /* [rows, x_stride] inputs, or pairs of them */
    float *y;
    const uint8_t *highs;
    const char *weight; /* the first panel; the next one is `apart` bytes further */
    const char *soon;   /* to prefetch for one panel, or for both, `soon_apart` bytes apart; or NULL */
    int64_t soon_step;  /* bytes to prefetch at a step */
    float *wide;        /* [panels][STRETCH][PANEL] receives decoded weights, as float32 or pairs; or NULL */
    int64_t x_stride, y_stride, apart, soon_apart, steps;
    int64_t onto; /* whether y is added to */
    int64_t lead; /* steps by which weights are prefetched ahead; `steps` where only `soon` is prefetched */
} Task;

/* The cache level to prefetch into, and the most bytes to prefetch ahead of a panel's reading: the second level, a
 * stretch ahead, as the first is too small. On AMD's processors, weights are marked as needed once and prefetched
 * little ahead: that reads them faster and leaves more of the caches to other data. */
#if LANES == 16 && (defined(__znver3__) || defined(__znver4__) || defined(__znver5__)) /* macros of gcc and clang */
enum { LOCALITY = 0, LEAD = 5120 };
#else
enum { LOCALITY = 2, LEAD = 4 * STRETCH * PANEL };
#endif

/* Prefetches. */
INLINE void ask(const char *soon, int64_t apart, const int lines) {
#pragma GCC unroll 2
    for (int at = 0; at < 64 * lines; at += 64) {
        __builtin_prefetch(soon + at, 0, LOCALITY);
        if (apart) __builtin_prefetch(soon + at + apart, 0, LOCALITY);
    }
}

/* Sums += x, row by row, times vectors [from, to) of the weight's steps [begin, end). Each step prefetches `step`
 * bytes from `soon` on, and as many `apart` bytes further, for `asks` panels. If `asks` is below 0, that is the
 * first panel unless `soon` is NULL, and the second unless `apart` is 0. */
INLINE void multiply_steps(const Task *t, const float *const x[FEW], floats sums[FEW][VECTORS], int64_t begin, int64_t end,
                           const char *soon, int64_t step, int64_t apart, const int rows, const int from, const int to,
                           const int kind, const int asks) {
    const int panels = (to - from) * LANES / PANEL, enough = LANES == 16 || !panels;
    const int lines = panels ? (bytes_of(kind) + 63) / 64 : 1, inputs = kind == CODED ? 2 : 1;
    const char *panel[2] = {t->weight, t->weight + t->apart};
    float *wide = t->wide;
#if READS_CODES
    const __m512i highs = !coded(kind) ? _mm512_setzero_si512()
                                       : _mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i *)t->highs));
#endif
    for (int64_t i = begin; i < end; i++) {
        /* A compiler moves no read across this. With enough registers the weights are read before it and kept;
         * otherwise they are read behind it, once for every row. */
        if ((asks < 0 ? soon != NULL : asks) && !enough) ask(soon + (i - begin) * step, asks == 1 ? 0 : apart, lines);
        floats weight[2][VECTORS]; /* of one step's inputs */
#if READS_CODES
        if (coded(kind))
            for (int one = 0; one < panels; one++) decode(panel[one] + i * CODE_BYTES, highs, weight[0] + 2 * one);
#endif
#pragma GCC unroll 4
        for (int v = from; v < to; v++) {
            const int one = v * LANES / PANEL, at = v * LANES % PANEL;
            if (!coded(kind)) weight[0][v] = load(panel[one], i * PANEL + at, kind == HALF);
            if (kind == CODED) {
                weight[1][v] = (floats)((words)weight[0][v] & 0xffff0000);
                weight[0][v] = (floats)((words)weight[0][v] << 16);
            }
#if LANES == 8 && defined(__AVX2__) /* or gcc reads them again for each row */
            if (enough) __asm__("" : "+x"(weight[0][v]));
#endif
            if ((kind == HALF || coded(kind)) && wide)
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

/* Vectors [from, to) of y [rows, STRIP] = x [rows, steps] times the weight; or += it. */
INLINE void multiply(const Task *t, const int rows, const int from, const int to, const int kind) {
    const float *x[FEW];
    floats sums[FEW][VECTORS];
#pragma GCC unroll 8
    for (int r = 0; r < rows; r++) {
        x[r] = t->x + r * t->x_stride;
#pragma GCC unroll 4
        for (int v = from; v < to; v++) sums[r][v] = (floats){0};
    }
    for (int next = 0; next < 2; next++) { /* prefetches the rest of these panels, then what comes next */
        const int64_t begin = next ? t->steps - t->lead : 0, end = next ? t->steps : t->steps - t->lead;
        const int64_t step = next ? t->soon_step : bytes_of(kind), apart = next ? t->soon_apart : t->apart;
        const char *soon = next ? t->soon : t->weight + t->lead * step;
        if (next && soon && from) soon += t->steps * step;
/* With float32, the loop is so short that a test in it costs time; with other kinds, gcc would run out of registers. */
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

/* How often a group of rows passes over a strip's weights; widening bfloat16 needs registers of its own. */
INLINE int passes_of(const int64_t rows, const int kind) {
    return LANES == 8 && rows > (kind == HALF ? 2 : 3) ? 2 : 1;
}

#define ROWS(n)                                                                 \
    case n:                                                                     \
        if (n > FEW) return;                                                    \
        if (LANES == 16 && panels == 1) multiply(t, n, 0, VECTORS / 2, kind);   \
        else multiply(t, n, 0, VECTORS / passes_of(n, kind), kind);             \
        if (passes_of(n, kind) > 1) multiply(t, n, VECTORS / 2, VECTORS, kind); \
        return;

/* Calls the version for a number of rows; a strip has one panel or two. */
INLINE void multiply_any(const Task *t, int64_t rows, const int panels, const int kind) {
    switch (rows) {
        ROWS(1) ROWS(2) ROWS(3) ROWS(4) ROWS(5) ROWS(6)
    }
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

/* A strip's y [rows, y_stride] += a group's rows times the odd weights of panels [first, last). */
static void add_odd(const Product *p, int64_t first, int64_t last, const float *x, float *y, int64_t y_stride,
                    int64_t rows) {
    const int64_t x_stride = apart_by(p->inputs);
    const int pairs = paired(p->kind);
    for (int64_t at = odd_from(p, first); at < odd_from(p, last); at++) {
        const Odd *o = p->odd + at;
        const float *input = x + (o->input >> pairs); /* the input, or its pair */
        const uint32_t mask = pairs ? 0xffff0000 : ~0u;
        const int shift = pairs && o->input % 2 == 0 ? 16 : 0;
        for (int64_t r = 0; r < rows; r++) {
            uint32_t bits;
            float value;
            memcpy(&bits, input + r * x_stride, sizeof bits);
            bits = bits << shift & mask;
            memcpy(&value, &bits, sizeof value);
            float *to = y + r * y_stride + o->output % STRIP;
            *to = fused_one(o->value, value, *to);
        }
    }
}

/* The outputs of a strip; the last strips may have fewer, or none. */
INLINE int64_t outputs_of(const Product *p, int64_t strip) {
    const int64_t left = p->outputs - strip * STRIP;
    return left < 0 ? 0 : left < STRIP ? left : STRIP;
}

/* Adds the bias of outputs [first, last) to rows [begin, end) of a strip's y. */
static void add_bias(const Product *p, float *y, int64_t y_stride, int64_t begin, int64_t end, int64_t first,
                     int64_t last) {
    if (last > p->outputs) last = p->outputs;
    for (int64_t r = begin; p->bias && r < end; r++)
        for (int64_t o = first; o < last; o++) y[r * y_stride + o % STRIP] += p->bias[o];
}

/* A strip's weights from one of its panels on, and the bytes from panel to panel. */
typedef struct {
    const char *weight;
    int64_t apart;
} Strip;

INLINE Strip strip_of(const Product *p, int64_t strip, int64_t first) {
    const int64_t steps = p->kind == CODED ? units_of(p) / 2 : units_of(p), apart = steps * bytes_of(p->kind);
    return (Strip){(const char *)p->weight + (strip * (STRIP / PANEL) + first) * apart, apart};
}

/* A strip's y [rows, y_stride] += row groups [begin, end) times the weights of `panels` panels, from panel `first`
 * on, a stretch of inputs at a time. Meanwhile the beginning of strip `then` is prefetched, unless it is empty. */
INLINE void multiply_panels(const Product *p, const float *x, float *y, int64_t y_stride, int64_t rows, int64_t strip,
                            int64_t first, const int panels, int64_t begin, int64_t end, int onto, Strip then) {
    const int64_t groups = (rows + FEW - 1) / FEW, size = bytes_of(p->kind), panel = strip * (STRIP / PANEL) + first;
    const int64_t taken = p->kind == CODED ? 2 : 1; /* floats of x per step */
    const int64_t steps = units_of(p) / taken, stretches = (steps * taken + STRETCH - 1) / STRETCH;
    const int64_t x_stride = apart_by(p->inputs);
    Strip own = strip_of(p, strip, first);
    if (panels < STRIP / PANEL) own.apart = 0;
    const int keeps = p->kind == HALF ? end - begin > 1 : coded(p->kind) && end - begin > MANY;
    float wide[STRIP * STRETCH] __attribute__((aligned(64)));
    int64_t passes = 0;
    for (int64_t g = begin; g < end; g++) passes += passes_of(rows * (g + 1) / groups - rows * g / groups, p->kind);
    const int64_t shares = passes < SHARES ? passes : SHARES; /* passes that share the prefetches, so that none waits */
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

/* One panel of a strip, times a group that has all rows. */
static void multiply_panel(const Product *p, const float *x, float *y, int64_t y_stride, int64_t rows, int64_t strip,
                           int64_t panel, int onto, Strip then) {
    multiply_panels(p, x, y, y_stride, rows, strip, panel, 1, 0, 1, onto, then);
}
