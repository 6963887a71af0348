/* Attention by vectors: all blocks that some rows see, and the softmax between keys and values. */

/* Softmax of scores in place, padded with zeros to a whole block. `sink`: one more score, of no key, or NULL. */
static void soften(float *scores, int64_t count, const float *sink) {
    floats most = spread(sink ? *sink : -INFINITY), other = most, sum = {0};
    for (int64_t rest = count; rest % LANES; rest++) scores[rest] = -INFINITY;
    for (int64_t s = 0; s < count; s += 2 * LANES) {
        most = larger(load(scores, s, 0), most);
        if (s + LANES < count) other = larger(load(scores, s + LANES, 0), other);
    }
    most = largest(larger(most, other));
    for (int64_t s = 0; s < count; s += LANES) {
        floats e = exponential_of_negative(load(scores, s, 0) - most);
        *(floats *)(scores + s) = e;
        sum += e;
    }
    const float all = sink ? total(sum) + exponential(spread(*sink) - most)[0] : total(sum), by = 1.f / all;
    for (int64_t s = 0; s < count; s += LANES) *(floats *)(scores + s) *= by;
}

/* What is prefetched, little by little: a burst would keep what is read meanwhile waiting. */
typedef struct {
    const char *at, *end;
} Soon;
INLINE void prefetch_some(Soon *soon, int64_t bytes) {
    for (; bytes > 0 && soon->at < soon->end; bytes -= 64, soon->at += 64) __builtin_prefetch(soon->at);
}

/* Goes through all blocks of keys, or of values; all units that see a block use it while it is in the CPU's cache.
 * Meanwhile it prefetches as much of what comes next, which weights drove out of the caches. */
static void each_block(const Seen *a, int64_t longest, int mixes) {
    const int64_t size = a->kind == PAIRS && !mixes ? a->dim / 2 : a->dim; /* floats per unit */
    const int64_t bytes = a->dim * (a->kind == FULL ? 4 : 2);              /* bytes per key or value */
    Keys block;
    for (int64_t s = 0; s < longest; s += LANES)
        for (int64_t r = 0; r < a->rows; r += block.rows) {
            block.rows = 1;
            if (s >= a->count[r]) continue;
            look_up(&block, a, mixes ? a->values : a->keys, r, s);
            Soon soon = {NULL, NULL};
            if (r == 0 && a->soon[mixes]) {
                soon.at = a->soon[mixes] + a->slots[s] * bytes;
                soon.end = soon.at + LANES * bytes;
            }
            const int64_t first = r * a->heads, units = block.rows * a->heads;
            if (!mixes && are_many(units)) {
                const int64_t groups = (units + TURNED - 1) / TURNED, each = LANES * bytes / groups;
                turn_keys(&block, a->dim, a->beside);
                for (int64_t g = 0, unit = first, count; g < groups; g++, unit += count) {
                    count = first + units * (g + 1) / groups - unit;
                    prefetch_some(&soon, each);
                    score_any_turned(a, a->beside, a->beside + a->dim * LANES + unit, size, a->scores + unit * a->room + s,
                                     count);
                }
                continue;
            }
            if (mixes && are_many(units) && a->kind == HALF) widen_values(&block, a->dim, a->beside);
            const int64_t each = LANES * bytes / ((units + UNITS - 1) / UNITS);
            int64_t row = r, head = 0;
            for (int64_t unit = first, end = unit + units, count; unit < end; unit += count) {
                const float *query[UNITS];
                float *output[UNITS], *scores = a->scores + unit * a->room + s / (a->kind == PAIRS && mixes ? 2 : 1);
                count = end - unit < UNITS ? end - unit : UNITS;
                for (int u = 0; u < count; u++) {
                    query[u] = a->query + row * a->query_stride + head * size;
                    output[u] = a->output + row * a->output_stride + head * size;
                    if (++head == a->heads) head = 0, row++;
                }
                prefetch_some(&soon, each);
                if (mixes) mix_any(a, &block, output, scores, count);
                else score_any(a, &block, query, scores, count);
            }
        }
}

static void attend(const Seen *a) {
    int64_t longest = 0;
    for (int64_t r = 0; r < a->rows; r++) longest = a->count[r] > longest ? a->count[r] : longest;
    if (are_many(a->rows * a->heads))
        turn_queries(a, a->kind == PAIRS ? a->dim / 2 : a->dim, a->beside + a->dim * LANES);
    each_block(a, longest, 0);
    for (int64_t r = 0; r < a->rows; r++) {
        for (int64_t h = 0; h < a->heads; h++) {
            float *own = a->scores + (r * a->heads + h) * a->room;
            soften(own, a->count[r], a->sinks ? a->sinks + h : NULL);
            if (a->kind == PAIRS) narrow_all(own, own, rounded_up(a->count[r]));
        }
        memset(a->output + r * a->output_stride, 0, a->heads * a->dim * sizeof(float));
    }
    each_block(a, longest, 1);
}
