/* Products of blocks that extract codes from their words right where they multiply: for rows in bytes, and for few rows
 * in 16-bit integers. */

/* Chunks to multiply: the codes of the first chunk; the bytes from a chunk to the next, and the chunks of a block;
 * and how many bytes ahead to prefetch, or 0. */
typedef struct {
    const uint8_t *codes;
    int64_t count, bytes, each, head, ahead;
    const float *scales, *minima; /* [count, groups, PANEL] */
    int offset, subtracts;
} Chunks;

/* Sums [rows, PANEL] += rows, `apart` words from row to row, times chunks, for vectors [from, from + wide). */
INLINE void multiply_chunks(const Chunks *c, const int32_t *x, int64_t apart, float *sums, int64_t from, const int rows,
                            const int wide, const int bits, const int listed, const int bytes) {
    enum { PARTS = 2 }; /* independent sums of a single row; integers give one total */
    const int parts = rows == 1 ? PARTS : 1, groups = bits == 2 || bits == 3 || bits == 6 ? 2 : 1;
    const int all = bytes ? FOURS : CHUNK / 2, steps = all / groups; /* words of a row's chunk, and of a group */
    const uint8_t *codes = c->codes;
    floats total[FEW_CODED][VECTORS];
#pragma GCC unroll 8
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
        for (int v = 0; v < wide; v++) total[r][v] = load(sums, r * PANEL + (from + v) * LANES, 0);
    for (int64_t n = 0; n < c->count; n++, x += all + 3) {
        const uint32_t *own = (const uint32_t *)codes + from * LANES;
        for (int at = 0; c->ahead && at < 4 * PANEL * bits + 64; at += 64)
            __builtin_prefetch(codes + c->ahead + at, 0, LOCALITY);
#pragma GCC unroll 2
        for (int g = 0; g < groups; g++) {
            const int64_t place = (n * groups + g) * PANEL + from * LANES;
            ints found[FEW_CODED][PARTS][VECTORS];
            int32_t sum[FEW_CODED];
#pragma GCC unroll 8
            for (int r = 0; r < rows; r++) {
                const int32_t *tail = x + r * apart + all;
                sum[r] = groups == 1 ? tail[1] + tail[2] : tail[1 + g];
#pragma GCC unroll 4
                for (int v = 0; v < wide; v++) {
                    found[r][parts - 1][v] = (ints){0};
                    found[r][0][v] = (ints){0} - sum[r] * c->offset;
                }
            }
#pragma GCC unroll 16
            for (int j = 0; j < steps; j++) {
                const int at = g * steps + j;
                words weight[VECTORS];
#pragma GCC unroll 4
                for (int v = 0; v < wide; v++)
                    if (bytes) weight[v] = four_of(own + v * LANES, at, bits, listed);
                    else weight[v] = pair_of(own + v * LANES, at, bits, listed);
#pragma GCC unroll 8
                for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
                    for (int v = 0; v < wide; v++) {
                        ints *to = &found[r][j % parts][v];
                        if (bytes) *to = add_fours(*to, weight[v], x[r * apart + at], bits == 8 || listed);
                        else *to = add_pairs(*to, weight[v], x[r * apart + at]);
                    }
            }
#pragma GCC unroll 8
            for (int r = 0; r < rows; r++) {
                float back;
                memcpy(&back, x + r * apart + all, sizeof back);
#pragma GCC unroll 4
                for (int v = 0; v < wide; v++) {
                    ints one = found[r][0][v];
                    if (parts > 1) one += found[r][1][v];
                    total[r][v] = add_group(total[r][v], one, back, load(c->scales, place + v * LANES, 0));
                    if (c->subtracts)
                        total[r][v] = fused(load(c->minima, place + v * LANES, 0), spread(-back * (float)sum[r]), total[r][v]);
                }
            }
        }
        codes += c->bytes;
        if ((n + 1) % c->each == 0) codes += c->head;
    }
#pragma GCC unroll 8
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
        for (int v = 0; v < wide; v++) *(floats *)(sums + r * PANEL + (from + v) * LANES) = total[r][v];
}

/* Calls the version for a number of rows; a machine with few registers takes half of the vectors at a time. */
#define CODED_ROWS(n)                                                                          \
    case n: {                                                                                  \
        if (n > FEW_CODED) return;                                                             \
        enum { WIDE = LANES == 16 || n == 1 ? PANEL / LANES : n < 4 ? PANEL / LANES / 2 : 1 }; \
        for (int64_t from = 0; from < PANEL / LANES; from += WIDE)                             \
            multiply_chunks(c, x, apart, sums, from, n, WIDE, bits, listed, bytes);            \
        return;                                                                                \
    }

INLINE void multiply_rows(const Chunks *c, const int32_t *x, int64_t apart, float *sums, int64_t rows, const int bits,
                          const int listed, const int bytes) {
    switch (rows) { CODED_ROWS(1) CODED_ROWS(2) CODED_ROWS(3) CODED_ROWS(4) }
}

INLINE void multiply_format(const WeightFormat *f, const Chunks *c, const int32_t *x, int64_t apart, float *sums,
                            int64_t rows, const int bytes) {
    switch (f->levels ? 0 : f->bits) {
        case 0: multiply_rows(c, x, apart, sums, rows, 4, 1, bytes); break;
        case 2: multiply_rows(c, x, apart, sums, rows, 2, 0, bytes); break;
        case 3: multiply_rows(c, x, apart, sums, rows, 3, 0, bytes); break;
        case 4: multiply_rows(c, x, apart, sums, rows, 4, 0, bytes); break;
        case 5: multiply_rows(c, x, apart, sums, rows, 5, 0, bytes); break;
        case 6: multiply_rows(c, x, apart, sums, rows, 6, 0, bytes); break;
        default: multiply_rows(c, x, apart, sums, rows, 8, 0, bytes);
    }
}

/* The sums [rows, PANEL] of up to PASS rows times a panel, with codes extracted anew for each few rows. */
static void multiply_coded(const WeightFormat *f, const uint8_t *panel, int64_t inputs, const float *x, int64_t apart,
                           float *sums, int64_t rows, int bytes) {
    float scales[STRETCHED / GROUP * PANEL], minima[STRETCHED / GROUP * PANEL];
    const int64_t chunks = inputs / CHUNK, groups = (rows + FEW_CODED - 1) / FEW_CODED;
    const int64_t each = f->values / CHUNK, size = chunk_bytes(f), own = groups_in(f) * PANEL;
    memset(sums, 0, rows * PANEL * sizeof *sums);
    for (int64_t first = 0, last; first < chunks; first = last) {
        last = first + STRETCHED / CHUNK < chunks ? first + STRETCHED / CHUNK : chunks;
        for (int64_t n = first; n < last; n++) {
            const uint8_t *head = panel + n / each * block_bytes(f), *chunk = head + head_bytes(f) + n % each * size;
            read_scales(f, head, chunk, scales + (n - first) * own, minima + (n - first) * own);
        }
        Chunks c = {.codes = panel + first / each * block_bytes(f) + head_bytes(f) + number_bytes(f), .bytes = size,
                    .count = last - first, .each = each, .head = head_bytes(f), .scales = scales, .minima = minima,
                    .offset = f->levels && bytes ? 128 : f->offset, .subtracts = f->minima, .ahead = AHEAD};
        for (int64_t g = 0; g < groups; g++, c.ahead = 0) {
            const int64_t row = rows * g / groups, count = rows * (g + 1) / groups - row;
            const int32_t *these = (const int32_t *)x + row * apart + first * (bytes ? BYTE_CHUNK : ROW_CHUNK);
            if (bytes) multiply_format(f, &c, these, apart, sums + row * PANEL, count, 1);
            else multiply_format(f, &c, these, apart, sums + row * PANEL, count, 0);
        }
    }
}
