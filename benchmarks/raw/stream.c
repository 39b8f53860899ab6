// One TCP stream between two processes of one machine, over loopback, with blocking calls: the most
// that a plain program gets out of it. A message is its size, its bytes, and one byte back when all
// of it has been received.
//
//     stream [rounds=5] [seconds of a round=0.2]
//     stream --serve      orders: BYTES SECONDS
#include <arpa/inet.h>
#include <errno.h>
#include <netinet/tcp.h>
#include <sys/socket.h>

#include "raw.h"

struct Stream {
    int fd;
    size_t total;  // of a message
    uint8_t* memory;
};

static void send_all(int fd, const void* bytes, size_t size) {
    for (const uint8_t* at = bytes; size > 0;) {
        const ssize_t moved = send(fd, at, size, MSG_NOSIGNAL);
        check(moved > 0, "send");
        at += moved;
        size -= (size_t)moved;
    }
}

// 0 when the stream has ended.
static int receive_all(int fd, void* bytes, size_t size) {
    for (uint8_t* at = bytes; size > 0;) {
        const ssize_t moved = recv(fd, at, size, 0);
        check(moved >= 0, "recv");
        if (moved == 0) return 0;
        at += moved;
        size -= (size_t)moved;
    }
    return 1;
}

static void without_delay(int fd) {
    const int on = 1;
    check(setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on) == 0, "TCP_NODELAY");
}

static void be_the_other(int listener, pid_t parent, const uint8_t* source) {
    end_with_parent(parent);
    uint8_t* const target = private_memory(0);
    const int fd = accept(listener, NULL, NULL);
    check(fd >= 0, "accept");
    without_delay(fd);
    uint64_t seen = 0, size;
    while (receive_all(fd, &size, sizeof size)) {
        check(size <= LARGEST && receive_all(fd, target, size), "message");
        // The first message of a size is looked at, outside of what is measured.
        const char same = size == seen || memcmp(target, source, size) == 0;
        seen = size;
        send_all(fd, &same, 1);
    }
    _exit(0);
}

static void start_the_other(struct Stream* stream) {
    stream->memory = private_memory(0);
    number_words(stream->memory);
    const int listener = socket(AF_INET, SOCK_STREAM, 0);
    struct sockaddr_in address = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    socklen_t size = sizeof address;
    check(bind(listener, (struct sockaddr*)&address, size) == 0, "bind");
    check(listen(listener, 1) == 0, "listen");
    check(getsockname(listener, (struct sockaddr*)&address, &size) == 0, "getsockname");
    const pid_t parent = getpid(), child = fork();
    check(child >= 0, "fork");
    if (child == 0) be_the_other(listener, parent, stream->memory);
    stream->fd = socket(AF_INET, SOCK_STREAM, 0);
    check(connect(stream->fd, (struct sockaddr*)&address, size) == 0, "connect");
    without_delay(stream->fd);
    close(listener);
}

static void move(void* context) {
    const struct Stream* const stream = context;
    const uint64_t size = stream->total;
    char same = 0;
    send_all(stream->fd, &size, sizeof size);
    send_all(stream->fd, stream->memory, stream->total);
    check(receive_all(stream->fd, &same, 1), "the other process");
    errno = EIO;
    check(same, "what arrived is not what was sent");
}

static void serve(struct Stream* stream) {
    char line[128];
    size_t total;
    double seconds;
    while (fgets(line, sizeof line, stdin)) {
        errno = EINVAL;
        check(sscanf(line, "%zu %lf", &total, &seconds) == 2 && total <= LARGEST, line);
        if (total != stream->total) {
            stream->total = total;
            move(stream);
        }
        print_timing(repeat(move, stream, seconds));
    }
}

int main(int argc, char** argv) {
    struct Stream stream = {0};
    start_the_other(&stream);
    if (argc > 1 && strcmp(argv[1], "--serve") == 0) {
        serve(&stream);
        return 0;
    }
    const int rounds = argc > 1 ? atoi(argv[1]) : 5;
    const double seconds = argc > 2 ? atof(argv[2]) : 0.2;
    printf("[\n");
    for (int shift = 20; shift <= 28; shift += 4) {
        char name[32];
        stream.total = (size_t)1 << shift;
        snprintf(name, sizeof name, "%zu MiB", stream.total >> 20);
        print_rates("stream", name, stream.total, move, &stream, rounds, seconds, shift == 28);
    }
    printf("]\n");
    return 0;
}
