/* Products of quantised blocks with many rows, whose codes are decoded a stretch at a time, and with rows in float32, which
 * are not rounded: each weight is the float32 number that its block stands for. */

/* What codes stand for. With minima the products are exact, so they may be fused. */
INLINE floats scaled(ints codes, floats scale, floats less, const int minima) {
    const floats numbers = __builtin_convertvector(codes, floats);
    if (minima) return fused(numbers, scale, less);
    return numbers * scale;
}

/* Sums [rows, PANEL] += rows in float32, `apart` from row to row, times decoded chunks, for vectors [from, from + wide). */
INLINE void multiply_exact(const Decoded *d, const float *x, int64_t apart, float *sums, int64_t chunks, int offset,
                           int minima, int64_t from, const int rows, const int wide, const int groups) {
    const int pairs = CHUNK / 2 / groups;
    for (int64_t n = 0; n < chunks; n++)
        for (int g = 0; g < groups; g++) {
            const uint32_t *weights = d->pairs + (n * CHUNK / 2 + g * pairs) * PANEL + from * LANES;
            const int64_t place = (n * groups + g) * PANEL + from * LANES;
            for (int k = 0; k < pairs; k++)
                for (int v = 0; v < wide; v++) {
                    const words pair = *(const words *)(weights + k * PANEL + v * LANES);
                    const floats scale = load(d->scales, place + v * LANES, 0);
                    const floats less = minima ? -load(d->minima, place + v * LANES, 0) : (floats){0};
                    const floats first = scaled(((ints)(pair << 16) >> 16) - offset, scale, less, minima);
                    const floats second = scaled(((ints)pair >> 16) - offset, scale, less, minima);
#pragma GCC unroll 8
                    for (int r = 0; r < rows; r++) {
                        const float *own = x + r * apart + n * CHUNK + 2 * (g * pairs + k);
                        floats *sum = (floats *)(sums + r * PANEL + (from + v) * LANES);
                        *sum = fused(second, spread(own[1]), fused(first, spread(own[0]), *sum));
                    }
                }
        }
}

/* Calls the version for a number of rows; a machine with few registers takes half of the vectors at a time. */
#define EXACT_ROWS(n)                                                                                      \
    case n: {                                                                                              \
        if (n > FEW) return;                                                                               \
        enum { WIDE = LANES == 16 || n == 1 ? PANEL / LANES : n < 4 ? PANEL / LANES / 2 : 1 };             \
        for (int64_t from = 0; from < PANEL / LANES; from += WIDE)                                         \
            multiply_exact(d, x, apart, sums, chunks, f->offset, f->minima, from, n, WIDE, groups);        \
        return;                                                                                            \
    }

INLINE void multiply_exact_rows(const WeightFormat *f, const Decoded *d, const float *x, int64_t apart, float *sums,
                                int64_t chunks, int64_t rows, const int groups) {
    switch (rows) {
        EXACT_ROWS(1) EXACT_ROWS(2) EXACT_ROWS(3) EXACT_ROWS(4) EXACT_ROWS(5) EXACT_ROWS(6)
    }
}

/* The sums [rows, PANEL] of up to PASS rows times a panel: rows rounded to bytes or to 16-bit integers, or whole. */
static void multiply_blocks(const WeightFormat *f, const uint8_t *panel, int64_t inputs, const float *x, int64_t apart,
                            float *sums, int64_t rows, int kind) {
    Decoded decoded;
    const int full = kind == EXACT_QUANTISED, bytes = DECODES_BYTES && kind == INT8_QUANTISED;
    const int64_t chunks = inputs / CHUNK, most = full ? FEW : MANY, groups = (rows + most - 1) / most;
    memset(sums, 0, rows * PANEL * sizeof *sums);
    for (int64_t first = 0, last; first < chunks; first = last) {
        last = first + STRETCHED / CHUNK < chunks ? first + STRETCHED / CHUNK : chunks;
        decode_blocks(f, panel, first, last, AHEAD, bytes, &decoded);
        const Chunks c = bytes && f->bits == 8 ? panel_chunks(f, panel, first, last, decoded.scales, decoded.minima, 1)
                                               : decoded_chunks(f, &decoded, last - first, bytes);
        for (int64_t g = 0; g < groups; g++) {
            const int64_t row = rows * g / groups, count = rows * (g + 1) / groups - row;
            const float *own = x + row * apart + first * (full ? CHUNK : bytes ? BYTE_CHUNK : ROW_CHUNK);
            const int32_t *these = (const int32_t *)own;
            float *to = sums + row * PANEL;
            if (full && f->group == CHUNK) multiply_exact_rows(f, &decoded, own, apart, to, last - first, count, 1);
            else if (full) multiply_exact_rows(f, &decoded, own, apart, to, last - first, count, 2);
            else if (bytes && f->group == CHUNK) multiply_decoded(&c, these, apart, to, count, 1, 1);
            else if (bytes) multiply_decoded(&c, these, apart, to, count, 1, 2);
            else if (f->group == CHUNK) multiply_decoded(&c, these, apart, to, count, 0, 1);
            else multiply_decoded(&c, these, apart, to, count, 0, 2);
        }
    }
}
