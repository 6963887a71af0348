/* Limits: what cores read and multiply at best, against which `specdec tune` sets a forward's time. */

/* Reads `bytes` from `from` on, which threads share, each in one stream or in two; with `asks`, by prefetch instructions as
 * well. Returns what follows from all that is read. */
int specdec_read(const char *from, int64_t bytes, int streams, int asks, int threads) {
    enum { TURN = 256, SOON = 4096 };
    int found = 0;
    AS_TEAM {
        const int64_t share = bytes / team->count / streams / TURN * TURN;
        const char *own = from + team->me * streams * share;
        ints sums[TURN / sizeof(ints)] = {{0}};
        for (int64_t at = 0; at < share; at += TURN)
            for (int s = 0; s < streams; s++) {
                const char *here = own + s * share + at;
                for (int line = 0; asks && line < TURN; line += 64)
                    if (at + SOON < share) __builtin_prefetch(here + SOON + line, 0, 0);
                for (unsigned n = 0; n < sizeof sums / sizeof *sums; n++) sums[n] ^= ((const ints *)here)[n];
            }
        int all = 0;
        for (unsigned n = 0; n < sizeof sums / sizeof *sums; n++)
            for (int lane = 0; lane < LANES; lane++) all ^= sums[n][lane];
        __atomic_fetch_xor(&found, all, __ATOMIC_RELAXED);
    }
    return found;
}

/* Hides from the compiler what lies in memory, and whether it is read: else clang computes the sums while it compiles. */
#define UNKNOWN(memory) __asm__ volatile("" : : "r"(memory) : "memory")

/* Sums [14] += weight times row, `times` times; the sums do not wait for each other. */
INLINE void multiply_often(float *sums, const float *values, int64_t times, const int kind) {
    enum { SUMS = LANES == 16 ? 14 : 12 };
    floats own[SUMS], weight = load(values, 0, 0);
    const floats row = load(values, LANES, 0);
    const int32_t word = ((ints)row)[0];
#pragma GCC unroll 14 /* or gcc keeps sums in memory, and measures a third of what products reach */
    for (int n = 0; n < SUMS; n++) own[n] = load(sums, n * LANES, 0);
    for (int64_t i = 0; i < times; i++)
#pragma GCC unroll 14
        for (int n = 0; n < SUMS; n++) {
            /* Or the compiler multiplies once, where an instruction of its own adds. */
#if LANES == 16
            if (kind >= QUANTISED) __asm__("" : "+x"(weight));
#else
            if (kind >= QUANTISED) UNKNOWN(values);
            if (kind >= QUANTISED) weight = load(values, 0, 0);
#endif
            if (kind == QUANTISED) own[n] = (floats)add_pairs((ints)own[n], (words)weight, word);
            else if (kind == INT8_QUANTISED) own[n] = (floats)add_fours((ints)own[n], (words)weight, word, 0);
            else own[n] = add_times(own[n], weight, row, kind);
        }
#pragma GCC unroll 14
    for (int n = 0; n < SUMS; n++) *(floats *)(sums + n * LANES) = own[n];
}

/* Multiplies and adds, `times` times, on each of some threads, as products with weights of a kind do: FULL; PAIRS, by tiles
 * where these are lent to the process; QUANTISED or INT8_QUANTISED, whose codes are not extracted and whose sums are not
 * scaled. Returns the number of multiplications and additions. */
int64_t specdec_multiply(int kind, int tiles, int64_t times, int threads) {
    int64_t operations = 0;
    AS_TEAM {
        float sums[16 * LANES] = {0}, values[2 * LANES] = {0};
        UNKNOWN(sums);
        UNKNOWN(values);
        const int each = kind == INT8_QUANTISED ? 4 : kind == QUANTISED || paired(kind) ? 2 : 1;
        int64_t own = 2 * (LANES == 16 ? 14 : 12) * LANES * times * each;
#if HAS_TILES
        if (tiles) {
            shape_tiles(TILE);
            for (int64_t i = 0; i < times; i++) {
                _tile_dpbf16ps(0, 4, 5);
                _tile_dpbf16ps(1, 4, 6);
                _tile_dpbf16ps(2, 4, 7);
                _tile_dpbf16ps(3, 4, 5);
            }
            release_tiles();
            own = 4 * 2 * TILE * TILE * STEP * times;
        } else
#endif
        if (paired(kind)) multiply_often(sums, values, times, PAIRS);
        else if (kind == QUANTISED) multiply_often(sums, values, times, QUANTISED);
        else if (kind == INT8_QUANTISED) multiply_often(sums, values, times, INT8_QUANTISED);
        else multiply_often(sums, values, times, FULL);
        __atomic_fetch_add(&operations, own, __ATOMIC_RELAXED);
        UNKNOWN(sums);
    }
    (void)tiles;
    return operations;
}
