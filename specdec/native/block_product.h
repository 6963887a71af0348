/* A whole product with quantised blocks, whose parts each have a format, and the look-up of a row. */

/* Panels of a product in blocks, whose parts each have a format. */
INLINE int64_t panels_of(const Part *part) { return (part->outputs + PANEL - 1) / PANEL; }

/* Sums [rows, PANEL] of rows times a panel of float16, which lies as a dense weight's. */
static void multiply_float16(const Part *part, int64_t panel, int64_t inputs, const float *x, float *sums, int64_t rows) {
    const Product p = {.weight = part->weight, .inputs = inputs, .outputs = part->outputs, .kind = FLOAT16};
    const char *next = (const char *)p.weight + (panel + 1) * panel_bytes(&p);
    const Ahead then = {panel + 1 < panels_of(part) ? next : NULL, NULL};
    multiply_panels(&p, x, sums, rows, 0, groups_of(&p, rows), panel, 1, 0, then);
}

/* Whether codes are extracted where they multiply: for few rows, unless these are not rounded. */
INLINE int extracts(const Product *p, int64_t rows) {
    if (p->kind == EXACT_QUANTISED) return 0;
    return rows <= (p->kind == INT8_QUANTISED ? FEW_BYTES : FEW_CODED);
}

/* Multiplies rows [row, row + some) with a panel of a part; `first` is the panel's first output. */
static void multiply_panel(const Product *p, const Part *part, int64_t panel, int64_t first, const float *x, float *y,
                           int64_t y_stride, int64_t row, int64_t some, int onto, void *out, int half) {
    const WeightFormat *f = formats + part->format;
    const uint8_t *weight = (const uint8_t *)part->weight + panel * (p->inputs / f->values) * block_bytes(f);
    const int64_t left = part->outputs - panel * PANEL, count = left < PANEL ? left : PANEL;
    const int64_t stride = apart_by(p->inputs);
    float sums[PASS * PANEL] __attribute__((aligned(64)));
    x += row * stride;
    if (f->levels == HALVES) multiply_float16(part, panel, p->inputs, x, sums, some);
    else if (has_float_levels(f)) multiply_levels(f, weight, p->inputs, x, stride, sums, some);
    else if (extracts(p, some)) multiply_coded(f, weight, p->inputs, x, stride, sums, some, p->kind == INT8_QUANTISED);
    else multiply_blocks(f, weight, p->inputs, x, stride, sums, some, p->kind);
    for (int64_t r = 0; r < some; r++) {
        float *own = sums + r * PANEL, *to = y + (row + r) * y_stride + first;
        for (int64_t o = 0; p->bias && o < count; o++) own[o] += p->bias[first + o];
        if (out) store(out, (row + r) * p->outputs + first, own, count, half);
        else for (int64_t o = 0; o < count; o++) to[o] = onto ? to[o] + own[o] : own[o];
    }
}

/* The product, as `product` does it for other kinds. */
static void product_in_blocks(const Product *p, const float *x, float *y, int64_t y_stride, int64_t rows, int onto,
                              void *out, int half, const Team *team) {
    int64_t all = 0;
    for (int64_t n = 0; n < p->count; n++) all += panels_of(p->parts + n);
    const int64_t begin = all * team->me / team->count, end = all * (team->me + 1) / team->count;
    const int64_t passes = (rows + PASS - 1) / PASS;
    for (int64_t g = 0; g < passes; g++) { /* a pass's rows stay in the caches while they multiply all panels */
        const int64_t row = rows * g / passes, some = rows * (g + 1) / passes - row;
        int64_t before = 0, at = 0;
        for (int64_t n = 0; n < p->count; at += p->parts[n].outputs, before += panels_of(p->parts + n++)) {
            const Part *part = p->parts + n;
            const int64_t from = begin > before ? begin - before : 0, left = end - before;
            for (int64_t panel = from; panel < panels_of(part) && panel < left; panel++)
                multiply_panel(p, part, panel, at + panel * PANEL, x, y, y_stride, row, some, onto, out, half);
        }
    }
    meet(team);
}

/* Writes a row of a weight in blocks to y [inputs], in bfloat16 or float32. */
static void look_up_blocks(const Product *p, int64_t number, void *y, int half) {
    const Part *part = p->parts;
    while (number >= part->outputs) number -= part++->outputs;
    const WeightFormat *f = formats + part->format;
    if (part->as_in_file) {
        Block256 block;
        for (int64_t n = 0; n < p->inputs / f->values; n++) {
            f->read((const uint8_t *)part->weight + (number * (p->inputs / f->values) + n) * f->bytes, &block);
            for (int i = 0; i < f->values; i++)
                if (half) ((uint16_t *)y)[n * f->values + i] = narrow(value_in(f, &block, i));
                else ((float *)y)[n * f->values + i] = value_in(f, &block, i);
        }
        return;
    }
    const uint8_t *panel = (const uint8_t *)part->weight + number / PANEL * (p->inputs / f->values) * block_bytes(f);
    const int64_t own = number % PANEL, chunks = p->inputs / CHUNK;
    for (int64_t i = 0; f->levels == HALVES && i < p->inputs; i++) {
        const float value = float_of(((const uint16_t *)panel)[i * PANEL + own]);
        if (half) ((uint16_t *)y)[i] = narrow(value);
        else ((float *)y)[i] = value;
    }
    if (f->levels == HALVES) return;
    Decoded d;
    for (int64_t first = 0; first < chunks; first += STRETCHED / CHUNK) {
        const int64_t last = first + STRETCHED / CHUNK < chunks ? first + STRETCHED / CHUNK : chunks;
        decode_blocks(f, panel, first, last, 0, 0, &d);
        for (int64_t i = 0; i < (last - first) * CHUNK; i++) {
            const int64_t place = i / f->group * PANEL + own;
            const uint32_t pair = d.pairs[i / 2 * PANEL + own];
            const int code = (int16_t)(i % 2 ? pair >> 16 : pair & 0xffff);
            const float level = f->levels == INTEGERS ? (float)code : level_of(f, code);
            const float value = f->minima ? fused_one(d.scales[place], level, -d.minima[place]) : d.scales[place] * level;
            if (half) ((uint16_t *)y)[first * CHUNK + i] = narrow(value);
            else ((float *)y)[first * CHUNK + i] = value;
        }
    }
}
