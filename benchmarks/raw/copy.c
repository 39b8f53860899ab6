// Copies between two processes of one machine: process_vm_writev into ordinary memory of the other,
// and memcpy into memory that both have mapped (a memfd).
//
//     copy [rounds=5] [seconds of a round=0.2]
//     copy --serve        orders: METHOD BYTES PIECES SECONDS, with METHOD writev or memcpy
//
// With PIECES above 1 the bytes are so many pieces of equal size, from places all over the source
// to others all over the target. Memory is warm, and what has been copied is looked at once.
#include <errno.h>
#include <sys/uio.h>
#include <sys/wait.h>

#include "raw.h"

#define MAX_PIECES ((size_t)1 << 16)
#define PIECES_A_CALL ((size_t)1024)  // IOV_MAX

struct Copy {
    size_t total, pieces;
    size_t from[MAX_PIECES], to[MAX_PIECES];  // offsets of the pieces
    const uint8_t* source;
    uint8_t* shared;  // the memory that both have mapped

    // The other process.
    pid_t pid;
    uint8_t* address;  // of its ordinary memory
    int ask, hear;     // pipes
};

// The same in both processes: it starts from the same seed.
static void place(struct Copy* copy, size_t total, size_t pieces) {
    errno = EINVAL;
    check(pieces >= 1 && pieces <= MAX_PIECES && total >= pieces && total <= LARGEST, "order");
    const size_t piece = total / pieces;
    copy->total = piece * pieces;
    copy->pieces = pieces;
    for (size_t i = 0; i < pieces; ++i) copy->from[i] = i * piece;
    uint64_t random = 1;
    for (size_t i = pieces - 1; i > 0; --i) {
        random = random * 6364136223846793005u + 1442695040888963407u;  // Knuth's MMIX
        const size_t j = (size_t)(random >> 33) % (i + 1);
        const size_t offset = copy->from[i];
        copy->from[i] = copy->from[j];
        copy->from[j] = offset;
    }
    for (size_t i = 0; i < pieces; ++i) copy->to[pieces - 1 - i] = copy->from[i];
}

static void by_writev(void* context) {
    const struct Copy* const copy = context;
    static struct iovec local[PIECES_A_CALL], remote[PIECES_A_CALL];
    const size_t piece = copy->total / copy->pieces;
    for (size_t i = 0; i < copy->pieces;) {
        size_t count = 0;
        for (; count < PIECES_A_CALL && i < copy->pieces; ++count, ++i) {
            local[count].iov_base = (void*)(copy->source + copy->from[i]);
            remote[count].iov_base = copy->address + copy->to[i];
            local[count].iov_len = remote[count].iov_len = piece;
        }
        const ssize_t moved = process_vm_writev(copy->pid, local, count, remote, count, 0);
        check(moved == (ssize_t)(count * piece), "process_vm_writev");
    }
}

static void by_memcpy(void* context) {
    const struct Copy* const copy = context;
    const size_t piece = copy->total / copy->pieces;
    for (size_t i = 0; i < copy->pieces; ++i) {
        memcpy(copy->shared + copy->to[i], copy->source + copy->from[i], piece);
    }
}

// ---- The other process ------------------------------------------------------------------------

struct Question {
    size_t total, pieces;
    int shared;  // whether the memory that both have mapped is meant
};

// Says whether what was copied is what the source, which it has inherited, holds; clears it then.
static void be_the_other(struct Copy* copy, pid_t parent, int ask, int hear) {
    end_with_parent(parent);
    uint8_t* const target = private_memory(0);
    check(write(hear, &target, sizeof target) == sizeof target, "pipe");
    struct Question question;
    while (read(ask, &question, sizeof question) == sizeof question) {
        place(copy, question.total, question.pieces);
        uint8_t* const at = question.shared ? copy->shared : target;
        const size_t piece = copy->total / copy->pieces;
        char same = 1;
        for (size_t i = 0; i < copy->pieces; ++i) {
            same &= memcmp(at + copy->to[i], copy->source + copy->from[i], piece) == 0;
        }
        memset(at, 0, copy->total);
        check(write(hear, &same, 1) == 1, "pipe");
    }
    _exit(0);
}

static void start_the_other(struct Copy* copy) {
    uint8_t* const source = private_memory(0);
    number_words(source);
    copy->source = source;
    const int fd = memfd_create("raw-copy", MFD_CLOEXEC);
    check(fd >= 0 && ftruncate(fd, (off_t)LARGEST) == 0, "memfd_create");
    copy->shared = mmap(NULL, LARGEST, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, fd, 0);
    check(copy->shared != MAP_FAILED, "mmap");
    memset(copy->shared, 0, LARGEST);
    int ask[2], hear[2];
    check(pipe(ask) == 0 && pipe(hear) == 0, "pipe");
    const pid_t parent = getpid();
    copy->pid = fork();
    check(copy->pid >= 0, "fork");
    if (copy->pid == 0) {
        close(ask[1]);
        be_the_other(copy, parent, ask[0], hear[1]);
    }
    copy->ask = ask[1];
    copy->hear = hear[0];
    check(read(hear[0], &copy->address, sizeof copy->address) == sizeof copy->address, "pipe");
}

// ---- What is measured -------------------------------------------------------------------------

static void (*method_named(const char* name))(void*) {
    errno = EINVAL;
    check(strcmp(name, "writev") == 0 || strcmp(name, "memcpy") == 0, name);
    return strcmp(name, "writev") == 0 ? by_writev : by_memcpy;
}

// Copies once, and ends the program if that is not what arrived.
static void prepare(struct Copy* copy, const char* method, size_t total, size_t pieces) {
    place(copy, total, pieces);
    method_named(method)(copy);
    const struct Question question = {total, pieces, strcmp(method, "memcpy") == 0};
    char same = 0;
    check(write(copy->ask, &question, sizeof question) == sizeof question, "pipe");
    check(read(copy->hear, &same, 1) == 1, "pipe");
    errno = EIO;
    check(same, "what arrived is not what was copied");
    method_named(method)(copy);
}

static void serve(struct Copy* copy) {
    char method[8], line[128];
    size_t total, pieces;
    double seconds;
    char prepared[128] = "";
    while (fgets(line, sizeof line, stdin)) {
        errno = EINVAL;
        check(sscanf(line, "%7s %zu %zu %lf", method, &total, &pieces, &seconds) == 4, line);
        snprintf(line, sizeof line, "%s %zu %zu", method, total, pieces);
        if (strcmp(line, prepared) != 0) prepare(copy, method, total, pieces);
        strcpy(prepared, line);
        print_timing(repeat(method_named(method), copy, seconds));
    }
}

int main(int argc, char** argv) {
    static struct Copy copy;
    start_the_other(&copy);
    if (argc > 1 && strcmp(argv[1], "--serve") == 0) {
        serve(&copy);
        return 0;
    }
    const int rounds = argc > 1 ? atoi(argv[1]) : 5;
    const double seconds = argc > 2 ? atof(argv[2]) : 0.2;
    static const struct {
        const char* name;
        size_t total, pieces;
    } cases[] = {
        {"1 MiB", (size_t)1 << 20, 1},
        {"4 MiB", (size_t)4 << 20, 1},
        {"16 MiB", (size_t)16 << 20, 1},
        {"256 MiB", (size_t)256 << 20, 1},
        {"4,096 x 16 KiB", (size_t)64 << 20, 4096},
    };
    const size_t count = sizeof cases / sizeof cases[0];
    printf("[\n");
    for (int shared = 0; shared <= 1; ++shared) {
        const char* const method = shared ? "memcpy" : "writev";
        for (size_t i = 0; i < count; ++i) {
            prepare(&copy, method, cases[i].total, cases[i].pieces);
            print_rates(method, cases[i].name, copy.total, method_named(method), &copy, rounds,
                        seconds, shared && i + 1 == count);
        }
    }
    printf("]\n");
    return 0;
}
