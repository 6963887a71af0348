/* By products: each kind of weight and each format of blocks, with rows alone and beside others. */

enum { ROWS_MADE = 48, ROWS_MOST = ROWS_MADE + 264 };

/* Rows [ROWS_MOST, size] that repeat ROWS_MADE random ones, some of them broken. */
static char *repeated(int64_t size, int half) {
    const int64_t bytes = size * (half ? 2 : 4);
    char *rows = memory(ROWS_MOST * bytes);
    fill(rows, ROWS_MADE * size, half, 1);
    break_rows(rows, 9, size, half);
    for (int64_t r = ROWS_MADE; r < ROWS_MOST; r++) memcpy(rows + r * bytes, rows + r % ROWS_MADE * bytes, (size_t)bytes);
    return rows;
}

typedef struct {
    const Product *p;
    const char *x, *onto;
    char *alone[2]; /* what each row gives by itself: the product, and the product added to `onto` */
    int half;
} Trial;

/* Rows [from, from + count), against what each gives alone. */
static void try_rows(const Trial *t, int64_t from, int64_t count, int adds, int threads, enum State state) {
    static const char *const names[] = {"product", "denormal numbers flushed", "rounding up"};
    const int64_t bytes = t->half ? 2 : 4, size = t->p->outputs * bytes;
    const int mark = holding;
    char *y = memory(count * size);
    set_state(state);
    specdec_product(t->p, t->x + from * t->p->inputs * bytes, adds ? t->onto + from * size : NULL, y, count, t->half, threads);
    unset_state(state);
    for (int64_t r = 0; r < count; r++)
        same(names[state], count, threads, from + r, y + r * size, t->alone[adds] + (from + r) % ROWS_MADE * size,
             t->p->outputs, t->half ? 'h' : 'f');
    release(mark);
}

static void try_product(const Product *p, int half, int64_t most) {
    const int64_t bytes = half ? 2 : 4, inputs = p->inputs, outputs = p->outputs;
    Trial t = {.p = p, .x = repeated(inputs, half), .onto = repeated(outputs, half), .half = half};
    for (int adds = 0; adds < 2; adds++) {
        t.alone[adds] = memory(ROWS_MADE * outputs * bytes);
        for (int64_t r = 0; r < ROWS_MADE; r++)
            specdec_product(p, t.x + r * inputs * bytes, adds ? t.onto + r * outputs * bytes : NULL,
                            t.alone[adds] + r * outputs * bytes, 1, half, 1);
        tell(t.alone[adds], ROWS_MADE * outputs, half ? 'h' : 'f');
    }
    for (int64_t n = 1; n <= 40; n++) {
        const int64_t from = below(ROWS_MADE); /* drawn for rows that are not tried, too: what follows must not change */
        if (tried(n)) try_rows(&t, from, n, n % 2, n % 4 ? 1 : 2 + (int)(n / 4 % 2), PLAIN_STATE);
    }
    for (int64_t n = most; n > 40 && !quick; n /= 2) try_rows(&t, 0, n - 1, 0, 1 + (int)(n % 3), PLAIN_STATE);
    for (int n = 0; n < 4; n++) try_rows(&t, 16 - n, 1 + 6 * n, 1, 1 + n % 3, n % 2 ? FLUSHED : UPWARD);
}

static char *joined(const char *one, const char *two, const char *three) {
    const size_t size = strlen(one) + strlen(two) + strlen(three) + 3;
    char *made = malloc(size);
    snprintf(made, size, "%s %s %s", one, two, three);
    return made;
}

/* Rows of a weight by number, against those of the same weight kept otherwise. */
static void try_look_ups(const Product *p, const Product *as_well) {
    enum { COUNT = 24 };
    int64_t numbers[COUNT];
    for (int half = 0; half < 2; half++) {
        if (half && (p->kind == FULL || p->kind == FLOAT16)) continue;
        char *found = memory(COUNT * p->inputs * 4), *other = memory(COUNT * p->inputs * 4);
        for (int n = 0; n < COUNT; n++) numbers[n] = n < SPECIALS ? n : below(p->outputs);
        if (specdec_look_up(p, numbers, COUNT, found, half)) told.differences++;
        tell(found, COUNT * p->inputs, half ? 'h' : 'f');
        if (as_well && !specdec_look_up(as_well, numbers, COUNT, other, half))
            same("a row that is looked up", COUNT, 1, 0, found, other, COUNT * p->inputs, half ? 'h' : 'f');
    }
}

static void try_kinds(int tiles) {
    static const char *const names[] = {"full", "half", "float16", "pairs", "coded", "coded pairs"};
    for (int kind = FULL; kind <= CODED_PAIRS; kind++)
        for (int half = 0; half < 2; half++) {
            if (!has(kind) || ((kind == FULL || kind == FLOAT16) && half) || (paired(kind) && !half)) continue;
            if (tiles && kind != PAIRS && !coded(kind)) continue;
            group(joined("product", names[kind], half ? "in bfloat16" : "in float32"));
            const int64_t inputs = tiles ? 416 : kind == FULL ? 411 : 414;
            Product p = weight(kind, inputs, 165, 1, SPECIALS);
            p.tiles = tiles;
            try_product(&p, half, coded(kind) ? 264 : 80);
            if (!tiles) try_look_ups(&p, NULL);
            p = weight(kind, 32, 33, 0, 0);
            p.tiles = tiles;
            try_product(&p, half, 0);
        }
}

/* Whether this library multiplies a format's blocks so: rounded to bfloat16, as they are, or with rows in bytes. */
static int multiplies(const WeightFormat *f, int kind, int half) {
    if (has_float_levels(f)) return kind == EXACT_QUANTISED;
    return kind == QUANTISED ? half : kind == INT8_QUANTISED || !half;
}

/* A format's blocks: their values by all ways, and their products with rows in integers, as they are and in bytes. */
static void try_format(int format) {
    static const char *const names[] = {"rounded", "exact", "in bytes"};
    const WeightFormat *f = specdec_format(format);
    const int64_t inputs = 512, outputs = 70, bytes = specdec_panel_bytes(format, outputs, inputs);
    group(joined("blocks", f->name, "by row"));
    uint8_t *file = blocks_of(format, inputs, outputs, BROKEN_SCALES), *laid = aligned_memory(bytes);
    const Part whole = {laid, format, outputs, 0}, in_file = {file, format, outputs, 1};
    Product p = {.inputs = inputs, .outputs = outputs, .kind = EXACT_QUANTISED, .parts = &whole, .count = 1}, q = p;
    float *found[2] = {memory(outputs * inputs * 4), memory(outputs * inputs * 4)};
    q.parts = &in_file;
    for (int threads = 1; threads <= 3; threads++) {
        uint8_t *again = aligned_memory(bytes);
        specdec_lay_blocks(format, file, outputs, inputs, threads == 1 ? laid : again, threads);
        if (threads > 1) same("panels", outputs, threads, 0, again, laid, bytes / 4, 'i');
        set_state(threads == 3 ? FLUSHED : PLAIN_STATE);
        specdec_dequantise(format, file, outputs * inputs / f->values, found[threads > 1], threads);
        unset_state(threads == 3 ? FLUSHED : PLAIN_STATE);
        same("dequantised", outputs, threads, 0, found[threads > 1], found[0], outputs * inputs, 'f');
    }
    tell(found[0], outputs * inputs, 'f');
    try_look_ups(&p, &q);
    for (int kind = QUANTISED; kind <= INT8_QUANTISED; kind++)
        for (int half = 0; half < 2; half++) { /* as Python makes them of weights and models */
            if (!multiplies(f, kind, half)) continue;
            group(joined(joined("blocks", f->name, names[kind - QUANTISED]), "in", half ? "bfloat16" : "float32"));
            p = quantised(kind, inputs, outputs, 1, &f->name, format % 2, 1);
            try_product(&p, half, 0);
        }
}

/* What no order of sums rounds is exact, by whatever instructions: one input of a row is 1, or eight in a line are as
 * large as bytes allow, where a sum of sixteen bits would overflow. */
static void try_exact(int format) {
    enum { INPUTS = 512, OUTPUTS = 70, LINES = INPUTS / 8 };
    const WeightFormat *f = specdec_format(format);
    group(joined("blocks", f->name, "in exact sums"));
    uint8_t *file = blocks_of(format, INPUTS, OUTPUTS, PLAIN_SCALES);
    uint8_t *laid = aligned_memory(specdec_panel_bytes(format, OUTPUTS, INPUTS));
    float *values = memory(OUTPUTS * INPUTS * 4);
    specdec_lay_blocks(format, file, OUTPUTS, INPUTS, laid, 1);
    specdec_dequantise(format, file, OUTPUTS * INPUTS / f->values, values, 1);
    const Part part = {laid, format, OUTPUTS, 0};
    for (int kind = QUANTISED; kind <= INT8_QUANTISED; kind++)
        for (int half = 0; half < 2; half++) {
            if (!multiplies(f, kind, half)) continue;
            const int lines = kind == QUANTISED || has_float_levels(f) ? 0 : LINES, count = INPUTS + lines;
            const Product p = {.inputs = INPUTS, .outputs = OUTPUTS, .kind = kind, .parts = &part, .count = 1};
            void *x = memory(count * INPUTS * 4), *y = memory(count * OUTPUTS * 4), *expected = memory(count * OUTPUTS * 4);
            for (int64_t r = 0; r < count; r++) {
                const int64_t first = r < INPUTS ? r : (r - INPUTS) * 8, last = r < INPUTS ? r + 1 : first + 8;
                const float one = r < INPUTS ? 1 : r % 2 ? 63.5f : -63.5f;
                for (int64_t i = first; i < last; i++) put(x, r * INPUTS + i, half, one);
                for (int64_t o = 0; o < OUTPUTS; o++) {
                    double sum = 0;
                    for (int64_t i = first; i < last; i++) sum += (double)one * values[o * INPUTS + i];
                    put(expected, r * OUTPUTS + o, half, (float)sum);
                }
            }
            specdec_product(&p, x, NULL, y, count, half, 1);
            same("exact product", count, 1, 0, y, expected, count * OUTPUTS, half ? 'h' : 'f');
            tell(y, count * OUTPUTS, half ? 'h' : 'f');
        }
}

/* A weight whose outputs have different formats, and more rows than one pass has. */
static void try_mixture(void) {
    static const char *const of_256[] = {"Q4_K", "Q6_K", "Q3_K", "Q2_K", "IQ4_XS"}, *const of_32[] = {"Q4_0", "Q8_0", "Q5_1"};
    for (int kind = QUANTISED; kind <= INT8_QUANTISED; kind++) {
        group(joined("blocks", "of several formats", kind == QUANTISED ? "rounded" : kind == EXACT_QUANTISED ? "exact" : "in bytes"));
        Product p = quantised(kind, 768, 230, 5, of_256, 1, 0), q = quantised(kind, 96, 100, 3, of_32, 1, 0);
        try_product(&p, kind != EXACT_QUANTISED, 128);
        try_product(&q, kind != EXACT_QUANTISED, 0);
    }
}

static void by_products(void) {
    try_kinds(0);
    for (int format = 0; specdec_format(format); format++) try_format(format), try_exact(format);
    try_mixture();
}
