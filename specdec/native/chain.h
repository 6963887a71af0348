/* EAGLE heads of one layer: a pass over rows of several sequences. */

typedef struct { /* a head; its rows and states are in the model's dtype */
    Shape shape;      /* of its layer */
    const Layer *layer;
    const Head *head; /* the last norm and the logits, or NULL */
    const Product *fuse; /* from the target's hidden states to a state; NULL where they are one */
    const Product *join; /* from an embedding and a state to a narrow head's stream; of a wide head NULL */
    const Product *embedding; /* or, where it is NULL, ... */
    const void *table;        /* ... [vocabulary, width], or NULL for rows that come with their embeddings */
    const float *features_norm;               /* [features] weights of `norms` norms side by side, or NULL */
    const float *embedded_norm, *hidden_norm; /* [width] of a wide head, whose attention reads both; else NULL */
    const int64_t *drafted;                   /* the token of each logit, ascending; NULL for 0, 1, 2, ... */
    int64_t width, features, taps, norms, vocabulary; /* features: values of `taps` hidden states of the target */
    int64_t from_norm, final; /* whether the stream begins with the normed state, and states come from the last norm */
    float epsilon;
} Chain;

typedef struct { /* where a pass keeps what it computes */
    void *read, *fused, *embedded, *inputs, *found, *stream, *left, *normed;
    float *first; /* [features] or [3 * width] floats of one row */
    int64_t *best;
} Space;

/* Divides scratch for a pass; returns the floats that it takes. With `base` NULL it only counts. */
static int64_t lay_space(const Chain *c, int64_t rows, int64_t fused, int64_t wanted, float *base, Space *s) {
    const int64_t width = c->width, most = c->features > 3 * width ? c->features : 3 * width;
    int64_t used = 0;
#define TAKE(count) (used += ((count) + 15) / 16 * 16, base ? base + used - ((count) + 15) / 16 * 16 : NULL)
    s->best = (int64_t *)TAKE(2 * wanted);
    s->read = TAKE(fused * c->features);
    s->fused = TAKE(fused * width);
    s->embedded = TAKE(rows * width);
    s->inputs = TAKE(rows * 2 * width);
    s->found = TAKE(rows * width);
    s->stream = TAKE(wanted * width);
    s->left = TAKE(rows * width);
    s->normed = TAKE(rows * width);
    s->first = TAKE(most);
#undef TAKE
    return used;
}

INLINE void *row_at(void *rows, int64_t row, int64_t size, int half) { return (char *)rows + row * size * (half ? 2 : 4); }

/* Writes the embeddings of tokens to `to` [rows, width]. Returns 0, or 2 for a token without one. */
static int embed(const Chain *c, const int64_t *tokens, int64_t rows, void *to) {
    const int half = c->shape.half;
    if (c->embedding) return specdec_look_up(c->embedding, tokens, rows, to, half) ? 2 : 0;
    for (int64_t r = 0; r < rows; r++) {
        if (tokens[r] < 0 || tokens[r] >= c->vocabulary) return 2;
        memcpy(row_at(to, r, c->width, half), row_of(c->table, tokens[r], c->width, half), c->width * (half ? 2 : 4));
    }
    return 0;
}

/* Writes the states that the target's hidden states of `rows` rows come to, to rows `places` of `states`. Row r has
 * its hidden states, one for each tap, at from[r * taps] and behind. Returns 0, or 1 without memory. */
static int fuse(const Chain *c, const void *const *from, const int64_t *places, int64_t rows, void *states, const Space *s,
                int threads) {
    const int half = c->shape.half;
    const int64_t width = c->width, each = c->features / c->taps, group = c->norms ? c->features / c->norms : 0;
    for (int64_t r = 0; r < rows; r++) {
        for (int64_t k = 0; k < c->taps; k++) widen_all(from[r * c->taps + k], s->first + k * each, each, half);
        for (int64_t n = 0; n < c->norms; n++)
            norm(s->first + n * group, c->features_norm + n * group, s->first + n * group, group, c->epsilon);
        store(s->read, r * c->features, s->first, c->features, half);
    }
    const void *fused = c->fuse ? s->fused : s->read;
    if (c->fuse && specdec_product(c->fuse, s->read, NULL, s->fused, rows, half, threads)) return 1;
    for (int64_t r = 0; r < rows; r++)
        memcpy(row_at(states, places[r], width, half), row_of(fused, r, width, half), width * (half ? 2 : 4));
    return 0;
}

/* A narrow head: the layer on what `join` makes of embeddings and states. */
static int run_narrow(const Chain *c, const Rows *all, const void *embedded, const void *states, const int64_t *wanted,
                      int64_t count, void *logits, void *onward, const Space *s, int threads) {
    const int half = c->shape.half;
    const int64_t width = c->width, bytes = width * (half ? 2 : 4);
    for (int64_t r = 0; r < all->rows; r++) {
        memcpy(row_at(s->inputs, 2 * r, width, half), row_of(embedded, r, width, half), bytes);
        memcpy(row_at(s->inputs, 2 * r + 1, width, half), row_of(states, r, width, half), bytes);
    }
    if (specdec_product(c->join, s->inputs, NULL, s->found, all->rows, half, threads)) return 1;
    void *normed = c->head && c->final ? s->normed : NULL;
    if (specdec_run_layers(&c->shape, c->layer, all, s->found, s->left, NULL, 0, 1, c->head, normed, wanted, count, logits,
                           s->best, 0, NULL, NULL, NULL, NULL, NULL, threads))
        return 1;
    for (int64_t r = 0; r < count; r++)
        memcpy(row_at(onward, r, width, half), row_of(normed ? normed : s->left, wanted[r], width, half), bytes);
    return 0;
}

/* A wide head: attention of all rows reads an embedding and a state side by side, both normed, and is added to the normed
 * state; only the rows that are wanted go on, with what the norm took away unless the stream begins with the normed state. */
static int run_wide(const Chain *c, const Rows *all, const void *embedded, const void *states, const int64_t *wanted,
                    int64_t count, void *logits, void *onward, const Space *s, int threads) {
    static const uint8_t attention = ATTENTION, mlp = MLP;
    const int half = c->shape.half, normed = c->head && c->final;
    const int64_t width = c->width, bytes = width * (half ? 2 : 4);
    float *one = s->first, *two = one + width, *three = two + width;
    for (int64_t r = 0; r < all->rows; r++) {
        widen_all(row_of(embedded, r, width, half), one, width, half);
        norm(one, c->embedded_norm, one, width, c->epsilon);
        widen_all(row_of(states, r, width, half), two, width, half);
        norm(two, c->hidden_norm, two, width, c->epsilon);
        store(s->inputs, r * 2 * width, one, 2 * width, half);
        memcpy(row_at(s->found, r, width, half), row_of(s->inputs, 2 * r + 1, width, half), bytes);
    }
    Rows attending = *all;
    attending.reads = s->inputs, attending.parts = &attention;
    if (specdec_run_layers(&c->shape, c->layer, &attending, s->found, s->left, NULL, 0, 1, NULL, NULL, NULL, 0, NULL, NULL, 0,
                           NULL, NULL, NULL, NULL, NULL, threads))
        return 1;
    for (int64_t r = 0; r < count; r++) {
        widen_all(row_of(s->left, wanted[r], width, half), one, width, half);
        widen_all(row_of(states, wanted[r], width, half), two, width, half);
        widen_all(row_of(s->found, wanted[r], width, half), three, width, half);
        for (int64_t i = 0; !c->from_norm && i < width; i++) {
            const float taken = two[i] - three[i];
            one[i] += half ? widen(narrow(taken)) : taken;
        }
        store(s->stream, r * width, one, width, half);
    }
    const Rows alone = {.rows = count, .parts = &mlp};
    return specdec_run_layers(&c->shape, c->layer, &alone, s->stream, normed ? s->left : onward, NULL, 0, 1, c->head,
                              normed ? onward : NULL, NULL, count, logits, s->best, 0, NULL, NULL, NULL, NULL, NULL, threads);
}

/* Runs rows, whose keys and values are stored. `states` [rows, width] has the states of all rows but those at `places`,
 * `fused` of them, which come from the target's hidden states, see fuse. `embedded` is NULL where the head has the
 * embedding. Writes the states that the next level reads behind the rows `wanted` to `onward` [count, width], and
 * their `logits`, unless there is no head. Returns as specdec_run_layers does. */
static int run_chain(const Chain *c, const Rows *all, const void *embedded, const void *const *features,
                     const int64_t *places, int64_t fused, void *states, const int64_t *wanted, int64_t count, void *logits,
                     void *onward, float *scratch, int threads) {
    Space s;
    lay_space(c, all->rows, fused, count, scratch, &s);
    int failed = embedded ? 0 : embed(c, all->tokens, all->rows, s.embedded);
    if (!failed && fused) failed = fuse(c, features, places, fused, states, &s, threads);
    if (failed) return failed;
    if (!embedded) embedded = s.embedded;
    return c->embedded_norm ? run_wide(c, all, embedded, states, wanted, count, logits, onward, &s, threads)
                            : run_narrow(c, all, embedded, states, wanted, count, logits, onward, &s, threads);
}

/* The same, with scratch of its own. */
int specdec_run_chain(const Chain *c, const Rows *all, const void *embedded, const void *const *features,
                      const int64_t *places, int64_t fused, void *states, const int64_t *wanted, int64_t count, void *logits,
                      void *onward, int threads) {
    ROUNDS_TO_NEAREST;
    Space s;
    float *scratch = take_scratch(lay_space(c, all->rows, fused, count, NULL, &s));
    if (!scratch) return 1;
    const int failed =
        run_chain(c, all, embedded, features, places, fused, states, wanted, count, logits, onward, scratch, threads);
    give_scratch(scratch);
    return failed;
}
