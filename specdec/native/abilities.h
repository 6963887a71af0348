/* Abilities: what the library can do on this machine. */

/* Whether this machine has an instruction for pairs of bfloat16. */
int specdec_pairs(void) {
#ifdef __AVX512BF16__
    return 1;
#else
    return 0;
#endif
}

/* The name of kind number n, or NULL where there is none. */
const char *specdec_kind(int n) {
#define KIND_NAME(kind) #kind,
    static const char *const names[] = {KINDS(KIND_NAME)};
    return n >= 0 && n < (int)(sizeof names / sizeof *names) ? names[n] : NULL;
}

/* The class of arithmetic: libraries of one class compute the same bits, whatever compiled them; see specdec_tiles, too. */
const char *specdec_arithmetic(void) {
#if LANES == 16 && defined(__AVX512BF16__)
    return "16 lanes, fused, pairs of bfloat16";
#elif LANES == 16
    return "16 lanes, fused";
#elif FUSES
    return "8 lanes, fused";
#else
    return "8 lanes";
#endif
}

/* Whether several threads share the library's work. */
int specdec_teams(void) {
#ifdef _OPENMP
    return 1;
#else
    return 0;
#endif
}

/* Whether the library reads coded weights. */
int specdec_codes(void) { return READS_CODES; }

/* Whether this machine has tiles (AMX) and the system lets this process use them; asking enables them. */
int specdec_tiles(void) {
#if HAS_TILES
    enum { REQUEST = 0x1023, TILE_DATA = 18 }; /* ARCH_REQ_XCOMP_PERM */
    return !syscall(SYS_arch_prctl, REQUEST, TILE_DATA);
#else
    return 0;
#endif
}
