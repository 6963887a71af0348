/* Attention by tiles. */

#if HAS_TILES
/* One product of tiles takes 16 queries times 16 keys. The order of a unit's scores and sums does not depend on
 * other units: it runs over the head's values, and over blocks of BLOCK keys of its path. Values of two keys are
 * interleaved, for one span of blocks at a time. */
enum { BLOCK = 32, SPAN = 8 };

/* Floats of scratch for rows that attend by tiles: queries, outputs, some keys, and the values of a span. */
INLINE int64_t room_for_tiles(const Shape *m) {
    const int64_t units = (together(m) * (m->query_heads / m->key_heads) + TILE - 1) / TILE * TILE;
    return attends_in_tiles(m) ? m->head_dim * (units / 2 + units + TILE / 2 + SPAN * BLOCK / 2) : 0;
}

/* Arranges the units' queries as [units / TILE][dim / STEP][STEP / 2][TILE] pairs. */
static void gather_queries(const Seen *a, float *to) {
    const int64_t units = a->rows * a->heads;
    for (int64_t first = 0; first < units; first += TILE) {
        const char *rows[TILE];
        for (int64_t u = 0; u < TILE; u++) rows[u] = query_of(a, first + u < units ? first + u : units - 1, a->dim / 2);
        for (int64_t d = 0; d < a->dim / 2; d += 4, to += 4 * TILE) {
            floats own[4];
            transpose(rows, d, own);
            memcpy(to, own, sizeof own);
        }
    }
}

/* Scores of units [first, end) for the keys in `slots` [from, to), of which the first `count` are seen. */
static void score_tiles(const Seen *a, const float *queries, int64_t first, int64_t end, const int32_t *slots,
                        int64_t from, int64_t to, int64_t count, char *beside) {
    const int64_t size = 2 * a->dim;
    float found[TILE * TILE] __attribute__((aligned(64)));
    const char *rows[TILE]; /* of what is found */
    for (int i = 0; i < TILE; i++) rows[i] = (const char *)(found + i * TILE);
    if (to > count) to = count;
    for (int64_t s = from; s < to; s += TILE) {
        const char *keys = a->keys + slots[s] * size;
        if (s + TILE > count || slots[s + TILE - 1] - slots[s] != TILE - 1) { /* the slots are not consecutive */
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
            floats own[4]; /* scores of four units */
            for (int64_t u = 0; u < TILE; u++) {
                const int64_t unit = tile * TILE + u;
                if (u % 4 == 0) transpose(rows, u, own);
                if (unit < first || unit >= end) continue;
                *(floats *)(a->scores + unit * a->room + s) = a->cap ? capped(a, own[u % 4]) : own[u % 4];
            }
        }
    }
}

/* Adds `blocks` blocks of values times their weights to `width` tiles of some units' sums, [dim] each. */
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

/* Adds the values in `slots` [from, to), of which the first `count` are seen, to the sums [dim] of units [first,
 * end). */
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

/* Attention of rows by tiles; `rest` has room_for_tiles floats. Blocks that all rows see are done for all rows at
 * once, then the rest of each row's path by itself. In a chain, all rows share all blocks: later keys have weight 0
 * for earlier rows. */
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
    if (a->chain) common = a->finite ? whole : shortest / BLOCK * BLOCK;
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
        soften(own, a->count[unit / a->heads], a->sinks ? a->sinks + unit % a->heads : NULL);
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
