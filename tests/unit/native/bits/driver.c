/* Whether the library's results are the same bits: for any rows beside a row, any threads and any place in a batch, which
 * this program sees by itself; and for any compiler, optimisation and tuning, for which it prints hashes to compare.
 *
 *     gcc -O3 -march=x86-64-v3 -fno-math-errno -fopenmp -I specdec/native tests/unit/native/bits/driver.c -lm && ./a.out
 *
 * One hash a line, of each group of results; the last one is of all groups but those by tiles. Prints what differs, and
 * exits with 1, where a row's result is not what it is alone. `quick` tries fewer numbers of rows; hashes stay. With
 * -DSMALL only groups without products are tried; -fwhole-program then leaves the rest out, and it compiles in a second.
 *
 * Hashes depend on the class of arithmetic, which is printed first:
 * - lanes: 16 with AVX-512, else 8: sums run over so many lanes;
 * - fused: whether a * b + c is rounded once: with FMA, AVX-512, or on Arm;
 * - pairs: whether a bfloat16 model multiplies pairs of bfloat16 (AVX512_BF16);
 * - tiles: whether it does so by tiles (AMX); then the groups by tiles are added, the others stay.
 * All other instructions (BW, VBMI, VNNI, F16C, BMI2, NEON) change no bit: those of integers and conversions are exact.
 * Blocks by row and in exact sums have one hash in all classes.
 */
#include <stdio.h>
#ifdef EMULATE_VNNI /* AVX-VNNI's code on a machine without it: its two instructions by loops */
#include <immintrin.h>
#include <stdint.h>
#include <string.h>
__attribute__((noinline)) static __m256i emulated_dpbusd(__m256i sum, __m256i codes, __m256i row) {
    uint8_t unsigned_bytes[32];
    int8_t signed_bytes[32];
    int32_t sums[8];
    memcpy(unsigned_bytes, &codes, sizeof codes), memcpy(signed_bytes, &row, sizeof row), memcpy(sums, &sum, sizeof sum);
    for (int i = 0; i < 32; i++) sums[i / 4] += unsigned_bytes[i] * signed_bytes[i];
    memcpy(&sum, sums, sizeof sum);
    return sum;
}
__attribute__((noinline)) static __m256i emulated_dpwssd(__m256i sum, __m256i codes, __m256i row) {
    int16_t one[16], other[16];
    int32_t sums[8];
    memcpy(one, &codes, sizeof codes), memcpy(other, &row, sizeof row), memcpy(sums, &sum, sizeof sum);
    for (int i = 0; i < 16; i++) sums[i / 2] += one[i] * other[i];
    memcpy(&sum, sums, sizeof sum);
    return sum;
}
#define __AVXVNNI__ 1
#define _mm256_dpbusd_avx_epi32 emulated_dpbusd
#define _mm256_dpwssd_avx_epi32 emulated_dpwssd
#endif
#ifdef EMULATE_TILES
#include "emulated.h"
#define OF_A_PROCESSOR ", emulated"
#else
#define OF_A_PROCESSOR ""
#endif
#include "layers.c"

#include "made.h"
#include "told.h"
#include "models.h"
#include "by_rows.h"
#include "by_products.h"
#include "by_layers.h"
#include "by_heads.h"
#include "by_growth.h"

int main(int count, char **arguments) {
    quick = count > 1 && !strcmp(arguments[1], "quick");
    printf("%s" OF_A_PROCESSOR "\n", specdec_arithmetic());
    by_rows(), by_attention(), by_one_block(), by_slots();
#ifdef SMALL
    try_scores(0), try_scores(1), try_ranks();
#else
    by_products();
    by_layers();
    by_heads();
    if (HAS_TILES && specdec_tiles()) {
        group(NULL);
        told.tiles = 1;
        try_kinds(1);
        by_layers();
        by_heads();
    }
#endif
    group(NULL);
    told.tiles = 0;
    printf("%016llx all\n", (unsigned long long)told.all);
    if (told.differences) printf("FAILED: %d rows differ\n", told.differences);
    return told.differences > 0;
}
