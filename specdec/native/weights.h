/* Weights and slots: coding, look-ups and moves. */

/* How often each high byte occurs among `count` bfloat16 values. */
void specdec_count_highs(const uint16_t *values, int64_t count, int64_t *found) {
    int64_t some[4][256] = {0}; /* so that counts of one byte need not wait for each other */
    for (int64_t i = 0; i < count; i++) some[i % 4][values[i] >> 8]++;
    for (int i = 0; i < 256; i++) found[i] = some[0][i] + some[1][i] + some[2][i] + some[3][i];
}

/* Codes a bfloat16 weight [outputs, inputs] with the high bytes of `p`. It writes the weight, the odd weights and
 * their ends, for which there is room; the caller has set the other fields of `p`. */
void specdec_code(const Product *p, const uint16_t *values, uint8_t *weight, Odd *odd, int64_t *odd_end) {
    const int64_t panels = padded(p->outputs) / PANEL;
    uint8_t codes[256], places[PANEL];
    memset(codes, CODES, sizeof codes); /* stands for "no code" */
    for (int i = CODES - 1; i > 0; i--) codes[p->highs[i]] = i;
    codes[0] = 0;
    for (int o = 0; o < PANEL; o++) places[o] = place_of(o);
    int64_t known = 0;
    for (int64_t panel = 0; panel < panels; odd_end[panel++] = known) {
        const uint16_t *first = values + panel * PANEL * p->inputs;
        const int rows = p->outputs - panel * PANEL < PANEL ? p->outputs - panel * PANEL : PANEL;
        uint8_t *step = weight + panel * p->inputs / 2 * CODE_BYTES;
        for (int64_t i = 0; i < p->inputs; i += 2, step += CODE_BYTES) {
            uint8_t high[LOWS] = {0}, any = 0;
            if (rows < PANEL) memset(step, 0, LOWS);
            for (int o = 0; o < rows; o++) {
                uint32_t pair;
                memcpy(&pair, first + o * p->inputs + i, sizeof pair);
                step[places[o]] = pair, step[places[o] + 1] = pair >> 16;
                const uint8_t even = codes[pair >> 8 & 255], uneven = codes[pair >> 24];
                high[places[o]] = even, high[places[o] + 1] = uneven;
                any |= even | uneven;
            }
            if (any & CODES)
                for (int n = 0; n < 2 * rows; n++) { /* of both inputs, all outputs */
                    const int o = n % rows, place = places[o] + n / rows;
                    if (high[place] != CODES) continue;
                    const int64_t at = i + n / rows;
                    odd[known++] = (Odd){(int32_t)(panel * PANEL + o), (int32_t)at, widen(first[o * p->inputs + at])};
                    step[place] = high[place] = 0;
                }
            for (int n = 0; n < PANEL; n++) step[LOWS + n] = high[n] | high[n + PANEL] << 4;
        }
    }
}

/* Writes the weight's rows with these indices to y [count, inputs], in bfloat16 or float32. Returns 0, or 1 where
 * such a row does not exist. */
int specdec_look_up(const Product *p, const int64_t *numbers, int64_t count, void *y, int half) {
    ROUNDS_TO_NEAREST;
    for (int64_t r = 0; r < count; r++) {
        if (numbers[r] < 0 || numbers[r] >= p->outputs) return 1;
        look_up_row(p, numbers[r], (char *)y + r * p->inputs * (half ? sizeof(uint16_t) : sizeof(float)), half);
    }
    return 0;
}

/* In each of `lists` of `size` slots, moves the slots `from`, ascending, to the slots from `first` on, each of
 * which is at or before its source, so it is read before it is overwritten. Positions wrap around at the last slot. */
void specdec_move(char *slots, int64_t lists, int64_t size, int64_t bytes, const int64_t *from, int64_t first,
                  int64_t count) {
    for (int64_t l = 0; l < lists; l++, slots += size * bytes)
        for (int64_t n = 0; n < count; n++)
            memcpy(slots + (first + n) % size * bytes, slots + from[n] % size * bytes, bytes);
}
