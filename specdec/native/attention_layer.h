/* Attention of one layer, run by a team of threads. */

/* Floats for a row's scores; never a multiple of a page, or rows would evict each other from the cache. */
static int64_t room_for(int64_t keys) { return padded(keys + 2 * LANES) + LANES; }

/* Floats of scratch that a thread needs for attention. */
static int64_t room_for_attention(const Shape *m, int64_t keys) {
    const int64_t heads = m->query_heads / m->key_heads;
    return room_for(keys) * together(m) * (heads + 1) + room_beside(together(m) * heads, m->head_dim) + room_for_tiles(m);
}

/* Norms, rotates and scales one row's queries and keys in place; stores its keys and values in their slot. */
static void store_row(const Shape *m, const Layer *l, const Slots *s, float *row, int64_t slot, const float *cosines,
                      const float *sines) {
    const int64_t dim = m->head_dim, turned = m->query_heads + m->key_heads;
    const int64_t queries = m->query_heads * dim;
    if (l->head_norm && l->norms_all) {
        norm(row, l->head_norm, row, queries, l->head_epsilon);
        norm(row + queries, l->head_norm + queries, row + queries, m->key_heads * dim, l->head_epsilon);
    }
    for (int64_t h = 0; h < turned; h++) {
        if (l->head_norm && !l->norms_all) norm(row + h * dim, l->head_norm + h * dim, row + h * dim, dim, l->head_epsilon);
        rotate(row + h * dim, cosines, sines, dim);
    }
    for (int64_t i = 0; i < queries; i++) row[i] *= l->scale;
    if (attends_in_pairs(m)) narrow_all(row, row, queries);
    for (int64_t h = 0; h < m->key_heads; h++) {
        store(s->keys, (h * s->stride + slot) * dim, row + (m->query_heads + h) * dim, dim, m->half);
        store(s->values, (h * s->stride + slot) * dim, row + (turned + h) * dim, dim, m->half);
    }
}

/* The same for all rows: qkv [rows, stride] of layer n. */
static void store_rows(const Shape *m, const Layer *l, const Rows *all, int64_t n, float *qkv, int64_t stride, const Team *team) {
    const Turns turns = all->turns[l->turns];
    SHARED(row, all->rows) {
        const Block *b = all->blocks;
        int64_t r = row; /* index within its block */
        while (r >= b->rows) r -= b++->rows;
        const Slots *s = b->slots + n;
        const int64_t at = all->by_row ? row : b->length + b->depths[b->first + r];
        store_row(m, l, s, qkv + row * stride, (b->length + b->first + r) % s->size, turns.cosines + at * m->head_dim,
                  turns.sines + at * m->head_dim);
    }
}

/* Work items of a block (key heads x pieces of queries x rows); about how many keys an item reads; and how many of a
 * block's items lie within the first `work` keys of all the work. */
INLINE int64_t items_of(const Shape *m, const Block *b, int64_t pieces) { return m->key_heads * pieces * b->rows; }
INLINE int64_t keys_of(const Block *b) { return b->length + b->first + b->rows + LANES; }
INLINE int64_t share(int64_t work, int64_t each, int64_t items) {
    return work < 0 ? 0 : work / each < items ? work / each : items;
}

/* Into how many pieces one row's queries of a key head are split, so that each thread has work. */
INLINE int64_t pieces_of(const Shape *m, int64_t rows, const Team *team) {
    const int64_t group = m->query_heads / m->key_heads;
    int64_t pieces = 1;
    while (rows == 1 && pieces < group && (m->key_heads * pieces < team->count || group % pieces)) pieces++;
    return pieces;
}

/* Attention over the slots of layer n, which hold the rows' keys and values: of queries, scaled and of the kind that is
 * multiplied, in qkv [rows, stride], to mixed [rows, apart_by(query_heads * head_dim)]. Rows that attend together are of
 * one block and share its keys. `sinks`: [query_heads] or NULL. */
static void attend_rows(const Shape *m, const Rows *all, int64_t n, const float *qkv, int64_t stride, float cap,
                        const float *sinks, float *mixed, float *scratch, const Team *team) {
    const int64_t dim = m->head_dim, group = m->query_heads / m->key_heads, size = m->half ? 2 : 4;
    const enum Kind kind = attends_in_pairs(m) ? PAIRS : m->half ? HALF : FULL;
    const int64_t mixed_stride = apart_by(m->query_heads * dim);
    const int64_t room = room_for(all->keys), most = together(m);
    const int64_t pieces = pieces_of(m, all->rows, team), heads = group / pieces; /* heads of a piece */
    int64_t work = 0; /* the number of keys that all items read */
    for (const Block *b = all->blocks; b < all->blocks + all->count; b++) work += items_of(m, b, pieces) * keys_of(b);
    float *scores = scratch + team->me * room_for_attention(m, all->keys);
    int32_t *slots = (int32_t *)(scores + room * most * group);
    int64_t from = 0, before = 0; /* rows and work of earlier blocks */
    const char *read = NULL;      /* the latest item's keys */
    for (const Block *b = all->blocks; b < all->blocks + all->count; from += b++->rows) {
        const Slots *s = b->slots + n;
        const int64_t items = items_of(m, b, pieces), each = s->stride * dim * size; /* bytes per key head */
        Path paths[2 * TOGETHER];
        int64_t item = share(work * team->me / team->count - before, keys_of(b), items);
        const int64_t end = share(work * (team->me + 1) / team->count - before, keys_of(b), items);
        for (int r = 0; r < most; r++) paths[r].row = -1;
        for (int64_t count; item < end; item += count) {
            const int64_t r = item % b->rows, head = item / b->rows * heads, at = head / group * each;
            count = b->rows - r < end - item ? b->rows - r : end - item;
            if (count > most) count = most;
            const int64_t after = item + count;
            const char *keys = (const char *)s->keys + at, *values = (const char *)s->values + at;
            const char *next = after < items ? (const char *)s->keys + after / b->rows * heads / group * each
                               : b + 1 < all->blocks + all->count ? b[1].slots[n].keys : keys;
            Seen seen = {.keys = keys, .values = values,
                         .soon = {keys == read ? NULL : values, keys == next ? NULL : next},
                         .query = qkv + (from + r) * stride + head * dim / (kind == PAIRS ? 2 : 1),
                         .output = mixed + (from + r) * mixed_stride + head * dim,
                         .scores = scores, .slots = slots, .dim = dim, .heads = heads, .room = room,
                         .rows = count, .query_stride = stride,
                         .output_stride = mixed_stride, .cap = cap,
                         .sinks = sinks ? sinks + head : NULL, .kind = kind,
                         .beside = (float *)(slots + room * most), .common = s->window || all->spans ? 0 : b->length};
            const int32_t *spans = all->spans ? all->spans + 2 * (n * all->rows + from + r) : NULL;
            seen.chain = !s->window && !spans;
            for (int64_t row = b->first + r + 1; row < b->first + r + seen.rows; row++)
                seen.chain &= b->parents[row] == row - 1;
            for (int64_t i = 0; spans && i < seen.rows; i++) seen.count[i] = spanned(spans + 2 * i, slots + i * room);
            for (int64_t i = seen.chain ? seen.rows - 1 : 0, own = 0; !spans && i < seen.rows; i++, own++)
                seen.count[i] = path(b, s, b->first + r + i, slots + own * room, paths + own);
            for (int64_t i = 0; seen.chain && i < seen.rows; i++)
                seen.count[i] = seen.count[seen.rows - 1] - (seen.rows - 1 - i);
            seen.finite = seen.chain && all_finite(&seen, slots, seen.count[0] - 1, seen.count[seen.rows - 1]);
            if (attends_in_tiles(m)) attend_tiles(&seen, seen.beside);
            else attend(&seen);
            read = keys;
        }
        before += items * keys_of(b);
    }
    if (attends_in_tiles(m)) release_tiles();
    meet(team);
}

/* Stores the rows' keys and values of layer n, then attends: qkv [rows, stride] to
 * mixed [rows, apart_by(query_heads * head_dim)]. */
static void attention(const Shape *m, const Layer *l, const Rows *all, int64_t n, float *qkv, int64_t stride,
                      float *mixed, float *scratch, const Team *team) {
    const int64_t mixed_stride = apart_by(m->query_heads * m->head_dim);
    store_rows(m, l, all, n, qkv, stride, team);
    meet(team);
    attend_rows(m, all, n, qkv, stride, l->cap, NULL, mixed, scratch, team);
    if (!reads_rounded(&l->out)) return;
    SHARED(row, all->rows) ready(&l->out, mixed + row * mixed_stride);
    meet(team);
}
