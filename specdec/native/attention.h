/* Attention by vectors: the slots that a row sees, and its queries over their keys and values. */

/* Writes the slots that tree row `row` sees, in order of position, and returns their number. `slots` already holds the
 * committed positions from *begun on. */
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
    for (int64_t rest = count; rest < count + LANES; rest++) slots[rest] = slots[count - 1]; /* read with weight 0 */
    return count;
}

/* The same for a row whose parent is the row before it, of `count` slots, stored before; without a window. */
static int64_t onward(const Block *b, const Slots *s, int64_t row, int32_t *slots, int64_t room, int64_t count) {
    memcpy(slots, slots - room, count * sizeof *slots);
    for (int64_t rest = count++; rest < count + LANES; rest++) slots[rest] = (int32_t)((b->length + row) % s->size);
    return count;
}

/* The same for a row that sees all positions of a span, of a cache without a window. */
static int64_t spanned(const int32_t *span, int32_t *slots) {
    const int64_t count = span[1] - span[0];
    for (int64_t p = 0; p < count; p++) slots[p] = (int32_t)(span[0] + p);
    for (int64_t rest = count; rest < count + LANES; rest++) slots[rest] = slots[count - 1];
    return count;
}

/* Softmax of scores in place, padded with zeros to a whole block. `sink`: one more score, of no key, or NULL. */
static void soften(float *scores, int64_t count, const float *sink) {
    floats most = spread(sink ? *sink : -INFINITY), sum = {0};
    for (int64_t rest = count; rest % LANES; rest++) scores[rest] = -INFINITY;
    for (int64_t s = 0; s < count; s += LANES) most = larger(load(scores, s, 0), most);
    most = largest(most);
    for (int64_t s = 0; s < count; s += LANES) {
        floats e = exponential(load(scores, s, 0) - most);
        *(floats *)(scores + s) = e;
        sum += e;
    }
    const float all = sink ? total(sum) + exponential(spread(*sink) - most)[0] : total(sum), by = 1.f / all;
    for (int64_t s = 0; s < count; s += LANES) *(floats *)(scores + s) *= by;
}

/* Attention's input and output for a few rows and the query heads of one key head: scaled queries, and outputs
 * [rows, stride] with heads side by side. A unit is one head of one row; units are numbered row by row. */
typedef struct {
    const float *query;
    float *output, *scores; /* scores [units, room]; a softmax turns them into weights */
    const char *keys, *values;
    const char *soon[2];  /* prefetched at these slots: [0] while keys are read, [1] while values are; or NULL */
    const int32_t *slots; /* [rows, room] */
    int64_t rows, heads, dim, room, query_stride, output_stride, count[2 * TOGETHER];
    int64_t chain; /* the rows are a chain: each row's slots begin those of the last row */
    float cap;
    const float *sinks; /* [heads] or NULL */
    enum Kind kind; /* FULL: float32; HALF: keys and values in bfloat16; PAIRS: queries and weights too */
} Seen;

/* Whether queries and weights are rounded to bfloat16, as keys and values are, to be multiplied in pairs. */
INLINE int attends_in_pairs(const Shape *m) {
#ifdef __AVX512BF16__
    return m->half && m->head_dim % (2 * LANES) == 0;
#else
    (void)m;
    return 0;
#endif
}

/* Whether pairs are multiplied by tiles. */
INLINE int attends_in_tiles(const Shape *m) { return HAS_TILES && m->tiles && m->half && m->head_dim % (2 * LANES) == 0; }

/* The number of rows that attend together, so that shared keys and values are read once. */
INLINE int64_t together(const Shape *m) { return attends_in_tiles(m) ? 2 * TOGETHER : TOGETHER; }

/* A block of LANES keys or values, and the number of consecutive rows that see it. */
typedef struct {
    const char *at[LANES];
    int64_t rows;
} Keys;

/* The block at slot index `s` of a row. */
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

/* Products of one key with the queries of some units. */
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

/* Sums over lanes for consecutive keys: first of two keys, then of four, and so on. */
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

INLINE floats capped(const Seen *a, floats scores) { /* bounded by a tanh */
    return a->cap - 2 * a->cap / (1.f + exponential(scores * (2 / a->cap)));
}

/* Scores of some units for a block of keys. */
INLINE void score(const Seen *a, const Keys *block, const float *const query[UNITS], float *scores, const int units,
                  const int kind) {
    const int64_t dim = a->dim;
    const int known = FEW > 2; /* with few registers a constant only takes the compiler longer */
    Sums sums = known && dim == 64    ? totals_of(block, query, 64, 0, units, kind) /* a constant, for the compiler */
                : known && dim == 128 ? totals_of(block, query, 128, 0, units, kind)
                                      : totals_of(block, query, dim, 0, units, kind);
    for (int u = 0; u < units; u++) {
        floats own = sums.of[u];
        if (a->cap) own = capped(a, own);
        *(floats *)(scores + u * a->room) = own;
    }
}

/* Adds a block's values times their weights to `width` vectors, from `d` on, of some units' outputs. */
INLINE void mix_some(const Keys *block, float *const output[UNITS], const float *shares, int64_t room, int64_t d,
                     const int width, const int units, const int kind) {
    floats sums[UNITS][2][WIDE] = {{{{0}}}}; /* two in turn, as an addition takes longer than a load */
#pragma GCC unroll 1 /* or gcc reads all values first and runs out of registers */
    for (int k = 0; k < LANES; k += 2)
        for (int turn = 0; turn < 2; turn++)
            for (int v = 0; v < width; v++) {
                floats value = load(block->at[k + turn], d + v * LANES, kind == HALF);
                for (int u = 0; u < units; u++) sums[u][turn][v] = fused(value, spread(shares[u * room + k + turn]), sums[u][turn][v]);
            }
    for (int u = 0; u < units; u++)
        for (int v = 0; v < width; v++) *(floats *)(output[u] + d + v * LANES) += sums[u][0][v] + sums[u][1][v];
}

#ifdef __AVX512BF16__
/* One half of the 32 values of two vectors that were unpacked with others into low and high halves. */
INLINE floats repack(floats low, floats high, int half) {
    const __m512i first = _mm512_set_epi32(23, 22, 21, 20, 7, 6, 5, 4, 19, 18, 17, 16, 3, 2, 1, 0);
    return (floats)_mm512_permutex2var_ps((__m512)low, _mm512_add_epi32(first, _mm512_set1_epi32(8 * half)), (__m512)high);
}

/* The same in pairs of keys: their values are interleaved first, and weights are in bfloat16, too. */
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

/* Adds a block's values times their weights to some units' outputs. */
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

#define EACH_KIND(n, act)                                                            \
    case n:                                                                          \
        if (a->kind == FULL) act(a, block, own, scores, n, FULL);                    \
        else if (a->kind == HALF || !HAS_PAIRS) act(a, block, own, scores, n, HALF); \
        else act(a, block, own, scores, n, PAIRS);                                   \
        return;

static void score_any(const Seen *a, const Keys *block, const float *const own[UNITS], float *scores, int64_t units) {
    switch (units) { EACH_KIND(1, score) EACH_KIND(2, score) EACH_KIND(3, score) }
}

static void mix_any(const Seen *a, const Keys *block, float *const own[UNITS], const float *scores, int64_t units) {
    switch (units) { EACH_KIND(1, mix) EACH_KIND(2, mix) EACH_KIND(3, mix) }
}

/* Goes through all blocks of keys, or of values; all units that see a block use it while it is in the CPU's cache.
 * Meanwhile it prefetches as much of what comes next, which weights drove out of the caches. */
static void each_block(const Seen *a, int64_t longest, int mixes) {
    const int64_t size = a->kind == PAIRS && !mixes ? a->dim / 2 : a->dim; /* floats per unit */
    const int64_t bytes = a->dim * (a->kind == FULL ? 4 : 2);              /* bytes per key or value */
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
            soften(own, a->count[r], a->sinks ? a->sinks + h : NULL);
            if (a->kind == PAIRS) narrow_all(own, own, (a->count[r] + LANES - 1) / LANES * LANES);
        }
        memset(a->output + r * a->output_stride, 0, a->heads * a->dim * sizeof(float));
    }
    each_block(a, longest, 1);
}
