/* Code for AVX512_BF16 and AMX on a machine with AVX-512 alone: their instructions in C, as Intel describes them. Numbers that
 * are too small for a normal one count as zero. What a processor does not allow, a tile of another shape say, ends the
 * program. The driver's hash by pairs was that of a Xeon with both. By tiles it was not compared with a processor's, so
 * hashes are of a class of their own. */
#include <immintrin.h>
#include <stdint.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

static __m512 emulated_flush(__m512 x) {
    const __m512i bits = (__m512i)x;
    const __mmask16 small = _mm512_testn_epi32_mask(bits, _mm512_set1_epi32(0x7f800000));
    return (__m512)_mm512_mask_and_epi32(bits, small, bits, _mm512_set1_epi32(INT32_MIN));
}

/* Sums plus products of each pair's first or second numbers. */
static __m512 emulated_add_products(__m512 sums, __m512i one, __m512i other, int second) {
    const __m512i upper = _mm512_set1_epi32(0xffff0000);
    const __m512 a = (__m512)(second ? _mm512_and_si512(one, upper) : _mm512_slli_epi32(one, 16));
    const __m512 b = (__m512)(second ? _mm512_and_si512(other, upper) : _mm512_slli_epi32(other, 16));
    return emulated_flush(_mm512_fmadd_ps(emulated_flush(a), emulated_flush(b), emulated_flush(sums)));
}
static __m512 emulated_dpbf16(__m512 sums, __m512bh one, __m512bh other) {
    sums = emulated_add_products(sums, (__m512i)one, (__m512i)other, 1);
    return emulated_add_products(sums, (__m512i)one, (__m512i)other, 0);
}

/* Two vectors in bfloat16, to the nearest, ties to even; the second vector's numbers come first. */
static __m256i emulated_narrow(__m512 x) {
    const __m512i bits = (__m512i)emulated_flush(x), one = _mm512_set1_epi32(1);
    const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), one);
    const __m512i rounded = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
    const __mmask16 none = _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q);
    const __m512i found = _mm512_mask_or_epi32(rounded, none, bits, _mm512_set1_epi32(0x00400000));
    return _mm512_cvtepi32_epi16(_mm512_srli_epi32(found, 16));
}
static __m512i emulated_narrow_both(__m512 high, __m512 low) {
    return _mm512_inserti64x4(_mm512_castsi256_si512(emulated_narrow(low)), emulated_narrow(high), 1);
}

/* A thread's tiles, whose shapes are given first. */
static __thread struct {
    int shaped;
    uint8_t rows[8];
    uint16_t bytes[8];
    char at[8][16][64];
} emulated;
static void emulated_require(int holds) {
    if (!holds) __builtin_trap();
}
static void emulated_shape(const void *shapes) {
    memset(&emulated, 0, sizeof emulated);
    memcpy(emulated.bytes, (const char *)shapes + 16, sizeof emulated.bytes);
    memcpy(emulated.rows, (const char *)shapes + 48, sizeof emulated.rows);
    emulated_require(*(const char *)shapes == 1);
    for (int tile = 0; tile < 8; tile++) emulated_require(emulated.rows[tile] <= 16 && emulated.bytes[tile] <= 64);
    emulated.shaped = 1;
}
static void emulated_zero(int tile) {
    emulated_require(emulated.shaped);
    memset(emulated.at[tile], 0, sizeof emulated.at[tile]);
}
static void emulated_load(int tile, const void *from, int64_t apart) {
    emulated_zero(tile);
    for (int row = 0; row < emulated.rows[tile]; row++)
        memcpy(emulated.at[tile][row], (const char *)from + row * apart, emulated.bytes[tile]);
}
static void emulated_store(int tile, void *to, int64_t apart) {
    emulated_require(emulated.shaped);
    for (int row = 0; row < emulated.rows[tile]; row++)
        memcpy((char *)to + row * apart, emulated.at[tile][row], emulated.bytes[tile]);
}
static void emulated_multiply(int to, int one, int other) {
    emulated_require(emulated.shaped && emulated.rows[to] == emulated.rows[one]);
    emulated_require(emulated.bytes[one] == 4 * emulated.rows[other] && emulated.bytes[to] == emulated.bytes[other]);
    for (int row = 0; row < emulated.rows[to]; row++) {
        __m512 sums = _mm512_loadu_ps(emulated.at[to][row]), products[2] = {_mm512_setzero_ps(), _mm512_setzero_ps()};
        for (int pair = 0; pair < emulated.rows[other]; pair++) {
            int32_t two;
            memcpy(&two, emulated.at[one][row] + sizeof two * pair, sizeof two);
            for (int second = 0; second < 2; second++)
                products[second] = emulated_add_products(products[second], _mm512_set1_epi32(two),
                                                         _mm512_loadu_si512(emulated.at[other][pair]), second);
        }
        products[0] = emulated_flush(_mm512_add_ps(products[0], products[1]));
        _mm512_storeu_ps(emulated.at[to][row], emulated_flush(_mm512_add_ps(emulated_flush(sums), products[0])));
    }
}
static void emulated_release(void) { emulated.shaped = 0; }

#undef _tile_loadconfig
#undef _tile_zero
#undef _tile_loadd
#undef _tile_stored
#undef _tile_dpbf16ps
#undef _tile_release
#define __AVX512BF16__ 1
#define __AMX_BF16__ 1
#define _mm512_dpbf16_ps emulated_dpbf16
#define _mm512_cvtne2ps_pbh(high, low) ((__m512bh)emulated_narrow_both(high, low))
#define _tile_loadconfig(shapes) emulated_shape(shapes)
#define _tile_zero(tile) emulated_zero(tile)
#define _tile_loadd(tile, from, apart) emulated_load(tile, from, apart)
#define _tile_stored(tile, to, apart) emulated_store(tile, to, apart)
#define _tile_dpbf16ps(to, one, other) emulated_multiply(to, one, other)
#define _tile_release() emulated_release()
#define syscall(...) 0L /* the system lends tiles */
