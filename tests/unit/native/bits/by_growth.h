/* By growth: drafts that grow in the library, alone, beside others, and behind text that was read before. */

typedef struct {
    Growing begun, now; /* as it is before each growth, and in it */
    Slots slots;
    char *first, *kept; /* the slots' content, before each growth and in it */
    int64_t bytes;
} Draft;

/* A draft behind `length` tokens and `rows` rows of text. `turn` chooses how it is priced, and whether there is noise. */
static void begin_draft(Draft *d, const Plan *plan, int64_t length, int64_t rows, int turn) {
    const int64_t width = plan->hidden, bytes = plan->half ? 2 : 4, values = plan->keys * POSITIONS * plan->dim;
    int64_t *text = memory(rows * 8);
    double *prices = memory(MOST_SCORES * 8);
    uint64_t *keys = memory(DEEPEST * 8);
    const void **features = memory(rows * TAPS * 8);
    char *hidden = filled(rows * TAPS * width, plan->half, 0);
    for (int64_t r = 0; r < rows; r++) text[r] = SPECIALS + below(TOKENS - SPECIALS);
    for (int64_t r = 0; r < rows * TAPS; r++) features[r] = hidden + r * width * bytes;
    for (int n = 0; n < MOST_SCORES; n++) prices[n] = (double)(n + 1) * 0x1p-7;
    for (int n = 0; n < DEEPEST; n++) keys[n] = random_bits();
    d->bytes = values * bytes, d->first = filled(2 * values, plan->half, 0), d->kept = aligned_memory(2 * d->bytes);
    d->slots = (Slots){d->kept, d->kept + d->bytes, POSITIONS, POSITIONS, 0};
    d->begun = (Growing){.slots = &d->slots, .text = text, .features = features, .prices = prices, .keys = turn % 2 ? keys : NULL,
                         .length = length, .rows = rows, .most = MOST_SCORES, .deepest = DEEPEST, .branch = BRANCH, .width = LEVEL,
                         .sure = 0x1.ep-1, .accepted = 7, .guesses = 11, .level_price = 0x1p-6, .least = turn / 2 ? 0x1p-7 : -1,
                         .temperature = 0x1.8p-1f, .divisor = turn == 2 ? 0x1.4p0f : 0};
    Growing *g = &d->begun;
    int64_t **const numbers[] = {&g->tokens, &g->parents, &g->first, &g->below, &g->best, &g->level, &g->draft_tokens, &g->draft_parents};
    int32_t **const small[] = {&g->depths, &g->places, &g->tree_parents, &g->tree_depths};
    double **const reals[] = {&g->chances, &g->reach, &g->promised, &g->draft_chances};
    for (int n = 0; n < 8; n++) *numbers[n] = memory(NODES * 8);
    for (int n = 0; n < 4; n++) *small[n] = memory(NODES * 4), *reals[n] = memory(NODES * 8);
}

static void restart(Draft *d) {
    d->now = d->begun;
    memcpy(d->kept, d->first, (size_t)(2 * d->bytes));
}

typedef struct { /* a draft that was grown */
    int64_t counts[3], tokens[MOST_SCORES + 1], parents[MOST_SCORES + 1], grown[NODES];
    double chances[MOST_SCORES + 1], promised[NODES];
} Result;

static Result grown(const Growing *g) {
    Result r = {.counts = {g->size, g->kept, g->passes}};
    memcpy(r.tokens, g->draft_tokens, (size_t)(g->kept + 1) * 8), memcpy(r.parents, g->draft_parents, (size_t)(g->kept + 1) * 8);
    memcpy(r.chances, g->draft_chances, (size_t)(g->kept + 1) * 8);
    memcpy(r.grown, g->tokens, (size_t)g->size * 8), memcpy(r.promised, g->promised, (size_t)g->size * 8);
    return r;
}

static void same_draft(const char *what, int threads, int64_t draft, const Result *found, const Result *alone) {
    same(joined(what, "of a draft:", "tokens and parents"), 1, threads, draft, found, alone, offsetof(Result, chances) / 8, 'l');
    same(joined(what, "of a draft:", "chances"), 1, threads, draft, found->chances, alone->chances, MOST_SCORES + 1 + NODES, 'd');
}

/* A narrow head: one layer on what `join` makes of embeddings and states; a wide one: its attention reads both. */
static Chain chain_of(const Plan *plan, int wide) {
    const int64_t width = plan->hidden;
    Layer *layer = memory(sizeof *layer);
    Head *head = memory(sizeof *head);
    Product *products = memory(3 * sizeof *products);
    int64_t *drafted = memory(TOKENS * 8);
    for (int64_t n = 0; n < TOKENS; n++) drafted[n] = n;
    *layer = layer_of(plan, 0);
    if (wide) layer->qkv = linear(plan, 2 * width, (plan->queries + 2 * plan->keys) * plan->dim, plan->biased);
    *head = (Head){linear(plan, width, TOKENS, 0), gains(width), 0x1p-17f};
    if (!wide) layer->first_norm = head->norm = NULL;
    products[0] = linear(plan, TAPS * width, width, 0), products[1] = linear(plan, 2 * width, width, 1);
    products[2] = weight(plan->half ? HALF : FULL, width, TOKENS, 0, SPECIALS);
    return (Chain){.shape = {width, plan->queries, plan->keys, plan->dim, plan->inner, 0, plan->half, 0, told.tiles},
                   .layer = layer, .head = head, .fuse = products, .join = wide ? NULL : products + 1,
                   .embedding = wide ? NULL : products + 2, .table = wide ? filled(TOKENS * width, plan->half, 0) : NULL,
                   .features_norm = gains(TAPS * width), .embedded_norm = wide ? gains(width) : NULL,
                   .hidden_norm = wide ? gains(width) : NULL, .drafted = wide ? drafted : NULL, .width = width,
                   .features = TAPS * width, .taps = TAPS, .norms = wide ? TAPS : 0, .vocabulary = TOKENS, .from_norm = wide == 2,
                   .final = wide == 2, .epsilon = 0x1p-17f};
}

/* The text's rows but the last, one by one; the draft then grows behind one row. */
static void read_text(const Chain *c, Draft *d, const Turns *turns) {
    static const int32_t parent = -1, depth = 0;
    static const int64_t zero = 0;
    Growing *g = &d->now;
    void *states = memory(c->width * 4), *logits = memory(TOKENS * 4), *onward = memory(c->width * 4);
    for (; g->rows > 1; g->rows--, g->length++, g->text++, g->features += TAPS) {
        const Block block = {g->length, 0, 1, &parent, &depth, &d->slots};
        const Rows one = {.rows = 1, .count = 1, .keys = g->length + 1, .blocks = &block, .turns = turns, .tokens = g->text};
        specdec_run_chain(c, &one, NULL, g->features, &zero, 1, states, &zero, 1, logits, onward, 1);
    }
}

static void try_growth(const Plan *plan, int wide) {
    static const char *const names[] = {"narrow head", "wide head", "wide head from its norm"};
    enum { DRAFTS = 3 };
    static Draft drafts[DRAFTS];
    static Result alone[DRAFTS];
    group(joined("drafts grown by a", names[wide], plan->name));
    const Chain c = chain_of(plan, wide);
    const Turns turns = {filled(POSITIONS * plan->dim, 0, 0), filled(POSITIONS * plan->dim, 0, 0)};
    Growing *all[DRAFTS];
    for (int turn = 0; turn < 4; turn++) {
        for (int n = 0; n < DRAFTS; n++) begin_draft(drafts + n, plan, 25 * n, 1 + 7 * n, turn), all[n] = &drafts[n].now;
        for (int n = 0; n < DRAFTS; n++) {
            restart(drafts + n);
            specdec_grow(&c, all + n, 1, &turns, 1);
            alone[n] = grown(all[n]);
            tell(&alone[n], offsetof(Result, chances) / 8, 'l'), tell(alone[n].chances, MOST_SCORES + 1 + NODES, 'd');
            restart(drafts + n);
            read_text(&c, drafts + n, &turns);
            specdec_grow(&c, all + n, 1, &turns, 2);
            const Result behind = grown(all[n]);
            same_draft("growth behind text", 2, n, &behind, alone + n);
        }
        for (int n = 0; n < 4; n++) {
            const enum State state = n ? (enum State)(n - 1) : PLAIN_STATE;
            for (int k = 0; k < DRAFTS; k++) restart(drafts + k);
            set_state(state);
            specdec_grow(&c, all, DRAFTS, &turns, 1 + n % 3);
            unset_state(state);
            for (int k = 0; k < DRAFTS; k++) {
                const Result found = grown(all[k]);
                same_draft(state ? "growth in the caller's state" : "growth beside others", 1 + n % 3, k, &found, alone + k);
            }
        }
    }
}

/* A draft from a block's guesses: with a bias for the token before, and a chance of acceptance, or without. */
static void try_block(const Plan *plan, int corrected) {
    enum { RANK = 32 };
    static Draft d;
    const int64_t width = plan->hidden;
    group(joined("drafts grown from a block", corrected ? "with corrections" : "as guessed", plan->name));
    const Product after = linear(plan, RANK, TOKENS, 0), chance = linear(plan, width + RANK, 1, 1);
    const Transitions t = {.guesses = {TOKENS, plan->half, NULL, NULL, NULL, NULL}, .width = width, .rank = corrected ? RANK : 0,
                           .before = filled(TOKENS * RANK, plan->half, 0), .after = corrected ? &after : NULL,
                           .chance = corrected ? &chance : NULL, .vocabulary = TOKENS};
    const char *hidden = filled(DEEPEST * width, plan->half, 0), *logits = filled(DEEPEST * TOKENS, plan->half, 2);
    for (int turn = 0; turn < 4; turn++) {
        Result alone;
        begin_draft(&d, plan, 0, 1, turn);
        for (int n = 0; n < 6; n++) {
            const enum State state = (enum State)(n % 3);
            restart(&d);
            set_state(state);
            specdec_grow_block(&t, &d.now, hidden, logits, 1 + n / 2);
            unset_state(state);
            const Result found = grown(&d.now);
            if (n) same_draft("growth from a block", 1 + n / 2, 0, &found, &alone);
            else alone = found;
        }
        tell(&alone, offsetof(Result, chances) / 8, 'l'), tell(alone.chances, MOST_SCORES + 1 + NODES, 'd');
    }
}

static void by_heads(void) {
    for (int half = 0; half < 2 && !told.tiles; half++) try_scores(half);
    if (!told.tiles) try_ranks();
    for (int half = told.tiles; half < 2; half++) {
        const Plan *plan = head_plans[half];
        try_guesses(plan, 0, 1), try_guesses(plan, 1, 0);
        try_absorbing(plan);
        for (int wide = 0; wide < 3; wide++) try_growth(plan, wide);
        try_block(plan, 0), try_block(plan, 1);
    }
}
