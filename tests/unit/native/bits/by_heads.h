/* By heads: drawing, Medusa's guesses, and drafts that EAGLE heads and block heads grow, alone and beside others. */

enum { SCORES = 211, SCORED = 20, LIKELY = 9, TAPS = 3, MOST_SCORES = 12, DEEPEST = 4, BRANCH = 4, LEVEL = 5, NODES = 128 };

static const Plan float_head = {"float", FULL, 0, 0, 1, 0, 1, 0, 100, 4, 2, 64, 48, {0, 0}, 0, {0}};
static const Plan half_head = {"half", HEIR, 1, 0, 1, 0, 1, 0, 96, 4, 2, 64, 64, {0, 0}, 0, {0}};
static const Plan *const head_plans[] = {&float_head, &half_head};

/* Rows of scores: their largest, draws and chances, the rows one by one and all at once, with noise and without. */
static void try_scores(int half) {
    const int64_t bytes = half ? 2 : 4;
    group(joined("scores", half ? "in bfloat16" : "in float32", "and draws"));
    char *scores = filled(SCORED * SCORES, half, 3);
    break_rows(scores, 0, SCORES, half);
    uint64_t keys[SCORED];
    int64_t tokens[SCORES], best[SCORED * LIKELY], own[LIKELY];
    float chances[SCORED * LIKELY], one[LIKELY];
    for (int r = 0; r < SCORED; r++) keys[r] = random_bits();
    for (int64_t i = 0; i < SCORES; i++) tokens[i] = 3 * i + (int64_t)(random_bits() & 1);
    for (int64_t size = SCORES - 17; size <= SCORES; size++) /* every remainder of lanes */
        for (int noisy = 0; noisy < 3; noisy++) {
            const float scale = noisy ? 0x1.8p-1f : 1, noise = noisy ? 0x1.4p-1f : 0;
            const int64_t *named = noisy == 2 ? tokens : NULL;
            specdec_chances(scores, SCORED, size, half, scale, noise, noisy ? keys : NULL, named, LIKELY, best, chances);
            tell(best, SCORED * LIKELY, 'l'), tell(chances, SCORED * LIKELY, 'f');
            for (int64_t r = 0; r < SCORED; r++) {
                const enum State state = (enum State)(r % 3);
                set_state(state);
                specdec_chances(scores + r * size * bytes, 1, size, half, scale, noise, noisy ? keys + r : NULL, named, LIKELY,
                                own, one);
                unset_state(state);
                same("likeliest", SCORED, 1, r, own, best + r * LIKELY, LIKELY, 'l');
                same("chances", SCORED, 1, r, one, chances + r * LIKELY, LIKELY, 'f');
            }
        }
    specdec_top(scores, NULL, SCORED, SCORES, half, LIKELY, best, chances);
    tell(best, SCORED * LIKELY, 'l'), tell(chances, SCORED * LIKELY, 'f');
    for (int64_t r = 0; r < SCORED; r++)
        for (int n = 0; n < 40; n++) {
            const enum State state = (enum State)(n % 3);
            const uint64_t key = random_bits();
            const float by = with_bits(0x3f000000 + (uint32_t)below(1 << 24));
            const int drawn = specdec_draw(scores + r * SCORES * bytes, SCORES, half, by, key);
            tell(&drawn, 1, 'i');
            set_state(state);
            const int again = specdec_draw(scores + r * SCORES * bytes, SCORES, half, by, key);
            unset_state(state);
            same("drawn", SCORED, 1, r, &again, &drawn, 1, 'i');
        }
}

/* Several distributions' mean, ranked; and rows' shares of experts. */
static void try_ranks(void) {
    enum { NUMBER = 3, SIZE = 30, COUNT = 20 };
    group("ranks and shares of experts");
    for (int n = 0; n < 20; n++) {
        int64_t tokens[NUMBER * SIZE], sizes[NUMBER] = {SIZE, SIZE - n, 1 + n}, best[2][NUMBER * SIZE];
        float scores[NUMBER * SIZE];
        double sums[2][NUMBER * SIZE], by = (double)with_bits(0x3f000000 + (uint32_t)below(1 << 24));
        const uint64_t key = random_bits();
        for (int i = 0; i < NUMBER * SIZE; i++) tokens[i] = i % SIZE * 2 + i / SIZE * 10, scores[i] = number(3) - (float)(i % SIZE);
        int64_t found[2];
        for (int state = 0; state < 2; state++) {
            set_state(state ? (enum State)(1 + n % 2) : PLAIN_STATE);
            found[state] = specdec_rank(tokens, scores, sizes, NUMBER, by, key, COUNT, best[state], sums[state]);
            unset_state(state ? (enum State)(1 + n % 2) : PLAIN_STATE);
        }
        tell(best[0], found[0], 'l'), tell(sums[0], found[0], 'd');
        same("ranked", found[0], 1, 0, best[1], best[0], found[0], 'l');
        same("ranks", found[0], 1, 0, sums[1], sums[0], found[0], 'd');
    }
    float logits[SCORED * 37], shares[2][SCORED * 37];
    fill(logits, SCORED * 37, 0, 3);
    for (int norm_topk = 0; norm_topk < 2; norm_topk++) {
        const Experts x = {.count = 37, .chosen = 4, .norm_topk = norm_topk};
        specdec_route(&x, logits, SCORED, shares[0]);
        tell(shares[0], SCORED * 37, 'f');
        set_state(norm_topk ? UPWARD : FLUSHED);
        for (int64_t r = 0; r < SCORED; r++) specdec_route(&x, logits + r * 37, 1, shares[1] + r * 37);
        unset_state(norm_topk ? UPWARD : FLUSHED);
        same("shares", SCORED, 1, 0, shares[1], shares[0], SCORED * 37, 'f');
    }
}

/* Medusa's heads: `own` logits for each head or one product for all, and a root beside the state. */
static void try_guesses(const Plan *plan, int own, int rooted) {
    enum { HEADS = 3, DEPTH = 2 };
    const int64_t size = plan->hidden, bytes = plan->half ? 2 : 4, each = HEADS * TOKENS * bytes;
    group(joined("Medusa's heads", plan->name, own ? "with logits of their own" : "with the target's logits"));
    Product blocks[1 + HEADS], ends[HEADS];
    blocks[0] = linear(plan, size * (1 + rooted), HEADS * size, 1);
    for (int k = 0; k < HEADS; k++) blocks[1 + k] = linear(plan, size, size, 1), ends[k] = linear(plan, size, TOKENS, 0);
    const Heads heads = {blocks, ends, DEPTH, HEADS, size, own};
    char *hidden = filled(SCORED * size, plan->half, 0), *embedded = filled(SCORED * size, plan->half, 0);
    char *alone = memory(SCORED * each), *found = memory(SCORED * each);
    break_rows(hidden, 3, size, plan->half), break_rows(embedded, 5, size, plan->half);
    for (int64_t rows = 1; rows <= SCORED; rows++)
        for (int64_t from = 0; from < (rows == 1 ? SCORED : 1); from++) {
            const void *states[SCORED];
            void *to[SCORED];
            const int threads = rows == 1 ? 1 : 1 + (int)(rows % 3);
            const enum State state = rows > SCORED - 3 ? (enum State)(SCORED - rows) : PLAIN_STATE;
            for (int64_t r = 0; r < rows; r++) states[r] = hidden + (from + r) * size * bytes, to[r] = (rows == 1 ? alone : found) + (from + r) * each;
            set_state(state);
            specdec_guess(&heads, states, embedded + from * size * bytes, rows, to, plan->half, threads);
            unset_state(state);
            for (int64_t r = 0; rows > 1 && r < rows; r++)
                same("guesses", rows, threads, r, found + r * each, alone + r * each, HEADS * TOKENS, plan->half ? 'h' : 'f');
        }
    tell(alone, SCORED * HEADS * TOKENS, plan->half ? 'h' : 'f');
}

/* Keys and values of text, row by row and all at once. */
static void try_absorbing(const Plan *plan) {
    group(joined("text of a block head in", plan->name, "precision"));
    const Model m = model_of(plan);
    const int64_t size = plan->hidden, values = 2 * plan->keys * plan->dim, bytes = plan->half ? 2 : 4;
    const Product fuse = linear(plan, 2 * size, size, 0), keyed = linear(plan, size, LAYERS * values, 0);
    const Context context = {&fuse, &keyed, gains(size), 0x1p-17f};
    static Sequence s;
    begin_sequence(&s, &m, 30, 0, 0);
    char *features = filled(ROWS_EACH * 2 * size, plan->half, 0), *alone = memory(ROWS_EACH * LAYERS * values * bytes);
    char *found = memory(LAYERS * values * bytes);
    break_rows(features, 30, 2 * size, plan->half);
    for (int64_t rows = 1; rows <= 20; rows++) {
        const enum State state = rows > 18 ? (enum State)(rows - 18) : PLAIN_STATE;
        const int threads = rows == 1 ? 1 : 1 + (int)(rows % 3);
        reset(&s);
        for (int64_t from = 0; from + rows <= ROWS_EACH; from += rows) {
            const Block block = {30, from, rows, s.parents, s.depths, s.slots};
            const Rows text = {.rows = rows, .count = 1, .keys = 30 + from + rows, .blocks = &block, .turns = m.turns};
            set_state(state);
            specdec_absorb(&m.shape, m.layers, &context, &text, features + from * 2 * size * bytes, threads);
            unset_state(state);
            for (int64_t r = from; r < from + rows; r++) {
                read_slots(plan, &s, 30 + r, rows == 1 ? alone + r * LAYERS * values * bytes : found);
                if (rows > 1) same("keys and values", rows, threads, r, found, alone + r * LAYERS * values * bytes,
                                   LAYERS * values, plan->half ? 'h' : 'f');
            }
        }
    }
    tell(alone, ROWS_EACH * LAYERS * values, plan->half ? 'h' : 'f');
}
