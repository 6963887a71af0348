/* Products of quantised blocks with rows rounded to bytes: `activations="int8"`.
 *
 * A row is rounded to integers from -127 to 127; CHUNK inputs share a scale, which is their largest magnitude over
 * 127, in float32. Codes are unsigned bytes, so a group's sum is an exact integer with any instructions. In float32
 * it is multiplied by the row's scale and by the group's, and added to the row's sum, group after group. */

enum { FOURS = CHUNK / 4, BYTE_CHUNK = FOURS + 3 }; /* words of one chunk of a row */

/* The nearest integers, ties to even, of numbers that have been rounded: no compiler may fuse what made them. */
INLINE ints nearest(floats x) {
#if LANES == 16
    return (ints)_mm512_cvtps_epi32((__m512)x);
#elif defined(__AVX2__)
    return (ints)_mm256_cvtps_epi32((__m256)x);
#else
    ints found;
    for (int n = 0; n < LANES; n++) found[n] = (int32_t)__builtin_rintf(x[n]);
    return found;
#endif
}

/* A chunk of a row is CHUNK bytes in the order of a panel's inputs, then their scale as a float, and the sums of both
 * halves. */
static void round_row_to_bytes(float *row, int64_t inputs) {
    for (int64_t n = 0; n < inputs / CHUNK; n++) {
        floats own[CHUNK / LANES], most = {0};
        int32_t out[BYTE_CHUNK], sums[2] = {0};
        int8_t rounded[CHUNK];
        for (int v = 0; v < CHUNK / LANES; v++) {
            own[v] = load(row, n * CHUNK + v * LANES, 0);
            const floats size = (floats)((words)own[v] & 0x7fffffff);
            const ints more = (ints)size > (ints)most; /* NaN counts as larger, too */
            most = (floats)(((ints)size & more) | ((ints)most & ~more));
        }
        uint32_t bits = 0;
        for (int i = 0; i < LANES; i++) bits = ((words)most)[i] > bits ? ((words)most)[i] : bits;
        float largest, by = 0, back = 0;
        memcpy(&largest, &bits, sizeof largest);
        if (bits >= 0x7f800000) back = NAN; /* so every result of it is NaN */
        else if (largest >= 0x1p-112f) by = 127 / largest, back = largest / 127;
        for (int v = 0; v < CHUNK / LANES; v++) {
            const ints whole = nearest(own[v] * by);
            for (int i = 0; i < LANES; i++) rounded[v * LANES + i] = back != back ? 0 : (int8_t)whole[i];
        }
        for (int i = 0; i < CHUNK; i++) sums[i / GROUP] += rounded[i];
        for (int j = 0; j < FOURS; j++) {
            const int8_t *four = rounded + j / 2 * 8 + j % 2 * 2;
            const int8_t mixed[4] = {four[0], four[4], four[1], four[5]};
            memcpy(out + j, mixed, sizeof mixed);
        }
        memcpy(out + FOURS, &back, sizeof back);
        memcpy(out + FOURS + 1, sums, sizeof sums);
        memcpy(row + n * BYTE_CHUNK, out, sizeof out); /* what is still to be read lies further on */
    }
}

/* Whether 16 bits add products of bytes, which 32 bits then add; else an instruction, or a loop, adds four of them. */
#if LANES == 8 && defined(__AVX2__) && !defined(__AVXVNNI__)
#define HOLDS 1
#else
#define HOLDS 0
#endif

/* Steps whose products of codes and bytes 16 bits hold, as 2 * 127 * steps * the largest code is below 2^15. */
INLINE int held_by(const int bits, const int listed) {
    return listed || bits == 8 ? 1 : bits == 6 ? 2 : bits == 5 ? 4 : 8;
}

/* sum + the products of four bytes in each lane, unsigned times signed; where it HOLDS, they are added two by two. A sum of
 * two can exceed 16 bits where codes use `whole` bytes; there codes less 128 are multiplied, of which 16 bits hold two. */
INLINE ints add_fours(ints sum, words weights, int32_t row, const int whole) {
#if LANES == 16 && defined(__AVX512VNNI__)
    (void)whole;
    return (ints)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)weights, _mm512_set1_epi32(row));
#elif LANES == 8 && defined(__AVXVNNI__)
    (void)whole;
    return (ints)_mm256_dpbusd_avx_epi32((__m256i)sum, (__m256i)weights, _mm256_set1_epi32(row));
#elif HOLDS
    const __m256i all = _mm256_set1_epi32(row), less = (__m256i)(weights ^ 0x80808080);
    if (whole) return (ints)_mm256_maddubs_epi16(_mm256_abs_epi8(less), _mm256_sign_epi8(all, less));
    return (ints)_mm256_add_epi16((__m256i)sum, _mm256_maddubs_epi16((__m256i)weights, all));
#elif LANES == 16 && defined(__AVX512BW__)
#define TWO(bytes) _mm512_madd_epi16(_mm512_maddubs_epi16((__m512i)(bytes), _mm512_set1_epi32(row)), _mm512_set1_epi16(1))
    if (!whole) return sum + (ints)TWO(weights);
    return sum + (ints)TWO(weights & 0x7f7f7f7f) + (ints)TWO(weights & 0x80808080);
#undef TWO
#else
    (void)whole;
    for (int at = 0; at < 32; at += 8) sum += (ints)(weights >> at & 255) * (int8_t)((uint32_t)row >> at);
    return sum;
#endif
}

/* sum + both of each lane's sums in 16 bits. */
INLINE ints add_held(ints sum, ints held) {
#if HOLDS
    return sum + (ints)_mm256_madd_epi16((__m256i)held, _mm256_set1_epi16(1));
#else
    return sum + held;
#endif
}
