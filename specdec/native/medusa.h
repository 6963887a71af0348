/* Medusa's heads, computed in one call. */

/* Medusa's heads. A head's state starts as its row's input; every block adds SiLU(the block's product) to it. */
typedef struct {
    const Product *blocks; /* the first block of all heads together, then each further block, head by head */
    const Product *ends;   /* to logits: one for all heads, or one for each; NULL: the states are the result */
    int64_t layers, heads, size, own;
} Heads;

/* A row's input is its `hidden` state [size] and, where the first block reads more, the embedding of its root from
 * `embedded` [rows, size], scaled to a mean square of 1. For each row `found` receives [heads, outputs] logits or
 * [heads, size] states; all in bfloat16 or float32. Returns as specdec_product does. */
int specdec_guess(const Heads *h, const void *const *hidden, const void *embedded, int64_t rows, void *const *found,
                  int half, int threads) {
    const int64_t size = h->size, heads = h->heads, all = rows * heads, seen = h->blocks->inputs;
    const int64_t line = apart_by(size), first = apart_by(seen); /* strides of rows that products read */
    const int64_t wide = padded(heads * size), width = h->ends ? padded(h->ends->outputs) : 0;
    const int64_t most = rows * gathered(seen) > all * gathered(size) ? rows * gathered(seen) : all * gathered(size);
    float *scratch = take_scratch(rows * (first + line + wide) + all * (line + width) + most);
    if (!scratch) return 1;
    float *brought = scratch, *states = brought + rows * first; /* [heads, rows, line], as products read it */
    float *read = states + all * line, *more = read + rows * line, *logits = more + rows * wide;
    float *grouped = logits + all * width;
    AS_TEAM {
        SHARED(r, rows) {
            float *own = brought + r * first, *root = own + size;
            widen_all(hidden[r], own, size, half);
            for (int64_t k = 0; k < heads; k++) memcpy(states + (k * rows + r) * line, own, size * sizeof *own);
            if (seen > size) {
                widen_all(row_of(embedded, r, size, half), root, size, half);
                const float by = inverse_rms(root, size, FLT_EPSILON);
                for (int64_t i = 0; i < size; i++) root[i] *= by;
            }
            ready(h->blocks, own);
        }
        meet(team);
        for (int64_t n = 0; n < h->layers; n++)
            for (int64_t k = 0; k < heads; k++) {
                const Product *p = n ? h->blocks + 1 + (n - 1) * heads + k : h->blocks;
                float *own = states + k * rows * line, *from = n ? read : brought;
                const int64_t stride = n ? padded(size) : wide;
                if (n) { /* a product in pairs rounds its input; the state stays unrounded */
                    SHARED(r, rows) {
                        memcpy(from + r * line, own + r * line, line * sizeof *own);
                        ready(p, from + r * line);
                    }
                    meet(team);
                }
                if (n || !k) product(p, NULL, from, grouped, more, stride, rows, 0, NULL, 0, team);
                SHARED(r, rows) {
                    const float *added = more + r * stride + (n ? 0 : k * size);
                    int64_t i = 0;
                    for (float *to = own + r * line; i + LANES <= size; i += LANES) {
                        const floats bent = load(added, i, 0);
                        *(floats *)(to + i) += gated(bent, bent);
                    }
                    const int64_t rest = size - i;
                    const floats bent = load_some(added + i, rest);
                    const floats all_of_it = load_some(own + r * line + i, rest) + gated(bent, bent);
                    memcpy(own + r * line + i, &all_of_it, rest * sizeof *own);
                }
                meet(team);
            }
        if (h->ends) {
            SHARED(r, all) ready(h->ends + (h->own ? r / rows : 0), states + r * line);
            meet(team);
        }
        for (int64_t k = 0; h->ends && k < (h->own ? heads : 1); k++) {
            const int64_t count = h->own ? rows : all;
            product(h->ends + k, NULL, states + k * rows * line, grouped, logits + k * rows * width, width, count, 0, NULL,
                    0, team);
        }
        SHARED(r, rows)
            for (int64_t k = 0; k < heads; k++) {
                const float *own = h->ends ? logits + (k * rows + r) * width : states + (k * rows + r) * line;
                const int64_t count = h->ends ? h->ends->outputs : size;
                store(found[r], k * count, own, count, half);
            }
    }
    give_scratch(scratch);
    return 0;
}
