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

/* GROUP integers as bytes, in the order of a panel's inputs. */
INLINE void mix_bytes(const ints *whole, int8_t *to) {
#if LANES == 16 || defined(__AVX2__)
#if LANES == 16
    const __m128i own = _mm512_cvtepi32_epi8((__m512i)whole[0]);
#else
    const __m256i twos = _mm256_permute4x64_epi64(_mm256_packs_epi32((__m256i)whole[0], (__m256i)whole[1]), 0xd8);
    const __m128i own = _mm_packs_epi16(_mm256_castsi256_si128(twos), _mm256_extracti128_si256(twos, 1));
#endif
    const __m128i order = _mm_setr_epi8(0, 4, 1, 5, 2, 6, 3, 7, 8, 12, 9, 13, 10, 14, 11, 15);
    _mm_storeu_si128((__m128i *)to, _mm_shuffle_epi8(own, order));
#else
    for (int i = 0; i < GROUP; i++) { /* of eight bytes, 0, 4, 1, 5, 2, 6, 3 and 7 */
        const int from = i / 8 * 8 + i % 2 * 4 + i % 8 / 2;
        to[i] = (int8_t)whole[from / LANES][from % LANES];
    }
#endif
}

/* A chunk of a row is CHUNK bytes in the order of a panel's inputs, then their scale as a float, and the sums of both
 * halves. */
static void round_row_to_bytes(float *row, int64_t inputs) {
    for (int64_t n = 0; n < inputs / CHUNK; n++) {
        floats own[CHUNK / LANES];
        ints whole[CHUNK / LANES];
        int32_t out[BYTE_CHUNK];
        for (int v = 0; v < CHUNK / LANES; v++) own[v] = load(row, n * CHUNK + v * LANES, 0);
        const uint32_t bits = largest_size(own);
        float largest, by = 0, back = 0;
        memcpy(&largest, &bits, sizeof largest);
        if (bits >= 0x7f800000) back = NAN; /* so every result of it is NaN */
        else if (largest >= 0x1p-112f) by = 127 / largest, back = largest / 127;
        for (int v = 0; v < CHUNK / LANES; v++) whole[v] = nearest(own[v] * by) & -(back == back);
        memcpy(out + FOURS, &back, sizeof back);
        for (int g = 0; g < CHUNK / GROUP; g++) {
            mix_bytes(whole + g * GROUP / LANES, (int8_t *)out + g * GROUP);
            out[FOURS + 1 + g] = sum_of_group(whole + g * GROUP / LANES);
        }
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
