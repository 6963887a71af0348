/* Rows rounded to 16-bit integers, for products of quantised blocks in a bfloat16 model.
 *
 * CHUNK inputs of a row share a power of two as their scale, the smallest with which they fit. Codes are integers as well,
 * so a group's sum is an exact integer. In float32 it is multiplied by the row's power of two and by the group's scale, and
 * added to the row's sum, group after group. */

enum { ROW_CHUNK = CHUNK / 2 + 3 }; /* words of a row's chunk */
typedef int16_t shorts_of_lanes __attribute__((vector_size(2 * LANES), aligned(2), may_alias));

/* The largest bits of numbers without their signs: NaN counts as larger than infinity. */
#define RAISE_BITS(x) more = (ints)TURN(most, x) > most, most = ((ints)TURN(most, x) & more) | (most & ~more);
INLINE uint32_t largest_size(const floats *own) {
    ints most = {0}, more;
    for (int v = 0; v < CHUNK / LANES; v++) {
        const ints size = (ints)own[v] & 0x7fffffff;
        more = size > most, most = (size & more) | (most & ~more);
    }
    EACH_BIT(RAISE_BITS)
    return (uint32_t)most[0];
}

/* The sum of a row's GROUP integers. */
INLINE int32_t sum_of_group(const ints *whole) {
    ints v = whole[0];
    for (int n = 1; n < GROUP / LANES; n++) v += whole[n];
    EACH_BIT(FOLD)
    return v[0];
}

/* A chunk of a row is CHUNK 16-bit integers, then their scale as a float, and the sums of both halves. */
static void round_row(float *row, int64_t inputs) {
    for (int64_t n = 0; n < inputs / CHUNK; n++) {
        floats own[CHUNK / LANES];
        ints whole[CHUNK / LANES];
        int32_t out[ROW_CHUNK];
        float by = 0, back = 0;
        uint32_t bits;
        for (int v = 0; v < CHUNK / LANES; v++) own[v] = load(row, n * CHUNK + v * LANES, 0);
        const uint32_t largest = largest_size(own) >> 23;
        if (largest == 255) back = NAN; /* so every result of it is NaN */
        else if (largest >= 15) {       /* smaller numbers than 2^-112 count as zero */
            bits = (268 - largest) << 23, memcpy(&by, &bits, sizeof by);
            bits = (largest - 14) << 23, memcpy(&back, &bits, sizeof back);
        }
        for (int v = 0; v < CHUNK / LANES; v++) {
            const floats magic = spread(12582912.f); /* 1.5 * 2^23: the nearest integer lands in the low bits */
            const ints near = (ints)fused(own[v], spread(by), magic) - (ints)magic, over = near > 32767;
            whole[v] = ((near & ~over) | (32767 & over)) & -(back == back);
            *(shorts_of_lanes *)((int16_t *)out + v * LANES) = __builtin_convertvector(whole[v], shorts_of_lanes);
        }
        memcpy(out + CHUNK / 2, &back, sizeof back);
        for (int g = 0; g < CHUNK / GROUP; g++) out[CHUNK / 2 + 1 + g] = sum_of_group(whole + g * GROUP / LANES);
        memcpy(row + n * ROW_CHUNK, out, sizeof out); /* what is still to be read lies further on */
    }
}

/* sum + the products of two 16-bit integers in each lane. */
INLINE ints add_pairs(ints sum, words weights, int32_t row) {
#if LANES == 16 && defined(__AVX512VNNI__)
    return (ints)_mm512_dpwssd_epi32((__m512i)sum, (__m512i)weights, _mm512_set1_epi32(row));
#elif LANES == 8 && defined(__AVXVNNI__)
    return (ints)_mm256_dpwssd_avx_epi32((__m256i)sum, (__m256i)weights, _mm256_set1_epi32(row));
#elif LANES == 16 && defined(__AVX512BW__)
    return sum + (ints)_mm512_madd_epi16((__m512i)weights, _mm512_set1_epi32(row));
#elif LANES == 8 && defined(__AVX2__)
    return sum + (ints)_mm256_madd_epi16((__m256i)weights, _mm256_set1_epi32(row));
#else
    const ints low = (ints)(weights << 16) >> 16, high = (ints)weights >> 16;
    return sum + low * (int16_t)row + high * (row >> 16);
#endif
}
