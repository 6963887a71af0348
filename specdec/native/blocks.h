/* Blocks: the quantised formats of GGUF files, and what the 4-bit and 8-bit weights of other checkpoints are packed into;
 * one row of a table and one function each. */

/* What a block holds, whatever its format: weight i is (its group's scale) * (code - offset) - (its group's minimum).
 * Plain scales are d and -m; others are d times a group's number, and minima m times a group's. d and m are float16, or
 * one float32 in two halves, which is the scale. */
enum { MOST = 256, GROUP = 16, CHUNK = 32 }; /* values of a block, at most; of the smallest group; decoded at once */
enum Scales { PLAIN, BYTES, NIBBLES, ZEROS, FLOATS, UNSCALED }; /* d and m alone; a byte of each for a group; four bits of
                                                                 * each; d alone, and m is the code that stands for zero;
                                                                 * a float32; none */
enum Lists { NONE, INTEGERS, NF4, FP4, HALVES }; /* of values that codes number; NF4 and FP4 are of float32; the codes of
                                                  * HALVES, of two bytes, are float16 themselves */
typedef struct {
    uint16_t d, m;
    int8_t scales[MOST / GROUP];
    uint8_t minima[MOST / GROUP];
    uint8_t codes[MOST];
} Block256;

typedef struct {
    const char *name;
    int32_t type, values, bytes;  /* GGUF's number of it, or one below 0; values and bytes of a block in a file */
    int32_t bits, offset, group;  /* of a code; what is taken from it; values that have one scale */
    int32_t scales, minima, levels; /* how scales are kept; whether there are minima; the list that codes are numbers of */
    void (*read)(const uint8_t *restrict block, Block256 *restrict to);
} WeightFormat;

INLINE uint16_t two_bytes(const uint8_t *from) { return (uint16_t)(from[0] | from[1] << 8); }

/* Values [0, half) are the low four bits of `half` bytes, and values [half, 2 half) the high ones. */
INLINE void split_nibbles(const uint8_t *restrict from, uint8_t *restrict codes, const int half) {
    for (int i = 0; i < half; i++) codes[i] = from[i] & 15, codes[half + i] = from[i] >> 4;
}

/* Adds one more bit to each of 32 codes. */
INLINE void add_bits(const uint8_t *restrict from, uint8_t *restrict codes, const int place) {
    for (int i = 0; i < CHUNK / 8; i++) {
        uint64_t some, bits;
        memcpy(&some, codes + 8 * i, sizeof some);
#ifdef __BMI2__
        bits = _pdep_u64(from[i], 0x0101010101010101);
#else
        bits = 0;
        for (int n = 0; n < 8; n++) bits |= (uint64_t)(from[i] >> n & 1) << 8 * n;
#endif
        some |= bits << place;
        memcpy(codes + 8 * i, &some, sizeof some);
    }
}

static void read_q4_0(const uint8_t *restrict block, Block256 *restrict to) {
    to->d = two_bytes(block);
    split_nibbles(block + 2, to->codes, 16);
}

static void read_q4_1(const uint8_t *restrict block, Block256 *restrict to) {
    to->d = two_bytes(block), to->m = two_bytes(block + 2);
    split_nibbles(block + 4, to->codes, 16);
}

static void read_q5_0(const uint8_t *restrict block, Block256 *restrict to) {
    to->d = two_bytes(block);
    split_nibbles(block + 6, to->codes, 16);
    add_bits(block + 2, to->codes, 4);
}

static void read_q5_1(const uint8_t *restrict block, Block256 *restrict to) {
    to->d = two_bytes(block), to->m = two_bytes(block + 2);
    split_nibbles(block + 8, to->codes, 16);
    add_bits(block + 4, to->codes, 4);
}

static void read_q8_0(const uint8_t *restrict block, Block256 *restrict to) {
    to->d = two_bytes(block);
    for (int i = 0; i < 32; i++) to->codes[i] = block[2 + i] ^ 128; /* the file's codes are signed */
}

/* Two bits of each of 256 codes; 32 bytes have those of four runs of 32 codes. */
INLINE void add_pairs_of_bits(const uint8_t *restrict from, uint8_t *restrict codes, const int place) {
    for (int part = 0; part < 2; part++)
        for (int turn = 0; turn < 4; turn++)
            for (int i = 0; i < 32; i++) codes[part * 128 + turn * 32 + i] |= (from[part * 32 + i] >> 2 * turn & 3) << place;
}

/* One bit of each of 256 codes; bit n of 32 bytes belongs to the n-th run of 32 codes. */
INLINE void add_bits_across(const uint8_t *restrict from, uint8_t *restrict codes, const int place) {
    for (int turn = 0; turn < 8; turn++)
        for (int i = 0; i < 32; i++) codes[turn * 32 + i] |= (from[i] >> turn & 1) << place;
}

static void read_q2_k(const uint8_t *restrict block, Block256 *restrict to) {
    to->d = two_bytes(block + 80), to->m = two_bytes(block + 82);
    for (int g = 0; g < 16; g++) to->scales[g] = block[g] & 15, to->minima[g] = block[g] >> 4;
    memset(to->codes, 0, MOST);
    add_pairs_of_bits(block + 16, to->codes, 0);
}

static void read_q3_k(const uint8_t *restrict block, Block256 *restrict to) {
    const uint8_t *scales = block + 96;
    to->d = two_bytes(block + 108);
    for (int g = 0; g < 16; g++)
        to->scales[g] = (int8_t)(((scales[g % 8] >> g / 8 * 4 & 15) | (scales[8 + g % 4] >> g / 4 * 2 & 3) << 4) - 32);
    memset(to->codes, 0, MOST);
    add_pairs_of_bits(block + 32, to->codes, 0);
    add_bits_across(block, to->codes, 2);
}

/* Eight scales and eight minima of six bits each, from twelve bytes. */
INLINE void read_six_bits(const uint8_t *from, Block256 *to) {
    for (int g = 0; g < 4; g++) {
        to->scales[g] = from[g] & 63, to->minima[g] = from[4 + g] & 63;
        to->scales[4 + g] = (int8_t)((from[8 + g] & 15) | from[g] >> 6 << 4);
        to->minima[4 + g] = (uint8_t)(from[8 + g] >> 4 | from[4 + g] >> 6 << 4);
    }
}

static void read_q4_k(const uint8_t *restrict block, Block256 *restrict to) {
    to->d = two_bytes(block), to->m = two_bytes(block + 2);
    read_six_bits(block + 4, to);
    for (int part = 0; part < 4; part++) split_nibbles(block + 16 + part * 32, to->codes + part * 64, 32);
}

static void read_q5_k(const uint8_t *restrict block, Block256 *restrict to) {
    to->d = two_bytes(block), to->m = two_bytes(block + 2);
    read_six_bits(block + 4, to);
    for (int part = 0; part < 4; part++) split_nibbles(block + 48 + part * 32, to->codes + part * 64, 32);
    add_bits_across(block + 16, to->codes, 4);
}

static void read_q6_k(const uint8_t *restrict block, Block256 *restrict to) {
    to->d = two_bytes(block + 208);
    memcpy(to->scales, block + 192, 16);
    for (int part = 0; part < 2; part++) split_nibbles(block + part * 64, to->codes + part * 128, 64);
    add_pairs_of_bits(block + 128, to->codes, 4);
}

static void read_iq4_xs(const uint8_t *restrict block, Block256 *restrict to) {
    to->d = two_bytes(block);
    for (int g = 0; g < 8; g++) {
        const int low = block[4 + g / 2] >> g % 2 * 4 & 15, high = two_bytes(block + 2) >> 2 * g & 3;
        to->scales[g] = (int8_t)((low | high << 4) - 32);
        split_nibbles(block + 8 + g * 16, to->codes + g * 32, 16);
    }
}

/* d, the zero as a float16, and codes two by two: the first in a byte's low bits. */
INLINE void read_int4(const uint8_t *restrict block, Block256 *restrict to, const int values) {
    to->d = two_bytes(block), to->m = two_bytes(block + 2);
    for (int i = 0; i < values / 2; i++) to->codes[2 * i] = block[4 + i] & 15, to->codes[2 * i + 1] = block[4 + i] >> 4;
}

static void read_int4_32(const uint8_t *restrict block, Block256 *restrict to) { read_int4(block, to, 32); }
static void read_int4_64(const uint8_t *restrict block, Block256 *restrict to) { read_int4(block, to, 64); }
static void read_int4_128(const uint8_t *restrict block, Block256 *restrict to) { read_int4(block, to, 128); }

/* A float32 scale, and codes two by two: the first in a byte's high bits. */
INLINE void read_levels(const uint8_t *restrict block, Block256 *restrict to, const int values) {
    to->d = two_bytes(block), to->m = two_bytes(block + 2);
    for (int i = 0; i < values / 2; i++) to->codes[2 * i] = block[4 + i] >> 4, to->codes[2 * i + 1] = block[4 + i] & 15;
}

static void read_levels_32(const uint8_t *restrict block, Block256 *restrict to) { read_levels(block, to, 32); }
static void read_levels_64(const uint8_t *restrict block, Block256 *restrict to) { read_levels(block, to, 64); }

/* A float32 scale, and signed codes. */
INLINE void read_int8(const uint8_t *restrict block, Block256 *restrict to, const int values) {
    to->d = two_bytes(block), to->m = two_bytes(block + 2);
    for (int i = 0; i < values; i++) to->codes[i] = block[4 + i] ^ 128;
}

static void read_int8_32(const uint8_t *restrict block, Block256 *restrict to) { read_int8(block, to, 32); }
static void read_int8_128(const uint8_t *restrict block, Block256 *restrict to) { read_int8(block, to, 128); }

static void read_f16(const uint8_t *restrict block, Block256 *restrict to) { memcpy(to->codes, block, 2 * CHUNK); }

static const WeightFormat formats[] = {
    /* name, type, values, bytes, bits, offset, group, scales, minima, levels */
    {"Q4_0", 2, 32, 18, 4, 8, 32, PLAIN, 0, 0, read_q4_0},
    {"Q4_1", 3, 32, 20, 4, 0, 32, PLAIN, 1, 0, read_q4_1},
    {"Q5_0", 6, 32, 22, 5, 16, 32, PLAIN, 0, 0, read_q5_0},
    {"Q5_1", 7, 32, 24, 5, 0, 32, PLAIN, 1, 0, read_q5_1},
    {"Q8_0", 8, 32, 34, 8, 128, 32, PLAIN, 0, 0, read_q8_0},
    {"Q2_K", 10, 256, 84, 2, 0, 16, NIBBLES, 1, 0, read_q2_k},
    {"Q3_K", 11, 256, 110, 3, 4, 16, BYTES, 0, 0, read_q3_k},
    {"Q4_K", 12, 256, 144, 4, 0, 32, BYTES, 1, 0, read_q4_k},
    {"Q5_K", 13, 256, 176, 5, 0, 32, BYTES, 1, 0, read_q5_k},
    {"Q6_K", 14, 256, 210, 6, 32, 16, BYTES, 0, 0, read_q6_k},
    {"IQ4_NL", 20, 32, 18, 4, 0, 32, PLAIN, 0, INTEGERS, read_q4_0},
    {"IQ4_XS", 23, 256, 136, 4, 0, 32, BYTES, 0, INTEGERS, read_iq4_xs},
    {"INT4_32", -32, 32, 20, 4, 0, 32, ZEROS, 1, 0, read_int4_32},
    {"INT4_64", -64, 64, 36, 4, 0, 32, ZEROS, 1, 0, read_int4_64},
    {"INT4_128", -128, 128, 68, 4, 0, 32, ZEROS, 1, 0, read_int4_128},
    {"NF4_32", -1032, 32, 20, 4, 0, 32, FLOATS, 0, NF4, read_levels_32},
    {"NF4_64", -1064, 64, 36, 4, 0, 32, FLOATS, 0, NF4, read_levels_64},
    {"FP4_32", -2032, 32, 20, 4, 0, 32, FLOATS, 0, FP4, read_levels_32},
    {"FP4_64", -2064, 64, 36, 4, 0, 32, FLOATS, 0, FP4, read_levels_64},
    {"INT8_32", -3032, 32, 36, 8, 128, 32, FLOATS, 0, 0, read_int8_32},
    {"INT8_128", -3128, 128, 132, 8, 128, 32, FLOATS, 0, 0, read_int8_128},
    {"F16", 1, 32, 64, 16, 0, 32, UNSCALED, 0, HALVES, read_f16}, /* in a file, values have no blocks */
};
enum { FORMATS = sizeof formats / sizeof *formats };

/* The list of values that four-bit codes number: as 16-bit numbers, twice; as bytes; and as bytes, plus 128. */
#define LEVELS(of) \
    of(-127) of(-104) of(-83) of(-65) of(-49) of(-35) of(-22) of(-10) of(1) of(13) of(25) of(38) of(53) of(69) of(89) of(113)
#define ITSELF(level) level,
#define ABOVE(level) level + 128,
typedef struct {
    int16_t twice[32];
    int8_t bytes[16];
    uint8_t above[16];
} Levels;
static const Levels levels = {{LEVELS(ITSELF) LEVELS(ITSELF)}, {LEVELS(ITSELF)}, {LEVELS(ABOVE)}};

/* Those of bitsandbytes: quantiles of a normal distribution; numbers of one sign bit, two bits of exponent and one of
 * fraction, over the largest. */
static const float float_levels[2][16] = {
    {-1.f, -0.6961928009986877f, -0.5250730514526367f, -0.39491748809814453f, -0.28444138169288635f, -0.18477343022823334f,
     -0.09105003625154495f, 0.f, 0.07958029955625534f, 0.16093020141124725f, 0.24611230194568634f, 0.33791524171829224f,
     0.44070982933044434f, 0.5626170039176941f, 0.7229568362236023f, 1.f},
    {0.f, 0.0625f / 12, 8 / 12.f, 1.f, 4 / 12.f, 6 / 12.f, 2 / 12.f, 3 / 12.f,
     -0.f, -0.0625f / 12, -8 / 12.f, -1.f, -4 / 12.f, -6 / 12.f, -2 / 12.f, -3 / 12.f},
};
INLINE int has_float_levels(const WeightFormat *f) { return f->levels >= NF4; }

/* Format number n, or NULL where there is none. */
const WeightFormat *specdec_format(int n) { return n >= 0 && n < FORMATS ? formats + n : NULL; }

/* The scale, or the minimum, of a group in a block. */
INLINE float scale_of(const WeightFormat *f, const Block256 *block, int group) {
    if (f->scales == FLOATS) {
        const uint32_t bits = block->d | (uint32_t)block->m << 16;
        float scale;
        memcpy(&scale, &bits, sizeof scale);
        return scale;
    }
    if (f->scales == UNSCALED) return 1;
    const float d = float_of(block->d);
    return f->scales == PLAIN || f->scales == ZEROS ? d : d * (float)block->scales[group];
}

INLINE float minimum_of(const WeightFormat *f, const Block256 *block, int group) {
    if (!f->minima) return 0;
    if (f->scales == ZEROS) return float_of(block->d) * float_of(block->m);
    return f->scales == PLAIN ? -float_of(block->m) : float_of(block->m) * (float)block->minima[group];
}

INLINE int code_of(const WeightFormat *f, const Block256 *block, int i) {
    return f->levels == HALVES ? two_bytes(block->codes + 2 * i) : block->codes[i];
}

/* What a code stands for, before it is scaled. */
INLINE float level_of(const WeightFormat *f, int code) {
    if (f->levels == HALVES) return float_of((uint16_t)code);
    if (has_float_levels(f)) return float_levels[f->levels - NF4][code];
    return (float)(f->levels ? levels.bytes[code] : code - f->offset);
}

/* With minima, a scale times a level is exact: at most 22 bits. */
INLINE float value_in(const WeightFormat *f, const Block256 *block, int i) {
    const float scale = scale_of(f, block, i / f->group), level = level_of(f, code_of(f, block, i));
    return f->minima ? fused_one(scale, level, -minimum_of(f, block, i / f->group)) : scale * level;
}

INLINE void dequantise_group(const WeightFormat *f, const Block256 *block, int first, float *y, const int group) {
    const float scale = scale_of(f, block, first / group), minimum = minimum_of(f, block, first / group);
    const uint8_t *codes = block->codes + first;
    float values[CHUNK];
    if (f->levels)
        for (int i = 0; i < group; i++) values[i] = level_of(f, code_of(f, block, first + i));
    else
        for (int i = 0; i < group; i++) values[i] = codes[i] - f->offset;
    if (f->minima)
        for (int i = 0; i < group; i++) y[first + i] = fused_one(scale, values[i], -minimum);
    else
        for (int i = 0; i < group; i++) y[first + i] = scale * values[i];
}

/* Writes the weights of `count` blocks, stored as in a file, to y [count, values of a block]. */
void specdec_dequantise(int format, const uint8_t *blocks, int64_t count, float *y, int threads) {
    const WeightFormat *f = formats + format;
    AS_TEAM {
        SHARED(n, count) {
            Block256 block;
            f->read(blocks + n * f->bytes, &block);
            for (int first = 0; first < f->values; first += f->group)
                if (f->group == GROUP) dequantise_group(f, &block, first, y + n * f->values, GROUP);
                else dequantise_group(f, &block, first, y + n * f->values, CHUNK);
        }
    }
}
