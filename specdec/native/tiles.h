/* Tiles: products on a processor with matrix instructions (AMX). */

#if HAS_TILES
/* Tiles are registers of 16 rows of 64 bytes. One instruction multiplies 16 rows of 32 bfloat16 inputs with 16
 * outputs, so 16 rows take less time than memory needs for the weights. The order of a row's sums does not depend
 * on the other rows. A float32 row is the exact sum of three bfloat16 rows of eight bits each, so no product is
 * rounded. (Numbers below 1.2e-38 count as zero.) A process may use tiles only after specdec_tiles has returned
 * true; before, it is killed. */
enum { TILE = 16, STEP = 32, STEP_BYTES = 2 * STEP * PANEL };
/* Groups of rows whose sums are kept at once, while the weights that they share are in the cache. */
enum { CROWD = 16 };
#define FENCE __asm__ volatile("" ::: "memory") /* the compiler does not see what tiles read and write */
#define EACH_SUM(act, sum)                 \
    do {                                   \
        act(0, sum, 4 * STRIP);            \
        act(1, sum + TILE, 4 * STRIP);     \
        act(2, sum + 2 * TILE, 4 * STRIP); \
        act(3, sum + 3 * TILE, 4 * STRIP); \
    } while (0)

typedef struct { /* the processor's format */
    uint8_t palette, start, none[14];
    uint16_t bytes[TILE];
    uint8_t rows[TILE];
} Shapes;

INLINE int parts_of(const Product *p) { return p->kind == CODED ? 3 : 1; }

/* Tiles 0 to 3 hold sums of so many rows, tile 4 rows, tiles 5 to 7 weights. */
static void shape_tiles(int64_t rows) {
    Shapes shapes = {.palette = 1};
    for (int tile = 0; tile < 8; tile++) {
        shapes.rows[tile] = tile < 5 ? rows : TILE;
        shapes.bytes[tile] = 4 * TILE;
    }
    __asm__ volatile("" : : "r"(&shapes) : "memory"); /* gcc believes that eight bytes are read, and drops the others */
    _tile_loadconfig(&shapes);
}

/* Sums += rows, [rows][STEP], times a step's weights of a strip, `apart` bytes from panel to panel, each
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

/* Prefetches into the second cache. */
INLINE void ask(const char *soon, int64_t apart, const int lines) {
#pragma GCC unroll 2
    for (int at = 0; at < 64 * lines; at += 64) {
        __builtin_prefetch(soon + at, 0, 2);
        if (apart) __builtin_prefetch(soon + at + apart, 0, 2);
    }
}

/* A position in a coded panel: the bytes from the next step on, and the next odd weights. */
typedef struct {
    const char *from;
    const Odd *odd, *last;
} Panel;

/* Decodes a step's weights to [STEP / 2][PANEL][2]. */
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

/* Adds the bias of outputs [first, last) to rows [begin, end) of a strip's y. */
static void add_bias(const Product *p, float *y, int64_t y_stride, int64_t begin, int64_t end, int64_t first,
                     int64_t last) {
    if (last > p->outputs) last = p->outputs;
    for (int64_t r = begin; p->bias && r < end; r++)
        for (int64_t o = first; o < last; o++) y[r * y_stride + o % STRIP] += p->bias[o];
}

/* A strip's y [rows, y_stride] = row groups [begin, end), up to CROWD, times its weights; with `onto`, += it. gather_tiles
 * made `x` from the rows; tiles have been shaped for *shaped rows. */
static void multiply_tiles(const Product *p, const char *x, float *y, int64_t y_stride, int64_t rows, int64_t strip,
                           int64_t begin, int64_t end, int onto, int64_t *shaped) {
    enum { PANELS = STRIP / PANEL };
    const int codes = coded(p->kind), parts = parts_of(p), several = end - begin > 1;
    const int64_t most = TILE / parts, groups = (rows + most - 1) / most, steps = p->inputs / STEP;
    const int64_t stretches = several ? (p->inputs + STRETCH - 1) / STRETCH : 1;
    const int64_t kept = several ? STRETCH / STEP : 1; /* steps decoded at a time, if several groups share them */
    const char *weight = (const char *)p->weight + strip * PANELS * steps * (codes ? STEP / 2 * CODE_BYTES : STEP_BYTES);
    const int64_t apart = codes ? STEP_BYTES : steps * STEP_BYTES; /* bytes from panel to panel */
    __m512i highs = _mm512_setzero_si512();
    Panel panel[PANELS];
    char wide[STRETCH / STEP * PANELS * STEP_BYTES] __attribute__((aligned(64)));
    float sums[CROWD][TILE * STRIP] __attribute__((aligned(64)));
    if (codes) highs = _mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i *)p->highs));
    for (int64_t n = 0, first = strip * PANELS; codes && n < PANELS; n++) {
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
                const char *these = codes ? decoded : weight + i * STEP_BYTES;
                for (int n = 0; codes && g == begin && n < PANELS; n++)
                    decode_step(panel + n, i, highs, decoded + n * STEP_BYTES);
                if (!codes && g == begin) ask(these + AHEAD, apart, STEP_BYTES / 64);
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

/* Writes `count` rows of x, from `row` on, in the layout [inputs / STEP][count][parts][STEP] of bfloat16. */
static void gather_tiles(const Product *p, const float *x, char *grouped, int64_t row, int64_t count) {
    const int parts = parts_of(p);
    char *to = grouped + row * p->inputs * parts * 2;
    for (int64_t i = 0; i < p->inputs; i += STEP)
        for (int64_t r = 0; r < count; r++) {
            const int64_t at = (row + r) * apart_by(p->inputs) + i;
            floats low = load(x, at, 0), high = load(x, at + LANES, 0);
            for (int part = 0; part < parts; part++) {
                floats first = low, second = high;
                if (parts > 1) { /* infinity has no remainder */
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
#define release_tiles() (void)0
#endif
