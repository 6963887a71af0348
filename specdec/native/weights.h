/* Weights and slots: coding, look-ups, moves. */

/* How often each high byte occurs among `count` bfloat16 values. */
void specdec_count_highs(const uint16_t *values, int64_t count, int64_t *found) {
    int64_t some[4][256] = {0}; /* so that one count need not wait for another of the same byte */
    for (int64_t i = 0; i < count; i++) some[i % 4][values[i] >> 8]++;
    for (int i = 0; i < 256; i++) found[i] = some[0][i] + some[1][i] + some[2][i] + some[3][i];
}

/* Codes a bfloat16 weight [outputs, inputs] by the high bytes of `p`, whose other fields are set but for what is
 * written: the weight, the odd ones and their ends, for which there is room. */
void specdec_code(const Product *p, const uint16_t *values, uint8_t *weight, Odd *odd, int64_t *odd_end) {
    const int64_t panels = padded(p->outputs) / PANEL;
    uint8_t codes[256] = {0};
    for (int i = 1; i < CODES; i++) codes[p->highs[i]] = i;
    int64_t known = 0;
    for (int64_t panel = 0; panel < panels; odd_end[panel++] = known) {
        uint8_t *to = weight + panel * p->inputs / 2 * CODE_BYTES;
        memset(to, 0, p->inputs / 2 * CODE_BYTES);
        for (int64_t i = 0; i < p->inputs; i++)
            for (int64_t o = 0; o < PANEL && panel * PANEL + o < p->outputs; o++) {
                const uint16_t value = values[(panel * PANEL + o) * p->inputs + i];
                const int64_t place = place_of(o) + i % 2;
                uint8_t *step = to + i / 2 * CODE_BYTES;
                if (value >> 8 && !codes[value >> 8])
                    odd[known++] = (Odd){(int32_t)(panel * PANEL + o), (int32_t)i, widen(value)};
                else {
                    step[place] = value & 255;
                    step[LOWS + place % PANEL] |= codes[value >> 8] << (place < PANEL ? 0 : 4);
                }
            }
    }
}

/* y [count, inputs], in bfloat16 or float32, gets the weight's rows by their numbers. Returns 0, or 1 where there is no
 * such row. */
int specdec_look_up(const Product *p, const int64_t *numbers, int64_t count, void *y, int half) {
    for (int64_t r = 0; r < count; r++) {
        if (numbers[r] < 0 || numbers[r] >= p->outputs) return 1;
        look_up_row(p, numbers[r], (char *)y + r * p->inputs * (half ? sizeof(uint16_t) : sizeof(float)), half);
    }
    return 0;
}

/* In each of `lists` of `size` slots the slots `from`, ascending, go to those from `first` on, which is no later: each is
 * read before it is written. Positions beyond the last slot begin anew at the first. */
void specdec_move(char *slots, int64_t lists, int64_t size, int64_t bytes, const int64_t *from, int64_t first,
                  int64_t count) {
    for (int64_t l = 0; l < lists; l++, slots += size * bytes)
        for (int64_t n = 0; n < count; n++)
            memcpy(slots + (first + n) % size * bytes, slots + from[n] % size * bytes, bytes);
}
