/* Products of quantised blocks: a panel's codes are decoded a stretch at a time and multiplied with rows.
 *
 * In a bfloat16 model, a row is rounded to 16-bit integers; CHUNK inputs share a power of two as their scale, the
 * smallest with which they fit. Codes are integers as well, so a group's sum is an exact integer. In float32 it is
 * multiplied by the row's power of two and by the group's scale, and added to the row's sum, group after group. In
 * a float32 model, rows are not rounded, and each weight is the float32 number that its block stands for. */

enum { ROW_CHUNK = CHUNK / 2 + 3, STRETCHED = MOST, PASS = 96 };
/* Words of a row's chunk; inputs, and rows, of one pass. */

/* A chunk of a row is CHUNK 16-bit integers, then their scale as a float, and the sums of both halves. */
static void round_row(float *row, int64_t inputs) {
    for (int64_t n = 0; n < inputs / CHUNK; n++) {
        floats own[CHUNK / LANES], most = {0};
        int32_t out[ROW_CHUNK];
        int16_t rounded[CHUNK];
        float by = 0, back = 0;
        uint32_t bits;
        for (int v = 0; v < CHUNK / LANES; v++) {
            own[v] = load(row, n * CHUNK + v * LANES, 0);
            const floats size = (floats)((words)own[v] & 0x7fffffff);
            const ints more = (ints)size > (ints)most; /* NaN counts as larger, too */
            most = (floats)(((ints)size & more) | ((ints)most & ~more));
        }
        uint32_t largest = 0;
        for (int i = 0; i < LANES; i++) largest = ((words)most)[i] > largest ? ((words)most)[i] : largest;
        largest >>= 23;
        if (largest == 255) back = NAN; /* so every result of it is NaN */
        else if (largest >= 15) {       /* smaller numbers than 2^-112 count as zero */
            bits = (268 - largest) << 23, memcpy(&by, &bits, sizeof by);
            bits = (largest - 14) << 23, memcpy(&back, &bits, sizeof back);
        }
        for (int v = 0; v < CHUNK / LANES; v++) {
            const floats magic = spread(12582912.f); /* 1.5 * 2^23: the nearest integer lands in the low bits */
            ints whole = (ints)fused(own[v], spread(by), magic) - (ints)magic;
            const ints over = whole > 32767;
            whole = (whole & ~over) | (32767 & over);
            for (int i = 0; i < LANES; i++) rounded[v * LANES + i] = back != back ? 0 : (int16_t)whole[i];
        }
        int32_t sums[2] = {0};
        for (int i = 0; i < CHUNK; i++) sums[i / GROUP] += rounded[i];
        for (int i = 0; i < CHUNK / 2; i++)
            out[i] = (int32_t)((uint32_t)(uint16_t)rounded[2 * i] | (uint32_t)(uint16_t)rounded[2 * i + 1] << 16);
        memcpy(out + CHUNK / 2, &back, sizeof back);
        memcpy(out + CHUNK / 2 + 1, sums, sizeof sums);
        memcpy(row + n * ROW_CHUNK, out, sizeof out); /* what is still to be read lies further on */
    }
}

/* sum + the products of two 16-bit integers in each lane. */
INLINE ints add_pairs(ints sum, words weights, int32_t row) {
#if LANES == 16 && defined(__AVX512VNNI__)
    return (ints)_mm512_dpwssd_epi32((__m512i)sum, (__m512i)weights, _mm512_set1_epi32(row));
#elif LANES == 16 && defined(__AVX512BW__)
    return sum + (ints)_mm512_madd_epi16((__m512i)weights, _mm512_set1_epi32(row));
#elif LANES == 8 && defined(__AVX2__)
    return sum + (ints)_mm256_madd_epi16((__m256i)weights, _mm256_set1_epi32(row));
#else
    const ints low = (ints)(weights << 16) >> 16, high = (ints)weights >> 16;
    return sum + low * (int16_t)row + high * (row >> 16);
#endif
}

/* A row's sum plus a group's: every product of blocks uses these operations in this order. */
INLINE floats add_group(floats sum, ints group, float back, floats scale) {
    return fused(__builtin_convertvector(group, floats) * back, scale, sum);
}

/* Sums [rows, PANEL] += rows, `apart` words from row to row, times decoded chunks, for vectors [from, from + wide). */
INLINE void multiply_whole(const Decoded *d, const int32_t *x, int64_t apart, float *sums, int64_t chunks, int offset,
                           int minima, int64_t from, const int rows, const int wide, const int groups) {
    enum { PARTS = 2 }; /* independent sums of a single row; integers give one total */
    const int parts = rows == 1 ? PARTS : 1, pairs = CHUNK / 2 / groups;
    for (int64_t n = 0; n < chunks; n++)
        for (int g = 0; g < groups; g++) {
            const uint32_t *weights = d->pairs + (n * CHUNK / 2 + g * pairs) * PANEL + from * LANES;
            const float *scales = d->scales + (n * groups + g) * PANEL, *minimum = d->minima + (n * groups + g) * PANEL;
            ints found[FEW][PARTS][VECTORS];
            float back[FEW], whole[FEW];
#pragma GCC unroll 8
            for (int r = 0; r < rows; r++) {
                const int32_t *own = x + r * apart + n * ROW_CHUNK + CHUNK / 2;
                const int32_t sum = groups == 1 ? own[1] + own[2] : own[1 + g];
                memcpy(back + r, own, sizeof *back);
                whole[r] = -back[r] * (float)sum;
#pragma GCC unroll 4
                for (int v = 0; v < wide; v++) {
                    found[r][0][v] = (ints){0} - sum * offset;
                    if (parts > 1) found[r][1][v] = (ints){0};
                }
            }
#pragma GCC unroll 16
            for (int k = 0; k < pairs; k++) {
                words weight[VECTORS];
#pragma GCC unroll 4
                for (int v = 0; v < wide; v++) weight[v] = *(const words *)(weights + k * PANEL + v * LANES);
#pragma GCC unroll 8
                for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
                    for (int v = 0; v < wide; v++)
                        found[r][k % parts][v] =
                            add_pairs(found[r][k % parts][v], weight[v], x[r * apart + n * ROW_CHUNK + g * pairs + k]);
            }
#pragma GCC unroll 8
            for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
                for (int v = 0; v < wide; v++) {
                    floats *own = (floats *)(sums + r * PANEL + (from + v) * LANES);
                    ints all = found[r][0][v];
                    if (parts > 1) all += found[r][1][v];
                    floats sum = add_group(*own, all, back[r], load(scales, (from + v) * LANES, 0));
                    if (minima) sum = fused(load(minimum, (from + v) * LANES, 0), spread(whole[r]), sum);
                    *own = sum;
                }
        }
}

/* What codes stand for. With minima the products are exact, so they may be fused. */
INLINE floats scaled(ints codes, floats scale, floats less, const int minima) {
    const floats numbers = __builtin_convertvector(codes, floats);
    if (minima) return fused(numbers, scale, less);
    return numbers * scale;
}

/* The same for rows [rows, apart] in float32. */
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
#define BLOCK_ROWS(n)                                                                                            \
    case n: {                                                                                                    \
        if (n > FEW) return;                                                                                     \
        enum { WIDE = LANES == 16 || n == 1 ? PANEL / LANES : n < 4 ? PANEL / LANES / 2 : 1 };                   \
        for (int64_t from = 0; from < PANEL / LANES; from += WIDE) {                                             \
            if (full) multiply_exact(d, x, apart, sums, chunks, f->offset, f->minima, from, n, WIDE, groups);     \
            else multiply_whole(d, (const int32_t *)x, apart, sums, chunks, f->offset, f->minima, from, n, WIDE, groups); \
        }                                                                                                        \
        return;                                                                                                  \
    }

INLINE void multiply_decoded(const WeightFormat *f, const Decoded *d, const float *x, int64_t apart, float *sums,
                             int64_t chunks, int64_t rows, const int full, const int groups) {
    switch (rows) {
        BLOCK_ROWS(1) BLOCK_ROWS(2) BLOCK_ROWS(3) BLOCK_ROWS(4) BLOCK_ROWS(5) BLOCK_ROWS(6)
    }
}

/* The sums [rows, PANEL] of up to PASS rows times a panel. */
static void multiply_blocks(const WeightFormat *f, const uint8_t *panel, int64_t inputs, const float *x, int64_t apart,
                            float *sums, int64_t rows, int full) {
    Decoded decoded;
    const int64_t chunks = inputs / CHUNK, groups = (rows + FEW - 1) / FEW;
    memset(sums, 0, rows * PANEL * sizeof *sums);
    for (int64_t first = 0, last; first < chunks; first = last) {
        last = first + STRETCHED / CHUNK < chunks ? first + STRETCHED / CHUNK : chunks;
        decode_blocks(f, panel, first, last, AHEAD, &decoded);
        for (int64_t g = 0; g < groups; g++) {
            const int64_t row = rows * g / groups, count = rows * (g + 1) / groups - row;
            const float *own = x + row * apart + first * (full ? CHUNK : ROW_CHUNK);
            float *to = sums + row * PANEL;
            if (full && f->group == CHUNK) multiply_decoded(f, &decoded, own, apart, to, last - first, count, 1, 1);
            else if (full) multiply_decoded(f, &decoded, own, apart, to, last - first, count, 1, 2);
            else if (f->group == CHUNK) multiply_decoded(f, &decoded, own, apart, to, last - first, count, 0, 1);
            else multiply_decoded(f, &decoded, own, apart, to, last - first, count, 0, 2);
        }
    }
}
