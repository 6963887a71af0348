/* A whole product run by a team; norms and rotations. */

/* Converts a row, once it is complete, to the form that a product reads: floats, bfloat16 pairs or integers. */
INLINE int reads_pairs(const Product *p) { return paired(p->kind) && !(HAS_TILES && p->tiles); }
INLINE int reads_rounded(const Product *p) { return reads_pairs(p) || p->kind == QUANTISED || p->kind == INT8_QUANTISED; }
INLINE void ready(const Product *p, float *x) {
    if (reads_pairs(p)) narrow_all(x, x, p->inputs);
    if (p->kind == QUANTISED) round_row(x, p->inputs);
    if (p->kind == INT8_QUANTISED) round_row_to_bytes(x, p->inputs);
}

/* y [rows, y_stride] = x [rows, apart_by(inputs)], each row `ready`, times the weight, plus the bias; with `onto`,
 * it is added to y. `grouped` has room for x in the layout of tiles. `next`, unless NULL, is the product that
 * follows, for prefetching. Unless `out` is NULL, the result goes there, [rows, outputs], in bfloat16 if `half`; y
 * is then scratch [threads, rows, STRIP]. */
static void product(const Product *p, const Product *next, const float *x, float *grouped, float *y, int64_t y_stride,
                    int64_t rows, int onto, void *out, int half, const Team *team) {
    if (in_blocks(p)) {
        product_in_blocks(p, x, y, y_stride, rows, onto, out, half, team);
        return;
    }
    const int tiles = HAS_TILES && p->tiles;
    const int64_t most = tiles ? TILE / parts_of(p) : FEW;
    const int64_t groups = (rows + most - 1) / most, me = team->me, count = team->count;
    /* Threads share a strip's groups of rows; a single group is shared by panels, as a weight may have few strips. */
    const int64_t panels = tiles || out || groups > 1 ? 1 : STRIP / PANEL, each = groups * panels;
    const int64_t all = padded(p->outputs) / STRIP * each;
    if (tiles) { /* rows of one product of tiles are stored side by side */
        SHARED(g, groups) gather_tiles(p, x, (char *)grouped, rows * g / groups, rows * (g + 1) / groups - rows * g / groups);
        meet(team);
    }
    int64_t shaped = 0;
    for (int64_t at = all * me / count, last = all * (me + 1) / count, begin, end; at < last; at += end - begin) {
        begin = at % each;
        end = each - begin < last - at ? each : begin + last - at;
        if (tiles && end - begin > CROWD) end = begin + CROWD;
        const int64_t strip = at / each, stride = out ? STRIP : y_stride;
        float *own = out ? y + me * rows * STRIP : y + strip * STRIP;
        if (tiles) multiply_tiles(p, (const char *)grouped, own, stride, rows, strip, begin, end, onto, &shaped);
        else {
            Strip then = {0}; /* the strip that this thread does next */
            if (at + end - begin < last) then = strip_of(p, strip + 1, 0);
            else if (next && !in_blocks(next)) {
                const int64_t there = padded(next->outputs) / STRIP * each * me / count;
                then = strip_of(next, there / each, there % panels);
            }
            if (end - begin < panels) multiply_panel(p, x, own, stride, rows, strip, begin, onto, then);
            else multiply_strip(p, x, own, stride, rows, strip, begin / panels, end / panels, onto, then);
        }
        for (int64_t r = rows * begin / groups; out && r < rows * end / groups; r++)
            store(out, r * p->outputs + strip * STRIP, own + r * STRIP, outputs_of(p, strip), half);
    }
    if (tiles) release_tiles();
    meet(team);
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
