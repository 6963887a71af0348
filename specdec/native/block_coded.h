/* Products of blocks with rounded rows. For few rows, codes are extracted from their words right where they multiply;
 * for many, pairs or bytes of them are read from where they were decoded. */

/* Chunks to multiply: the codes of the first chunk; the bytes from a chunk to the next, and the chunks of a block;
 * and how many bytes ahead to prefetch, or 0. Scales that lie before a chunk's codes in float16 are read where they are
 * `used`; others have been computed. */
typedef struct {
    const uint8_t *codes;
    int64_t count, bytes, each, head, ahead;
    const float *scales, *minima; /* [count, groups, PANEL] */
    int offset, subtracts, used;
} Chunks;

/* Inputs, and rows, of one pass. More rows would leave the caches before the next panel reads them again. */
enum { STRETCHED = MOST, PASS = 72 };
/* Rows of bytes for which codes are extracted where they multiply, at most. */
enum { FEW_BYTES = DECODES_BYTES ? 12 : PASS };
/* Decoded chunks of a format, of pairs or of bytes. */
INLINE Chunks decoded_chunks(const WeightFormat *f, const Decoded *d, int64_t count, int bytes) {
    return (Chunks){.codes = (const uint8_t *)d->pairs, .count = count, .bytes = CHUNK * PANEL * (bytes ? 1 : 2),
                    .each = 1, .scales = d->scales, .minima = d->minima, .subtracts = f->minima,
                    .offset = f->levels && bytes ? 128 : f->offset};
}

/* Chunks [first, last) of a panel, as they lie in it; a block begins with the first one. */
INLINE Chunks panel_chunks(const WeightFormat *f, const uint8_t *panel, int64_t first, int64_t last,
                           const float *scales, const float *minima, int bytes) {
    const int64_t each = f->values / CHUNK;
    const uint8_t *head = panel + first / each * block_bytes(f);
    return (Chunks){.codes = head + head_bytes(f) + number_bytes(f), .count = last - first, .bytes = chunk_bytes(f),
                    .each = each, .head = head_bytes(f), .scales = scales, .minima = minima,
                    .offset = f->levels && bytes ? 128 : f->offset, .subtracts = f->minima};
}

enum { DECODED = 16 }; /* bits of a code that has been decoded */
/* Rows that multiply decoded codes at once, at most and at least. With AVX-512 sums of twelve are in registers, as many
 * as hide how long each product takes; their totals are in memory, as those of more than FEW rows are. */
enum { MANY = LANES == 16 ? 12 : FEW, LEAST = LANES == 16 ? FEW_CODED + 1 : FEW / 2 };
enum { PARTS = 2 };    /* independent sums of a single row; integers give one total */
/* Of how many rows one has a pointer; a row or two behind it is addressed by the stride and its double, which with
 * AVX-512, whose products read rows themselves, would take an instruction more: there only where pointers would be too
 * many. */
INLINE int every(const int rows) { return LANES == 16 && rows <= FEW ? 1 : 3; }
enum { ROWS_AT_ONCE = MANY > FEW_CODED ? MANY : FEW_CODED };

#if LANES == 8 && defined(__AVX2__) /* or gcc computes all products of a group, stores them, and adds them up later */
#define KEEP(sum) __asm__("" : "+x"(sum))
#else
#define KEEP(sum) (void)0
#endif
#define HIDE(pointer) __asm__("" : "+r"(pointer)) /* or gcc computes and stores the address of all that is read */

/* A chunk of rows: words, `stride` bytes from row to row; the first `tail` are the row's numbers. */
typedef struct {
    const char *at[ROWS_AT_ONCE];
    int64_t stride;
    int tail;
} RowWords;
INLINE int32_t word_of(const RowWords *x, const int r, const int number, const int rows) {
    return *(const int32_t *)(x->at[r / every(rows)] + r % every(rows) * x->stride + 4 * number);
}

/* The sum of a row's numbers in a group: of one half of a chunk, or of both. */
INLINE int32_t sum_of(const RowWords *x, const int r, const int half, const int groups, const int rows) {
    return word_of(x, r, x->tail + 1 + half, rows) + (groups > 1 ? 0 : word_of(x, r, x->tail + 2, rows));
}

/* Sums of rows by vectors: those of a group, and the totals, in registers or, if `stored`, in memory. */
typedef struct {
    ints found[ROWS_AT_ONCE][PARTS][VECTORS], held[ROWS_AT_ONCE][VECTORS];
    floats total[ROWS_AT_ONCE][VECTORS];
} GroupSums;

/* Adds a group's sums, times scales, less minima, to the totals: every product of blocks with rounded rows uses these
 * operations in this order. */
INLINE void add_group(GroupSums *s, const RowWords *x, floats *sums, const floats *scale, const float *minima,
                      const int half, const int groups, const int rows, const int wide, const int stored,
                      const int subtracts) {
#pragma GCC unroll 12
    for (int r = 0; r < rows; r++) {
        const int32_t sum = sum_of(x, r, half, groups, rows), bits = word_of(x, r, x->tail, rows);
        float back;
        memcpy(&back, &bits, sizeof back);
#if LANES == 16
        const floats less = spread(-back * (float)sum);
#else /* what is read for all lanes is computed for all */
        const floats less = -spread(back) * __builtin_convertvector(sum + (ints){0}, floats);
#endif
#pragma GCC unroll 4
        for (int v = 0; v < wide; v++) {
            floats *own = stored ? sums + (r * PANEL / LANES + v) : &s->total[r][v];
            const floats found = __builtin_convertvector(s->found[r][0][v], floats) * back;
            *own = fused(found, scale[v], *own);
            if (subtracts) *own = fused(load(minima, v * LANES, 0), less, *own);
        }
    }
}

/* Adds one step's products to sums of a group; j is the step's number in it. */
INLINE void add_step(GroupSums *s, const RowWords *x, const words *weight, const ints *begun, const int at, const int j,
                     const int steps, const int rows, const int wide, const int bits, const int listed, const int bytes) {
    const int holds = HOLDS && bytes, held = held_by(bits, listed) < steps ? held_by(bits, listed) : steps;
    const int parts = rows == 1 && !holds ? PARTS : 1;
#pragma GCC unroll 12
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
        for (int v = 0; v < wide; v++) {
            ints *to = holds ? &s->held[r][v] : &s->found[r][j % parts][v], *all = &s->found[r][0][v];
            const ints none = {0}, before = (holds ? j % held : j / parts) ? *to : j || holds ? none : begun[r];
            if (bytes) *to = add_fours(before, weight[v], word_of(x, r, at, rows), bits >= 8 || listed);
            else *to = add_pairs(before, weight[v], word_of(x, r, at, rows));
            KEEP(*to);
            if (holds && (j + 1) % held == 0) {
                *all = add_held(j < held ? begun[r] : *all, *to);
                KEEP(*all);
            }
            if (parts > 1 && j == steps - 1) *all += s->found[r][1][v];
        }
}

/* Sums [rows, PANEL] += rows, `apart` words from row to row, times chunks, for vectors [from, from + wide). */
INLINE void multiply_chunks(const Chunks *c, const int32_t *x, int64_t apart, float *sums, int64_t from, const int rows,
                            const int wide, const int bits, const int listed, const int bytes, const int groups) {
    const int all = bytes ? FOURS : CHUNK / 2, steps = all / groups; /* words of a row's chunk, and of a group */
    const int stored = rows > (LANES == 16 ? FEW : 3), offset = HOLDS && bytes && (bits == 8 || listed) ? 0 : c->offset;
    const float *scales = c->scales + from * LANES, *minima = c->minima + from * LANES;
    const uint8_t *codes = c->codes;
    RowWords own = {.stride = apart * sizeof *x, .tail = all};
    GroupSums s;
    floats *to = (floats *)(sums + from * LANES);
    for (int r = 0; r < rows; r += every(rows)) own.at[r / every(rows)] = (const char *)(x + r * apart);
#pragma GCC unroll 12
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
        for (int v = 0; v < wide && !stored; v++) s.total[r][v] = to[r * PANEL / LANES + v];
    for (int64_t n = 0; n < c->count; n++) {
        const uint32_t *here = (const uint32_t *)codes + from * LANES;
        HIDE(here);
#pragma GCC unroll 12
        for (int r = 0; r < rows; r += every(rows)) HIDE(own.at[r / every(rows)]);
        if (bits < DECODED && c->ahead) ask_blocks(codes + c->ahead, 4 * PANEL * bits + 64);
#pragma GCC unroll 2
        for (int g = 0; g < groups; g++, scales += PANEL, minima += PANEL) {
            HIDE(scales);
            HIDE(minima);
            HIDE(to);
            ints begun[ROWS_AT_ONCE]; /* less what is taken from codes */
#pragma GCC unroll 12
            for (int r = 0; r < rows; r++) begun[r] = (ints){0} - sum_of(&own, r, g, groups, rows) * offset;
#pragma GCC unroll 16
            for (int j = 0; j < steps; j++) {
                const int at = bytes || bits == DECODED ? g * steps + j : pair_at(g * steps + j);
                words weight[VECTORS];
#pragma GCC unroll 4
                for (int v = 0; v < wide; v++)
                    if (bits == DECODED) weight[v] = WORDS(here + v * LANES, at);
                    else if (bytes) weight[v] = four_of(here + v * LANES, at, bits, listed);
                    else weight[v] = pair_of(here + v * LANES, at, bits, listed);
                add_step(&s, &own, weight, begun, at, j, steps, rows, wide, bits, listed, bytes);
            }
            const uint16_t *halves = (const uint16_t *)(codes - c->head) + from * LANES;
            floats scale[VECTORS];
            if (bits < DECODED && c->used)
#pragma GCC unroll 4
                for (int v = 0; v < wide; v++) scale[v] = widen_halves(halves + v * LANES);
            else
#pragma GCC unroll 4
                for (int v = 0; v < wide; v++) scale[v] = load(scales, v * LANES, 0);
            if (c->subtracts) add_group(&s, &own, to, scale, minima, g, groups, rows, wide, stored, 1);
            else add_group(&s, &own, to, scale, minima, g, groups, rows, wide, stored, 0);
        }
#pragma GCC unroll 12
        for (int r = 0; r < rows; r += every(rows)) own.at[r / every(rows)] += 4 * (all + 3);
        codes += c->bytes;
        if ((n + 1) % c->each == 0) codes += c->head;
    }
#pragma GCC unroll 12
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
        for (int v = 0; v < wide && !stored; v++) to[r * PANEL / LANES + v] = s.total[r][v];
}

/* Vectors of a panel that some rows multiply at once: a machine with few registers takes half of them, or one. */
#define VECTORS_OF(rows) \
    (LANES == 16 || (rows) == 1 ? PANEL / LANES : (rows) <= HALVING ? PANEL / LANES / 2 : 1)

/* Calls the version for a number of rows; more are equal groups. */
#define BLOCK_ROWS(n, least, most, bits, listed)                                                       \
    case n: {                                                                                          \
        if (n < least || n > most) return;                                                             \
        enum { WIDE = VECTORS_OF(n) };                                                                 \
        for (int64_t from = 0; from < PANEL / LANES; from += WIDE)                                     \
            multiply_chunks(c, x, apart, sums, from, n, WIDE, bits, listed, bytes, groups);            \
        return;                                                                                        \
    }
#define CODED_ROWS(n) BLOCK_ROWS(n, 1, FEW_CODED, bits, listed)
#define DECODED_ROWS(n) BLOCK_ROWS(n, LEAST, MANY, DECODED, 0)

INLINE void multiply_rows(const Chunks *c, const int32_t *x, int64_t apart, float *sums, int64_t rows, const int bits,
                          const int listed, const int bytes, const int groups) {
    switch (rows) { CODED_ROWS(1) CODED_ROWS(2) CODED_ROWS(3) CODED_ROWS(4) CODED_ROWS(5) CODED_ROWS(6) }
}

INLINE void multiply_decoded(const Chunks *c, const int32_t *x, int64_t apart, float *sums, int64_t rows,
                             const int bytes, const int groups) {
    switch (rows) {
        DECODED_ROWS(1) DECODED_ROWS(2) DECODED_ROWS(3) DECODED_ROWS(4) DECODED_ROWS(5) DECODED_ROWS(6)
        DECODED_ROWS(7) DECODED_ROWS(8) DECODED_ROWS(9) DECODED_ROWS(10) DECODED_ROWS(11) DECODED_ROWS(12)
    }
}

INLINE void multiply_format(const WeightFormat *f, const Chunks *c, const int32_t *x, int64_t apart, float *sums,
                            int64_t rows, const int bytes) {
    switch (f->levels ? 0 : f->bits) {
        case 0: multiply_rows(c, x, apart, sums, rows, 4, 1, bytes, 1); break;
        case 2: multiply_rows(c, x, apart, sums, rows, 2, 0, bytes, 2); break;
        case 3: multiply_rows(c, x, apart, sums, rows, 3, 0, bytes, 2); break;
        case 4: multiply_rows(c, x, apart, sums, rows, 4, 0, bytes, 1); break;
        case 5: multiply_rows(c, x, apart, sums, rows, 5, 0, bytes, 1); break;
        case 6: multiply_rows(c, x, apart, sums, rows, 6, 0, bytes, 2); break;
        default: multiply_rows(c, x, apart, sums, rows, 8, 0, bytes, 1);
    }
}

/* The sums [rows, PANEL] of up to PASS rows times a panel, with codes extracted anew for each few rows. */
static void multiply_coded(const WeightFormat *f, const uint8_t *panel, int64_t inputs, const float *x, int64_t apart,
                           float *sums, int64_t rows, int bytes) {
    float scales[STRETCHED / GROUP * PANEL], minima[STRETCHED / GROUP * PANEL];
    const int64_t chunks = inputs / CHUNK, groups = (rows + FEW_CODED - 1) / FEW_CODED;
    const int64_t each = f->values / CHUNK, size = chunk_bytes(f), own = groups_in(f) * PANEL;
    const int used = f->scales == PLAIN && !f->minima;
    memset(sums, 0, rows * PANEL * sizeof *sums);
    for (int64_t first = 0, last; first < chunks; first = last) {
        last = first + STRETCHED / CHUNK < chunks ? first + STRETCHED / CHUNK : chunks;
        for (int64_t n = first; n < last && !used; n++) {
            const uint8_t *head = panel + n / each * block_bytes(f), *chunk = head + head_bytes(f) + n % each * size;
            read_scales(f, head, chunk, scales + (n - first) * own, minima + (n - first) * own);
        }
        Chunks c = panel_chunks(f, panel, first, last, scales, minima, bytes);
        c.used = used, c.ahead = AHEAD;
        for (int64_t g = 0; g < groups; g++, c.ahead = 0) {
            const int64_t row = rows * g / groups, count = rows * (g + 1) / groups - row;
            const int32_t *these = (const int32_t *)x + row * apart + first * (bytes ? BYTE_CHUNK : ROW_CHUNK);
            if (bytes) multiply_format(f, &c, these, apart, sums + row * PANEL, count, 1);
            else multiply_format(f, &c, these, apart, sums + row * PANEL, count, 0);
        }
    }
}
