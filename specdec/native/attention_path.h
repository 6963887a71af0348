/* Paths: the slots that a row sees, and which blocks of them rows share. */

/* A row's path: its slots in order of position, behind which the last one stands for a block's rest. */
typedef struct {
    int64_t row, from, count; /* the row, or -1 of a new path; its first committed position; its number of slots */
} Path;

/* Writes the slots that tree row `row` sees and returns their number. `slots` has those of `old`: what both share stays. */
static int64_t path(const Block *b, const Slots *s, int64_t row, int32_t *slots, Path *old) {
    int64_t first = b->length + b->depths[row] - s->window + 1;
    int64_t from = !s->window || first < 0 ? 0 : first < b->length ? first : b->length;
    if (old->row < 0 || from != old->from) {
        int64_t slot = from % s->size;
        for (int64_t p = 0; p < b->length - from; p++) {
            slots[p] = (int32_t)slot;
            if (++slot == s->size) slot = 0;
        }
    }
    const int64_t above = s->window ? -1 : old->row; /* a row whose path may begin this one's */
    int64_t own = 0, r = row;
    for (; r >= 0 && r != above && (!s->window || b->depths[row] - b->depths[r] < s->window); r = b->parents[r]) own++;
    const int64_t count = own + (r >= 0 && r == above ? old->count : b->length - from);
    for (int64_t place = count, r = row; own > 0; own--, r = b->parents[r])
        slots[--place] = (int32_t)((b->length + r) % s->size);
    for (int64_t rest = count; rest < count + LANES; rest++) slots[rest] = slots[count - 1]; /* read with weight 0 */
    *old = (Path){row, from, count};
    return count;
}

/* The same for a row that sees all positions of a span, of a cache without a window. */
static int64_t spanned(const int32_t *span, int32_t *slots) {
    const int64_t count = span[1] - span[0];
    for (int64_t p = 0; p < count; p++) slots[p] = (int32_t)(span[0] + p);
    for (int64_t rest = count; rest < count + LANES; rest++) slots[rest] = slots[count - 1];
    return count;
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
    int64_t common; /* slots that begin those of all rows; there may be more */
    int64_t chain;  /* the rows are a chain: each row's slots begin those of the last row, which alone are in `slots` */
    int64_t finite; /* ... and the values from the first row's last one on are finite: a weight of 0 makes 0 of them */
    float cap;
    const float *sinks; /* [heads] or NULL */
    enum Kind kind; /* FULL: float32; HALF: keys and values in bfloat16; PAIRS: queries and weights too */
    float *beside;  /* room_beside floats */
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
INLINE int64_t together(const Shape *m) {
    const int64_t rows = ABREAST * m->key_heads / m->query_heads;
    return attends_in_tiles(m) || rows > 2 * TOGETHER ? 2 * TOGETHER : rows > TOGETHER ? rows : TOGETHER;
}

/* Whether a block is seen by so many units that it is laid out anew for them. */
INLINE int are_many(int64_t units) { return units >= WORTH_TURNING; }

/* A number of floats rounded up to whole vectors. */
INLINE int64_t rounded_up(int64_t count) { return (count + LANES - 1) / LANES * LANES; }

/* Floats of scratch for units that attend together: a block of keys or values, and queries. */
INLINE int64_t room_beside(int64_t units, int64_t dim) { return are_many(units) ? dim * (LANES + rounded_up(units)) : 0; }

/* A block of LANES keys or values, their kind, and the number of consecutive rows that see it. */
typedef struct {
    const char *at[LANES];
    int64_t rows;
    enum Kind kind;
} Keys;

/* The block at slot index `s` of a row. Of a chain's rows all share it if keys behind a row's last one do no harm. */
static void look_up(Keys *keys, const Seen *a, const char *from, int64_t row, int64_t s) {
    const int32_t *slots = a->slots + (a->chain ? 0 : row * a->room) + s;
    const int64_t left = a->count[row] - s;
    int64_t end = row + 1, last = LANES - 1;
    if (a->chain && left < LANES && !a->finite) last = left - 1;
    else if (a->chain || s + LANES <= a->common) end = a->rows;
    else
        for (; end < a->rows && s < a->count[end]; end++)
            if (memcmp(slots, slots + (end - row) * a->room, LANES * sizeof *slots)) break;
    keys->rows = end - row;
    keys->kind = a->kind;
    for (int64_t k = 0; k < LANES; k++)
        keys->at[k] = from + slots[k < last ? k : last] * a->dim * (a->kind == FULL ? 4 : 2);
}

/* Whether the values in the slots are finite. */
static int all_finite(const Seen *a, const int32_t *slots, int64_t from, int64_t to) {
    ints odd = {0};
    for (int64_t s = from; s < to; s++)
        for (int64_t d = 0; d < a->dim; d += LANES) {
            const floats own = load(a->values, slots[s] * a->dim + d, a->kind != FULL), none = own - own;
            odd |= none != none;
        }
    for (int n = 0; n < LANES; n++)
        if (odd[n]) return 0;
    return 1;
}
