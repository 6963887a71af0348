/* Made: numbers, weights and blocks. They are made of integers, so no rounding and no mathematical library has a part
 * in them, and they are the same on every machine. */

static uint64_t seed;

static uint64_t random_bits(void) { /* SplitMix64 */
    uint64_t x = seed += 0x9E3779B97F4A7C15;
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9, x = (x ^ x >> 27) * 0x94D049BB133111EB;
    return x ^ x >> 31;
}

static int64_t below(int64_t n) { return (int64_t)(random_bits() >> 33) % n; }

/* Zeroed memory, until it is released. It begins at any multiple of four bytes. */
static void *held[1 << 14];
static int holding;
static void *memory(int64_t bytes) {
    const size_t size = (size_t)(bytes + 127) / 64 * 64;
    char *found = aligned_alloc(64, size);
    if (!found || holding == sizeof held / sizeof *held) abort();
    held[holding++] = memset(found, 0, size);
    return found + holding % 16 * 4;
}

static void *aligned_memory(int64_t bytes) { /* of weights and slots, which begin pages */
    char *found = memory(bytes + 64);
    return found + (64 - (uintptr_t)found % 64) % 64;
}

static void release(int mark) { /* all that was taken since so much was held */
    while (holding > mark) free(held[--holding]);
}

static float with_bits(uint32_t bits) {
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

/* A number of 17 bits, smaller than 2^power; the product is exact. */
static float number(int power) {
    return (float)((int32_t)(random_bits() >> 40 & 0x1ffff) - 0x10000) * with_bits((uint32_t)(127 + power - 16) << 23);
}

/* What arithmetic treats in a way of its own; NaN first. */
static const uint32_t specials[] = {0x7fc00000, 0x7f800000, 0xff800000, 0x7f7f0000, 0x00010000, 0x80000000, 0x807f0000, 0};
enum { SPECIALS = sizeof specials / sizeof *specials };

INLINE void put(void *to, int64_t at, int half, float value) {
    if (half) ((uint16_t *)to)[at] = narrow(value);
    else ((float *)to)[at] = value;
}

/* Random values in bfloat16 or float32, some of them denormal; a row of zeros in `specials` has other exponents. */
static void fill(void *to, int64_t count, int half, int power) {
    for (int64_t i = 0; i < count; i++) {
        const int chance = (int)below(128);
        const float wide = number((int)below(60) - 40 + power);
        put(to, i, half, chance == 0 ? with_bits((uint32_t)random_bits() & 0x807fffff) : chance == 1 ? wide : number(power));
    }
}

static void *filled(int64_t count, int half, int power) {
    void *made = memory(count * (half ? 2 : 4));
    fill(made, count, half, power);
    return made;
}

/* The weights of a norm: near one. */
static float *gains(int64_t count) {
    float *made = memory(count * 4);
    for (int64_t i = 0; i < count; i++) made[i] = with_bits(0x3f400000 + (uint32_t)(random_bits() >> 42));
    return made;
}

/* Rows [first, first + SPECIALS) of [rows, size] become NaN, infinite, denormal and so on, as a whole or here and there. */
static void break_rows(void *values, int64_t first, int64_t size, int half) {
    for (int n = 0; n < SPECIALS; n++)
        for (int64_t i = n % 2 ? below(size) : 0; i < size; i += n % 2 ? 1 + below(size) : 1)
            put(values, (first + n) * size + i, half, with_bits(specials[n]));
}

static void code(Product *p, const uint16_t *values) {
    int64_t found[256], panels = padded(p->outputs) / PANEL, odd = 0;
    uint8_t *highs = memory(CODES), *coded = aligned_memory(panels * p->inputs / 2 * CODE_BYTES);
    specdec_count_highs(values, p->outputs * p->inputs, found);
    for (int n = 1; n < CODES; n++) {
        int best = 1;
        for (int high = 1; high < 256; high++) best = found[high] > found[best] ? high : best;
        highs[n] = (uint8_t)best, found[best] = -1;
    }
    for (int high = 1; high < 256; high++) odd += found[high] > 0 ? found[high] : 0;
    Odd *others = memory(odd * (int64_t)sizeof *others);
    int64_t *ends = memory(panels * 8);
    p->highs = highs;
    specdec_code(p, values, coded, others, ends);
    p->weight = coded, p->odd = others, p->odd_end = ends;
}

/* Float16 [outputs, inputs]: most of a size from 2^-3 to 2, the others of any; the first rows as by `break_rows`. */
static void *float16_of(int64_t inputs, int64_t outputs, int broken) {
    static const uint16_t special[SPECIALS] = {0x7e00, 0x7c00, 0xfc00, 0x7bff, 0x0001, 0x8000, 0x83ff, 0};
    uint16_t *made = memory(outputs * inputs * 2);
    for (int64_t n = 0; n < outputs * inputs; n++) {
        const uint16_t bits = (uint16_t)random_bits();
        made[n] = below(64) ? (bits & 0x8fff) | 0x3000 : (bits & 0x7c00) == 0x7c00 ? bits & 0x83ff : bits;
    }
    for (int64_t n = 0; n < SPECIALS && broken; n++)
        for (int64_t i = 0; i < inputs; i += n % 2 ? 1 + below(inputs) : 1) made[n * inputs + i] = special[n];
    return made;
}

/* A weight of any kind but blocks. The first `broken` outputs are `specials`. */
static Product weight(int kind, int64_t inputs, int64_t outputs, int biased, int broken) {
    const int half = kind != FULL;
    Product p = {.inputs = inputs, .outputs = outputs, .kind = kind};
    char *values = kind == FLOAT16 ? float16_of(inputs, outputs, broken) : filled(outputs * inputs, half, -2);
    if (broken && kind != FLOAT16) break_rows(values, 0, inputs, half);
    if (biased) p.bias = filled(outputs, 0, -1);
    if (coded(kind)) {
        code(&p, (const uint16_t *)values);
        return p;
    }
    char *panels = aligned_memory(padded(outputs) * inputs * (half ? 2 : 4));
    for (int64_t o = 0; o < outputs; o++)
        for (int64_t i = 0; i < inputs; i++) {
            const int64_t step = kind == PAIRS ? i / 2 : i, steps = kind == PAIRS ? inputs / 2 : inputs, own = o % PANEL;
            const int64_t at = kind == PAIRS ? ((o / PANEL * steps + step) * PANEL + own) * 2 + i % 2
                                             : (o / PANEL * steps + step) * PANEL + own;
            memcpy(panels + at * (half ? 2 : 4), values + (o * inputs + i) * (half ? 2 : 4), half ? 2 : 4);
        }
    p.weight = panels;
    return p;
}

static int format_of(const char *name) {
    int found = 0;
    while (strcmp(specdec_format(found)->name, name)) found++;
    return found;
}

/* Scales of blocks: any, those of the first outputs infinite, denormal and so on, or 2^-6 of all. */
enum { ANY_SCALE, BROKEN_SCALES, PLAIN_SCALES };

/* Blocks as in a file, [outputs, inputs]. */
static uint8_t *blocks_of(int format, int64_t inputs, int64_t outputs, int scales) {
    static const uint16_t halves_of[] = {0x7e00, 0x7c00, 0x0001, 0x83ff, 0x7bff, 0x8000};
    const WeightFormat *f = specdec_format(format);
    const int64_t each = inputs / f->values, count = outputs * each;
    const int at = f->type == 10 ? 80 : f->type == 11 ? 108 : f->type == 14 ? 208 : 0; /* of the scales */
    const int broken = scales == BROKEN_SCALES, plain = scales == PLAIN_SCALES;
    if (f->levels == HALVES) return float16_of(inputs, outputs, broken);
    uint8_t *made = memory(count * f->bytes);
    for (int64_t n = 0; n < count * f->bytes; n++) made[n] = (uint8_t)random_bits();
    for (int64_t n = 0; n < count; n++) {
        uint16_t scale = (uint16_t)(0x1c00 + below(0x400)), minimum = (uint16_t)(0x1800 + below(0x400));
        uint32_t whole = 0x3c000000 + (uint32_t)below(0x800000);
        if (broken && n / each < 6) scale = halves_of[n / each], whole = specials[n / each];
        if (f->scales == ZEROS) minimum = (uint16_t)(0x4400 + below(0x400)); /* a zero from 4 to 8 */
        if (plain) scale = 0x2400, minimum = f->scales == ZEROS ? 0x4400 : 0x2400, whole = 0x3c800000;
        if (f->scales == FLOATS) memcpy(made + n * f->bytes + at, &whole, sizeof whole);
        else memcpy(made + n * f->bytes + at, &scale, sizeof scale);
        if (f->minima) memcpy(made + n * f->bytes + at + 2, &minimum, sizeof minimum);
    }
    return made;
}

/* A product whose outputs are shared by blocks of some formats. */
static Product quantised(int kind, int64_t inputs, int64_t outputs, int count, const char *const *names, int biased,
                         int broken) {
    Part *parts = memory(count * (int64_t)sizeof *parts);
    for (int n = 0; n < count; n++) {
        const int format = format_of(names[n]);
        const int64_t own = outputs * (n + 1) / count - outputs * n / count;
        uint8_t *laid = aligned_memory(specdec_panel_bytes(format, own, inputs));
        specdec_lay_blocks(format, blocks_of(format, inputs, own, broken), own, inputs, laid, 1);
        parts[n] = (Part){laid, format, own, 0};
    }
    return (Product){.inputs = inputs, .outputs = outputs, .kind = kind, .parts = parts, .count = count,
                     .bias = biased ? filled(outputs, 0, -1) : NULL};
}

/* Whether this build has a kind. */
static int has(int kind) {
    if (paired(kind) && !specdec_pairs()) return 0;
    return !coded(kind) || specdec_codes();
}
