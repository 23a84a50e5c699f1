/* How fast threads read memory that is in no cache: the limit of a decode step, which reads every weight once.
 *
 *     cc -O3 -march=native -pthread read_bandwidth.c && ./a.out THREADS MEGABYTES SECONDS
 *
 * Prints gigabytes per second as "pages streams GB/s" lines, for normal and for huge pages, and for 1 to 8 streams of
 * each thread; each is the best pass of those that fit into SECONDS, since whatever disturbs a pass only slows it.
 */
#define _GNU_SOURCE
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>

typedef uint64_t vector __attribute__((vector_size(64)));

typedef struct {
    const char *data;
    size_t bytes;
    int streams;
    uint64_t sum;
} Part;

static pthread_barrier_t gate;
static volatile int stop;

static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

/* Every cache line of the part once, in `streams` sequences side by side. */
static uint64_t read_once(const Part *part) {
    vector sums[8] = {{0}};
    const size_t each = part->bytes / (size_t)part->streams / 128 * 128;
    for (size_t at = 0; at < each; at += 128)
        for (int s = 0; s < part->streams; s++) {
            const vector *from = (const vector *)(part->data + (size_t)s * each + at);
            sums[s] += from[0];
            sums[s] ^= from[1];
        }
    uint64_t sum = 0;
    for (int s = 0; s < 8; s++)
        for (int i = 0; i < 8; i++) sum += sums[s][i];
    return sum;
}

static void *work(void *argument) {
    Part *part = argument;
    for (;;) {
        pthread_barrier_wait(&gate);
        if (stop) return NULL;
        part->sum += read_once(part);
        pthread_barrier_wait(&gate);
    }
}

static double best(const char *data, size_t bytes, int threads, int streams, double seconds) {
    Part *parts = calloc((size_t)threads, sizeof *parts);
    pthread_t *ids = calloc((size_t)threads, sizeof *ids);
    const size_t each = bytes / (size_t)threads / 4096 * 4096;
    pthread_barrier_init(&gate, NULL, (unsigned)threads + 1);
    stop = 0;
    for (int i = 0; i < threads; i++) {
        parts[i] = (Part){data + (size_t)i * each, each, streams, 0};
        if (pthread_create(&ids[i], NULL, work, &parts[i])) exit(1);
    }
    double shortest = 1e9;
    const double until = now() + seconds;
    do {
        const double from = now();
        pthread_barrier_wait(&gate);
        pthread_barrier_wait(&gate);
        const double taken = now() - from;
        if (taken < shortest) shortest = taken;
    } while (now() < until);
    stop = 1;
    pthread_barrier_wait(&gate);
    for (int i = 0; i < threads; i++) pthread_join(ids[i], NULL);
    pthread_barrier_destroy(&gate);
    free(parts);
    free(ids);
    return (double)each * threads / shortest / 1e9;
}

int main(int count, char **arguments) {
    const int threads = count > 1 ? atoi(arguments[1]) : 1;
    const size_t bytes = (size_t)(count > 2 ? atoi(arguments[2]) : 512) << 20;
    const double seconds = count > 3 ? atof(arguments[3]) : 0.4;
    if (threads < 1 || bytes < 1 << 20) {
        fprintf(stderr, "usage: %s THREADS MEGABYTES SECONDS\n", arguments[0]);
        return 2;
    }
    for (int huge = 0; huge < 2; huge++) {
        char *data = mmap(NULL, bytes + (2 << 20), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        if (data == MAP_FAILED) return 1;
        char *aligned = (char *)(((uintptr_t)data + (2 << 20) - 1) & ~(uintptr_t)((2 << 20) - 1));
        madvise(aligned, bytes, huge ? MADV_HUGEPAGE : MADV_NOHUGEPAGE);
        memset(aligned, 1, bytes);
        for (int streams = 1; streams <= 8; streams *= 2)
            printf("%s %d %.2f\n", huge ? "huge" : "normal", streams, best(aligned, bytes, threads, streams, seconds));
        munmap(data, bytes + (2 << 20));
    }
    return 0;
}
