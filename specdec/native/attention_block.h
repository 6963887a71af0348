/* A block of keys or values, times the queries or weights of the units that see it. */

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
                HOLD(value);
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

#define EACH_KIND(n, act)                                                                \
    case n:                                                                              \
        if (block->kind == FULL) act(a, block, own, scores, n, FULL);                    \
        else if (block->kind == HALF || !HAS_PAIRS) act(a, block, own, scores, n, HALF); \
        else act(a, block, own, scores, n, PAIRS);                                       \
        return;

static void score_any(const Seen *a, const Keys *block, const float *const own[UNITS], float *scores, int64_t units) {
    switch (units) { EACH_KIND(1, score) EACH_KIND(2, score) EACH_KIND(3, score) }
}

static void mix_any(const Seen *a, const Keys *block, float *const own[UNITS], const float *scores, int64_t units) {
    switch (units) { EACH_KIND(1, mix) EACH_KIND(2, mix) EACH_KIND(3, mix) }
}

/* A block's keys turned: [dim][LANES] floats, or [dim / 2][LANES] pairs. */
static void turn_keys(const Keys *block, int64_t dim, float *to) {
    const int64_t places = block->kind == FULL ? dim : dim / 2; /* of floats, which hold two numbers in bfloat16 */
    for (int64_t at = 0; at < places; at += 4) {
        floats own[4];
        transpose(block->at, at, own);
        for (int i = 0; i < 4; i++) {
            if (block->kind == HALF) {
                *(floats *)to = (floats)((words)own[i] << 16);
                to += LANES;
                own[i] = (floats)((words)own[i] & 0xffff0000);
            }
            *(floats *)to = own[i];
            to += LANES;
        }
    }
}

/* A unit's query, of `size` floats. */
INLINE const char *query_of(const Seen *a, int64_t unit, int64_t size) {
    return (const char *)(a->query + unit / a->heads * a->query_stride + unit % a->heads * size);
}

/* The units' queries turned: [size][rounded_up(units)] floats, or pairs. */
static void turn_queries(const Seen *a, int64_t size, float *to) {
    const int64_t units = a->rows * a->heads, apart = rounded_up(units);
    for (int64_t first = 0; first < units; first += LANES) {
        const char *rows[LANES];
        for (int64_t u = 0; u < LANES; u++) rows[u] = query_of(a, first + u < units ? first + u : units - 1, size);
        for (int64_t d = 0; d < size; d += 4) {
            floats own[4];
            transpose(rows, d, own);
            for (int i = 0; i < 4; i++) *(floats *)(to + (d + i) * apart + first) = own[i];
        }
    }
}

/* The scores that `score` finds, of keys and queries that are turned, which takes no sums over lanes. */
INLINE void score_turned(const Seen *a, const float *keys, const float *queries, int64_t size, float *scores,
                         const int units, const int kind) {
    const int64_t apart = rounded_up(a->rows * a->heads);
    floats levels[3][TURNED]; /* sums of what two lanes would hold, four lanes, eight lanes */
    for (int64_t lane = 0;; lane += 2) {
        floats sums[2][TURNED];
        int64_t level = 0;
        for (int side = 0; side < 2; side++)
#pragma GCC unroll 16
            for (int u = 0; u < units; u++) sums[side][u] = (floats){0};
        for (int64_t d = lane; d < size; d += LANES)
#pragma GCC unroll 2
            for (int side = 0; side < 2; side++) {
                const floats own = load(keys, (d + side) * LANES, 0);
#pragma GCC unroll 16
                for (int u = 0; u < units; u++)
                    sums[side][u] = accumulate(sums[side][u], own, queries + (d + side) * apart + u, kind);
            }
#pragma GCC unroll 16
        for (int u = 0; u < units; u++) sums[0][u] += sums[1][u];
        for (; lane >> (level + 1) & 1; level++)
#pragma GCC unroll 16
            for (int u = 0; u < units; u++) sums[0][u] += levels[level][u];
        if (lane + 2 == LANES) {
#pragma GCC unroll 16
            for (int u = 0; u < units; u++) *(floats *)(scores + u * a->room) = a->cap ? capped(a, sums[0][u]) : sums[0][u];
            return;
        }
#pragma GCC unroll 16
        for (int u = 0; u < units; u++) levels[level][u] = sums[0][u];
    }
}

#define TURNED_UNITS(n)                                                                            \
    case n:                                                                                        \
        if (n > TURNED) return;                                                                    \
        if (HAS_PAIRS && a->kind == PAIRS) score_turned(a, keys, queries, size, scores, n, PAIRS); \
        else score_turned(a, keys, queries, size, scores, n, FULL);                                \
        return;

static void score_any_turned(const Seen *a, const float *keys, const float *queries, int64_t size, float *scores,
                             int64_t units) {
    switch (units) {
        TURNED_UNITS(1) TURNED_UNITS(2) TURNED_UNITS(3) TURNED_UNITS(4) TURNED_UNITS(5) TURNED_UNITS(6)
        TURNED_UNITS(7) TURNED_UNITS(8) TURNED_UNITS(9) TURNED_UNITS(10) TURNED_UNITS(11) TURNED_UNITS(12)
    }
}

/* A block's values in float32. */
static void widen_values(Keys *block, int64_t dim, float *to) {
    for (int k = 0; k < LANES; k++, to += dim) {
        for (int64_t d = 0; d < dim; d += LANES) *(floats *)(to + d) = load(block->at[k], d, 1);
        block->at[k] = (const char *)to;
    }
    block->kind = FULL;
}
