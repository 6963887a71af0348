/* Growth: drafts that an EAGLE head grows level by level, as drafters/heads/growing.py does. */

typedef struct { /* a draft of one sequence: what it begins with, ... */
    const Slots *slots;          /* of the head's cache */
    const int64_t *text;         /* [rows] tokens of rows of text; the last row is the root's */
    const void *const *features; /* [rows, taps] hidden states of the target for these rows */
    const double *prices;        /* [most] what the first 1, 2, ... rows below the root cost, in tokens */
    const uint64_t *keys;        /* [deepest] key of the noise behind each depth, or NULL */
    int64_t length, rows;        /* tokens in the cache; rows of text */
    int64_t most, deepest, branch, width; /* most rows, depth, children of a row, and rows of a level that are run */
    double sure, accepted, guesses; /* factor on chances; nodes with an accepted child, of so many */
    double level_price, least; /* price of a level in tokens; least chance of rows, or -1: as prices say */
    float temperature, divisor; /* of noise; logits are divided by it, 0 for no division */
    /* ... and what it becomes; nodes are in order of growth, the root first */
    int64_t size, kept, passes;                /* nodes; rows of the draft below the root; passes of the head */
    int64_t *tokens, *parents, *first, *below; /* by node; its children are nodes first to first + below */
    int32_t *depths, *places;                  /* by node; places: its row among the rows that the head has run */
    double *chances, *reach, *promised;        /* by node; promised: of its likeliest child, if extended */
    int32_t *tree_parents, *tree_depths;       /* of the rows that the head has run, the root's first */
    int64_t *best, *level;                     /* [most + 1] nodes, likeliest to be reached first; [width] */
    int64_t *draft_tokens, *draft_parents;     /* [most + 1] of the draft's rows */
    double *draft_chances;
    int64_t ran, latest, count; /* rows that the head has run; the latest level's first row; rows of the next level */
} Growing;

static void add_node(Growing *g, int64_t parent, int64_t token, double chance) {
    const int64_t own = g->size++;
    g->tokens[own] = token, g->parents[own] = parent, g->below[own] = 0, g->promised[own] = 0;
    g->depths[own] = own ? g->depths[parent] + 1 : 0;
    g->chances[own] = chance;
    const double reach = g->reach[own] = own ? g->reach[parent] * chance : chance;
    if (!own) return;
    int64_t known = own - 1 < g->most ? own - 1 : g->most; /* of equal nodes the first one first */
    if (known == g->most && !(reach > g->reach[g->best[known - 1]])) return;
    int64_t at = known < g->most ? known : known - 1;
    for (; at > 0 && reach > g->reach[g->best[at - 1]]; at--) g->best[at] = g->best[at - 1];
    g->best[at] = own;
}

/* Guesses behind a row: which logits are whose, and room for the logits, and for the likeliest and their chances. */
typedef struct {
    int64_t size, half;
    const int64_t *drafted; /* as in Chain */
    float *apart, *chances;
    int64_t *likely;
} Guesses;

/* The number of a node's likeliest guesses. */
INLINE int64_t guessed(const Growing *g, const Guesses *s) { return g->branch < s->size ? g->branch : s->size; }

/* Finds the likeliest guesses at a depth by `logits`. Returns as specdec_chances does. */
static int rank_guesses(const Growing *g, const Guesses *s, int32_t depth, const void *logits) {
    const int noisy = g->keys != NULL;
    int half = (int)s->half;
    if (g->divisor > 0) {
        for (int64_t i = 0; i < s->size; i++) s->apart[i] = value_of(logits, i, half) / g->divisor;
        logits = s->apart, half = 0;
    }
    return specdec_chances(logits, 1, s->size, half, noisy ? g->temperature : 1.f, noisy ? g->temperature : 0.f,
                           noisy ? g->keys + depth : NULL, noisy ? s->drafted : NULL, guessed(g, s), s->likely, s->chances);
}

/* Adds these guesses as a node's children. With `accepted` of 0 or more, that is the likeliest one's chance, and those of
 * the others are scaled with it. */
static void extend_node(Growing *g, int64_t node, const Guesses *s, double accepted) {
    double scale = 1;
    g->first[node] = g->size;
    for (int64_t n = 0; n < guessed(g, s); n++) {
        if (!(s->chances[n] > 0)) continue;
        if (!g->below[node] && accepted >= 0) scale = accepted / (double)s->chances[n];
        const double own = scale * (double)s->chances[n], chance = g->sure * own;
        if (!g->below[node]++) g->promised[node] = own;
        add_node(g, node, s->drafted ? s->drafted[s->likely[n]] : s->likely[n], chance < 1 ? chance : 1);
    }
}

/* The number of the likeliest nodes to verify. */
static int64_t rows_to_keep(const Growing *g) {
    const int64_t known = g->size - 1 < g->most ? g->size - 1 : g->most;
    int64_t kept = 0;
    double sum = 0, most = 0;
    if (g->least >= 0) {
        while (kept < known && g->reach[g->best[kept]] >= g->least) kept++;
        return kept;
    }
    for (int64_t n = 0; n < known; n++) {
        sum += g->reach[g->best[n]];
        if (sum - g->prices[n] > most) most = sum - g->prices[n], kept = n + 1;
    }
    return kept;
}

/* Chooses the rows to verify, and those among them of this depth that the head runs next, if that pays. */
static void choose_level(Growing *g, int64_t depth) {
    double tokens = 0;
    g->kept = rows_to_keep(g);
    g->count = 0;
    for (int64_t n = 0; n < g->kept && g->count < g->width; n++) {
        if (g->depths[g->best[n]] != depth) continue;
        g->level[g->count++] = g->best[n];
        tokens += g->reach[g->best[n]];
    }
    if (depth == g->deepest || (g->least < 0 && !(tokens * g->accepted / g->guesses - g->level_price > 0))) g->count = 0;
    g->passes += g->count > 0;
}

/* Puts the next level behind the rows that the head has run; its states go from `onward` to `states`. */
static Block put_level(const Chain *c, Growing *g, int64_t *tokens, const void *onward, void *states) {
    const int half = c->shape.half;
    const int64_t first = g->ran;
    for (int64_t n = 0; n < g->count; n++) {
        const int64_t node = g->level[n], parent = g->places[g->parents[node]];
        tokens[n] = g->tokens[node];
        g->places[node] = g->ran;
        g->tree_parents[g->ran] = parent, g->tree_depths[g->ran++] = g->depths[node];
        memcpy(row_at(states, n, c->width, half), row_of(onward, parent - g->latest, c->width, half), c->width * (half ? 2 : 4));
    }
    g->latest = first;
    return (Block){g->length, first, g->count, g->tree_parents, g->tree_depths, g->slots};
}

static void begin_growth(Growing *g) {
    g->size = 0, g->kept = 0, g->passes = 1, g->ran = 1, g->latest = 0, g->count = 1;
    add_node(g, -1, g->text[g->rows - 1], 1);
    g->level[0] = g->places[0] = g->tree_depths[0] = 0;
    g->tree_parents[0] = -1;
    g->length += g->rows - 1; /* the rows of text but the root's are committed */
}

/* The draft: the nodes to verify, each behind its parent. */
static void finish_growth(Growing *g) {
    g->draft_tokens[0] = g->tokens[0], g->draft_parents[0] = -1, g->draft_chances[0] = 1;
    g->places[0] = 0;
    for (int64_t n = 0; n < g->kept; n++) {
        const int64_t node = g->best[n];
        g->places[node] = n + 1;
        g->draft_tokens[n + 1] = g->tokens[node];
        g->draft_parents[n + 1] = g->places[g->parents[node]];
        g->draft_chances[n + 1] = g->chances[node];
    }
}

/* Grows `count` drafts together: each pass has a level of each draft that grows on. `turns` are of positions 0, 1, 2,
 * ... Returns as specdec_run_layers does. */
int specdec_grow(const Chain *c, Growing *const *all, int64_t count, const Turns *turns, int threads) {
    ROUNDS_TO_NEAREST;
    const int half = c->shape.half;
    const int64_t width = c->width, size = c->head->product.outputs;
    int64_t text = 0, later = 0, branch = 1, longest = 1, wanted = count;
    for (int64_t n = 0; n < count; n++) {
        text += all[n]->rows, later += all[n]->width;
        if (all[n]->branch > branch) branch = all[n]->branch;
        if (all[n]->rows > longest) longest = all[n]->rows;
    }
    if (later > wanted) wanted = later;
    const int64_t rows = text > later ? text : later;
    Space s;
    const int64_t first = lay_space(c, text, text, count, NULL, &s), next = lay_space(c, later, 0, later, NULL, &s);
    const int64_t passing = first > next ? first : next;
    /* Pieces of whole cache lines: the rows' tokens and places, those wanted, blocks, pointers to hidden states, children
     * and their chances, a chain's parents and depths, states, states for the next level, logits, and a row of them. */
    const int64_t sizes[] = {2 * rows, 2 * rows, 2 * wanted, (int64_t)(count * sizeof(Block) / sizeof(float)),
                             2 * text * c->taps, 2 * branch, branch, 2 * longest, rows * width, wanted * width,
                             wanted * size / (half ? 2 : 1) + 1, size};
    enum { PIECES = sizeof sizes / sizeof *sizes };
    int64_t needed = passing;
    for (int p = 0; p < PIECES; p++) needed += (sizes[p] + 15) / 16 * 16;
    float *scratch = take_scratch(needed), *at = scratch + passing;
    if (!scratch) return 1;
    void *piece[PIECES];
    for (int p = 0; p < PIECES; at += (sizes[p++] + 15) / 16 * 16) piece[p] = at;
    int64_t *tokens = piece[0], *places = piece[1], *asked = piece[2];
    Block *blocks = piece[3];
    const void **features = piece[4];
    const Guesses guesses = {size, half, c->drafted, piece[11], piece[6], piece[5]};
    int32_t *chain = piece[7];
    void *states = piece[8], *onward = piece[9], *logits = piece[10];
    for (int64_t r = 0; r < longest; r++) chain[r] = r - 1, chain[longest + r] = r;
    Rows told = {.turns = turns, .blocks = blocks, .tokens = tokens};
    for (int64_t n = 0, r = 0; n < count; n++) {
        Growing *g = all[n];
        blocks[n] = (Block){g->length, 0, g->rows, chain, chain + longest, g->slots};
        memcpy(tokens + r, g->text, g->rows * sizeof *tokens);
        memcpy(features + r * c->taps, g->features, g->rows * c->taps * sizeof *features);
        r += g->rows;
        asked[n] = r - 1;
        begin_growth(g);
    }
    for (int64_t r = 0; r < text; r++) places[r] = r;
    told.rows = text, told.count = count;
    int failed = 0;
    for (int64_t depth = 0; told.rows; depth++) {
        told.keys = 0;
        for (const Block *b = blocks; b < blocks + told.count; b++)
            if (b->length + b->first + b->rows > told.keys) told.keys = b->length + b->first + b->rows;
        const int64_t from = depth ? 0 : text, read = depth ? told.rows : count;
        failed = run_chain(c, &told, NULL, features, places, from, states, asked, read, logits, onward, scratch, threads);
        told.rows = told.count = 0;
        for (int64_t n = 0, r = 0, own; n < count && !failed; n++, r += own) {
            Growing *g = all[n];
            own = g->count;
            for (int64_t i = 0; i < own && !failed; i++) {
                failed = rank_guesses(g, &guesses, (int32_t)depth, row_of(logits, r + i, size, half));
                if (!failed) extend_node(g, g->level[i], &guesses, -1);
            }
            if (!own) continue;
            choose_level(g, depth + 1);
            if (!g->count) continue;
            blocks[told.count++] =
                put_level(c, g, tokens + told.rows, row_of(onward, r, width, half), row_at(states, told.rows, width, half));
            told.rows += g->count;
        }
        for (int64_t r = 0; r < told.rows; r++) asked[r] = r;
    }
    give_scratch(scratch);
    for (int64_t n = 0; n < count && !failed; n++) finish_growth(all[n]);
    return failed;
}
