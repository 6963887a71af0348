/* The head: the last norm, logits and largest scores. */

/* Floats that a row of `count` inputs takes in the layout of tiles. */
INLINE int64_t gathered(int64_t count) { return HAS_TILES ? count + (count + 1) / 2 : 0; }

/* Floats that a row of logits takes for each thread while it is summed by tiles. */
enum { SUMMED = HAS_TILES ? STRIP : 0 };

/* Scratch of so many floats, to be given back. Buffers are kept for the next calls, up to a size: otherwise the
 * system takes their pages back after every forward of many rows, and has to clear new ones for the next. There are
 * two, as a call with scratch of its own may run layers. */
enum { BUFFERS = 2 };
static float *kept[BUFFERS];
#ifdef __SANITIZE_ADDRESS__ /* a kept buffer may be longer than requested, and so hide reads past the end */
enum { KEPT = 0 };
#else
enum { KEPT = 32 << 20 };
#endif

static float *take_scratch(int64_t count) {
    const size_t size = (size_t)(count / 16 + 2) * 64; /* one cache line before it stores the size */
    float *found = NULL;
    for (int i = 0; i < BUFFERS && !found; i++) found = __atomic_exchange_n(kept + i, NULL, __ATOMIC_ACQUIRE);
    if (found && *(size_t *)found < size) free(found), found = NULL;
    if (!found && !(found = aligned_alloc(64, size))) return NULL;
    *(size_t *)found = size;
    return found + 16;
}

static void give_scratch(float *scratch) {
    scratch -= 16;
    const int keep = *(size_t *)scratch <= KEPT;
    for (int i = 0; i < BUFFERS && keep && scratch; i++) scratch = __atomic_exchange_n(kept + i, scratch, __ATOMIC_ACQ_REL);
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

/* The largest of values [first, end), or NaN where one of them is NaN. */
INLINE float highest(const void *values, int64_t first, int64_t end, const int half) {
    floats most[VECTORS], odd = {0};
    for (int v = 0; v < VECTORS; v++) most[v] = spread(-INFINITY);
    for (; first + STRIP <= end; first += STRIP)
        for (int v = 0; v < VECTORS; v++) {
            floats own = load(values, first + v * LANES, half);
            most[v] = larger(own, most[v]);
            odd = (floats)((ints)odd | (own != own)); /* a number with all bits set is NaN, too */
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

/* Whether a precedes b in descending order; NaN precedes every number. */
INLINE int before(float a, float b) { return a > b || (a != a && b == b); }

/* Inserts the indices of values [first, end) into the `known` entries of the `count` largest, which are in
 * descending order, of equal values the first one first. Values behind `least` in that order are skipped. Returns
 * the number known. */
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

/* specdec_top of one row. It takes `count` blocks with the largest maxima; the smallest of these maxima is a lower
 * bound of the result, so blocks and values below it are skipped. */
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

/* Writes the indices of each row's `count` largest of `size` values to `best` [rows, count], in descending order,
 * of equal values the first one first, and the values to `found`, unless NULL. The rows are `values` at the indices
 * `wanted`, or the first ones where that is NULL. */
void specdec_top(const void *values, const int64_t *wanted, int64_t rows, int64_t size, int half, int64_t count,
                 int64_t *best, float *found) {
    ROUNDS_TO_NEAREST;
    for (int64_t r = 0; r < rows; r++, best += count) {
        const void *row = row_of(values, wanted ? wanted[r] : r, size, half);
        if (half) top(row, size, count, best, 1);
        else top(row, size, count, best, 0);
        for (int64_t n = 0; found && n < count; n++) *found++ = value_of(row, best[n], half);
    }
}

/* The index of the first largest value; -1 where it is not finite, or a value is NaN. */
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

/* Takes rows `wanted` (NULL: the first `count`) of `hidden` through the last norm and writes their `logits` [count,
 * outputs], and each row's `best` token, or -1 where a row is not a distribution. `normed`, unless NULL, receives
 * all `rows` after the norm. All are in the model's dtype. While logits are in the cache, each row's `tops` largest
 * go to `most` and `found` [count, tops], as in specdec_top; and for rows with `by` above 0, a draw as in
 * specdec_draw goes to `drawn`, unless NULL. */
static void read_head(const Shape *m, const Head *head, const void *hidden, int64_t rows, void *normed,
                      const int64_t *wanted, int64_t count, void *logits, int64_t *best, int64_t tops, int64_t *most,
                      float *found, const float *by, const uint64_t *keys, int64_t *drawn, float *scratch, const Team *team) {
    const Product *p = &head->product;
    const int64_t size = m->hidden, half = m->half;
    float *x = scratch, *grouped = x + count * apart_by(size), *sums = grouped + count * gathered(size);
    float *all = sums + team->count * count * SUMMED;
    if (normed)
        SHARED(r, rows) {
            widen_all(row_of(hidden, r, size, half), all + r * size, size, half);
            norm_if(all + r * size, head->norm, all + r * size, size, head->epsilon);
            store(normed, r * size, all + r * size, size, half);
        }
    SHARED(r, count) {
        float *own = x + r * apart_by(size);
        widen_all(row_of(hidden, wanted ? wanted[r] : r, size, half), own, size, half);
        norm_if(own, head->norm, own, size, head->epsilon);
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

/* Floats of scratch that it needs. */
static int64_t room_for_head(const Shape *m, int64_t rows, const void *normed, int64_t count, int threads) {
    return (normed ? rows : 0) * m->hidden + count * (apart_by(m->hidden) + gathered(m->hidden) + threads * SUMMED);
}
