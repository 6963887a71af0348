/* Told: a hash of each group of results, one of all, and what differs where it must not. */

static struct {
    const char *group;
    uint64_t hash, all;
    int differences, groups, tiles; /* tiles: whether what follows is by tiles, which are no part of `all` */
} told = {.all = 14695981039346656037u};

static void mix_in(uint64_t *hash, uint64_t value) { *hash = (*hash ^ value) * 1099511628211u, *hash ^= *hash >> 29; }

/* Ends a group and begins the next one, NULL after the last. */
static void group(const char *name) {
    if (told.group) {
        printf("%016llx %s%s\n", (unsigned long long)told.hash, told.group, told.tiles ? ", by tiles" : "");
        if (!told.tiles) mix_in(&told.all, told.hash);
    }
    release(0);
    told.group = name, told.hash = 14695981039346656037u, told.groups++;
    seed = 0; /* so that groups do not depend on those before them */
    for (; name && *name; name++) mix_in(&seed, (uint64_t)*name);
    fflush(stdout);
}

/* Bits of a value: 'h' bfloat16, 'f' float, 'd' double, 'i' int32, 'l' int64. All NaN are one, as the sign and the
 * payload of what an operation makes of NaN depend on the order of its operands, which compilers choose. */
INLINE int width_of(char type) { return type == 'h' ? 2 : type == 'f' || type == 'i' ? 4 : 8; }
static uint64_t bits_of(const void *values, int64_t at, char type) {
    uint64_t bits = 0;
    memcpy(&bits, (const char *)values + at * width_of(type), (size_t)width_of(type)); /* little endian */
    if (type == 'h' && (bits & 0x7fff) > 0x7f80) return 0x7fc0;
    if (type == 'f' && (bits & 0x7fffffff) > 0x7f800000) return 0x7fc00000;
    if (type == 'd' && (bits & ~(1ull << 63)) > 0x7ffull << 52) return 0x7ff8ull << 48;
    return bits;
}

static void tell(const void *values, int64_t count, char type) {
    for (int64_t i = 0; i < count; i++) mix_in(&told.hash, bits_of(values, i, type));
}

/* Sees that values are as expected; of a group, the first differences are printed. */
static void same(const char *what, int64_t rows, int threads, int64_t row, const void *found, const void *expected,
                 int64_t count, char type) {
    static const char *latest;
    static int printed;
    if (!memcmp(found, expected, (size_t)(count * width_of(type)))) return;
    if (latest != told.group) latest = told.group, printed = 0;
    for (int64_t i = 0; i < count; i++) {
        const unsigned long long own = bits_of(found, i, type), other = bits_of(expected, i, type);
        if (own == other) continue;
        told.differences++;
        if (printed++ < 4)
            printf("DIFFERS %s%s: %s, %lld rows, %d threads, row %lld, value %lld: %llx, not %llx\n", told.group,
                   told.tiles ? ", by tiles" : "", what, (long long)rows, threads, (long long)row, (long long)i, own, other);
        return;
    }
}

/* The state in which a host may have left the thread that calls: denormal numbers count as zero, or all is rounded up. */
enum State { PLAIN_STATE, FLUSHED, UPWARD };
#if defined(__x86_64__)
static uint32_t control(void) { return __builtin_ia32_stmxcsr() & 0xffc0; }
static void set_control(uint32_t bits) { __builtin_ia32_ldmxcsr(bits); }
static const uint32_t controls[] = {0x1f80, 0x1f80 | 0x8040, 0x1f80 | 0x4000};
#elif defined(__aarch64__)
static uint32_t control(void) {
    uint64_t bits;
    __asm__ volatile("mrs %0, fpcr" : "=r"(bits));
    return (uint32_t)bits;
}
static void set_control(uint32_t bits) { __asm__ volatile("msr fpcr, %0" : : "r"((uint64_t)bits)); }
static const uint32_t controls[] = {0, 1u << 24, 1u << 22};
#endif

static void set_state(enum State state) {
    __asm__ volatile("" : : : "memory");
    set_control(controls[state]);
    __asm__ volatile("" : : : "memory");
}

/* Back from a call that was made in a state, which the call must have left as it was. */
static void unset_state(enum State state) {
    __asm__ volatile("" : : : "memory");
    const uint32_t now = control();
    set_state(PLAIN_STATE);
    same("the caller's state of floating point", 0, 0, 0, &now, controls + state, 1, 'i');
}

/* Numbers of rows that are tried: all up to 40, or few of them where a machine is emulated. */
static int quick;
static int tried(int64_t rows) { return !quick || rows < 8 || rows % 6 == 1; }
