/* The head: the last norm, logits, largest values. */

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
