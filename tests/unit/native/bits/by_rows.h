/* By rows: norms, rotations, softmax and gates of every size, in the thread that calls. */

static void by_rows(void) {
    enum { SIZE = 100 };
    float x[SIZE + LANES], y[SIZE + LANES], by[2 * SIZE];
    group("rows of every size");
    for (int64_t size = 1; size <= SIZE; size++)
        for (int power = 0; power < 6; power += 2) {
            fill(x, size, 0, power), fill(by, 2 * size, 0, 0);
            norm(x, by, y, size, 0x1p-17f), tell(y, size, 'f');
            memcpy(y, x, (size_t)size * 4), rotate(y, by, by + size, size / 2 * 2), tell(y, size, 'f');
            memcpy(y, x, (size_t)size * 4), soften(y, size, NULL), tell(y, size, 'f');
            for (int64_t i = 0; i + LANES <= size; i += LANES) {
                const floats gate = gated(load(x, i, 0), load(by, i, 0));
                tell(&gate, LANES, 'f');
            }
        }
}

/* Attention by vectors, rows of three heads each, for which blocks are turned; one row after the other sees what all see. */
static void by_attention(void) {
    enum { DIM = 48, HEADS = 3, SEEN = 37, ROOM = 64, ROWS = 3, WIDTH = HEADS * DIM };
    for (int half = 0; half < 2; half++) {
        group(half ? "attention in bfloat16" : "attention in float32");
        char *keys = memory(SEEN * DIM * 4), *values = memory(SEEN * DIM * 4);
        float *query = memory(ROWS * WIDTH * 4), *scores = memory(ROWS * HEADS * ROOM * 4), *found = memory(2 * ROWS * WIDTH * 4);
        float *beside = memory(room_beside(ROWS * HEADS, DIM) * 4);
        int32_t slots[ROWS * ROOM];
        for (int64_t i = 0; i < SEEN * DIM; i++) put(keys, i, half, number(0)), put(values, i, half, number(0));
        for (int64_t i = 0; i < ROWS * WIDTH; i++) put(query, i, 0, number(0)); /* no large one, which would take all weight */
        for (int32_t n = 0; n < ROWS * ROOM; n++) slots[n] = n % ROOM * 5 % SEEN;
        Seen a = {.query = query, .output = found, .scores = scores, .keys = keys, .values = values, .slots = slots, .rows = ROWS,
                  .heads = HEADS, .dim = DIM, .room = ROOM, .query_stride = WIDTH, .output_stride = WIDTH,
                  .count = {SEEN - 9, SEEN, SEEN}, .cap = half ? 0 : 30, .kind = half ? HALF : FULL, .beside = beside};
        attend(&a);
        tell(found, ROWS * WIDTH, 'f');
        a.rows = 1, a.output = found + ROWS * WIDTH;
        for (int r = 0; r < ROWS; r++, a.query += WIDTH, a.output += WIDTH, a.count[0] = SEEN, a.slots += ROOM) attend(&a);
        same("attention", ROWS, 1, 0, found + ROWS * WIDTH, found, ROWS * WIDTH, 'f');
    }
}

/* Blocks of a panel times one row, by one version of each loop of products; `by_products` tries all of them. */
static void by_one_block(void) {
    enum { INPUTS = 256 };
    static Decoded decoded;
    static const char *const names[] = {"Q4_K", "NF4_64"};
    group("a panel of blocks");
    for (int n = 0; n < 2; n++) {
        const Product p = quantised(EXACT_QUANTISED, INPUTS, PANEL, 1, names + n, 0, 0);
        const WeightFormat *f = specdec_format(p.parts->format);
        const uint8_t *panel = p.parts->weight;
        float sums[PANEL] = {0}, x[2 * INPUTS];
        fill(x, INPUTS, 0, 0);
        if (n) {
            multiply_vectors(f, panel, INPUTS, x, INPUTS, sums, 0, 1, PANEL / LANES);
            tell(sums, PANEL, 'f');
            continue;
        }
        decode_blocks(f, panel, 0, INPUTS / CHUNK, 0, 0, &decoded);
        multiply_exact(&decoded, x, INPUTS, sums, INPUTS / CHUNK, f->offset, f->minima, 0, 1, PANEL / LANES, 1);
        tell(sums, PANEL, 'f');
        round_row(x, INPUTS);
        const Chunks chunks = decoded_chunks(f, &decoded, INPUTS / CHUNK, 0);
        multiply_chunks(&chunks, (const int32_t *)x, INPUTS, sums, 0, 1, PANEL / LANES, DECODED, 0, 0, 1);
        tell(sums, PANEL, 'f');
    }
}

/* Slots of accepted rows, moved to the front within each head's list, which begins again at its end. */
static void by_slots(void) {
    enum { LISTS = 3, SIZE = 11, BYTES = 12, COUNT = 5, FIRST = 8 };
    static const int64_t from[COUNT] = {8, 10, 13, 14, 18};
    char slots[LISTS][SIZE][BYTES], moved[LISTS][SIZE][BYTES];
    group("slots that move");
    for (size_t n = 0; n < sizeof slots; n++) ((char *)slots)[n] = (char)random_bits();
    memcpy(moved, slots, sizeof slots);
    for (int l = 0; l < LISTS; l++)
        for (int n = 0; n < COUNT; n++) memcpy(slots[l][(FIRST + n) % SIZE], slots[l][from[n] % SIZE], BYTES);
    specdec_move((char *)moved, LISTS, SIZE, BYTES, from, FIRST, COUNT);
    same("moved", COUNT, 1, 0, moved, slots, sizeof slots / 4, 'i');
    tell(moved, sizeof slots / 4, 'i');
}
