/* Vectors: fused products, loads, rounding, sums, maxima and exponentials over lanes.
 *
 * The library is compiled with -ffp-contract=off. Every product that is added to something is written as `fused` or one
 * of its kin, for lanes as for single numbers: a compiler would fuse some of them, others than in the next function, for
 * another number of rows or for another processor, and a row's bits would depend on that. Without such an instruction
 * the product is rounded before it is added, everywhere. */

INLINE int64_t padded(int64_t n) { return (n + PAIR - 1) / PAIR * PAIR; }
INLINE floats spread(float x) { return x - (floats){0}; }

/* Keeps a value in a register: without it gcc reads it again for each use. */
#if LANES == 16
#define HOLD(value) __asm__("" : "+v"(value))
#elif defined(__AVX2__)
#define HOLD(value) __asm__("" : "+x"(value))
#else
#define HOLD(value) (void)0
#endif

/* a * b + c */
INLINE floats fused(floats a, floats b, floats c) {
#if LANES == 16
    return (floats)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif FUSES && defined(__AVX2__)
    return (floats)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#elif defined(__aarch64__) /* gcc would take a loop's lanes one by one */
    typedef union {
        floats all;
        float32x4_t half[2];
    } Parts;
    const Parts first = {a}, second = {b};
    Parts sum = {c};
    for (int n = 0; n < 2; n++) sum.half[n] = vfmaq_f32(sum.half[n], first.half[n], second.half[n]);
    return sum.all;
#elif FUSES
    for (int n = 0; n < LANES; n++) c[n] = __builtin_fmaf(a[n], b[n], c[n]);
    return c;
#else
    return a * b + c;
#endif
}

INLINE float fused_one(float a, float b, float c) {
#if FUSES
    return __builtin_fmaf(a, b, c);
#else
    return a * b + c;
#endif
}

INLINE floats load(const void *from, int64_t at, int half) {
    if (!half) return *(const floats *)((const float *)from + at);
    const uint16_t *first = (const uint16_t *)from + at;
#if LANES == 16 /* one instruction; gcc makes five of the other version */
    return (floats)((ints)_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)first)) << 16);
#elif defined(__AVX2__)
    return (floats)((ints)_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)first)) << 16);
#else
    return (floats)(__builtin_convertvector(*(const halves *)first, ints) << 16);
#endif
}

INLINE float widen(uint16_t half) {
    uint32_t bits = (uint32_t)half << 16;
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

INLINE float float_of(uint16_t half) { /* the value of a float16 */
#ifdef __F16C__
    return _cvtsh_ss(half);
#else
    const uint32_t sign = (uint32_t)(half & 0x8000) << 16, rest = half & 0x7fff;
    uint32_t bits = rest >= 0x7c00 ? rest << 13 | 0x7f800000 : (rest << 13) + (112u << 23);
    float value;
    if (rest < 0x0400) return (sign ? -1.f : 1.f) * (float)rest * 0x1p-24f;
    bits |= sign;
    memcpy(&value, &bits, sizeof value);
    return value;
#endif
}

/* LANES float16 numbers as floats. */
INLINE floats widen_halves(const uint16_t *from) {
#if LANES == 16
    return (floats)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)from));
#elif defined(__F16C__)
    return (floats)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)from));
#else
    const words all = __builtin_convertvector(*(const halves *)from, words), bits = (all & 0x7fff) << 13;
    const words endless = (words)((ints)bits >= 0x7c00 << 13), denormal = (words)((ints)bits < 0x0400 << 13);
    const words whole = (bits + (112u << 23)) | (endless & 0x7f800000), tiny = (words)((floats)(bits | 113u << 23) - 0x1p-14f);
    return (floats)((whole & ~denormal) | (tiny & denormal) | (all & 0x8000) << 16);
#endif
}

INLINE uint16_t narrow(float value) { /* to the nearest bfloat16, ties to even */
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    if ((bits & 0x7fffffff) > 0x7f800000) return 0x7fc0; /* NaN */
    return (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}

/* `to` may equal `from`: each write lies before what is still to be read. */
static void narrow_all(const float *from, void *to, int64_t count) {
    int64_t i = 0;
    for (; i + LANES <= count; i += LANES) {
        floats value = load(from, i, 0);
        words bits = (words)value, number = (words)(value == value);
        bits = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
        *(halves *)((uint16_t *)to + i) = __builtin_convertvector((bits & number) | (0x7fc0 & ~number), halves);
    }
    for (; i < count; i++) {
        uint16_t half = narrow(from[i]);
        memcpy((char *)to + i * sizeof half, &half, sizeof half);
    }
}

static void store(void *to, int64_t at, const float *from, int64_t count, int half) {
    if (!half) memcpy((float *)to + at, from, count * sizeof(float));
    else narrow_all(from, (uint16_t *)to + at, count);
}

/* Takes lanes of b where one bit of the lane's number is set, else of a; CROSS flips that bit in the number taken. */
#define PICK(n, x) ((n) & x ? LANES + (n) : (n))
#if defined(__clang__) || __GNUC__ >= 12
#define SHUFFLE(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define SHUFFLE(a, b, ...) __builtin_shuffle(a, b, (ints){__VA_ARGS__})
#endif
#if LANES == 16
#define BLEND(a, b, x) \
    SHUFFLE(a, b, PICK(0, x), PICK(1, x), PICK(2, x), PICK(3, x), PICK(4, x), PICK(5, x), PICK(6, x), \
            PICK(7, x), PICK(8, x), PICK(9, x), PICK(10, x), PICK(11, x), PICK(12, x), PICK(13, x), \
            PICK(14, x), PICK(15, x))
#define CROSS(a, b, x) \
    SHUFFLE(a, b, PICK(0, x) ^ x, PICK(1, x) ^ x, PICK(2, x) ^ x, PICK(3, x) ^ x, PICK(4, x) ^ x, \
            PICK(5, x) ^ x, PICK(6, x) ^ x, PICK(7, x) ^ x, PICK(8, x) ^ x, PICK(9, x) ^ x, \
            PICK(10, x) ^ x, PICK(11, x) ^ x, PICK(12, x) ^ x, PICK(13, x) ^ x, PICK(14, x) ^ x, \
            PICK(15, x) ^ x)
#define EACH_BIT(step) step(8) step(4) step(2) step(1)
#else
#define BLEND(a, b, x) \
    SHUFFLE(a, b, PICK(0, x), PICK(1, x), PICK(2, x), PICK(3, x), PICK(4, x), PICK(5, x), PICK(6, x), \
            PICK(7, x))
#define CROSS(a, b, x) \
    SHUFFLE(a, b, PICK(0, x) ^ x, PICK(1, x) ^ x, PICK(2, x) ^ x, PICK(3, x) ^ x, PICK(4, x) ^ x, \
            PICK(5, x) ^ x, PICK(6, x) ^ x, PICK(7, x) ^ x)
#define EACH_BIT(step) step(4) step(2) step(1)
#endif
#define TURN(v, x) CROSS(v, v, x)
#define FOLD(x) v += TURN(v, x);
#define RAISE(x) v = larger(v, TURN(v, x));

/* a > b ? a : b */
INLINE floats larger(floats a, floats b) {
#if LANES == 16
    return (floats)_mm512_max_ps((__m512)a, (__m512)b);
#elif defined(__AVX2__)
    return (floats)_mm256_max_ps((__m256)a, (__m256)b);
#else
    const ints first = a > b;
    return (floats)(((ints)a & first) | ((ints)b & ~first));
#endif
}

INLINE float total(floats v) {
    EACH_BIT(FOLD)
    return v[0];
}

INLINE floats largest(floats v) { /* in all lanes */
    EACH_BIT(RAISE)
    return v;
}

/* The numbers at..at + 3 of LANES rows, a number of every row in each vector. */
INLINE void transpose(const char *const rows[LANES], int64_t at, floats to[4]) {
    for (int i = 0; i < 4; i++) {
#if LANES == 16
        __m512 four = _mm512_castps128_ps512(_mm_loadu_ps((const float *)rows[i] + at));
        four = _mm512_insertf32x4(four, _mm_loadu_ps((const float *)rows[i + 4] + at), 1);
        four = _mm512_insertf32x4(four, _mm_loadu_ps((const float *)rows[i + 8] + at), 2);
        to[i] = (floats)_mm512_insertf32x4(four, _mm_loadu_ps((const float *)rows[i + 12] + at), 3);
#elif defined(__AVX2__)
        const __m256 four = _mm256_castps128_ps256(_mm_loadu_ps((const float *)rows[i] + at));
        to[i] = (floats)_mm256_insertf128_ps(four, _mm_loadu_ps((const float *)rows[i + 4] + at), 1);
#else
        memcpy(to + i, (const float *)rows[i] + at, 16);
        memcpy((char *)(to + i) + 16, (const float *)rows[i + 4] + at, 16);
#endif
    }
#define SWAP(i, x)                                    \
    {                                                 \
        const floats t = CROSS(to[i], to[i + x], x);  \
        to[i] = BLEND(to[i], t, x);                   \
        to[i + x] = BLEND(t, to[i + x], x);           \
    }
    SWAP(0, 2) SWAP(1, 2) SWAP(0, 1) SWAP(2, 1)
#undef SWAP
}

INLINE floats exponential_of_negative(floats x) { /* e^x for x <= 0 to two units in the last place; 0 below -87 */
    const floats magic = spread(12582912.f); /* 1.5 * 2^23: the nearest integer lands in the low bits */
    ints live = x > spread(-87.f);
    x = larger(x, spread(-87.f));
    floats n = fused(x, spread(1.44269504f), magic);
    ints power = (ints)n - (ints)magic;
    n -= magic;
    const floats r = fused(n, spread(2.12194440e-4f), fused(n, spread(-0.693359375f), x));
    floats p = fused(r, spread(1.f / 5040), spread(1.f / 720));
    p = fused(p, r, spread(1.f / 120));
    p = fused(p, r, spread(1.f / 24));
    p = fused(p, r, spread(1.f / 6));
    p = fused(p, r, spread(.5f));
    p = fused(fused(p, r, spread(1.f)), r, spread(1.f));
    return (floats)(((ints)p + (power << 23)) & live);
}

INLINE floats exponential(floats x) { return exponential_of_negative(-larger(spread(-88.f), -x)); }

INLINE float exponential_one(float x) { return x != x ? x : exponential(spread(x))[0]; }

/* x / (1 + e^-by): SiLU where both are the same. */
INLINE floats gated(floats x, floats by) { return x / (1.f + exponential(-by)); }

/* The lanes of a row's end: `count` of them, the others 0. */
INLINE floats load_some(const float *from, int64_t count) {
    floats found = {0};
    memcpy(&found, from, count * sizeof *from);
    return found;
}
