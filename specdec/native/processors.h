/* Processors: with how many rows products prefetch weights by instructions, and whether blocks are marked as needed once. It
 * follows from the processor that runs the library, not from the one that compiled it. No bit depends on it. */

typedef struct {
    const char *vendor;
    uint32_t family, first, last; /* its models, both ends included */
    int64_t rows, twins;          /* the fewest rows that prefetch; the most rows that read two panels at once */
    int64_t once;                 /* whether blocks are marked as needed once, which leaves more of the caches to other data */
} Processor;

/* scripts/prefetch_table.py makes such a line. A core that runs far enough ahead of one stream by itself loses by
 * instructions; one that does not gains by a second stream. Zen 4 and Emerald Rapids were measured; Sapphire Rapids, whose
 * core is the same, was not. */
static const Processor processors[] = {
    {"AuthenticAMD", 25, 16, 31, 4, 0, 1},   /* Zen 4 */
    {"AuthenticAMD", 25, 96, 127, 4, 0, 1},  /* Zen 4 */
    {"AuthenticAMD", 25, 160, 175, 4, 0, 1}, /* Zen 4 */
    {"GenuineIntel", 6, 143, 143, 1, 6, 0},  /* Sapphire Rapids */
    {"GenuineIntel", 6, 207, 207, 1, 6, 0},  /* Emerald Rapids */
};

/* Those of a processor that is not in the table. */
static int64_t prefetching = 4, twins = 0, once = 0;

/* Takes other numbers than the table's, for measurements. */
void specdec_prefetch(int64_t rows, int64_t most, int64_t marks) { prefetching = rows, twins = most, once = marks; }

__attribute__((constructor)) static void know_processor(void) {
#ifdef __SSE2__
    uint32_t most, vendor[4] = {0} /* twelve letters */, version, b, c, d;
    if (!__get_cpuid(0, &most, vendor, vendor + 2, vendor + 1) || !__get_cpuid(1, &version, &b, &c, &d)) return;
    uint32_t family = version >> 8 & 15, model = version >> 4 & 15;
    if (family == 6 || family == 15) model |= version >> 12 & 0xf0;
    if (family == 15) family += version >> 20 & 255;
    for (unsigned n = 0; n < sizeof processors / sizeof *processors; n++) {
        const Processor *p = processors + n;
        if (!memcmp(vendor, p->vendor, 12) && family == p->family && model >= p->first && model <= p->last)
            specdec_prefetch(p->rows, p->twins, p->once);
    }
#endif
}

/* Whether a product of some rows prefetches, a stretch ahead, into the second cache. */
INLINE int prefetches(int64_t rows) { return rows >= prefetching; }

/* Whether it reads two panels at once: one row by one panel has too few sums to be bound by anything but their latency,
 * which shows where weights lie in the caches. */
INLINE int reads_twins(int64_t rows, int64_t cached) { return rows <= (cached && twins < 2 ? 2 : twins) && rows <= TWIN; }

/* Prefetches some bytes of blocks: into the second cache, or marked as needed once, which was measured with AVX-512 alone. */
INLINE void ask_blocks(const uint8_t *soon, int64_t bytes) {
    if (LANES == 16 && once)
        for (int64_t at = 0; at < bytes; at += 64) __builtin_prefetch(soon + at, 0, 0);
    else
        for (int64_t at = 0; at < bytes; at += 64) __builtin_prefetch(soon + at, 0, 2);
}
