// The soft device's TCP path between two processes, beside one blocking stream of send() and
// recv() in the same run: the most a plain TCP program gets out of the machine.
//
//     soft_tcp [slice bytes=65536] [total MiB=4096] [streams=2] [rounds=5]
#include <arpa/inet.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

#include "verbs/soft/soft.h"

using namespace aioflagcx;
using namespace aioflagcx::verbs;

namespace {

constexpr std::size_t kBuffer = std::size_t{256} << 20;

double seconds_since(Clock::time_point start) {
    return std::chrono::duration<double>(Clock::now() - start).count();
}

void check(bool fine, const char* what) {
    if (fine) return;
    std::perror(what);
    std::exit(1);
}

std::uint8_t* make_buffer(int fill) {
    void* memory = ::mmap(nullptr, kBuffer, PROT_READ | PROT_WRITE,
                          MAP_PRIVATE | MAP_ANONYMOUS | MAP_POPULATE, -1, 0);
    check(memory != MAP_FAILED, "mmap");
    std::memset(memory, fill, kBuffer);
    return static_cast<std::uint8_t*>(memory);
}

void transfer(int fd, void* bytes, std::size_t size, bool sending) {
    auto* at = static_cast<std::uint8_t*>(bytes);
    while (size > 0) {
        const ssize_t moved =
            sending ? ::send(fd, at, size, MSG_NOSIGNAL) : ::recv(fd, at, size, 0);
        check(moved > 0, "stream");
        at += moved;
        size -= static_cast<std::size_t>(moved);
    }
}

// ---- One blocking stream ---------------------------------------------------------------------

double blocking_stream(std::uint8_t* buffer, std::size_t slice, std::size_t total) {
    const int listener = ::socket(AF_INET, SOCK_STREAM, 0);
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    socklen_t size = sizeof address;
    check(::bind(listener, reinterpret_cast<sockaddr*>(&address), size) == 0, "bind");
    check(::listen(listener, 1) == 0, "listen");
    ::getsockname(listener, reinterpret_cast<sockaddr*>(&address), &size);
    const pid_t child = ::fork();
    char done = 1;
    if (child == 0) {
        std::uint8_t* const target = make_buffer(0);
        const int fd = ::accept(listener, nullptr, nullptr);
        std::size_t at = 0;
        for (std::size_t left = total; left > 0; left -= slice) {
            transfer(fd, target + at, slice, false);
            at = at + 2 * slice <= kBuffer ? at + slice : 0;
        }
        transfer(fd, &done, 1, true);
        ::_exit(0);
    }
    const int fd = ::socket(AF_INET, SOCK_STREAM, 0);
    const int on = 1;
    ::setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
    check(::connect(fd, reinterpret_cast<sockaddr*>(&address), size) == 0, "connect");
    ::usleep(200000);  // until the child has its memory
    const auto start = Clock::now();
    std::size_t at = 0;
    for (std::size_t left = total; left > 0; left -= slice) {
        transfer(fd, buffer + at, slice, true);
        at = at + 2 * slice <= kBuffer ? at + slice : 0;
    }
    transfer(fd, &done, 1, false);
    const double seconds = seconds_since(start);
    ::close(fd);
    ::close(listener);
    ::waitpid(child, nullptr, 0);
    return seconds;
}

// ---- The soft device -------------------------------------------------------------------------

struct Region {
    std::uint64_t addr;
    std::uint32_t rkey;
};

// The handshake's part, reduced to what both programs know: fixed-size copies over a socket pair.
void send_attributes(int fd, const Attributes& attributes) {
    const auto& token = std::get<Bytes>(attributes.at("token"));
    const auto& process = std::get<Bytes>(attributes.at("process"));
    std::uint64_t port = std::get<std::uint64_t>(attributes.at("port"));
    transfer(fd, const_cast<std::uint8_t*>(token.data()), 16, true);
    transfer(fd, const_cast<std::uint8_t*>(process.data()), 16, true);
    transfer(fd, &port, sizeof port, true);
}

Attributes receive_attributes(int fd, Attributes like, bool responder) {
    Bytes token(16);
    Bytes process(16);
    std::uint64_t port = 0;
    transfer(fd, token.data(), 16, false);
    transfer(fd, process.data(), 16, false);
    transfer(fd, &port, sizeof port, false);
    like["token"] = token;
    like["process"] = process;
    like["port"] = port;
    if (responder) like["path"] = std::string("tcp");
    return like;
}

struct End {
    explicit End(std::uint32_t streams, std::uint8_t* buffer) {
        soft::SoftOptions options;
        options.paths = {"tcp"};
        options.streams = streams;
        device = soft::open_soft_device(options);
        pd = device->alloc_pd();
        cq = device->create_cq(1 << 16);
        mr = pd->register_memory(reinterpret_cast<std::uint64_t>(buffer), kBuffer,
                                 kAccessLocalWrite | kAccessRemoteWrite | kAccessRemoteRead, {});
        QpInit init;
        init.send_cq = init.recv_cq = cq.get();
        init.max_send_wr = 256;
        init.max_recv_wr = 16;
        qp = pd->create_qp(init);
    }
    std::unique_ptr<Device> device;
    std::unique_ptr<ProtectionDomain> pd;
    std::unique_ptr<CompletionQueue> cq;
    std::unique_ptr<MemoryRegion> mr;
    std::unique_ptr<QueuePair> qp;
};

double soft_device(std::uint8_t* buffer, std::size_t slice, std::size_t total,
                   std::uint32_t streams, WrOpcode opcode) {
    int pair[2];
    check(::socketpair(AF_UNIX, SOCK_STREAM, 0, pair) == 0, "socketpair");
    const pid_t child = ::fork();
    if (child == 0) {
        ::close(pair[0]);
        std::uint8_t* const target = make_buffer(0);
        End end(streams, target);
        const Attributes remote = receive_attributes(pair[1], end.qp->local_attributes(), false);
        end.qp->accept(remote);
        send_attributes(pair[1], end.qp->local_attributes());
        Region region{reinterpret_cast<std::uint64_t>(target), end.mr->rkey()};
        transfer(pair[1], &region, sizeof region, true);
        char done = 0;
        transfer(pair[1], &done, 1, false);
        ::_exit(0);
    }
    ::close(pair[1]);
    double seconds = 0;
    {
        End end(streams, buffer);
        send_attributes(pair[0], end.qp->local_attributes());
        const Attributes remote = receive_attributes(pair[0], end.qp->local_attributes(), true);
        Region region{};
        transfer(pair[0], &region, sizeof region, false);
        end.qp->connect(remote, Clock::now() + std::chrono::seconds(5));

        const std::size_t count = total / slice;
        std::size_t posted = 0;
        std::size_t done = 0;
        std::size_t at = 0;
        std::vector<SendWr> batch;
        std::vector<WorkCompletion> completions(256);
        const auto start = Clock::now();
        auto last = start;
        while (done < count) {
            // As the engine: batches of at most 16 within a credit of 8 MiB or 256 requests.
            const std::size_t credit = std::clamp<std::size_t>((8U << 20) / slice, 16, 256);
            batch.clear();
            while (posted + batch.size() < count && posted + batch.size() - done < credit &&
                   batch.size() < 16) {
                SendWr wr;
                wr.opcode = opcode;
                wr.rkey = region.rkey;
                wr.remote_addr = region.addr + at;
                wr.sge = {reinterpret_cast<std::uint64_t>(buffer) + at,
                          static_cast<std::uint32_t>(slice), end.mr->lkey()};
                batch.push_back(wr);
                at = at + 2 * slice <= kBuffer ? at + slice : 0;
            }
            if (!batch.empty()) posted += end.qp->post_send(batch);
            const std::size_t got = end.cq->poll(completions);
            for (std::size_t i = 0; i < got; ++i) {
                check(completions[i].status == WcStatus::Success, "completion");
            }
            done += got;
            if (got > 0) {
                last = Clock::now();
            } else if (batch.empty() && Clock::now() - last > std::chrono::microseconds(20)) {
                end.cq->arm();
                const std::size_t late = end.cq->poll(completions);
                done += late;
                if (late == 0) {
                    pollfd entry{end.cq->fd(), POLLIN, 0};
                    ::poll(&entry, 1, 1000);
                }
                end.cq->disarm();
                last = Clock::now();
            }
        }
        seconds = seconds_since(start);
    }
    char done = 1;
    transfer(pair[0], &done, 1, true);
    ::close(pair[0]);
    ::waitpid(child, nullptr, 0);
    return seconds;
}

}  // namespace

int main(int argc, char** argv) {
    const std::size_t slice = argc > 1 ? std::strtoul(argv[1], nullptr, 10) : 65536;
    std::size_t total = (argc > 2 ? std::strtoul(argv[2], nullptr, 10) : 4096) << 20;
    const auto streams = static_cast<std::uint32_t>(argc > 3 ? std::atoi(argv[3]) : 2);
    const int rounds = argc > 4 ? std::atoi(argv[4]) : 5;
    total -= total % slice;
    std::uint8_t* const buffer = make_buffer(7);
    const double gib = static_cast<double>(total) / (1 << 30);
    for (int round = 0; round < rounds; ++round) {
        const double plain = gib / blocking_stream(buffer, slice, total);
        const double write = gib / soft_device(buffer, slice, total, streams, WrOpcode::RdmaWrite);
        const double read = gib / soft_device(buffer, slice, total, streams, WrOpcode::RdmaRead);
        std::printf("blocking stream %.2f GiB/s, soft write %.2f GiB/s, soft read %.2f GiB/s\n",
                    plain, write, read);
        std::fflush(stdout);
    }
    return 0;
}
