/* By layers: rows of whole models, each alone against chains, trees and batches of several sequences. */

/* Results of rows, each [rows, sizes[n]]. */
enum { OUT, NORMED, LOGITS, STORED, BEST, DRAWN, LARGEST, FOUND, RESULTS };
typedef struct {
    char *at[RESULTS];
} Results;

static int64_t size_of(const Plan *p, int n) {
    return n == LOGITS ? TOKENS : n == STORED ? LAYERS * 2 * p->keys * p->dim : n < BEST ? p->hidden : n < LARGEST ? 1 : TOPS;
}
static char type_of(const Plan *p, int n) { return n < BEST ? p->half ? 'h' : 'f' : n == FOUND ? 'f' : 'l'; }

static Results results(const Plan *p, int64_t rows) {
    Results made;
    for (int n = 0; n < RESULTS; n++) made.at[n] = memory(rows * size_of(p, n) * width_of(type_of(p, n)));
    return made;
}

/* Keys and values of a row, from its slots. */
static void read_slots(const Plan *p, const Sequence *s, int64_t position, char *to) {
    const int64_t bytes = p->dim * (p->half ? 2 : 4);
    for (int n = 0; n < LAYERS; n++)
        for (int side = 0; side < 2; side++)
            for (int64_t h = 0; h < p->keys; h++, to += bytes) {
                const Slots *own = s->slots + n;
                const char *from = side ? own->values : own->keys;
                memcpy(to, from + (h * own->stride + position % own->size) * bytes, (size_t)bytes);
            }
}

/* How rows are run: with rotary values row by row; a layer at a time; without the largest logits. */
enum { BY_ROW = 1, CUT = 2, TOPLESS = 4 };

typedef struct { /* rows of some sequences: of sequence n rows [first[n], first[n] + rows[n]) */
    Sequence *sequences[SEQUENCES];
    int64_t count, first[SEQUENCES], rows[SEQUENCES];
    int how, threads;
    enum State state;
    int64_t seen; /* rows of its sequence that each row sees, later ones too; 0: those of its path */
} Step;

/* Rows as the library reads them, and what their draws are made of. */
typedef struct {
    Block blocks[SEQUENCES];
    int64_t tokens[SEQUENCES * ROWS_EACH];
    float by[SEQUENCES * ROWS_EACH];
    uint64_t keys[SEQUENCES * ROWS_EACH];
    Turns turns[LAYERS];
    Rows all;
} Described;

static void describe(const Model *m, const Step *s, Described *d) {
    const int64_t dim = m->shape.head_dim;
    Rows *all = &d->all;
    *all = (Rows){.count = s->count, .blocks = d->blocks, .turns = m->turns, .tokens = d->tokens, .embedding = &m->embedding};
    for (int64_t n = 0; n < s->count; n++) {
        Sequence *q = s->sequences[n];
        const int64_t end = q->length + s->first[n] + s->rows[n];
        d->blocks[n] = (Block){q->length, s->first[n], s->rows[n], q->parents, q->depths, q->slots};
        if (end > all->keys) all->keys = end;
        if (q->length + s->seen > all->keys) all->keys = q->length + s->seen;
        for (int64_t r = s->first[n]; r < s->first[n] + s->rows[n]; r++, all->rows++) {
            d->tokens[all->rows] = q->tokens[r];
            d->by[all->rows] = q->tokens[r] % 3 ? 0x1.8p-1f : 0;
            d->keys[all->rows] = (uint64_t)(q->tokens[r] * 977 + q->length + q->depths[r]);
        }
    }
    if (s->seen) {
        int32_t *spans = memory(LAYERS * all->rows * 8);
        all->spans = spans;
        for (int layer = 0; layer < LAYERS; layer++)
            for (int64_t n = 0; n < s->count; n++)
                for (int64_t r = 0; r < s->rows[n]; r++) {
                    *spans++ = (int32_t)(layer ? s->sequences[n]->length / 2 : 0);
                    *spans++ = (int32_t)(s->sequences[n]->length + s->seen);
                }
    }
    if (!(s->how & BY_ROW)) return;
    all->turns = d->turns, all->by_row = 1;
    for (int layer = 0; layer < LAYERS; layer++) {
        float *cosines = memory(all->rows * dim * 4), *sines = memory(all->rows * dim * 4);
        d->turns[layer] = (Turns){cosines, sines};
        for (int64_t n = 0; n < s->count; n++)
            for (int64_t r = s->first[n]; r < s->first[n] + s->rows[n]; r++, cosines += dim, sines += dim) {
                const int64_t at = (s->sequences[n]->length + s->sequences[n]->depths[r]) * dim;
                memcpy(cosines, m->turns[layer].cosines + at, (size_t)dim * 4);
                memcpy(sines, m->turns[layer].sines + at, (size_t)dim * 4);
            }
    }
}

static Results run_rows(const Model *m, const Step *s) {
    static Described d;
    const int cut = s->how & CUT ? 1 : 0;
    describe(m, s, &d);
    const int64_t rows = d.all.rows;
    const Results to = results(m->plan, rows);
    set_state(s->state);
    if (cut) /* in place */
        specdec_run_layers(&m->shape, m->layers, &d.all, NULL, to.at[OUT], NULL, 0, 1, NULL, NULL, NULL, 0, NULL, NULL, 0,
                           NULL, NULL, NULL, NULL, NULL, s->threads);
    specdec_run_layers(&m->shape, m->layers, &d.all, cut ? to.at[OUT] : NULL, to.at[OUT], NULL, cut, LAYERS, &m->head,
                       to.at[NORMED], NULL, rows, to.at[LOGITS], (int64_t *)to.at[BEST], s->how & TOPLESS ? 0 : TOPS,
                       (int64_t *)to.at[LARGEST], (float *)to.at[FOUND], d.by, d.keys, (int64_t *)to.at[DRAWN], s->threads);
    unset_state(s->state);
    for (int64_t n = 0, row = 0; n < s->count; n++)
        for (int64_t r = s->first[n]; r < s->first[n] + s->rows[n]; r++, row++)
            read_slots(m->plan, s->sequences[n], s->sequences[n]->length + r,
                       to.at[STORED] + row * size_of(m->plan, STORED) * width_of(type_of(m->plan, STORED)));
    return to;
}

/* Runs rows and sees that each has the results `alone`, of its sequence's rows by themselves. */
static void try_step(const Model *m, const Step *s, const Results *alone) {
    static const char *const names[] = {"out", "normed", "logits", "slots", "best", "draw", "likeliest", "scores"};
    const int mark = holding;
    const Results found = run_rows(m, s);
    int64_t rows = 0, row = 0;
    for (int64_t n = 0; n < s->count; n++) rows += s->rows[n];
    for (int64_t n = 0; n < s->count; n++)
        for (int64_t r = s->first[n]; r < s->first[n] + s->rows[n]; r++, row++)
            for (int f = 0; f < (s->how & TOPLESS ? LARGEST : RESULTS); f++) {
                const int64_t size = size_of(m->plan, f), bytes = size * width_of(type_of(m->plan, f));
                same(s->state ? joined("caller's state", s->state == FLUSHED ? "flushes" : "rounds up", names[f]) : names[f],
                     rows, s->threads, row, found.at[f] + row * bytes, alone[n].at[f] + r * bytes, size, type_of(m->plan, f));
            }
    release(mark);
}

/* The results of each row of a sequence, decoded token by token behind the tokens of its path. */
static Results decoded(const Model *m, Sequence *s) {
    const Results found = results(m->plan, ROWS_EACH);
    const int64_t length = s->length;
    Sequence plain = *s;
    for (int64_t r = 0; r < ROWS_EACH; r++) {
        int64_t path[ROWS_EACH], depth = 0;
        for (int64_t at = r; at >= 0; at = s->parents[at]) path[depth++] = at;
        const int onward = r && s->parents[r] == r - 1; /* then all but the last have just been decoded */
        if (!onward) reset(s);
        for (int64_t n = onward ? depth - 1 : 0; n < depth; n++) {
            const int mark = holding;
            plain.length = length + n, plain.parents[0] = -1, plain.depths[0] = 0, plain.tokens[0] = s->tokens[path[depth - 1 - n]];
            Step one = {.sequences = {&plain}, .count = 1, .rows = {1}, .threads = 1};
            const Results own = run_rows(m, &one);
            for (int f = 0; f < RESULTS && n + 1 == depth; f++) {
                const int64_t bytes = size_of(m->plan, f) * width_of(type_of(m->plan, f));
                memcpy(found.at[f] + r * bytes, own.at[f], (size_t)bytes);
            }
            release(mark);
        }
    }
    for (int f = 0; f < RESULTS; f++) tell(found.at[f], ROWS_EACH * size_of(m->plan, f), type_of(m->plan, f));
    return found;
}

/* Rows of a block that see each other, those before them and those behind. */
static void try_spans(const Model *m, Sequence *s) {
    enum { SEEN = 17 };
    Results alone[2];
    for (int n = 0; n < 2; n++) {
        reset(s + n);
        alone[n] = run_rows(m, &(Step){.sequences = {s + n}, .count = 1, .rows = {SEEN}, .threads = 1, .seen = SEEN});
        for (int f = 0; f < RESULTS; f++) tell(alone[n].at[f], SEEN * size_of(m->plan, f), type_of(m->plan, f));
        for (int64_t r = 0; r < SEEN; r++) /* its keys and values are there by now, and so are the others' */
            try_step(m, &(Step){.sequences = {s + n}, .count = 1, .first = {r}, .rows = {1}, .threads = 1, .seen = SEEN},
                     alone + n);
    }
    for (int threads = 1; threads <= 3; threads++)
        try_step(m, &(Step){.sequences = {s, s + 1}, .count = 2, .rows = {SEEN, SEEN}, .threads = threads, .seen = SEEN}, alone);
}

/* Rows of several sequences at once, in any order of these, behind rows that were run before or not. */
static void try_batches(const Model *m, Sequence *s, const Results *alone) {
    for (int n = 0; n < (quick ? 3 : 12); n++) {
        Step step = {.count = 2 + n % 3, .threads = 1 + n % 3, .how = n % 8};
        Results own[SEQUENCES];
        for (int64_t k = 0; k < step.count; k++) {
            const int64_t at = (n + k * 3) % SEQUENCES;
            Step before = {.sequences = {s + at}, .count = 1, .rows = {below(20)}, .threads = 1};
            step.sequences[k] = s + at, own[k] = alone[at];
            reset(s + at);
            if (before.rows[0]) try_step(m, &before, alone + at);
            step.first[k] = before.rows[0], step.rows[k] = 1 + below(k ? 12 : ROWS_EACH - before.rows[0]);
            if (step.first[k] + step.rows[k] > ROWS_EACH) step.rows[k] = ROWS_EACH - step.first[k];
        }
        try_step(m, &step, own);
    }
}

/* A layer's inputs, and logits of a list of rows: of all rows at once, and row by row. */
static void try_wanted(const Model *m, Sequence *s, const Results *alone) {
    enum { SEEN = 17, WANTED = 8 };
    static Described d;
    const int64_t bytes = m->plan->half ? 2 : 4, size = m->plan->hidden, outputs = TOKENS * bytes;
    const char type = m->plan->half ? 'h' : 'f';
    char *together = memory(SEEN * size * bytes), *one = memory(size * bytes), *out = memory(SEEN * size * bytes);
    char *logits = memory(WANTED * outputs);
    int64_t wanted[WANTED], best[WANTED];
    for (int64_t n = 0; n < WANTED; n++) wanted[n] = SEEN - 1 - 2 * n;
    reset(s);
    describe(m, &(Step){.sequences = {s}, .count = 1, .rows = {SEEN}}, &d);
    specdec_run_layers(&m->shape, m->layers, &d.all, NULL, out, (void *[]){NULL, together}, 0, LAYERS, &m->head, NULL, wanted, WANTED,
                       logits, best, 0, NULL, NULL, NULL, NULL, NULL, 2);
    for (int64_t n = 0; n < WANTED; n++)
        same("wanted logits", SEEN, 2, wanted[n], logits + n * outputs, alone->at[LOGITS] + wanted[n] * outputs, TOKENS, type);
    tell(together, SEEN * size, type);
    for (int64_t r = 0; r < SEEN; r++) {
        describe(m, &(Step){.sequences = {s}, .count = 1, .first = {r}, .rows = {1}}, &d);
        specdec_run_layers(&m->shape, m->layers, &d.all, NULL, out, (void *[]){NULL, one}, 0, LAYERS, NULL, NULL, NULL, 0, NULL, NULL,
                           0, NULL, NULL, NULL, NULL, NULL, 1);
        same("a layer's input", SEEN, 2, r, together + r * size * bytes, one, size, type);
    }
}

static void try_model(const Plan *plan) {
    static const int64_t lengths[] = {37, 90, 0, 20};
    static Sequence s[SEQUENCES];
    Results alone[SEQUENCES];
    group(joined("layers of", plan->name, "as a model"));
    const Model m = model_of(plan);
    for (int n = 0; n < SEQUENCES; n++) begin_sequence(s + n, &m, lengths[n], n % 2, n > 1);
    for (int n = 0; n < SEQUENCES; n++) alone[n] = decoded(&m, s + n);
    for (int64_t rows = 1; rows <= 40; rows++)
        for (int n = 0; n < SEQUENCES && tried(rows); n++) {
            if (n != rows % SEQUENCES && (quick || n % 2 != rows % 2)) continue;
            reset(s + n);
            try_step(&m, &(Step){.sequences = {s + n}, .count = 1, .rows = {rows}, .how = (int)(rows / 2 % 8),
                                 .threads = rows % 5 ? 1 : 2 + (int)(rows / 5 % 2)}, alone + n);
        }
    if (!plan->windows[0] && !plan->windows[1]) try_spans(&m, s);
    try_wanted(&m, s, alone), try_wanted(&m, s + 1, alone + 1);
    try_batches(&m, s, alone);
    for (int n = 0; n < SEQUENCES; n++) {
        reset(s + n);
        try_step(&m, &(Step){.sequences = {s + n}, .count = 1, .rows = {5 + 8 * n}, .threads = 1 + n % 3,
                             .state = n % 2 ? FLUSHED : UPWARD}, alone + n);
    }
}

static void by_layers(void) {
    for (size_t n = 0; n < sizeof plans / sizeof *plans; n++)
        if (!told.tiles || plans[n].kind == HEIR || plans[n].kind == CODED) try_model(plans + n);
}
