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

INLINE double gumbel(uint64_t hash) { return -log(-log(((double)hash + .5) * 0x1p-53)); }

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
        float least = by * (missing - .01 - 1e-6 * fabs(missing));
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
    return draw(scores, count, half, by, key, peak(scores, count, half));
}

/* Ranks the tokens of several distributions' mean. Writes the `count` tokens with the largest sums of
 * log-probability and Gumbel number under a key to `best`, largest first, of equal sums the first token first, and
 * the sums to `sums`; both have room for all tokens. Returns the number written. Distribution n has sizes[n]
 * distinct tokens, largest score first; scores divided `by` the temperature are log-probabilities. The
 * distributions are stored one behind another. */
int64_t specdec_rank(const int64_t *tokens, const float *scores, const int64_t *sizes, int64_t number, double by,
                     uint64_t key, int64_t count, int64_t *best, double *sums) {
    int64_t size = 0, known = 0;
    for (int64_t n = 0, others; n < number; tokens += sizes[n], scores += sizes[n], n++) {
        double whole = 0;
        others = size;
        for (int64_t i = 0; i < sizes[n]; i++) whole += exp(((double)scores[i] - scores[0]) / by);
        for (int64_t i = 0, at; i < sizes[n]; i++) {
            for (at = 0; at < others && best[at] != tokens[i];) at++;
            if (at == others) at = size++, best[at] = tokens[i], sums[at] = 0;
            sums[at] += exp(((double)scores[i] - scores[0]) / by) / (whole * number);
        }
    }
    for (int64_t i = 0; i < size; i++) { /* in place: fewer are kept than were read */
        if (!(sums[i] > 0)) continue;
        uint64_t x = key + (best[i] + 1) * golden;
        int64_t token = best[i];
        double sum = gumbel(HASH(x)) + log(sums[i]);
        if (known == count && sum <= sums[count - 1]) continue;
        int64_t at = known < count ? known++ : count - 1;
        for (; at > 0 && sum > sums[at - 1]; at--) best[at] = best[at - 1], sums[at] = sums[at - 1];
        best[at] = token, sums[at] = sum;
    }
    return known;
}

INLINE doubles logarithm(doubles x) { /* of a positive number; to 2e-12 */
    const signed_hashes low = (signed_hashes)((doubles){0} + 0.7071067811865476);
    signed_hashes power = ((signed_hashes)x - low) >> 52; /* 2^power times [1 / sqrt 2, sqrt 2) */
    doubles m = (doubles)((signed_hashes)x - (power << 52)) - 1, t = m / (m + 2), square = t * t;
    doubles p = square * (2. / 13) + 2. / 11;
    p = p * square + 2. / 9;
    p = p * square + 2. / 7;
    p = p * square + 2. / 5;
    p = p * square + 2. / 3;
    return (p * square + 2) * t + __builtin_convertvector(power, doubles) * 0.6931471805599453;
}

/* Writes the `count` largest of each row's `size` logits, largest first, and their probabilities under a softmax
 * over all of them. A logit is a score times `scale` plus, where there are keys, `noise` times the token's Gumbel
 * number under the row's key. `tokens`, ascending, are 0, 1, 2, ... where NULL. Returns as specdec_run_layers does. */
int specdec_chances(const void *scores, int64_t rows, int64_t size, int half, float scale, float noise,
                    const uint64_t *keys, const int64_t *tokens, int64_t count, int64_t *best, float *chances) {
    float *logits = take_scratch(size);
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
            for (int64_t n = 0; n < there; n++) logits[i + n] += noise * (float)own[n];
        }
        top(logits, size, count, best, 0);
        const float most = logits[best[0]];
        floats sums = {0};
        int64_t i = 0;
        for (; i + LANES <= size; i += LANES) sums += exponential(load(logits, i, 0) - most);
        float sum = total(sums);
        for (; i < size; i++) sum += expf(logits[i] - most);
        for (int64_t n = 0; n < count; n++) chances[n] = expf(logits[best[n]] - most) / sum;
    }
    give_scratch(logits);
    return 0;
}
