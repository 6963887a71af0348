/* Heads that draft a block: keys and values of text, which has no queries there; and drafts from a block's guesses. */

typedef struct { /* from the target's hidden states of a row, side by side, to its keys and values */
    const Product *fuse;  /* to a state */
    const Product *keyed; /* from a normed state to keys and values, layer by layer */
    const float *norm;    /* [outputs of fuse] */
    float epsilon;
} Context;

/* Stores keys and values of rows of text in all layers, from `features` [rows, inputs of fuse] in the model's dtype.
 * Returns 0, or 1 without memory. */
int specdec_absorb(const Shape *m, const Layer *layers, const Context *c, const Rows *text, const void *features, int threads) {
    const int64_t rows = text->rows, half = m->half, inputs = c->fuse->inputs, size = c->fuse->outputs;
    const int64_t each = 2 * m->key_heads * m->head_dim, count = c->keyed->outputs / each;
    const int64_t read = apart_by(inputs), line = padded(size), seen = apart_by(size), wide = padded(c->keyed->outputs);
    float *scratch = take_scratch(rows * (read + line + seen + wide + gathered(inputs > size ? inputs : size)));
    if (!scratch) return 1;
    float *x = scratch, *fused = x + rows * read, *states = fused + rows * line, *found = states + rows * seen;
    float *grouped = found + rows * wide;
    Shape keys = *m;
    keys.query_heads = 0;
    AS_TEAM {
        SHARED(r, rows) {
            widen_all(row_of(features, r, inputs, half), x + r * read, inputs, half);
            ready(c->fuse, x + r * read);
        }
        meet(team);
        product(c->fuse, c->keyed, x, grouped, fused, line, rows, 0, NULL, 0, team);
        SHARED(r, rows) {
            float *own = fused + r * line;
            for (int64_t i = 0; half && i < size; i++) own[i] = widen(narrow(own[i]));
            norm(own, c->norm, states + r * seen, size, c->epsilon);
            ready(c->keyed, states + r * seen);
        }
        meet(team);
        product(c->keyed, NULL, states, grouped, found, wide, rows, 0, NULL, 0, team);
        for (int64_t n = 0; n < count; n++) {
            Layer own = layers[n];
            if (own.head_norm) own.head_norm += m->query_heads * m->head_dim; /* those of keys */
            store_rows(&keys, &own, text, n, found + n * each, wide, team);
        }
    }
    give_scratch(scratch);
    return 0;
}

typedef struct { /* guesses of a block's rows, and what corrects them for the token before */
    Guesses guesses;        /* its room is the library's */
    const void *before;     /* [vocabulary, rank] of a bias on logits ... */
    const Product *after;   /* ... and its product; NULL for none */
    const Product *chance;  /* from a state, and the row of `before` if it reads so much, to a logit of acceptance; or NULL */
    int64_t width, rank, vocabulary;
} Transitions;

/* Corrects one row's guesses behind `count` tokens: logits to `found` [count, size], and logits of acceptance to `sure`
 * [count]. `known` [count, rank], `read` [count, inputs of chance] and `sums` [size] are scratch. Returns as
 * specdec_run_layers does. */
static int correct(const Transitions *t, const Growing *g, int64_t count, const void *state, const void *logits, void *known,
                   void *read, float *sums, void *found, void *sure, int threads) {
    const int half = (int)t->guesses.half;
    const int64_t size = t->guesses.size, each = half ? 2 : 4;
    for (int64_t i = 0; t->after && i < count; i++) {
        const int64_t token = g->tokens[g->level[i]];
        if (token < 0 || token >= t->vocabulary) return 2;
        memcpy(row_at(known, i, t->rank, half), row_of(t->before, token, t->rank, half), t->rank * each);
    }
    if (t->after && specdec_product(t->after, known, NULL, found, count, half, threads)) return 1;
    for (int64_t i = 0; t->after && i < count; i++) {
        for (int64_t v = 0; v < size; v++) sums[v] = value_of(logits, v, half) + value_of(found, i * size + v, half);
        store(found, i * size, sums, size, half);
    }
    if (!t->chance) return 0;
    for (int64_t i = 0; i < count; i++) {
        const int64_t inputs = t->chance->inputs;
        void *own = row_at(read, i, inputs, half);
        memcpy(own, state, t->width * each);
        if (inputs > t->width) memcpy(row_at(own, 1, t->width, half), row_of(known, i, t->rank, half), t->rank * each);
    }
    return specdec_product(t->chance, read, NULL, sure, count, half, 1);
}

/* Grows a draft from a block, as far as that pays: `hidden` [depths, width] and `logits` [depths, size] of its rows.
 * Returns as specdec_run_layers does. */
int specdec_grow_block(const Transitions *t, Growing *g, const void *hidden, const void *logits, int threads) {
    ROUNDS_TO_NEAREST;
    Guesses own = t->guesses;
    const int half = (int)own.half;
    const int64_t most = g->width, line = t->chance ? t->chance->inputs : 0, corrected = t->after ? most * own.size : 0;
    const int64_t sizes[] = {own.size, g->branch, 2 * g->branch, most * t->rank, most * line, corrected, most};
    enum { PIECES = sizeof sizes / sizeof *sizes };
    int64_t needed = 0;
    for (int p = 0; p < PIECES; p++) needed += (sizes[p] + 15) / 16 * 16;
    float *scratch = take_scratch(needed), *at = scratch;
    if (!scratch) return 1;
    void *piece[PIECES];
    for (int p = 0; p < PIECES; at += (sizes[p++] + 15) / 16 * 16) piece[p] = at;
    own.apart = piece[0], own.chances = piece[1], own.likely = piece[2];
    void *found = piece[5], *sure = piece[6];
    int failed = 0;
    begin_growth(g);
    for (int32_t depth = 0; g->count && !failed; depth++) {
        const void *row = row_of(logits, depth, own.size, half), *state = row_of(hidden, depth, t->width, half);
        const int64_t apart = t->after ? g->count : 1; /* without a bias, all nodes of a depth have the same guesses */
        failed = correct(t, g, apart, state, row, piece[3], piece[4], own.apart, found, sure, threads);
        for (int64_t i = 0; i < g->count && !failed; i++) {
            if (i < apart) failed = rank_guesses(g, &own, depth, t->after ? row_of(found, i, own.size, half) : row);
            const double logit = t->chance ? value_of(sure, i < apart ? i : 0, half) : 0;
            if (!failed) extend_node(g, g->level[i], &own, t->chance ? specdec_sigmoid(logit) : -1);
        }
        if (!failed) choose_level(g, depth + 1);
    }
    give_scratch(scratch);
    if (!failed) finish_growth(g);
    return failed;
}
