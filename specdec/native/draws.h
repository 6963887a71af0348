/* Draws: tokens drawn by scores and Gumbel noise. */

/* Whether a strip of values has one above `least`, or a NaN. */
INLINE int reaches(const void *values, int64_t at, float least, const int half) {
    ints above = {0};
    for (int v = 0; v < VECTORS; v++) above |= ~(load(values, at + v * LANES, half) <= least);
    return total((floats)((ints)spread(1.f) & above)) > 0;
}

/* SplitMix64's hash, in [0, 2^53), and its Gumbel number; both as in specdec/sampling/sampler.py. */
#define HASH(x) \
    (x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9, x = (x ^ x >> 27) * 0x94D049BB133111EB, (x ^ x >> 31) >> 11)
static const uint64_t golden = 0x9E3779B97F4A7C15;
enum { HASHES = LANES / 2 }; /* hashes of a register; gcc would split longer vectors into single numbers */
typedef uint64_t hashes __attribute__((vector_size(8 * HASHES)));
typedef int64_t signed_hashes __attribute__((vector_size(8 * HASHES))); /* signed: one instruction compares them */
typedef double doubles __attribute__((vector_size(8 * HASHES)));

/* An upper bound of a finite Gumbel number: with u = (hash + .5) / 2^53, -log(-log u) < -log(1 - u), which the bits of
 * 2^53 - hash bound. */
INLINE double most_gumbel(uint64_t hash) { return (__builtin_clzll((1ull << 53) - hash) - 9) * 0.6931471805599454; }

INLINE doubles fused_doubles(doubles a, doubles b, doubles c) { /* a * b + c */
#if LANES == 16
    return (doubles)_mm512_fmadd_pd((__m512d)a, (__m512d)b, (__m512d)c);
#elif FUSES && defined(__AVX2__)
    return (doubles)_mm256_fmadd_pd((__m256d)a, (__m256d)b, (__m256d)c);
#elif FUSES
    for (int n = 0; n < HASHES; n++) c[n] = __builtin_fma(a[n], b[n], c[n]);
    return c;
#else
    return a * b + c;
#endif
}

INLINE doubles each(double x) { return x - (doubles){0}; }

/* Logarithms and exponentials of the library's own: those of C's libraries differ. */
INLINE doubles logarithm(doubles x) { /* of a positive normal number; to some units in the last place */
    const signed_hashes low = (signed_hashes)each(0.7071067811865476);
    const signed_hashes power = ((signed_hashes)x - low) >> 52; /* 2^power times [1 / sqrt 2, sqrt 2) */
    const doubles m = (doubles)((signed_hashes)x - (power << 52)) - 1, t = m / (m + 2), square = t * t;
    doubles p = each(2. / 19);
    for (int odd = 17; odd > 0; odd -= 2) p = fused_doubles(p, square, each(2. / odd));
    return fused_doubles(__builtin_convertvector(power, doubles), each(0.6931471805599453), p * t);
}

INLINE double logarithm_one(double x) { /* of a positive number */
    const int small = x < 0x1p-1000;
    return logarithm(each(small ? x * 0x1p200 : x))[0] - (small ? 200 * 0.6931471805599453 : 0);
}

INLINE double fused_double(double a, double b, double c) {
#if FUSES
    return __builtin_fma(a, b, c);
#else
    return a * b + c;
#endif
}

static double exponential_double(double x) { /* of at most 709 */
    static const double inverse_factorials[] = {
        1. / 6227020800, 1. / 479001600, 1. / 39916800, 1. / 3628800, 1. / 362880, 1. / 40320, 1. / 5040,
        1. / 720, 1. / 120, 1. / 24, 1. / 6, .5, 1, 1};
    if (!(x >= -746)) return x != x ? x : 0;
    const double magic = 6755399441055744.; /* 1.5 * 2^52 */
    const double n = fused_double(x, 1.4426950408889634, magic) - magic;
    const double r = fused_double(n, -1.90821492927058770002e-10, fused_double(n, -6.93147180369123816490e-01, x));
    double p = 0;
    for (int i = 0; i < (int)(sizeof inverse_factorials / sizeof *inverse_factorials); i++)
        p = fused_double(p, r, inverse_factorials[i]);
    const int64_t power = (int64_t)n, half = power / 2; /* 2^power may be too small for a normal number */
    const uint64_t bits[2] = {(uint64_t)(1023 + half) << 52, (uint64_t)(1023 + power - half) << 52};
    double scales[2];
    memcpy(scales, bits, sizeof scales);
    return p * scales[0] * scales[1];
}

/* 1 / (1 + e^-x); 0 for NaN, and where it is below e^-700. */
double specdec_sigmoid(double x) { return x > -700 ? 1 / (1 + exponential_double(-x)) : 0; }

INLINE double gumbel(uint64_t hash) {
    const double u = ((double)hash + .5) * 0x1p-53;
    return (-logarithm(-logarithm(each(u))))[0];
}

/* As specdec_draw, with the token of the largest score known. */
static int draw(const void *scores, int64_t count, int half, float by, uint64_t key, int64_t likeliest) {
    if (likeliest < 0) return -1;
    uint64_t x = key + (likeliest + 1) * golden;
    double bar = gumbel(HASH(x)) + value_of(scores, likeliest, half) / by, best = -INFINITY, second = best;
    int64_t winner = 0;
    hashes states;
    for (int i = 0; i < HASHES; i++) states[i] = key + (i + 1) * golden;
    for (int64_t i = 0, end; i < count; i = end) {
        signed_hashes most = {0};
        for (int v = 0; v < STRIP / HASHES; v++, states += HASHES * golden) { /* may pass the last token */
            hashes many = states;
            signed_hashes own = (signed_hashes)HASH(many), larger = own > most;
            most = (own & larger) | (most & ~larger);
        }
        int64_t largest = 0;
        for (int n = 0; n < HASHES; n++) largest = most[n] > largest ? most[n] : largest;
        /* A score below this cannot reach the best sum, even with the strip's largest noise; a margin allows for
         * rounding. */
        double missing = bar - most_gumbel(largest);
        float least = by * fused_double(-1e-6, fabs(missing), missing - .01);
        end = i + STRIP < count ? i + STRIP : count;
        if (end - i == STRIP && !reaches(scores, i, least, half)) continue;
        for (int64_t n = i; n < end; n++) {
            float score = value_of(scores, n, half);
            if (!(score > least)) continue;
            x = key + (n + 1) * golden;
            uint64_t hash = HASH(x);
            if (most_gumbel(hash) + score / by < bar - .01) continue; /* spares most logarithms */
            double sum = gumbel(hash) + score / by;
            second = sum > best ? best : sum > second ? sum : second;
            if (sum > best) best = sum, winner = n;
        }
        if (best > bar) bar = best;
    }
    return best - second > 1e-9 && isfinite(best) ? (int)winner : -1;
}

/* The token with the largest sum of score `by` temperature and Gumbel number under a key. Returns -1 where the
 * caller must find it: the scores are not a distribution, or two sums are closer than logarithms of two libraries
 * can differ. */
int specdec_draw(const void *scores, int64_t count, int half, float by, uint64_t key) {
    ROUNDS_TO_NEAREST;
    return draw(scores, count, half, by, key, peak(scores, count, half));
}

/* Ranks the tokens of several distributions' mean. Writes the `count` tokens with the largest sums of
 * log-probability and Gumbel number under a key to `best`, largest first, of equal sums the first token first, and
 * the sums to `sums`; both have room for all tokens. Returns the number written. Distribution n has sizes[n]
 * distinct tokens, largest score first; scores divided `by` the temperature are log-probabilities. The
 * distributions are stored one behind another. */
int64_t specdec_rank(const int64_t *tokens, const float *scores, const int64_t *sizes, int64_t number, double by,
                     uint64_t key, int64_t count, int64_t *best, double *sums) {
    ROUNDS_TO_NEAREST;
    int64_t size = 0, known = 0;
    for (int64_t n = 0, others; n < number; tokens += sizes[n], scores += sizes[n], n++) {
        double whole = 0;
        others = size;
        for (int64_t i = 0; i < sizes[n]; i++) whole += exponential_double(((double)scores[i] - scores[0]) / by);
        for (int64_t i = 0, at; i < sizes[n]; i++) {
            for (at = 0; at < others && best[at] != tokens[i];) at++;
            if (at == others) at = size++, best[at] = tokens[i], sums[at] = 0;
            sums[at] += exponential_double(((double)scores[i] - scores[0]) / by) / (whole * number);
        }
    }
    for (int64_t i = 0; i < size; i++) { /* in place: fewer are kept than were read */
        if (!(sums[i] > 0)) continue;
        uint64_t x = key + (best[i] + 1) * golden;
        int64_t token = best[i];
        double sum = gumbel(HASH(x)) + logarithm_one(sums[i]);
        if (known == count && sum <= sums[count - 1]) continue;
        int64_t at = known < count ? known++ : count - 1;
        for (; at > 0 && sum > sums[at - 1]; at--) best[at] = best[at - 1], sums[at] = sums[at - 1];
        best[at] = token, sums[at] = sum;
    }
    return known;
}

/* Writes the `count` largest of each row's `size` logits, largest first, and their probabilities under a softmax
 * over all of them. A logit is a score times `scale` plus, where there are keys, `noise` times the token's Gumbel
 * number under the row's key. `tokens`, ascending, are 0, 1, 2, ... where NULL. Returns as specdec_run_layers does. */
int specdec_chances(const void *scores, int64_t rows, int64_t size, int half, float scale, float noise,
                    const uint64_t *keys, const int64_t *tokens, int64_t count, int64_t *best, float *chances) {
    ROUNDS_TO_NEAREST;
    float *logits = take_scratch(size + LANES);
    if (!logits) return 1;
    for (int64_t r = 0; r < rows; r++, best += count, chances += count) {
        const void *row = row_of(scores, r, size, half);
        widen_all(row, logits, size, half);
        const float base = highest(logits, 0, size, 0); /* subtracted, or the sum would round the noise */
        for (int64_t i = 0; i < size; i++) logits[i] = (logits[i] - base) * scale;
        for (int64_t i = 0; keys && i < size; i += HASHES) {
            const int64_t there = i + HASHES < size ? HASHES : size - i;
            hashes x = {0};
            for (int64_t n = 0; n < HASHES; n++) x[n] = tokens && n < there ? (uint64_t)tokens[i + n] : (uint64_t)(i + n);
            x = keys[r] + (x + 1) * golden;
            doubles u = (__builtin_convertvector((signed_hashes)HASH(x), doubles) + .5) * 0x1p-53;
            doubles own = -logarithm(-logarithm(u));
            for (int64_t n = 0; n < there; n++) logits[i + n] = fused_one(noise, (float)own[n], logits[i + n]);
        }
        top(logits, size, count, best, 0);
        const float most = logits[best[0]];
        floats sums = {0};
        for (int64_t rest = size; rest % LANES; rest++) logits[rest] = -INFINITY;
        for (int64_t i = 0; i < size; i += LANES) sums += exponential(load(logits, i, 0) - most);
        const float sum = total(sums);
        for (int64_t n = 0; n < count; n++) chances[n] = exponential_one(logits[best[n]] - most) / sum;
    }
    give_scratch(logits);
    return 0;
}
