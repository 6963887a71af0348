/* OpenMP's entry by plain threads: a thread sanitizer sees these begin, wait and end, as it cannot see in gcc's runtime,
 * which is not compiled for one. By gcc's names for it, so for gcc alone; compiled into the library, in place of its own. */
#include <pthread.h>
#include <stdlib.h>

typedef struct {
    void (*run)(void *);
    void *data;
    int me, count;
    pthread_barrier_t *barrier;
} Member;

static __thread Member own = {.count = 1};

static void *enter(void *member) {
    own = *(Member *)member;
    own.run(own.data);
    own = (Member){.count = 1};
    return NULL;
}

void GOMP_parallel(void (*run)(void *), void *data, unsigned count, unsigned flags) {
    (void)flags;
    pthread_barrier_t barrier;
    Member *members = calloc(count, sizeof *members);
    pthread_t *threads = calloc(count, sizeof *threads);
    if (!members || !threads || pthread_barrier_init(&barrier, NULL, count)) abort();
    for (unsigned i = 0; i < count; i++) members[i] = (Member){run, data, (int)i, (int)count, &barrier};
    for (unsigned i = 1; i < count; i++)
        if (pthread_create(threads + i, NULL, enter, members + i)) abort();
    enter(members);
    for (unsigned i = 1; i < count; i++) pthread_join(threads[i], NULL);
    pthread_barrier_destroy(&barrier);
    free(threads);
    free(members);
}

void GOMP_barrier(void) { pthread_barrier_wait(own.barrier); }

int omp_get_thread_num(void) { return own.me; }

int omp_get_num_threads(void) { return own.count; }

/* So that teams of up to three wait in the library's own way, and larger ones in OpenMP's, on any machine. */
int omp_get_num_procs(void) { return 3; }
