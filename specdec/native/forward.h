/* A forward pass: embedding, layers, head. */

/* The position of an output's low byte, and of its code, within the bytes of two inputs. */
INLINE int64_t place_of(int64_t output) { /* decode takes a panel's two vectors from the halves of every 16 bytes */
    return output % 16 / 4 * 16 + output / 16 * 8 + output % 4 * 2;
}

/* Writes a coded weight's row to y [inputs]; values without a code become zeros. */
INLINE void copy_row(const Product *p, int64_t number, void *y, const int kind, const int half) {
    const int64_t own = number % PANEL, place = place_of(own), steps = kind < PAIRS ? p->inputs : p->inputs / 2;
    const char *panel = (const char *)p->weight + number / PANEL * steps * bytes_of(kind);
    for (int64_t i = 0; i < p->inputs; i++) {
        if (kind == FULL) {
            ((float *)y)[i] = ((const float *)panel)[i * PANEL + own];
            continue;
        }
        if (kind == FLOAT16) {
            ((float *)y)[i] = float_of(((const uint16_t *)panel)[i * PANEL + own]);
            continue;
        }
        uint16_t value;
        if (kind == HALF) value = ((const uint16_t *)panel)[i * PANEL + own];
        else if (kind == PAIRS) value = ((const uint16_t *)panel)[(i / 2 * PANEL + own) * 2 + i % 2];
        else {
            const uint8_t *step = (const uint8_t *)panel + i / 2 * CODE_BYTES;
            const int code = step[LOWS + place % PANEL + i % 2] >> (place < PANEL ? 0 : 4) & (CODES - 1);
            value = step[place + i % 2] | p->highs[code] << 8;
        }
        if (half) ((uint16_t *)y)[i] = value;
        else ((float *)y)[i] = widen(value);
    }
}

/* Writes a weight's row to y [inputs], in bfloat16 or float32; of a float32 or float16 weight in float32. */
static void look_up_row(const Product *p, int64_t number, void *y, int half) {
    const int64_t panel = number / PANEL;
    if (in_blocks(p)) {
        look_up_blocks(p, number, y, half);
        return;
    }
#define COPY(kind) half ? copy_row(p, number, y, kind, 1) : copy_row(p, number, y, kind, 0)
    if (p->kind == FULL) copy_row(p, number, y, FULL, 0);
    else if (p->kind == FLOAT16) copy_row(p, number, y, FLOAT16, 0);
    else if (p->kind == HALF) COPY(HALF);
    else if (p->kind == PAIRS) COPY(PAIRS);
    else COPY(CODED);
#undef COPY
    for (int64_t at = odd_from(p, panel); at < odd_from(p, panel + 1); at++) {
        if (p->odd[at].output != number) continue;
        if (half) ((uint16_t *)y)[p->odd[at].input] = narrow(p->odd[at].value);
        else ((float *)y)[p->odd[at].input] = p->odd[at].value;
    }
}

/* Whether the weights that a pass reads are so few that they are still in the caches at the next one. */
static int stay_cached(const Layer *layers, const Rows *all, int64_t first, int64_t last, const Head *head) {
    int64_t bytes = head ? weight_bytes(&head->product) : 0;
    for (int64_t n = first; n < last; n++) {
        const Layer *l = layers + n;
        const Experts *e = l->experts;
        if (runs(all, n, ATTENTION)) bytes += weight_bytes(&l->qkv) + weight_bytes(&l->out);
        const int64_t mlp = weight_bytes(e ? e->gate_up : &l->gate_up) + weight_bytes(e ? e->down : &l->down);
        if (runs(all, n, MLP)) bytes += e ? e->count * mlp : mlp;
    }
    return bytes <= CACHED;
}

/* The first product of layers [n, last) that runs, or the head's, for prefetching; NULL where there is none. */
static const Product *following(const Layer *layers, const Rows *all, int64_t n, int64_t last, const Head *head) {
    for (; n < last; n++) {
        if (runs(all, n, ATTENTION)) return &layers[n].qkv;
        if (runs(all, n, MLP)) return first_of(layers + n);
    }
    return head ? &head->product : NULL;
}

/* Runs `hidden` [rows, m->hidden], or where it is NULL the embeddings of the rows' tokens, through layers [first,
 * last), and writes the result to `out`; all in the model's dtype. taps[n], unless it or `taps` is NULL, receives
 * the input of layer n. Unless `head` is NULL, read_head follows. Returns 0, or 1 without memory, or 2 for a token
 * without an embedding. */
int specdec_run_layers(const Shape *m, const Layer *layers, const Rows *all, const void *hidden, void *out,
                       void *const *taps, int64_t first, int64_t last, const Head *head, void *final,
                       const int64_t *wanted, int64_t count, void *logits, int64_t *best, int64_t tops, int64_t *most,
                       float *found, const float *by, const uint64_t *keys, int64_t *drawn, int threads) {
    const int64_t rows = all->rows, width = padded(m->hidden), size = m->hidden, half = m->half;
    const int64_t heads = padded((m->query_heads + 2 * m->key_heads) * m->head_dim), mix = m->query_heads * m->head_dim;
    const int64_t inputs = all->reads && layers[first].qkv.inputs > size ? layers[first].qkv.inputs : size;
    const int64_t seen = apart_by(size), mixed_stride = apart_by(mix);
    const int64_t attending = room_for_attention(m, all->keys) * threads;
    const int64_t wide = mix > inputs ? mix : inputs, widest = m->inner > wide ? m->inner : wide;
    const int64_t reading = head ? room_for_head(m, rows, final, count, threads) : 0;
    for (int64_t r = 0; !hidden && r < rows; r++)
        if (all->tokens[r] < 0 || all->tokens[r] >= all->embedding->outputs) return 2;
    const int64_t beside = room_for_mlp(m, rows, threads);
    const int64_t each = 2 * width + apart_by(inputs) + heads + mixed_stride + gathered(widest);
    float *scratch = take_scratch(rows * each + beside + attending + reading);
    if (!scratch) return 1;
    float *stream = scratch, *apart = stream + rows * width, *normed = apart + rows * width;
    float *qkv = normed + rows * apart_by(inputs), *mixed = qkv + rows * heads, *gates = mixed + rows * mixed_stride, *grouped = gates + beside;
    float *rest = grouped + rows * gathered(widest), *read = rest + attending;
    const Room room = mlp_room(m, rows, normed, grouped, stream, apart, gates);
    const int cached = stay_cached(layers, all, first, last, head);
    AS_TEAM {
        team->cached = cached;
        SHARED(r, rows) {
            if (hidden) widen_all(row_of(hidden, r, size, half), stream + r * width, size, half);
            else look_up_row(all->embedding, all->tokens[r], stream + r * width, 0);
        }
        for (int64_t n = first; n < last; n++) {
            const Layer *l = layers + n;
            const int attends = runs(all, n, ATTENTION), reads = all->reads && n == first;
            const Product *next = following(layers, all, n + 1, last, head);
            SHARED(r, rows) {
                float *own = stream + r * width, *read = normed + r * apart_by(l->qkv.inputs);
                for (int64_t i = 0; half && i < size; i++) own[i] = widen(narrow(own[i])); /* a walk may begin here */
                if (taps && taps[n]) store(taps[n], r * size, own, size, half);
                if (!attends) continue;
                if (reads) widen_all(row_of(all->reads, r, l->qkv.inputs, half), read, l->qkv.inputs, half);
                else norm_if(own, l->first_norm, read, size, l->first_epsilon);
                ready(&l->qkv, read);
            }
            if (attends) {
                const Product *then = runs(all, n, MLP) ? first_of(l) : next;
                meet(team);
                product(&l->qkv, &l->out, normed, grouped, qkv, heads, rows, 0, NULL, 0, team);
                attention(m, l, all, n, qkv, heads, mixed, rest, team);
                add_product(&l->out, then, mixed, grouped, l->out_norm, l->out_epsilon, stream, apart, width, rows, team);
            }
            if (!runs(all, n, MLP)) continue;
            SHARED(r, rows) norm(stream + r * width, l->second_norm, normed + r * seen, size, l->second_epsilon);
            mlp(m, l, next, &room, rows, team);
        }
        SHARED(r, rows) store(out, r * size, stream + r * width, size, half);
        meet(team);
        if (head)
            read_head(m, head, out, rows, final, wanted, count, logits, best, tops, most, found, by, keys, drawn, read, team);
    }
    give_scratch(scratch);
    return 0;
}

/* y [rows, outputs] = x [rows, inputs] times one weight, plus `onto` unless it is NULL; in bfloat16 or float32.
 * Returns 0, or 1 without memory. */
int specdec_product(const Product *p, const void *x, const void *onto, void *y, int64_t rows, int half, int threads) {
    const int64_t width = padded(p->outputs), seen = apart_by(p->inputs);
    float *scratch = take_scratch(rows * (seen + gathered(p->inputs) + width));
    if (!scratch) return 1;
    float *grouped = scratch + rows * seen, *sums = grouped + rows * gathered(p->inputs);
    AS_TEAM {
        SHARED(r, rows) {
            widen_all(row_of(x, r, p->inputs, half), scratch + r * seen, p->inputs, half);
            ready(p, scratch + r * seen);
            if (onto) widen_all(row_of(onto, r, p->outputs, half), sums + r * width, p->outputs, half);
        }
        meet(team);
        product(p, NULL, scratch, grouped, sums, width, rows, onto != NULL, NULL, 0, team);
        SHARED(r, rows) store(y, r * p->outputs, sums + r * width, p->outputs, half);
    }
    give_scratch(scratch);
    return 0;
}

/* Attention of queries [rows, query_heads, head_dim] over the slots of layer n, which hold the rows' keys and values, to
 * out of the same shape; in bfloat16 or float32. `sinks`: one more score for each query head, of no key, or NULL.
 * Returns 0, or 1 without memory. */
int specdec_attend(const Shape *m, const Rows *all, int64_t n, const void *queries, float scale, float cap,
                   const float *sinks, void *out, int threads) {
    const int64_t rows = all->rows, size = m->query_heads * m->head_dim, apart = apart_by(size);
    float *scratch = take_scratch(2 * rows * apart + room_for_attention(m, all->keys) * threads);
    if (!scratch) return 1;
    float *own = scratch + rows * apart, *rest = own + rows * apart;
    AS_TEAM {
        SHARED(r, rows) {
            float *row = own + r * apart;
            widen_all(row_of(queries, r, size, m->half), row, size, m->half);
            for (int64_t i = 0; i < size; i++) row[i] *= scale;
            if (attends_in_pairs(m)) narrow_all(row, row, size);
        }
        meet(team);
        attend_rows(m, all, n, own, apart, cap, sinks, scratch, rest, team);
        SHARED(r, rows) store(out, r * size, scratch + r * apart, size, m->half);
    }
    give_scratch(scratch);
    return 0;
}
