/* A whole product run by a team; norms and rotations. */

/* Converts a row, once it is complete, to the form that a product reads: floats, bfloat16 pairs or integers. */
INLINE int reads_pairs(const Product *p) { return paired(p->kind) && !(HAS_TILES && p->tiles); }
INLINE int reads_rounded(const Product *p) { return reads_pairs(p) || p->kind == QUANTISED || p->kind == INT8_QUANTISED; }
INLINE void ready(const Product *p, float *x) {
    if (reads_pairs(p)) narrow_all(x, x, p->inputs);
    if (p->kind == QUANTISED) round_row(x, p->inputs);
    if (p->kind == INT8_QUANTISED) round_row_to_bytes(x, p->inputs);
}

#if HAS_TILES
/* The product by tiles; y is scratch [threads, rows, STRIP] unless `out` is NULL. */
static void product_by_tiles(const Product *p, const float *x, float *grouped, float *y, int64_t y_stride, int64_t rows,
                             int onto, void *out, int half, const Team *team) {
    const int64_t most = TILE / parts_of(p), groups = (rows + most - 1) / most, me = team->me, count = team->count;
    const int64_t all = padded(p->outputs) / STRIP * groups; /* threads share a strip's groups of rows */
    SHARED(g, groups) { /* rows of one product of tiles are stored side by side */
        const int64_t row = rows * g / groups;
        gather_tiles(p, x, (char *)grouped, row, rows * (g + 1) / groups - row);
    }
    meet(team);
    int64_t shaped = 0;
    for (int64_t at = all * me / count, last = all * (me + 1) / count, begin, end; at < last; at += end - begin) {
        begin = at % groups;
        end = groups - begin < last - at ? groups : begin + last - at;
        if (end - begin > CROWD) end = begin + CROWD;
        const int64_t strip = at / groups, stride = out ? STRIP : y_stride, left = p->outputs - strip * STRIP;
        float *own = out ? y + me * rows * STRIP : y + strip * STRIP;
        multiply_tiles(p, (const char *)grouped, own, stride, rows, strip, begin, end, onto, &shaped);
        for (int64_t r = rows * begin / groups; out && r < rows * end / groups; r++)
            store(out, r * p->outputs + strip * STRIP, own + r * STRIP, left < 0 ? 0 : left < STRIP ? left : STRIP, half);
    }
    release_tiles();
    meet(team);
}
#endif

/* A panel's y [rows, PANEL] += rows times its odd weights. */
static void add_odd(const Product *p, int64_t panel, const float *x, float *y, int64_t rows) {
    const int64_t x_stride = apart_by(p->inputs);
    const int pairs = paired(p->kind);
    for (int64_t at = odd_from(p, panel); at < odd_from(p, panel + 1); at++) {
        const Odd *o = p->odd + at;
        const float *input = x + (o->input >> pairs); /* the input, or its pair */
        const uint32_t mask = pairs ? 0xffff0000 : ~0u;
        const int shift = pairs && o->input % 2 == 0 ? 16 : 0;
        for (int64_t r = 0; r < rows; r++) {
            uint32_t bits;
            float value;
            memcpy(&bits, input + r * x_stride, sizeof bits);
            bits = bits << shift & mask;
            memcpy(&value, &bits, sizeof value);
            float *to = y + r * PANEL + o->output % PANEL;
            *to = fused_one(o->value, value, *to);
        }
    }
}

/* Prefetches a panel's odd weights, up to a few lines, which are needed when it has been read. */
INLINE void ask_for_odd(const Product *p, int64_t panel) {
    if (!p->odd) return;
    const Odd *first = p->odd + odd_from(p, panel), *end = p->odd + odd_from(p, panel + 1);
    for (int line = 0; line < 4 && first < end; line++, first += 64 / sizeof(Odd)) __builtin_prefetch(first);
}

/* The outputs of a panel; the last panels may have fewer, or none. */
INLINE int64_t outputs_of(const Product *p, int64_t panel) {
    const int64_t left = p->outputs - panel * PANEL;
    return left < 0 ? 0 : left < PANEL ? left : PANEL;
}

/* Adds odd weights and bias to a panel's sums [rows, PANEL], and writes them to y [rows, y_stride], or to `out`. */
static void finish_panel(const Product *p, int64_t panel, const float *x, float *sums, float *y, int64_t y_stride,
                         int64_t first, int64_t rows, void *out, int half) {
    const int64_t at = panel * PANEL, count = outputs_of(p, panel);
    add_odd(p, panel, x + first * apart_by(p->inputs), sums, rows);
    for (int64_t r = 0; r < rows; r++) {
        float *own = sums + r * PANEL;
        for (int64_t o = 0; p->bias && o < count; o++) own[o] += p->bias[at + o];
        if (out) store(out, (first + r) * p->outputs + at, own, count, half);
        else memcpy(y + (first + r) * y_stride + at, own, PANEL * sizeof(float));
    }
}

/* What a thread reads next: `left` panels of a product from `panel` on, `panels` at once, or if none is left the next
 * product's. */
static Ahead ahead_of(const Product *p, const Product *next, int64_t panel, int64_t panels, int64_t left,
                      const Team *team) {
    const int64_t size = panel_bytes(p), most = size < STRETCH_BYTES ? size : STRETCH_BYTES;
    if (left > 0) {
        const char *first = (const char *)p->weight + panel * size;
        return (Ahead){first, panels > 1 && left > 1 ? first + size : NULL};
    }
    if (!next || in_blocks(next) || (HAS_TILES && next->tiles)) return (Ahead){NULL, NULL};
    const char *weight = (const char *)next->weight, *end = weight + weight_bytes(next);
    const char *first = weight + padded(next->outputs) / PANEL * team->me / team->count * panel_bytes(next);
    if (end - first < most) return (Ahead){NULL, NULL};
    return (Ahead){first, panels > 1 && end - first - panel_bytes(next) >= most ? first + panel_bytes(next) : NULL};
}

/* The product by vectors, which reads its panels as one stream. */
static void product_by_vectors(const Product *p, const Product *next, const float *x, float *y, int64_t y_stride,
                               int64_t rows, int onto, void *out, int half, const Team *team) {
    float sums[CROWDED * PANEL] __attribute__((aligned(64)));
    const int64_t groups = groups_of(p, rows), most = CROWDED / rows_at_once(p->kind), pair = PAIR / PANEL;
    /* Threads share a panel's groups of rows, as a weight may have few panels. */
    const int64_t all = padded(p->outputs) / PANEL * groups;
    const int64_t first = all * team->me / team->count, last = all * (team->me + 1) / team->count;
    const int twin = p->kind != FLOAT16 && reads_twins(rows, team->cached);
    for (int64_t at = first, begin, end; at < last;) {
        const int64_t panel = at / groups;
        begin = at % groups;
        end = groups - begin < last - at ? groups : begin + last - at;
        if (end - begin > most) end = begin + most;
        const int panels = twin && last - at >= pair ? pair : 1;
        const int64_t row = rows * begin / groups, count = rows * end / groups - row;
        for (int n = 0; n < panels; n++) {
            ask_for_odd(p, panel + n);
            for (int64_t r = 0; onto && r < count; r++)
                memcpy(sums + (n * count + r) * PANEL, y + (row + r) * y_stride + (panel + n) * PANEL, 4 * PANEL);
        }
        const int64_t done = end - begin + panels - 1;
        const Ahead then = ahead_of(p, next, (at + done) / groups, panels, last - at - done, team);
        multiply_panels(p, x, sums, rows, begin, end, panel, panels, onto, then);
        for (int n = 0; n < panels; n++)
            finish_panel(p, panel + n, x, sums + n * count * PANEL, y, y_stride, row, count, out, half);
        at += done;
    }
    meet(team);
}

/* y [rows, y_stride] = x [rows, apart_by(inputs)], each row `ready`, times the weight, plus the bias; with `onto`,
 * it is added to y. `grouped` has room for x in the layout of tiles. `next`, unless NULL, is the product that
 * follows, for prefetching. Unless `out` is NULL, the result goes there, [rows, outputs], in bfloat16 if `half`; y
 * is then scratch [threads, rows, STRIP] for tiles, and `onto` is 0. */
static void product(const Product *p, const Product *next, const float *x, float *grouped, float *y, int64_t y_stride,
                    int64_t rows, int onto, void *out, int half, const Team *team) {
    if (in_blocks(p)) product_in_blocks(p, x, y, y_stride, rows, onto, out, half, team);
#if HAS_TILES
    else if (p->tiles) product_by_tiles(p, x, grouped, y, y_stride, rows, onto, out, half, team);
#endif
    else product_by_vectors(p, next, x, y, y_stride, rows, onto, out, half, team);
    (void)grouped;
}

/* The inverse of the root of the mean of squares, plus epsilon. */
static float inverse_rms(const float *x, int64_t size, float epsilon) {
    floats squares = {0};
    int64_t i = 0;
    for (; i + LANES <= size; i += LANES) squares = fused(load(x, i, 0), load(x, i, 0), squares);
    float sum = total(squares);
    for (; i < size; i++) sum = fused_one(x[i], x[i], sum);
    return 1.f / sqrtf(sum / size + epsilon);
}

/* y = x * weight / rms(x), over `size` values. */
static void norm(const float *x, const float *weight, float *y, int64_t size, float epsilon) {
    const int64_t whole = size / LANES * LANES;
    const float by = inverse_rms(x, size, epsilon);
    for (int64_t i = 0; i < whole; i += LANES) *(floats *)(y + i) = load(x, i, 0) * by * load(weight, i, 0);
    for (int64_t i = whole; i < size; i++) y[i] = x[i] * by * weight[i];
}

/* The same; without a weight x as it is. */
static void norm_if(const float *x, const float *weight, float *y, int64_t size, float epsilon) {
    if (weight) norm(x, weight, y, size, epsilon);
    else if (y != x) memcpy(y, x, size * sizeof *y);
}

static void rotate(float *head, const float *cosines, const float *sines, int64_t size) {
    const int64_t half = size / 2;
    int64_t i = 0;
    for (; i + LANES <= half; i += LANES) {
        const floats low = load(head, i, 0), high = load(head, i + half, 0);
        *(floats *)(head + i) = fused(high, load(sines, i, 0), low * load(cosines, i, 0));
        *(floats *)(head + i + half) = fused(low, load(sines, i + half, 0), high * load(cosines, i + half, 0));
    }
    for (; i < half; i++) {
        const float low = head[i], high = head[i + half];
        head[i] = fused_one(high, sines[i], low * cosines[i]);
        head[i + half] = fused_one(low, sines[i + half], high * cosines[i + half]);
    }
}

/* Adds x [rows, inputs] times the weight to the stream [rows, width]; with a weight for a norm, the product is
 * normed before it is added, and `apart` holds it. A thread reads and writes only its share of the stream's rows. */
static void add_product(const Product *p, const Product *next, const float *x, float *grouped, const float *weight,
                        float epsilon, float *stream, float *apart, int64_t width, int64_t rows, const Team *team) {
    if (!weight) {
        product(p, next, x, grouped, stream, width, rows, 1, NULL, 0, team);
        return;
    }
    product(p, next, x, grouped, apart, width, rows, 0, NULL, 0, team);
    SHARED(r, rows) {
        norm(apart + r * width, weight, apart + r * width, p->outputs, epsilon);
        for (int64_t i = 0; i < p->outputs; i++) stream[r * width + i] += apart[r * width + i];
    }
}
