/* Heads that draft a block: keys and values of text, which has no queries there. */

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
