/* Panels of quantised blocks, the layout that products read.
 *
 * A panel interleaves the blocks of PANEL outputs for the same inputs: d of each output; m of each, where the
 * format has minima; or a float32 of each; then for every CHUNK inputs the group numbers of each output, and the codes. The bits of codes
 * lie in 32-bit words, one word of each output after another. For eight inputs, byte 0 of a word has the bits of
 * inputs 0 and 2, byte 1 of inputs 4 and 6, byte 2 of 1 and 3, byte 3 of 5 and 7. So one shift and one mask give,
 * for each output, two inputs as adjacent 16-bit numbers (0 and 1, 2 and 3, ...), or four as bytes (0, 4, 1, 5 and
 * 2, 6, 3, 7). Bits above the lowest four, or two, have words of their own. A panel takes the bytes of its blocks
 * in the file, or up to 4% more. Float16 lies as in dense weights' panels: of each input, one output after another. */

INLINE int64_t head_bytes(const WeightFormat *f) {
    return f->scales == UNSCALED ? 0 : 2 * PANEL * (f->minima || f->scales == FLOATS ? 2 : 1);
}
INLINE int64_t groups_in(const WeightFormat *f) { return CHUNK / f->group; } /* of a chunk */
INLINE int has_numbers(const WeightFormat *f) { return f->scales == BYTES || f->scales == NIBBLES; }
INLINE int64_t number_bytes(const WeightFormat *f) { /* of a chunk's groups */
    const int64_t bytes = PANEL * groups_in(f);
    return !has_numbers(f) ? 0 : f->scales == BYTES && f->minima ? 2 * bytes : bytes;
}
INLINE int64_t chunk_bytes(const WeightFormat *f) { return number_bytes(f) + 4 * PANEL * f->bits; }
INLINE int64_t block_bytes(const WeightFormat *f) { return head_bytes(f) + f->values / CHUNK * chunk_bytes(f); }

/* Bytes of all panels of a weight. */
int64_t specdec_panel_bytes(int format, int64_t outputs, int64_t inputs) {
    const WeightFormat *f = formats + format;
    return (outputs + PANEL - 1) / PANEL * (inputs / f->values) * block_bytes(f);
}

/* The bits of `from` at the set bits of `mask`, moved together. */
INLINE uint32_t gather_bits(uint64_t from, uint64_t mask) {
#ifdef __BMI2__
    return (uint32_t)_pext_u64(from, mask);
#else
    uint32_t found = 0;
    for (int at = 0; mask; mask &= mask - 1) found |= (uint32_t)(from >> __builtin_ctzll(mask) & 1) << at++;
    return found;
#endif
}

/* Writes bits [first, first + wide) of CHUNK codes to words, PANEL words apart. */
INLINE void put_bits(const uint8_t *codes, uint32_t *to, const int first, const int wide) {
    if (wide == 8) {
        for (int four = 0; four < CHUNK / 4; four++, to += PANEL) {
            const uint8_t *own = codes + four / 2 * 8 + four % 2 * 2;
            *to = own[0] | own[4] << 8 | own[1] << 16 | (uint32_t)own[5] << 24;
        }
        return;
    }
    const uint64_t mask = (((uint64_t)1 << wide) - 1) << first, both = mask | mask << 16; /* inputs 0 and 2 of eight */
    uint32_t word = 0;
    for (int at = 0, bits = 0; at < CHUNK; at += 8) {
        uint64_t some;
        memcpy(&some, codes + at, sizeof some);
        if (wide == 4) word = gather_bits(some, both | both << 32) | gather_bits(some, both << 8 | both << 40) << 16;
        else
            word |= (gather_bits(some, both) | gather_bits(some, both << 32) << 8 | gather_bits(some, both << 8) << 16 |
                     gather_bits(some, both << 40) << 24) << bits;
        bits += 2 * wide;
        if (bits < 8) continue;
        *to = word, to += PANEL, word = 0, bits = 0;
    }
}

INLINE void put_codes(const uint8_t *codes, uint32_t *to, const int bits) {
    put_bits(codes, to, 0, bits == 8 ? 8 : bits >= 4 ? 4 : 2);
    if (bits == 6) put_bits(codes, to + 4 * PANEL, 4, 2);
    if (bits == 5) put_bits(codes, to + 4 * PANEL, 4, 1);
    if (bits == 3) put_bits(codes, to + 2 * PANEL, 2, 1);
}

INLINE void put_any_codes(const uint8_t *codes, uint32_t *to, int bits) {
    switch (bits) {
        case 2: put_codes(codes, to, 2); return;
        case 3: put_codes(codes, to, 3); return;
        case 4: put_codes(codes, to, 4); return;
        case 5: put_codes(codes, to, 5); return;
        case 6: put_codes(codes, to, 6); return;
        default: put_codes(codes, to, 8);
    }
}

/* Writes one output's block to its place in the panel's block. */
static void put_block(const WeightFormat *f, const Block256 *block, uint8_t *to, int64_t own) {
    const int64_t groups = groups_in(f);
    if (f->levels == HALVES) {
        for (int i = 0; i < CHUNK; i++) ((uint16_t *)to)[i * PANEL + own] = two_bytes(block->codes + 2 * i);
        return;
    }
    if (f->scales == FLOATS) ((uint32_t *)to)[own] = block->d | (uint32_t)block->m << 16;
    else ((uint16_t *)to)[own] = block->d;
    if (f->minima) ((uint16_t *)to)[PANEL + own] = block->m;
    to += head_bytes(f);
    for (int64_t chunk = 0; chunk < f->values / CHUNK; chunk++, to += chunk_bytes(f)) {
        for (int64_t g = 0; g < groups && has_numbers(f); g++) {
            const uint8_t scale = (uint8_t)block->scales[chunk * groups + g], minimum = block->minima[chunk * groups + g];
            to[g * PANEL + own] = f->scales == BYTES ? scale : (uint8_t)(scale | minimum << 4);
            if (f->scales == BYTES && f->minima) to[(groups + g) * PANEL + own] = minimum;
        }
        put_any_codes(block->codes + chunk * CHUNK, (uint32_t *)(to + number_bytes(f)) + own, f->bits);
    }
}

/* Panels of a weight [outputs, inputs] from its rows' blocks. */
void specdec_lay_blocks(int format, const uint8_t *blocks, int64_t outputs, int64_t inputs, uint8_t *to, int threads) {
    const WeightFormat *f = formats + format;
    const int64_t count = inputs / f->values, panels = (outputs + PANEL - 1) / PANEL;
    AS_TEAM {
        SHARED(panel, panels)
            for (int64_t n = 0; n < count; n++) {
                uint8_t *own = to + (panel * count + n) * block_bytes(f);
                const int64_t there = outputs - panel * PANEL < PANEL ? outputs - panel * PANEL : PANEL;
                if (there < PANEL) memset(own, 0, (size_t)block_bytes(f));
                for (int64_t o = 0; o < there; o++) {
                    Block256 block;
                    f->read(blocks + ((panel * PANEL + o) * count + n) * f->bytes, &block);
                    put_block(f, &block, own, o);
                }
            }
    }
}

typedef int16_t shorts __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef uint16_t doubled __attribute__((vector_size(4 * LANES), aligned(4), may_alias));

INLINE words shifted(words bits, const int right) { return right < 0 ? bits << -right : bits >> right; }

/* Levels of pair k of a word's eight codes, for LANES outputs: two adjacent 16-bit numbers each. */
INLINE words levels_of(words eight, const int k) {
#if LANES == 16 && defined(__AVX512BW__) /* it reads five bits of each number, and the list is there twice */
    return (words)_mm512_permutexvar_epi16((__m512i)(eight >> 4 * k), _mm512_loadu_si512(levels.twice));
#elif LANES == 8 && defined(__AVX2__) /* four levels as bytes, of which two are widened */
    const __m256i list = _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i *)levels.bytes));
    const shorts four = (shorts)_mm256_shuffle_epi8(list, (__m256i)eight);
    return (words)((k ? four : four << 8) >> 8);
#else
    words found;
    for (int n = 0; n < LANES; n++)
        found[n] = (uint16_t)levels.bytes[eight[n] >> 8 * k & 15] | (uint32_t)(uint16_t)levels.bytes[eight[n] >> (8 * k + 16) & 15] << 16;
    return found;
#endif
}

/* Levels of four codes as bytes, plus 128. */
INLINE words byte_levels_of(words numbers) {
#if LANES == 16 && defined(__AVX512BW__)
    const __m128i list = _mm_loadu_si128((const __m128i *)levels.above);
    return (words)_mm512_shuffle_epi8(_mm512_broadcast_i32x4(list), (__m512i)numbers);
#elif LANES == 8 && defined(__AVX2__)
    const __m128i list = _mm_loadu_si128((const __m128i *)levels.above);
    return (words)_mm256_shuffle_epi8(_mm256_broadcastsi128_si256(list), (__m256i)numbers);
#else
    for (int n = 0; n < LANES; n++)
        numbers[n] = levels.above[numbers[n] & 15] | levels.above[numbers[n] >> 8 & 15] << 8 |
                     levels.above[numbers[n] >> 16 & 15] << 16 | (uint32_t)levels.above[numbers[n] >> 24] << 24;
    return numbers;
#endif
}

#define WORDS(from, n) (*(const words *)((from) + (n) * PANEL))

/* Values of four inputs' codes as bytes, plus 128 where they are levels. `j` is the index of the four in CHUNK. */
INLINE words four_of(const uint32_t *codes, const int j, const int bits, const int listed) {
    const uint32_t *more = codes + 4 * PANEL;
    if (bits == 8) return WORDS(codes, j);
    if (bits < 4) {
        const words low = WORDS(codes, j / 4) >> 2 * (j % 4) & 0x03030303;
        if (bits == 2) return low;
        return low | (shifted(WORDS(codes, 2), j - 2) & 0x04040404);
    }
    const words low = WORDS(codes, j / 2) >> 4 * (j % 2) & 0x0f0f0f0f;
    if (bits == 5) return low | (shifted(WORDS(more, 0), j - 4) & 0x10101010);
    if (bits == 6) return low | (shifted(WORDS(more, j / 4), 2 * (j % 4) - 4) & 0x30303030);
    if (listed) return byte_levels_of(low);
    return low;
}

/* Values of two inputs' codes, for LANES outputs: two adjacent 16-bit numbers each. `k` is the pair's index in
 * CHUNK. Pairs k and k + 2 of four are extracted as bytes together. */
INLINE words pair_of(const uint32_t *codes, const int k, const int bits, const int listed) {
    const int high = k % 4 / 2;
    if (listed && LANES == 16) return levels_of(WORDS(codes, k / 4), k % 4);
    const words four = four_of(codes, k / 4 * 2 + k % 2, bits, 0);
    if (listed) return levels_of(four, high);
    if (high) return (words)((doubled)four >> 8);
    return (words)((doubled)four & 255);
}

/* The order in which pairs are extracted. */
INLINE int pair_at(const int n) { return n / 4 * 4 + n % 4 / 2 + n % 2 * 2; }

INLINE void decode_chunk(const uint32_t *codes, uint32_t *to, const int bits, const int listed) {
    for (int first = 0; first < PANEL; first += LANES)
#pragma GCC unroll 16
        for (int n = 0; n < CHUNK / 2; n++) {
            const int k = pair_at(n);
            *(words *)(to + k * PANEL + first) = pair_of(codes + first, k, bits, listed);
        }
}

/* LANES bytes, signed or unsigned, as 32-bit numbers; gcc would convert vectors one lane after another. */
INLINE ints widen_bytes(const uint8_t *from, const int with_sign) {
#if LANES == 16
    const __m128i own = _mm_loadu_si128((const __m128i *)from);
    return (ints)(with_sign ? _mm512_cvtepi8_epi32(own) : _mm512_cvtepu8_epi32(own));
#elif defined(__AVX2__)
    const __m128i own = _mm_loadl_epi64((const __m128i *)from);
    return (ints)(with_sign ? _mm256_cvtepi8_epi32(own) : _mm256_cvtepu8_epi32(own));
#else
    ints found;
    for (int n = 0; n < LANES; n++) found[n] = with_sign ? (int8_t)from[n] : from[n];
    return found;
#endif
}

/* The scales [groups, PANEL] of a chunk, and its minima. */
INLINE void read_scales(const WeightFormat *f, const uint8_t *head, const uint8_t *chunk, float *scales, float *minima) {
    const int64_t groups = groups_in(f);
    for (int64_t g = 0; g < groups; g++)
        for (int64_t o = 0; o < PANEL; o += LANES) {
            floats scale = f->scales == FLOATS ? load(head, o, 0) : widen_halves((const uint16_t *)head + o), minimum = {0};
            const uint8_t *own = chunk + g * PANEL + o;
            if (f->minima) minimum = widen_halves((const uint16_t *)head + PANEL + o);
            if (f->scales == PLAIN || f->scales == FLOATS) minimum = -minimum;
            else if (f->scales == ZEROS) minimum *= scale;
            else if (f->scales == BYTES) {
                scale *= __builtin_convertvector(widen_bytes(own, 1), floats);
                if (f->minima) minimum *= __builtin_convertvector(widen_bytes(own + groups * PANEL, 0), floats);
            } else {
                scale *= __builtin_convertvector(widen_bytes(own, 0) & 15, floats);
                minimum *= __builtin_convertvector(widen_bytes(own, 0) >> 4, floats);
            }
            *(floats *)(scales + g * PANEL + o) = scale;
            if (f->minima) *(floats *)(minima + g * PANEL + o) = minimum;
        }
}

/* Whether codes are decoded to bytes, for many rows of bytes; with few registers that would not pay. */
enum { DECODES_BYTES = LANES == 16 };

/* The same as bytes, four of them, which products with rows of bytes read. */
INLINE void decode_fours(const uint32_t *codes, uint32_t *to, const int bits, const int listed) {
    for (int first = 0; first < PANEL; first += LANES)
#pragma GCC unroll 16
        for (int j = 0; j < CHUNK / 4; j++)
            *(words *)(to + j * PANEL + first) = four_of(codes + first, j, bits, listed);
}

/* Decoded chunks: pairs of codes as 16-bit numbers, or fours as bytes, without the format's offset subtracted, and
 * scales. Codes of float32 values stay codes. */
typedef struct {
    uint32_t pairs[MOST / 2 * PANEL] __attribute__((aligned(64)));
    float scales[MOST / GROUP * PANEL], minima[MOST / GROUP * PANEL];
} Decoded;

INLINE void decode_codes(const uint32_t *codes, uint32_t *to, const int bits, const int listed, const int bytes) {
    if (bytes) decode_fours(codes, to, bits, listed);
    else decode_chunk(codes, to, bits, listed);
}

/* Decodes chunks [first, last) of a panel, counted from its first block, to pairs, or to bytes, which codes of eight
 * bits are; prefetches `ahead` bytes further on. */
INLINE void decode_to(const WeightFormat *f, const uint8_t *panel, int64_t first, int64_t last, int64_t ahead,
                      Decoded *to, const int bytes) {
    const int64_t each = f->values / CHUNK, groups = groups_in(f), size = chunk_bytes(f);
    for (int64_t n = first; n < last; n++) {
        const uint8_t *head = panel + n / each * block_bytes(f), *chunk = head + head_bytes(f) + n % each * size;
        const uint32_t *codes = (const uint32_t *)(chunk + number_bytes(f));
        uint32_t *found = to->pairs + (n - first) * CHUNK / (bytes ? 4 : 2) * PANEL;
        ask_blocks(chunk + ahead, size + 64);
        read_scales(f, head, chunk, to->scales + (n - first) * groups * PANEL, to->minima + (n - first) * groups * PANEL);
        switch (f->levels == INTEGERS ? 0 : f->bits) {
            case 0: decode_codes(codes, found, 4, 1, bytes); break;
            case 2: decode_codes(codes, found, 2, 0, bytes); break;
            case 3: decode_codes(codes, found, 3, 0, bytes); break;
            case 4: decode_codes(codes, found, 4, 0, bytes); break;
            case 5: decode_codes(codes, found, 5, 0, bytes); break;
            case 6: decode_codes(codes, found, 6, 0, bytes); break;
            default:
                if (!bytes) decode_chunk(codes, found, 8, 0);
        }
    }
}

static void decode_blocks(const WeightFormat *f, const uint8_t *panel, int64_t first, int64_t last, int64_t ahead,
                          int bytes, Decoded *to) {
    if (DECODES_BYTES && bytes) decode_to(f, panel, first, last, ahead, to, 1);
    else decode_to(f, panel, first, last, ahead, to, 0);
}
