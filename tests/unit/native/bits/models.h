/* Models of two layers, and sequences of rows for them. */

enum { LAYERS = 2, ROWS_EACH = 41, POSITIONS = 160, TOKENS = 150, TOPS = 5, SEQUENCES = 4, HEIR = -1 };
/* HEIR: the kind that this build has for a bfloat16 model. */

typedef struct {
    const char *name;
    int kind, half, gelu, norms; /* norms: of heads; 1 for each head by itself, 2 for all at once */
    int after, biased, experts;  /* after: norms of outputs; experts: 2 where a row's shares add up to one */
    int64_t hidden, queries, keys, dim, inner, windows[LAYERS];
    float cap;
    const char *formats[2];
} Plan;

static const Plan plans[] = {
    {"llama", HEIR, 1, 0, 0, 0, 0, 0, 96, 4, 2, 64, 160, {0, 0}, 0, {0}},
    {"gemma", FULL, 0, 1, 1, 1, 0, 0, 100, 3, 1, 128, 112, {24, 0}, 30, {0}},
    {"olmo", HALF, 1, 0, 2, 1, 1, 0, 96, 4, 2, 48, 64, {0, 40}, 0, {0}},
    {"mixtral", HEIR, 1, 0, 0, 0, 0, 1, 64, 8, 1, 32, 64, {0, 0}, 20, {0}},
    {"qwen", CODED, 0, 0, 1, 0, 1, 2, 64, 6, 2, 64, 48, {0, 0}, 0, {0}},
    {"rounded", QUANTISED, 1, 0, 0, 0, 1, 0, 256, 4, 2, 64, 256, {0, 0}, 0, {"Q4_K", "Q6_K"}},
    {"exact", EXACT_QUANTISED, 0, 1, 0, 0, 0, 0, 128, 2, 2, 64, 64, {24, 0}, 0, {"Q8_0", "NF4_64"}},
    {"bytes", INT8_QUANTISED, 1, 0, 0, 0, 0, 0, 96, 4, 2, 32, 64, {0, 0}, 0, {"Q4_0", "Q5_1"}},
};

typedef struct {
    const Plan *plan;
    Shape shape;
    Layer layers[LAYERS];
    Head head;
    Product embedding;
    Turns turns[LAYERS];
} Model;

typedef struct { /* of a layer, with the content that each run begins with */
    char *first[2], *now[2];
    int64_t bytes;
} Kept;

typedef struct {
    int64_t length, tokens[ROWS_EACH];
    int32_t parents[ROWS_EACH], depths[ROWS_EACH];
    Slots slots[LAYERS];
    Kept kept[LAYERS];
} Sequence;

static int kind_of(const Plan *p) { return p->kind != HEIR ? p->kind : !specdec_pairs() ? HALF : PAIRS; }

static Product linear(const Plan *plan, int64_t inputs, int64_t outputs, int biased) {
    int kind = kind_of(plan);
    if (kind >= QUANTISED) return quantised(kind, inputs, outputs, 2, plan->formats, biased, 0);
    if (kind == PAIRS && outputs % 3 == 0) kind = CODED_PAIRS;
    if (!has(kind)) kind = HALF; /* of the same values */
    Product p = weight(kind, inputs, outputs, biased, 0);
    p.tiles = told.tiles && (kind == PAIRS || coded(kind)) && inputs % 32 == 0;
    return p;
}

static const Experts *experts_of(const Plan *plan) {
    enum { EXPERTS = 5, CHOSEN = 2 };
    Product *gate_up = memory(EXPERTS * sizeof(Product)), *down = memory(EXPERTS * sizeof(Product));
    Experts *made = memory(sizeof *made);
    for (int e = 0; e < EXPERTS; e++) {
        gate_up[e] = linear(plan, plan->hidden, 2 * plan->inner, 0);
        down[e] = linear(plan, plan->inner, plan->hidden, 0);
    }
    *made = (Experts){linear(plan, plan->hidden, EXPERTS, 0), gate_up, down, EXPERTS, CHOSEN, plan->experts == 2};
    return made;
}

static Layer layer_of(const Plan *plan, int number) {
    const int64_t heads = plan->queries + plan->keys, size = plan->hidden;
    Layer l = {.first_norm = gains(size), .second_norm = gains(size), .first_epsilon = 0x1p-17f, .second_epsilon = 0x1p-17f,
               .head_epsilon = 0x1p-20f, .out_epsilon = 0x1p-18f, .down_epsilon = 0x1p-19f, .scale = 0x1.5p-3f,
               .cap = plan->cap, .turns = number, .norms_all = plan->norms == 2};
    l.qkv = linear(plan, size, (heads + plan->keys) * plan->dim, plan->biased);
    l.out = linear(plan, plan->queries * plan->dim, size, plan->biased);
    if (plan->experts) l.experts = experts_of(plan);
    else l.gate_up = linear(plan, size, 2 * plan->inner, plan->biased), l.down = linear(plan, plan->inner, size, plan->biased);
    if (plan->norms) l.head_norm = gains(heads * plan->dim);
    if (plan->after) l.out_norm = gains(size), l.down_norm = gains(size);
    return l;
}

static Model model_of(const Plan *plan) {
    const int kind = kind_of(plan);
    Model m = {.plan = plan, .shape = {plan->hidden, plan->queries, plan->keys, plan->dim, plan->inner, plan->experts ? 5 : 0,
                                       plan->half, plan->gelu, told.tiles}};
    for (int n = 0; n < LAYERS; n++) {
        m.layers[n] = layer_of(plan, n);
        m.turns[n] = (Turns){filled(POSITIONS * plan->dim, 0, 0), filled(POSITIONS * plan->dim, 0, 0)};
    }
    m.head = (Head){linear(plan, plan->hidden, TOKENS, 0), gains(plan->hidden), 0x1p-17f};
    m.embedding = kind >= QUANTISED ? quantised(kind, plan->hidden, TOKENS, 2, plan->formats, 0, 1)
                                    : weight(plan->half ? HALF : FULL, plan->hidden, TOKENS, 0, SPECIALS);
    return m;
}

/* A sequence: a chain or a tree of rows behind `length` tokens. `broken` puts tokens whose embeddings are NaN, infinite
 * and so on where few rows see them: at the leaves of a tree, or at the end of a chain. */
static void begin_sequence(Sequence *s, const Model *m, int64_t length, int tree, int broken) {
    const Plan *plan = m->plan;
    *s = (Sequence){.length = length};
    for (int32_t r = 0; r < ROWS_EACH; r++) {
        s->parents[r] = !tree || r < 4 || below(3) ? r - 1 : (int32_t)below(r);
        while (tree && broken && s->parents[r] >= 0 && s->tokens[s->parents[r]] < SPECIALS) s->parents[r]--;
        s->depths[r] = s->parents[r] < 0 ? 0 : s->depths[s->parents[r]] + 1;
        s->tokens[r] = SPECIALS + below(TOKENS - SPECIALS);
        if (broken && (tree ? r > 4 && below(3) == 0 : r > 33)) s->tokens[r] = below(SPECIALS);
    }
    for (int n = 0; n < LAYERS; n++) {
        const int64_t size = plan->windows[n] ? 83 : POSITIONS, values = plan->keys * (size + 3) * plan->dim;
        Kept *k = s->kept + n;
        k->bytes = values * (plan->half ? 2 : 4);
        for (int side = 0; side < 2; side++) {
            k->first[side] = filled(values, plan->half, 0), k->now[side] = aligned_memory(k->bytes);
        }
        s->slots[n] = (Slots){k->now[0], k->now[1], size, size + 3, plan->windows[n]};
    }
}

static void reset(Sequence *s) {
    for (int n = 0; n < LAYERS; n++)
        for (int side = 0; side < 2; side++) memcpy(s->kept[n].now[side], s->kept[n].first[side], (size_t)s->kept[n].bytes);
}
