/* Products of quantised blocks whose codes number float32 values, with rows in float32: each weight is the float32 number
 * that its block stands for. Codes are extracted right where they multiply. */

/* Values of LANES codes, the low four bits of each lane. */
INLINE floats float_levels_of(const float *list, words codes) {
#if LANES == 16
    return (floats)_mm512_permutexvar_ps((__m512i)codes, _mm512_loadu_ps(list));
#elif defined(__AVX2__)
    const __m256 low = _mm256_permutevar8x32_ps(_mm256_loadu_ps(list), (__m256i)codes);
    const __m256 high = _mm256_permutevar8x32_ps(_mm256_loadu_ps(list + 8), (__m256i)codes);
    return (floats)_mm256_blendv_ps(low, high, (__m256)(codes << 28));
#else
    floats found;
    for (int n = 0; n < LANES; n++) found[n] = list[codes[n] & 15];
    return found;
#endif
}

/* Sums [rows, PANEL] of rows, `apart` floats from row to row, times a panel, for vectors [from, from + wide). */
INLINE void multiply_vectors(const WeightFormat *f, const uint8_t *panel, int64_t inputs, const float *x, int64_t apart,
                             float *sums, int64_t from, const int rows, const int wide) {
    const float *list = float_levels[f->levels - NF4];
    floats total[FEW][VECTORS];
#pragma GCC unroll 8
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
        for (int v = 0; v < wide; v++) total[r][v] = (floats){0};
    for (int64_t first = 0; first < inputs; first += f->values, panel += block_bytes(f)) {
        const uint32_t *codes = (const uint32_t *)(panel + head_bytes(f)) + from * LANES;
        floats scale[VECTORS];
        if (from == 0) ask_blocks(panel + AHEAD, block_bytes(f));
#pragma GCC unroll 4
        for (int v = 0; v < wide; v++) scale[v] = load(panel, (from + v) * LANES, 0);
        for (int64_t at = 0; at < f->values; at += 8, codes += PANEL) { /* a word has the codes of eight inputs */
#pragma GCC unroll 8
            for (int i = 0; i < 8; i++) {
                floats weight[VECTORS];
#pragma GCC unroll 4
                for (int v = 0; v < wide; v++)
                    weight[v] = float_levels_of(list, WORDS(codes + v * LANES, 0) >> (4 * (i / 2) + 16 * (i % 2))) * scale[v];
#pragma GCC unroll 8
                for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
                    for (int v = 0; v < wide; v++) total[r][v] = fused(weight[v], spread(x[r * apart + first + at + i]), total[r][v]);
            }
        }
    }
#pragma GCC unroll 8
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
        for (int v = 0; v < wide; v++) *(floats *)(sums + r * PANEL + (from + v) * LANES) = total[r][v];
}

/* Calls the version for a number of rows; a machine with few registers takes half of the vectors at a time. */
#define LEVEL_ROWS(n)                                                                          \
    case n: {                                                                                  \
        if (n > FEW) return;                                                                   \
        enum { WIDE = LANES == 16 || n == 1 ? PANEL / LANES : n < 4 ? PANEL / LANES / 2 : 1 }; \
        for (int64_t from = 0; from < PANEL / LANES; from += WIDE)                             \
            multiply_vectors(f, panel, inputs, x, apart, sums, from, n, WIDE);                 \
        break;                                                                                 \
    }

/* The sums [rows, PANEL] of rows times a panel. */
static void multiply_levels(const WeightFormat *f, const uint8_t *panel, int64_t inputs, const float *x, int64_t apart,
                            float *sums, int64_t rows) {
    for (int64_t n = 0; n < rows; n += FEW, x += FEW * apart, sums += FEW * PANEL)
        switch (rows - n < FEW ? rows - n : FEW) {
            LEVEL_ROWS(1) LEVEL_ROWS(2) LEVEL_ROWS(3) LEVEL_ROWS(4) LEVEL_ROWS(5) LEVEL_ROWS(6)
        }
}
