/* MLPs, of two kinds: one gated MLP for all rows, or experts, of which each row has a few. */

/* Where an MLP finds its rows and keeps what it computes; row by row, at fixed distances. */
typedef struct {
    float *stream, *apart; /* [rows, width] to add to; a product that is not added as it is */
    float *normed;         /* [rows, seen] the MLP's input */
    float *grouped, *gates, *active; /* rows in the layout of tiles; of gate and up; of down */
    float *taken;          /* [rows, seen] rows of one product among several */
    float *logits, *shares; /* [rows, experts] the router's, and what of each expert a row has, or NOT_CHOSEN */
    int32_t *members;      /* [threads, rows] rows of one expert; each thread has its own list */
    int64_t width, seen, wide, experts;
} Room;

#define NOT_CHOSEN -1.f

/* Floats that the MLPs' rows take beside those of attention. */
static int64_t room_for_mlp(const Shape *m, int64_t rows, int64_t threads) {
    const int64_t dense = rows * (padded(2 * m->inner) + apart_by(m->inner));
    const int64_t lists = (threads * rows + 15) / 16 * 16;
    return dense + (m->experts ? rows * (apart_by(m->hidden) + 2 * padded(m->experts)) + lists : 0);
}

static Room mlp_room(const Shape *m, int64_t rows, float *normed, float *grouped, float *stream, float *apart, float *gates) {
    Room room = {.stream = stream, .apart = apart, .normed = normed, .grouped = grouped, .gates = gates,
                 .width = padded(m->hidden), .seen = apart_by(m->hidden), .wide = padded(2 * m->inner),
                 .experts = padded(m->experts)};
    room.active = room.gates + rows * room.wide;
    room.taken = room.active + rows * apart_by(m->inner);
    room.logits = room.taken + rows * room.seen;
    room.shares = room.logits + rows * room.experts;
    room.members = (int32_t *)(room.shares + rows * room.experts);
    return room;
}

/* The first product of a layer's MLP, for prefetching. */
INLINE const Product *first_of(const Layer *l) { return l->experts ? &l->experts->router : &l->gate_up; }

/* Gate and up of `rows` rows become the input of `down`. */
static void activate(const Shape *m, const Product *down, const Room *room, int64_t rows, const Team *team) {
    const int64_t inner = down->inputs;
    SHARED(r, rows) {
        const float *gate = room->gates + r * room->wide, *up = gate + inner;
        float *own = room->active + r * apart_by(inner);
        for (int64_t i = 0; i + LANES <= inner; i += LANES) {
            floats g = load(gate, i, 0), bent = g;
            if (m->gelu) bent = g * fused(0.07135481f * g, g, spread(1.5957691f)); /* 2 sqrt(2 / pi) (g + 0.044715 g^3) */
            *(floats *)(own + i) = gated(g, bent) * load(up, i, 0);
        }
        ready(down, own);
    }
    meet(team);
}

static void gated_mlp(const Shape *m, const Layer *l, const Product *next, const Room *room, int64_t rows, const Team *team) {
    SHARED(r, rows) ready(&l->gate_up, room->normed + r * room->seen);
    meet(team);
    product(&l->gate_up, &l->down, room->normed, room->grouped, room->gates, room->wide, rows, 0, NULL, 0, team);
    activate(m, &l->down, room, rows, team);
    add_product(&l->down, next, room->active, room->grouped, l->down_norm, l->down_epsilon, room->stream, room->apart,
                room->width, rows, team);
}

/* A row's shares of experts, from its logits: softmax, and the likeliest; of equal logits the first. */
static void route(const Experts *x, const float *logits, float *shares) {
    float most = logits[0], sum = 0, kept = 0;
    for (int64_t e = 1; e < x->count; e++) most = logits[e] > most ? logits[e] : most;
    for (int64_t e = 0; e < x->count; e++) sum += exponential_one(logits[e] - most), shares[e] = NOT_CHOSEN;
    for (int64_t n = 0; n < x->chosen; n++) {
        int64_t best = -1;
        for (int64_t e = 0; e < x->count; e++)
            if (shares[e] == NOT_CHOSEN && (best < 0 || logits[e] > logits[best])) best = e;
        shares[best] = exponential_one(logits[best] - most) / sum;
        kept += shares[best];
    }
    for (int64_t e = 0; e < x->count; e++)
        if (shares[e] != NOT_CHOSEN && x->norm_topk) shares[e] /= kept;
}

/* The first expert from number `e` on that a row has chosen; their number where there is none. */
static int64_t chosen_from(const Experts *x, const Room *room, int64_t rows, int64_t e) {
    for (; e < x->count; e++)
        for (int64_t r = 0; r < rows; r++)
            if (room->shares[r * room->experts + e] != NOT_CHOSEN) return e;
    return e;
}

/* Expert after expert, each with the rows that have chosen it, so that its weights are read once. A row adds its
 * experts' results in the experts' order, whatever other rows have chosen. */
static void mix_experts(const Shape *m, const Layer *l, const Product *next, const Room *room, int64_t rows, const Team *team) {
    const Experts *x = l->experts;
    const int64_t width = room->width, seen = room->seen, size = m->hidden;
    int32_t *members = room->members + team->me * rows;
    SHARED(r, rows) {
        memcpy(room->taken + r * seen, room->normed + r * seen, size * sizeof(float));
        ready(&x->router, room->taken + r * seen);
    }
    meet(team);
    product(&x->router, NULL, room->taken, room->grouped, room->logits, room->experts, rows, 0, NULL, 0, team);
    SHARED(r, rows) route(x, room->logits + r * room->experts, room->shares + r * room->experts);
    meet(team);
    for (int64_t e = chosen_from(x, room, rows, 0), then; e < x->count; e = then) {
        then = chosen_from(x, room, rows, e + 1);
        int64_t count = 0;
        for (int64_t r = 0; r < rows; r++)
            if (room->shares[r * room->experts + e] != NOT_CHOSEN) members[count++] = r;
        SHARED(i, count) {
            memcpy(room->taken + i * seen, room->normed + members[i] * seen, size * sizeof(float));
            ready(x->gate_up + e, room->taken + i * seen);
        }
        meet(team);
        product(x->gate_up + e, x->down + e, room->taken, room->grouped, room->gates, room->wide, count, 0, NULL, 0, team);
        activate(m, x->down + e, room, count, team);
        product(x->down + e, then < x->count ? x->gate_up + then : next, room->active, room->grouped, room->apart, width,
                count, 0, NULL, 0, team);
        SHARED(i, count) {
            const float by = room->shares[members[i] * room->experts + e];
            float *to = room->stream + members[i] * width;
            for (int64_t n = 0; n < size; n++) to[n] = fused_one(by, room->apart[i * width + n], to[n]);
        }
    }
    meet(team);
}

/* Adds a layer's MLP of the rows in `normed` to their stream. `next` is the product that follows. */
static void mlp(const Shape *m, const Layer *l, const Product *next, const Room *room, int64_t rows, const Team *team) {
    if (l->experts) mix_experts(m, l, next, room, rows, team);
    else gated_mlp(m, l, next, room, rows, team);
}

/* Rows' shares [rows, count] of experts, from the router's logits [rows, count]. */
void specdec_route(const Experts *x, const float *logits, int64_t rows, float *shares) {
    ROUNDS_TO_NEAREST;
    for (int64_t r = 0; r < rows; r++) route(x, logits + r * x->count, shares + r * x->count);
}
