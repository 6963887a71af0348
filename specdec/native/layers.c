/* Llama-like decoder layers on a CPU: a step's rows through any run of layers in one call.
 *
 * Weights lie in panels of PANEL outputs, input by input, so that a product is one stream through memory whatever its
 * rows; up to 12 rows share each weight that is read. A weight is float32, or bfloat16 where that holds it exactly.
 *
 * What a row computes does not depend on the rows beside it: every sum runs in one order, over inputs and over the
 * row's own path of keys. So a tree's accepted rows are, bit for bit, those of plain decoding.
 */
#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#ifdef __AVX512BF16__
#include <immintrin.h>
#endif

#ifdef __AVX512F__ /* registers hold 24 sums of 16 values: 6 rows of 4 vectors, 12 rows of 2 */
#define LANES 16
enum { FEW = 6, MOST_SHARED = 12 };
#else /* 12 sums of 8 values: 3 rows of 4 vectors */
#define LANES 8
enum { FEW = 2, MOST_SHARED = 3 };
#endif
enum { PANEL = 32, PAIR = 2 * PANEL, DEEP = PANEL / LANES, WIDE = 2 * DEEP, STRETCH = 256, TOGETHER = 8 };
enum { MOST_VECTORS = 128 / LANES };

enum Kind { FULL, HALF, PAIRS }; /* float32; bfloat16; bfloat16 by two inputs, for rows in bfloat16 */

typedef float floats __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef int32_t ints __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef uint16_t halves __attribute__((vector_size(2 * LANES), aligned(2), may_alias));
#define INLINE static inline __attribute__((always_inline))

typedef struct {
    const void *weight; /* [panels][inputs][PANEL], zeros up to a whole PAIR */
    const float *bias;  /* [outputs] or NULL */
    int64_t inputs, outputs, kind;
} Product;

typedef struct {
    Product qkv, out, gate_up, down;
    const float *first_norm, *second_norm; /* [hidden] */
    const float *head_norm;                /* [query_heads + key_heads, head_dim] or NULL */
    float first_epsilon, second_epsilon, head_epsilon, scale;
} Layer;

typedef struct {
    int64_t hidden, query_heads, key_heads, head_dim, inner;
    int64_t half; /* the model computes in bfloat16: the stream between layers and the cache are rounded to it */
} Shape;

typedef struct {
    void *keys, *values; /* [key_heads, stride, head_dim] */
    int64_t size, stride, window; /* ring size; slots held; 0 for no window */
} Slots;

typedef struct {
    int64_t length, first, rows; /* committed tokens; the tree's rows before this block, and of it */
    const int32_t *parents, *depths; /* [first + rows] */
    const float *cosines, *sines; /* [rows, head_dim]; the sines' first half negated */
} Block;

INLINE int64_t padded(int64_t n) { return (n + PAIR - 1) / PAIR * PAIR; }
INLINE floats spread(float x) { return x - (floats){0}; }

INLINE floats load(const void *from, int64_t at, int half) {
    if (!half) return *(const floats *)((const float *)from + at);
    return (floats)(__builtin_convertvector(*(const halves *)((const uint16_t *)from + at), ints) << 16);
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

static void round_all(float *values, int64_t count) {
    for (int64_t i = 0; i < count; i++) values[i] = widen(narrow(values[i]));
}

/* Lanes of v by their number with one bit turned; and where that bit is set, b's lane instead of a's. */
#define PICK(n, x) ((n) & x ? LANES + (n) : (n))
#if LANES == 16
#define TURN(v, x) \
    __builtin_shufflevector(v, v, 0 ^ x, 1 ^ x, 2 ^ x, 3 ^ x, 4 ^ x, 5 ^ x, 6 ^ x, 7 ^ x, 8 ^ x, 9 ^ x, 10 ^ x, 11 ^ x, \
                            12 ^ x, 13 ^ x, 14 ^ x, 15 ^ x)
#define BLEND(a, b, x) \
    __builtin_shufflevector(a, b, PICK(0, x), PICK(1, x), PICK(2, x), PICK(3, x), PICK(4, x), PICK(5, x), PICK(6, x), \
                            PICK(7, x), PICK(8, x), PICK(9, x), PICK(10, x), PICK(11, x), PICK(12, x), PICK(13, x), \
                            PICK(14, x), PICK(15, x))
#define EACH_BIT(step) step(8) step(4) step(2) step(1)
#else
#define TURN(v, x) __builtin_shufflevector(v, v, 0 ^ x, 1 ^ x, 2 ^ x, 3 ^ x, 4 ^ x, 5 ^ x, 6 ^ x, 7 ^ x)
#define BLEND(a, b, x) \
    __builtin_shufflevector(a, b, PICK(0, x), PICK(1, x), PICK(2, x), PICK(3, x), PICK(4, x), PICK(5, x), PICK(6, x), \
                            PICK(7, x))
#define EACH_BIT(step) step(4) step(2) step(1)
#endif
#define HALVE(x) \
    for (int i = 0; i < x; i++) v[i] = BLEND(v[i], v[i + x], x) + BLEND(TURN(v[i], x), TURN(v[i + x], x), x);
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

/* The totals of LANES vectors, each one's additions being those of `total`. */
INLINE floats totals(floats v[LANES]) {
    EACH_BIT(HALVE)
    return v[0];
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

/* sum + weight * x, where x is a float or, of PAIRS, two bfloat16. */
INLINE floats accumulate(floats sum, floats weight, const float *x, const int kind) {
#ifdef __AVX512BF16__
    if (kind == PAIRS) {
        int32_t two;
        memcpy(&two, x, sizeof two);
        return (floats)_mm512_dpbf16_ps((__m512)sum, (__m512bh)weight, (__m512bh)_mm512_set1_epi32(two));
    }
#endif
    (void)kind;
    return sum + weight * *x;
}

/* y [rows, .] += x [rows, .] times `steps` inputs (or pairs of them) of a panel, or with WIDE vectors of two panels. */
INLINE void multiply(const float *x, int64_t x_stride, const char *panel, int64_t next, float *y, int64_t y_stride,
                     int64_t steps, const int rows, const int vectors, const int kind) {
    const int bytes = kind == HALF ? 2 : 4, line = 64 / bytes;
    /* How far ahead to ask for memory, in steps: measured; near for one row, which waits for nothing else. */
    const int ahead = kind == HALF ? 64 : rows <= FEW ? 16 : 64;
    floats sums[MOST_SHARED][WIDE];
#pragma GCC unroll 12
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 8
        for (int v = 0; v < vectors; v++) sums[r][v] = (floats){0};
    for (int64_t i = 0; i < steps; i++) {
        floats weight[WIDE];
#pragma GCC unroll 8
        for (int v = 0; v < vectors; v++) {
            int64_t at = v / DEEP * next + i * PANEL + v % DEEP * LANES;
            weight[v] = load(panel, at, kind == HALF);
            if (v % DEEP * LANES % line == 0) __builtin_prefetch(panel + (at + ahead * PANEL) * bytes);
        }
#pragma GCC unroll 12
        for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
            for (int v = 0; v < vectors; v++) sums[r][v] = accumulate(sums[r][v], weight[v], x + r * x_stride + i, kind);
    }
#pragma GCC unroll 12
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 8
        for (int v = 0; v < vectors; v++) *(floats *)(y + r * y_stride + v * LANES) += sums[r][v];
}

#define NARROW(n) \
    case n: \
        multiply(x, x_stride, panel, next, y, y_stride, steps, n, WIDE, kind); \
        return;
#define SHALLOW(n) \
    case n: \
        multiply(x, x_stride, panel, next, y, y_stride, steps, n, DEEP, kind); \
        multiply(x, x_stride, panel + next * (kind == HALF ? 2 : 4), next, y + PANEL, y_stride, steps, n, DEEP, kind); \
        return;

/* A pair of panels for up to MOST_SHARED rows. */
INLINE void share(const float *x, int64_t x_stride, const char *panel, int64_t next, float *y, int64_t y_stride,
                  int64_t steps, int64_t rows, const int kind) {
    switch (rows) {
#if LANES == 16
        NARROW(1) NARROW(2) NARROW(3) NARROW(4) NARROW(5) NARROW(6)
        SHALLOW(7) SHALLOW(8) SHALLOW(9) SHALLOW(10) SHALLOW(11) SHALLOW(12)
#else
        SHALLOW(1) SHALLOW(2) SHALLOW(3)
#endif
    }
}

/* y [rows, y_stride] += x [rows, inputs] times the weight, plus the bias. Of PAIRS, x is left in bfloat16. */
static void product(const Product *p, float *x, float *y, int64_t y_stride, int64_t rows, int threads) {
    int64_t pairs = padded(p->outputs) / PAIR, size = p->kind == HALF ? 2 : 4;
    int64_t steps = p->kind == PAIRS ? p->inputs / 2 : p->inputs, next = steps * PANEL;
    int64_t groups = (rows + MOST_SHARED - 1) / MOST_SHARED;
    if (p->kind == PAIRS) /* in place: what is written lies before what is still to be read */
        for (int64_t i = 0; i < rows * p->inputs; i++) {
            uint16_t half = narrow(x[i]);
            memcpy((char *)x + i * sizeof half, &half, sizeof half);
        }
#pragma omp parallel for num_threads(threads) if (threads > 1)
    for (int64_t n = 0; n < pairs; n++) {
        for (int64_t from = 0; from < steps; from += STRETCH) {
            const char *panel = (const char *)p->weight + (2 * n * next + from * PANEL) * size;
            int64_t count = steps - from < STRETCH ? steps - from : STRETCH;
            for (int64_t g = 0; g < groups; g++) {
                int64_t row = rows * g / groups, shared = rows * (g + 1) / groups - row;
                const float *in = x + row * steps + from;
                float *out = y + row * y_stride + n * PAIR;
                if (p->kind == FULL) share(in, steps, panel, next, out, y_stride, count, shared, FULL);
                else if (p->kind == HALF) share(in, steps, panel, next, out, y_stride, count, shared, HALF);
                else share(in, steps, panel, next, out, y_stride, count, shared, PAIRS);
            }
        }
        if (p->bias)
            for (int64_t r = 0; r < rows; r++)
                for (int64_t o = n * PAIR; o < (n + 1) * PAIR && o < p->outputs; o++)
                    y[r * y_stride + o] += p->bias[o];
    }
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
    for (int64_t i = 0; i < size; i++) y[i] = x[i] * by * weight[i];
}

static void rotate(float *head, const float *cosines, const float *sines, int64_t size) {
    int64_t half = size / 2;
    for (int64_t i = 0; i < half; i++) {
        float low = head[i], high = head[i + half];
        head[i] = low * cosines[i] + high * sines[i];
        head[i + half] = high * cosines[i + half] + low * sines[i + half];
    }
}

static void store(void *to, int64_t at, const float *from, int64_t count, int half) {
    if (!half) memcpy((float *)to + at, from, count * sizeof(float));
    else for (int64_t i = 0; i < count; i++) ((uint16_t *)to)[at + i] = narrow(from[i]);
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

/* What the query heads of one key head see, for a few rows: queries and outputs [rows, stride], heads side by side. */
typedef struct {
    const float *query;
    float *output, *scores; /* scores [rows, heads, room] */
    const char *keys, *values;
    const int32_t *slots; /* [rows, room] */
    int64_t rows, heads, room, query_stride, output_stride, count[TOGETHER];
    float scale;
} Seen;

/* Ask for the next block of keys or values. */
INLINE void ahead(const char *from, const int32_t *slots, int64_t bytes) {
    for (int k = LANES; k < 2 * LANES; k++)
        for (int64_t at = 0; at < bytes; at += 64) __builtin_prefetch(from + slots[k] * bytes + at);
}

/* `vectors` of LANES make a head. Keys go by in blocks, each for all rows and heads while it is in the CPU's cache. */
INLINE void attend(const Seen *a, const int vectors, const int half) {
    const int64_t dim = vectors * LANES;
    int64_t longest = 0;
    for (int64_t r = 0; r < a->rows; r++) longest = a->count[r] > longest ? a->count[r] : longest;
    for (int64_t s = 0; s < longest; s += LANES) {
        if (s + LANES < a->count[0]) ahead(a->keys, a->slots + s, dim * (half ? 2 : 4));
        for (int64_t r = 0; r < a->rows; r++)
            for (int64_t h = 0; h < a->heads && s < a->count[r]; h++) {
                const float *query = a->query + r * a->query_stride + h * dim;
                const int32_t *slots = a->slots + r * a->room + s;
                floats q[MOST_VECTORS], dots[LANES];
                for (int v = 0; v < vectors; v++) q[v] = load(query, v * LANES, 0) * a->scale;
#pragma GCC unroll 16
                for (int k = 0; k < LANES; k++) {
                    dots[k] = q[0] * load(a->keys, slots[k] * dim, half);
                    for (int v = 1; v < vectors; v++) dots[k] += q[v] * load(a->keys, slots[k] * dim + v * LANES, half);
                }
                *(floats *)(a->scores + (r * a->heads + h) * a->room + s) = totals(dots);
            }
    }
    for (int64_t r = 0; r < a->rows; r++)
        for (int64_t h = 0; h < a->heads; h++) {
            float *output = a->output + r * a->output_stride + h * dim;
            soften(a->scores + (r * a->heads + h) * a->room, a->count[r]);
            for (int v = 0; v < vectors; v++) *(floats *)(output + v * LANES) = (floats){0};
        }
    for (int64_t s = 0; s < longest; s += LANES) {
        if (s + LANES < a->count[0]) ahead(a->values, a->slots + s, dim * (half ? 2 : 4));
        for (int64_t r = 0; r < a->rows; r++)
            for (int64_t h = 0; h < a->heads && s < a->count[r]; h++) {
                const float *weights = a->scores + (r * a->heads + h) * a->room + s;
                const int32_t *slots = a->slots + r * a->room + s;
                float *output = a->output + r * a->output_stride + h * dim;
                floats sums[2][MOST_VECTORS] = {{{0}}}; /* two by turns, as an addition takes longer than a load */
                for (int k = 0; k < LANES; k += 2)
                    for (int v = 0; v < vectors; v++)
#pragma GCC unroll 2
                        for (int turn = 0; turn < 2; turn++)
                            sums[turn][v] +=
                                load(a->values, slots[k + turn] * dim + v * LANES, half) * weights[k + turn];
                for (int v = 0; v < vectors; v++) *(floats *)(output + v * LANES) += sums[0][v] + sums[1][v];
            }
    }
}

#define HEADS(n) \
    case n: \
        if (half) attend(a, n * 16 / LANES, 1); \
        else attend(a, n * 16 / LANES, 0); \
        return;

static void attend_any(const Seen *a, int64_t dim, int half) {
    switch (dim / 16) { HEADS(1) HEADS(2) HEADS(3) HEADS(4) HEADS(5) HEADS(6) HEADS(7) HEADS(8) }
}

/* Store the rows' keys and values, then mix: qkv [rows, stride] to mixed [rows, query_heads * head_dim]. */
static void attention(const Shape *m, const Layer *l, const Block *b, const Slots *s, float *qkv, int64_t stride,
                      float *mixed, float *scratch, int64_t room, int threads) {
    int64_t dim = m->head_dim, turned = m->query_heads + m->key_heads, group = m->query_heads / m->key_heads;
    int64_t size = m->half ? 2 : 4;
    for (int64_t r = 0; r < b->rows; r++) {
        float *row = qkv + r * stride;
        int64_t slot = (b->length + b->first + r) % s->size;
        for (int64_t h = 0; h < turned; h++) {
            if (l->head_norm) norm(row + h * dim, l->head_norm + h * dim, row + h * dim, dim, l->head_epsilon);
            rotate(row + h * dim, b->cosines + r * dim, b->sines + r * dim, dim);
        }
        for (int64_t h = 0; h < m->key_heads; h++) {
            store(s->keys, (h * s->stride + slot) * dim, row + (m->query_heads + h) * dim, dim, m->half);
            store(s->values, (h * s->stride + slot) * dim, row + (turned + h) * dim, dim, m->half);
        }
    }
#pragma omp parallel for num_threads(threads) if (threads > 1)
    for (int64_t k = 0; k < m->key_heads; k++) {
        int64_t at = k * s->stride * dim * size;
        float *scores = scratch + k * room * TOGETHER * (group + 1);
        int32_t *slots = (int32_t *)(scores + room * TOGETHER * group);
        Seen seen = {.keys = (const char *)s->keys + at, .values = (const char *)s->values + at, .scores = scores,
                     .slots = slots, .heads = group, .room = room, .scale = l->scale, .query_stride = stride,
                     .output_stride = m->query_heads * dim};
        int64_t begun[TOGETHER];
        for (int r = 0; r < TOGETHER; r++) begun[r] = -1;
        for (int64_t r = 0; r < b->rows; r += seen.rows) {
            seen.rows = b->rows - r < TOGETHER ? b->rows - r : TOGETHER;
            for (int64_t i = 0; i < seen.rows; i++)
                seen.count[i] = path(b, s, b->first + r + i, slots + i * room, begun + i);
            seen.query = qkv + r * stride + k * group * dim;
            seen.output = mixed + (r * m->query_heads + k * group) * dim;
            attend_any(&seen, dim, m->half);
        }
    }
}

static int64_t room_for(int64_t keys) { return padded(keys + LANES); }

/* Floats of scratch that a walk of so many rows over at most so many keys needs. */
int64_t specdec_scratch(const Shape *m, int64_t rows, int64_t keys) {
    int64_t heads = (m->query_heads + 2 * m->key_heads) * m->head_dim;
    int64_t row = padded(m->hidden) + m->hidden + padded(heads) + m->query_heads * m->head_dim + padded(2 * m->inner) +
                  m->inner;
    return rows * row + room_for(keys) * TOGETHER * (m->query_heads + m->key_heads);
}

/* hidden [rows, m->hidden] through layers [first, last), in place. Where taps[n] is not NULL, it gets what goes into
 * layer n. */
void specdec_run_layers(const Shape *m, const Layer *layers, const Slots *slots, const Block *b, float *hidden,
                  float *const *taps, int64_t first, int64_t last, float *scratch, int threads) {
    int64_t rows = b->rows, width = padded(m->hidden), bytes = m->hidden * sizeof(float);
    int64_t heads = padded((m->query_heads + 2 * m->key_heads) * m->head_dim), mix = m->query_heads * m->head_dim;
    int64_t wide = padded(2 * m->inner), room = room_for(b->length + b->first + rows);
    float *stream = scratch, *normed = stream + rows * width, *qkv = normed + rows * m->hidden;
    float *mixed = qkv + rows * heads, *gates = mixed + rows * mix, *active = gates + rows * wide;
    float *rest = active + rows * m->inner;
    for (int64_t r = 0; r < rows; r++) memcpy(stream + r * width, hidden + r * m->hidden, bytes);
    for (int64_t n = first; n < last; n++) {
        const Layer *l = layers + n;
        for (int64_t r = 0; r < rows; r++) {
            if (taps[n]) memcpy(taps[n] + r * m->hidden, stream + r * width, bytes);
            norm(stream + r * width, l->first_norm, normed + r * m->hidden, m->hidden, l->first_epsilon);
        }
        memset(qkv, 0, rows * heads * sizeof(float));
        product(&l->qkv, normed, qkv, heads, rows, threads);
        attention(m, l, b, slots + n, qkv, heads, mixed, rest, room, threads);
        product(&l->out, mixed, stream, width, rows, threads);
        for (int64_t r = 0; r < rows; r++)
            norm(stream + r * width, l->second_norm, normed + r * m->hidden, m->hidden, l->second_epsilon);
        memset(gates, 0, rows * wide * sizeof(float));
        product(&l->gate_up, normed, gates, wide, rows, threads);
        for (int64_t r = 0; r < rows; r++) {
            const float *gate = gates + r * wide, *up = gate + m->inner;
            for (int64_t i = 0; i + LANES <= m->inner; i += LANES) {
                floats g = load(gate, i, 0);
                *(floats *)(active + r * m->inner + i) = g / (1.f + exponential(-g)) * load(up, i, 0);
            }
        }
        product(&l->down, active, stream, width, rows, threads);
        if (m->half) round_all(stream, rows * width); /* so that a walk may end here and another go on */
    }
    for (int64_t r = 0; r < rows; r++) memcpy(hidden + r * m->hidden, stream + r * width, bytes);
}

/* y [rows, padded outputs] += x [rows, inputs] times one weight; x is scratch afterwards. */
void specdec_product(const Product *p, float *x, float *y, int64_t rows, int threads) {
    product(p, x, y, padded(p->outputs), rows, threads);
}

/* Whether this machine multiplies pairs. */
int specdec_pairs(void) {
#ifdef __AVX512BF16__
    return 1;
#else
    return 0;
#endif
}
