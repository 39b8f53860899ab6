// What the raw programs share: memory, clock, and how they are asked and answer.
//
// They measure the least that the machine takes for moving bytes from one process to another, with
// nothing around it, so they are plain C without dependencies. Each program measures everything by
// itself and prints JSON; with --serve it reads orders, a line each, and answers each by a line of
// JSON, so that another program can measure by turns with it.
#ifndef AIOFLAGCX_BENCHMARKS_RAW_H
#define AIOFLAGCX_BENCHMARKS_RAW_H

#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <time.h>
#include <unistd.h>

#define LARGEST ((size_t)256 << 20)
#define GIB ((double)(1 << 30))

// Samples of one order: more than that are moved, but not in the percentiles.
#define MAX_SAMPLES ((size_t)1 << 20)

static void check(int fine, const char* what) {
    if (fine) return;
    perror(what);
    exit(1);
}

static double now(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (double)time.tv_sec + (double)time.tv_nsec * 1e-9;
}

// Ordinary memory: as malloc and most libraries get it, without huge pages being asked for. Every
// page is there.
static uint8_t* private_memory(int fill) {
    uint8_t* const memory =
        mmap(NULL, LARGEST, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    check(memory != MAP_FAILED, "mmap");
    memset(memory, fill, LARGEST);
    return memory;
}

// Every 8-byte word tells where it is.
static void number_words(uint8_t* memory) {
    for (uint64_t i = 0; i < LARGEST / 8; ++i) memcpy(memory + i * 8, &i, 8);
}

// For the other process: it ends with this one, in whatever way that ends.
static void end_with_parent(pid_t parent) {
    check(prctl(PR_SET_PDEATHSIG, SIGKILL) == 0, "prctl");
    if (getppid() != parent) _exit(1);
}

static int by_value(const void* a, const void* b) {
    const double x = *(const double*)a, y = *(const double*)b;
    return (x > y) - (x < y);
}

struct Timing {
    size_t count;    // of moves
    double seconds;  // for all of them
    double p50, p99, p999;
};

// Calls move(context) for at least `seconds`, at least once.
static struct Timing repeat(void (*move)(void*), void* context, double seconds) {
    static double samples[MAX_SAMPLES];
    struct Timing timing = {0};
    const double start = now();
    double last = start;
    do {
        move(context);
        const double at = now();
        if (timing.count < MAX_SAMPLES) samples[timing.count] = at - last;
        last = at;
        ++timing.count;
    } while (last - start < seconds);
    timing.seconds = last - start;
    const size_t kept = timing.count < MAX_SAMPLES ? timing.count : MAX_SAMPLES;
    qsort(samples, kept, sizeof samples[0], by_value);
    timing.p50 = samples[(kept - 1) / 2];
    timing.p99 = samples[(size_t)((double)(kept - 1) * 0.99)];
    timing.p999 = samples[(size_t)((double)(kept - 1) * 0.999)];
    return timing;
}

static void print_timing(struct Timing timing) {
    printf("{\"count\": %zu, \"seconds\": %.9f, \"p50\": %.9f, \"p99\": %.9f, \"p999\": %.9f}\n",
           timing.count, timing.seconds, timing.p50, timing.p99, timing.p999);
    fflush(stdout);
}

// One case of a program that measures by itself: GiB/s of the best round and of the median one.
static void print_rates(const char* method, const char* shape, size_t total, void (*move)(void*),
                        void* context, int rounds, double seconds, int last) {
    double rates[64];
    move(context);
    for (int i = 0; i < rounds; ++i) {
        const struct Timing timing = repeat(move, context, seconds);
        rates[i] = (double)timing.count * (double)total / timing.seconds / GIB;
    }
    qsort(rates, (size_t)rounds, sizeof rates[0], by_value);
    printf(
        "  {\"method\": \"%s\", \"case\": \"%s\", \"bytes\": %zu, \"best_gib_per_second\": %.3f, "
        "\"median_gib_per_second\": %.3f}%s\n",
        method, shape, total, rates[rounds - 1], rates[(rounds - 1) / 2], last ? "" : ",");
    fflush(stdout);
}

#endif
