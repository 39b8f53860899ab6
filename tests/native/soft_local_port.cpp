// Who comes to the local path's Unix socket, or answers at one: other processes that stop or end in
// the middle, and strangers. Each costs at most its own connection.
#include <fcntl.h>
#include <poll.h>
#include <sys/mman.h>
#include <sys/ptrace.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <csignal>
#include <functional>
#include <optional>
#include <thread>

#include "soft_fixture.h"
#include "verbs/soft/limits.h"
#include "verbs/soft/local/guarded_copy.h"
#include "verbs/soft/local/layout.h"
#include "verbs/soft/local/memory_file.h"
#include "verbs/soft/local/packets.h"
#include "verbs/soft/local/service.h"

namespace aioflagcx::verbs::soft::local {
namespace {

using namespace std::chrono_literals;

using Files = std::array<UniqueFd, kMaxDescriptors>;

Token token_in(const Attributes& attributes, const std::string& key) {
    Token token{};
    const auto& bytes = std::get<Bytes>(attributes.at(key));
    std::copy(bytes.begin(), bytes.end(), token.begin());
    return token;
}

// One end of a local connection that says whatever a test wants.
class Raw {
  public:
    explicit Raw(const Token& listener) : fd_(open_packet_socket()) {
        const ListenerAddress address(listener);
        EXPECT_EQ(::connect(fd_.get(), address.get(), address.length), 0);
    }
    explicit Raw(UniqueFd fd) : fd_(std::move(fd)) {}

    int fd() const { return fd_.get(); }
    void close() { fd_.reset(); }
    bool send(const Message& message, std::initializer_list<int> files = {}) {
        return send_message(fd_.get(), message, {files.begin(), files.size()});
    }
    void send_bytes(const std::vector<std::uint8_t>& bytes) {
        [[maybe_unused]] auto ignored =
            ::send(fd_.get(), bytes.data(), bytes.size(), MSG_NOSIGNAL | MSG_DONTWAIT);
    }
    // The next message; of a kind that does not exist when the connection has ended.
    Message receive(Files* files = nullptr) {
        Message message;
        Files unwanted;
        for (;;) {
            switch (receive_message(fd_.get(), message, files != nullptr ? *files : unwanted)) {
                case Received::Message:
                    return message;
                case Received::Ended:
                    message.kind = Kind{};
                    return message;
                case Received::Nothing:
                    break;
            }
            pollfd entry{fd_.get(), POLLIN, 0};
            const auto patience = std::chrono::milliseconds(kPatience).count();
            if (::poll(&entry, 1, static_cast<int>(patience)) != 1) {
                ADD_FAILURE() << "nothing came";
                message.kind = Kind{};
                return message;
            }
        }
    }
    void expect_closed() {
        while (receive().kind != Kind{}) {
        }
    }

  private:
    UniqueFd fd_;
};

// A guest of a responder, made by hand.
struct RawGuest {
    RawGuest(Side& target, QueuePair& responder)
        : raw(token_in(responder.local_attributes(), "socket")) {
        auto stranger = target.make_qp();
        responder.accept(stranger->local_attributes());
        enter(responder, *stranger);
    }
    void enter(const QueuePair& responder, const QueuePair& initiator) {
        message.target = token_in(responder.local_attributes(), "token");
        message.initiator = token_in(initiator.local_attributes(), "token");
        message.kind = Kind::Open;
        EXPECT_TRUE(raw.send(message));
        offered = raw.receive();
        EXPECT_EQ(offered.kind, Kind::Offered);
        message.kind = Kind::Enter;
        EXPECT_TRUE(raw.send(message));
        opened = raw.receive(&files);
        ASSERT_EQ(opened.kind, Kind::Opened);
        table = Mapping(files[0].get(), sizeof(Table), false);
        page = Mapping(files[1].get(), sizeof(Announcement), true);
    }
    bool gate_open() const {
        return static_cast<const Table*>(table.get())->gates[opened.gate].load() == opened.ticket;
    }
    Announcement& announcement() const { return *static_cast<Announcement*>(page.get()); }
    void announce(std::uint32_t key) const {
        announcement().keys[0].store(key);
        announcement().count.store(1);
    }

    Raw raw;
    Message message;  // as sent last
    Message offered;
    Message opened;
    Files files;
    Mapping table;
    Mapping page;
};

// A pair that works, beside which it all happens.
class SoftLocalPort : public ::testing::Test {
  protected:
    SoftLocalPort() : a(options_for("local")), b(options_for("local")) { connect(*a.qp, *b.qp); }
    ~SoftLocalPort() override { expect_unhurt(); }

    void expect_unhurt() {
        const SendWr wr = a.request(WrOpcode::RdmaWrite, b, 1000, 1, 0, 5000);
        a.qp->post_send({&wr, 1});
        EXPECT_EQ(a.take_one().status, WcStatus::Success) << "the neighbour was hurt";
    }
    Token listener() const { return token_in(b.qp->local_attributes(), "socket"); }
    static bool eventually(const std::function<bool()>& condition) {
        const Deadline deadline = soon();
        while (!condition()) {
            if (Clock::now() > deadline) return false;
            std::this_thread::yield();
        }
        return true;
    }

    Side a;
    Side b;
};

// ---- Guests ----------------------------------------------------------------------------------

TEST_F(SoftLocalPort, WhatIsSharedCannotBeWrittenByGuests) {
    auto qp = b.make_qp();
    const RawGuest guest(b, *qp);
    const int table = guest.files[0].get();
    EXPECT_EQ(::mmap(nullptr, 4096, PROT_READ | PROT_WRITE, MAP_SHARED, table, 0), MAP_FAILED);
    EXPECT_EQ(::write(table, "x", 1), -1);
    EXPECT_EQ(::ftruncate(table, 0), -1);
    EXPECT_EQ(::mprotect(guest.table.get(), 4096, PROT_READ | PROT_WRITE), -1);
    const UniqueFd again(
        ::open(("/proc/self/fd/" + std::to_string(table)).c_str(), O_RDWR | O_CLOEXEC));
    EXPECT_EQ(::mmap(nullptr, 4096, PROT_READ | PROT_WRITE, MAP_SHARED, again.get(), 0), MAP_FAILED)
        << "not even by opening it anew";
    EXPECT_EQ(::ftruncate(guest.files[1].get(), 0), -1) << "the page must stay";
}

TEST_F(SoftLocalPort, AGateThatIsUsedAgainHasAnotherTicket) {
    std::vector<std::pair<std::uint32_t, std::uint32_t>> seen;
    for (int i = 0; i < 5; ++i) {
        auto qp = b.make_qp();
        const RawGuest guest(b, *qp);
        EXPECT_TRUE(guest.gate_open());
        const std::pair<std::uint32_t, std::uint32_t> now{guest.opened.gate, guest.opened.ticket};
        EXPECT_EQ(std::count(seen.begin(), seen.end(), now), 0);
        seen.push_back(now);
        EXPECT_TRUE(qp->fence(soon()));
        EXPECT_FALSE(guest.gate_open());
    }
    std::vector<std::uint32_t> gates;
    for (const auto& [gate, ticket] : seen) gates.push_back(gate);
    std::sort(gates.begin(), gates.end());
    EXPECT_LT(std::unique(gates.begin(), gates.end()), gates.end()) << "none was used again";
}

TEST_F(SoftLocalPort, AnAnnouncementDelaysExactlyWhatItNames) {
    auto qp = b.make_qp();
    const RawGuest guest(b, *qp);
    const auto other = b.pd->register_memory(address(b.buffer.data()), 64, kAllAccess, {});
    const auto named = b.pd->register_memory(address(b.buffer.data()), 64, kAllAccess, {});
    guest.announce(named->rkey());
    EXPECT_TRUE(other->revoke(soon()));
    EXPECT_FALSE(named->revoke(Clock::now() + 20ms));
    EXPECT_FALSE(qp->fence(Clock::now() + 20ms)) << "it is inside a copy";
    EXPECT_FALSE(guest.gate_open()) << "but begins no other";
    std::thread later([&] { guest.announcement().count.store(0); });
    EXPECT_TRUE(named->revoke(soon()));
    EXPECT_TRUE(qp->fence(soon()));
    later.join();
}

TEST_F(SoftLocalPort, NonsenseInAnAnnouncementIsHarmless) {
    auto qp = b.make_qp();
    const RawGuest guest(b, *qp);
    const auto mr = b.pd->register_memory(address(b.buffer.data()), 64, kAllAccess, {});
    for (auto& key : guest.announcement().keys) key.store(mr->rkey() + 1);
    guest.announcement().count.store(0xffffffff);
    EXPECT_TRUE(mr->revoke(soon()));
}

TEST_F(SoftLocalPort, AConnectionThatEndsLeavesNothingThatDelays) {
    auto qp = b.make_qp();
    RawGuest guest(b, *qp);
    const auto mr = b.pd->register_memory(address(b.buffer.data()), 64, kAllAccess, {});
    guest.announce(mr->rkey());
    EXPECT_FALSE(mr->revoke(Clock::now() + 5ms));
    guest.raw.close();  // as execve(2) does, which ends all threads but not the process
    EXPECT_TRUE(mr->revoke(soon()));
    EXPECT_TRUE(qp->fence(soon()));
}

TEST_F(SoftLocalPort, AGuestThatSpeaksNonsenseLosesItsQueuePair) {
    const std::vector<std::function<void(RawGuest&)>> mistakes = {
        [](RawGuest& guest) { guest.raw.send_bytes({1, 2, 3}); },
        [](RawGuest& guest) { guest.raw.send_bytes(std::vector<std::uint8_t>(100'000)); },
        [](RawGuest& guest) {
            Message message;
            message.kind = Kind::Recall;
            guest.raw.send(message);
        },
        [](RawGuest& guest) { guest.raw.send(guest.message); },  // Enter, again
        [](RawGuest& guest) { guest.raw.close(); },
        [](RawGuest& guest) {
            const std::vector<std::uint8_t> no_frame(100, 'x');
            EXPECT_EQ(::send(guest.files[2].get(), no_frame.data(), no_frame.size(), 0), 100);
        },
        [](RawGuest& guest) { guest.files[2].reset(); },
    };
    for (const auto& mistake : mistakes) {
        auto qp = b.make_qp();
        RawGuest guest(b, *qp);
        EXPECT_EQ(qp->state(), QpState::Rts);
        mistake(guest);
        EXPECT_TRUE(eventually([&] { return qp->state() == QpState::Err; }));
        EXPECT_FALSE(guest.gate_open());
        expect_unhurt();
    }
}

TEST_F(SoftLocalPort, AskingForFilesWithoutEndStarvesNobody) {
    auto qp = b.make_qp();
    RawGuest guest(b, *qp);
    Message lend;
    lend.kind = Kind::Lend;
    lend.key = b.mr->rkey();
    std::atomic<bool> stop{false};
    std::thread asker([&] {
        do {  // once, even if all else is over before this thread has begun
            guest.raw.send(lend);
        } while (!stop);
    });
    // Requests that the target's thread must answer, too.
    const RecvWr receive = b.receive(1);
    for (std::uint32_t i = 0; i < 50; ++i) {
        b.qp->post_recv({&receive, 1});
        SendWr wr = a.request(WrOpcode::RdmaWriteWithImm, b, 100, i);
        a.qp->post_send({&wr, 1});
        EXPECT_EQ(a.take_one().status, WcStatus::Success);
        b.take_one();
    }
    stop = true;
    asker.join();
    const Message answer = guest.raw.receive();
    EXPECT_EQ(answer.kind, Kind::Lent);
    EXPECT_EQ(answer.key, lend.key);
}

TEST_F(SoftLocalPort, AGuestThatDoesNotReadItsRecallsLosesItsConnectionAndNotTheOwnersTime) {
    const UniqueFd file = create_memory_file("aioflagcx-test", 4096);
    auto qp = b.make_qp();
    RawGuest guest(b, *qp);
    std::vector<std::unique_ptr<MemoryRegion>> lent;
    for (int i = 0; i < 1000; ++i) {
        lent.push_back(
            b.pd->register_memory(address(b.buffer.data()), 4096, kAllAccess, {file.get(), 0}));
        Message lend;
        lend.kind = Kind::Lend;
        lend.key = lent.back()->rkey();
        ASSERT_TRUE(guest.raw.send(lend));
        ASSERT_EQ(guest.raw.receive().kind, Kind::Lent);
    }
    for (const auto& mr : lent) EXPECT_TRUE(mr->revoke(soon()));
    std::size_t recalls = 0;
    while (guest.raw.receive().kind == Kind::Recall) ++recalls;
    EXPECT_GT(recalls, 10U);
    EXPECT_LT(recalls, lent.size()) << "all had room: not what this is about";
}

// ---- Other processes -------------------------------------------------------------------------

// A forked process that holds a guest's page and descriptors; it runs only calls that are allowed
// after fork(2) in a process with threads.
class Child {
  public:
    explicit Child(const std::function<void()>& live) : pid_(::fork()) {
        if (pid_ == 0) {
            live();
            for (;;) ::pause();
        }
    }
    ~Child() {
        if (pid_ > 0) end();
    }
    Child(const Child&) = delete;
    Child& operator=(const Child&) = delete;

    pid_t pid() const { return pid_; }
    void stop() const {
        ::kill(pid_, SIGSTOP);
        expect_stop();
    }
    void expect_stop() const {
        int status = 0;
        EXPECT_EQ(::waitpid(pid_, &status, WUNTRACED), pid_);
        EXPECT_TRUE(WIFSTOPPED(status));
    }
    void go_on() const { ::kill(pid_, SIGCONT); }
    void end() {
        ::kill(pid_, SIGKILL);
        EXPECT_EQ(::waitpid(pid_, nullptr, 0), pid_);
        pid_ = -1;
    }

  private:
    pid_t pid_;
};

class SoftLocalProcess : public SoftLocalPort {
  protected:
    // Starts a child that enters as a guest of `responder`, announces `key`, and says so. Then it
    // does `next`.
    std::unique_ptr<Child> start_guest(
        QueuePair& responder, std::uint32_t key, bool guarded = false,
        const std::function<void(const Guard&)>& next = [](const Guard&) {}) {
        auto stranger = b.make_qp();
        responder.accept(stranger->local_attributes());
        Message message;
        message.target = token_in(responder.local_attributes(), "token");
        message.initiator = token_in(stranger->local_attributes(), "token");
        message.kind = Kind::Enter;
        const ListenerAddress address(listener());
        int ends[2];
        EXPECT_EQ(::pipe2(ends, O_CLOEXEC), 0);
        auto child = std::make_unique<Child>([&] {
            const int fd = ::socket(AF_UNIX, SOCK_SEQPACKET, 0);
            if (::connect(fd, address.get(), address.length) != 0) ::_exit(1);
            if (!send_message(fd, message, {})) ::_exit(2);
            pollfd entry{fd, POLLIN, 0};
            ::poll(&entry, 1, -1);
            Message opened;
            Files files;
            if (receive_message(fd, opened, files) != Received::Message) ::_exit(3);
            void* const page = ::mmap(nullptr, sizeof(Announcement), PROT_READ | PROT_WRITE,
                                      MAP_SHARED, files[1].get(), 0);
            void* const table =
                ::mmap(nullptr, sizeof(Table), PROT_READ, MAP_SHARED, files[0].get(), 0);
            auto& announcement = *static_cast<Announcement*>(page);
            announcement.keys[0].store(key);
            announcement.thread.store(guarded ? static_cast<std::uint32_t>(::gettid()) : 0);
            announcement.count.store(1);
            const auto& revocations = static_cast<Table*>(table)->revocations;
            const Guard guard{&revocations, revocations.load()};
            if (::write(ends[1], "1", 1) != 1) ::_exit(4);
            next(guard);
            for (;;) ::pause();
        });
        ::close(ends[1]);
        char byte = 0;
        EXPECT_EQ(::read(ends[0], &byte, 1), 1) << "the child came to nothing";
        ::close(ends[0]);
        return child;
    }
};

TEST_F(SoftLocalProcess, OneThatEndedInsideACopyDelaysNothing) {
    auto qp = b.make_qp();
    const auto mr = b.pd->register_memory(address(b.buffer.data()), 64, kAllAccess, {});
    const auto child = start_guest(*qp, mr->rkey());
    EXPECT_FALSE(mr->revoke(Clock::now() + 5ms));
    std::thread killer([&] { child->end(); });
    EXPECT_TRUE(mr->revoke(soon()));
    killer.join();
    EXPECT_TRUE(eventually([&] { return qp->state() == QpState::Err; })) << "the pidfd tells";
    EXPECT_TRUE(qp->fence(Deadline::min()));
}

TEST_F(SoftLocalProcess, AStoppedOneIsWaitedForToTheDeadlineAndNotBeyond) {
    auto qp = b.make_qp();
    const auto mr = b.pd->register_memory(address(b.buffer.data()), 64, kAllAccess, {});
    const auto child = start_guest(*qp, mr->rkey());
    child->stop();
    const auto start = Clock::now();
    EXPECT_FALSE(mr->revoke(start + 50ms));
    EXPECT_FALSE(qp->fence(start + 50ms));
    EXPECT_GE(Clock::now(), start + 50ms);
    EXPECT_LT(Clock::now(), start + 10s);
    // Nor do regions, queue pairs or a device that go wait for it.
    child->end();
    EXPECT_TRUE(mr->revoke(soon()));
}

TEST_F(SoftLocalProcess, AStoppedOneWhoseCopiesAreGuardedIsNotWaitedFor) {
    auto qp = b.make_qp();
    const auto mr = b.pd->register_memory(address(b.buffer.data()), 64, kAllAccess, {});
    const auto child = start_guest(*qp, mr->rkey(), true);
    EXPECT_FALSE(mr->revoke(Clock::now() + 20ms)) << "it is not stopped yet";
    child->stop();
    EXPECT_TRUE(mr->revoke(soon()));
    // Also for one who only looks from time to time.
    EXPECT_TRUE(eventually([&] { return qp->fence(Deadline::min()); }));
}

// In front of the system call that copies, behind the last look: where strace stops its tracee.
TEST_F(SoftLocalProcess, AGuardedCopyThatATracerHoldsBackIsWaitedFor) {
    if (!copies_are_guarded()) return;
    auto qp = b.make_qp();
    const auto mr = b.pd->register_memory(address(b.buffer.data()), 64, kAllAccess, {});
    const pid_t target = ::getpid();
    const auto child = start_guest(*qp, mr->rkey(), true, [&](const Guard& guard) {
        static std::uint8_t source[64] = {77};
        const iovec here{source, sizeof source};
        const iovec there{b.buffer.data(), sizeof source};
        if (::ptrace(PTRACE_TRACEME, 0, nullptr, nullptr) != 0) ::_exit(5);
        ::raise(SIGSTOP);
        ssize_t result = 0;
        guarded_call(guard, false, target, {&here, 1}, {&there, 1}, &result);
    });
    child->expect_stop();
    ASSERT_EQ(::ptrace(PTRACE_SETOPTIONS, child->pid(), nullptr, PTRACE_O_TRACESYSGOOD), 0);
    __ptrace_syscall_info info{};
    do {
        ASSERT_EQ(::ptrace(PTRACE_SYSCALL, child->pid(), nullptr, nullptr), 0);
        child->expect_stop();
        ASSERT_GT(::ptrace(PTRACE_GET_SYSCALL_INFO, child->pid(), sizeof info, &info), 0);
    } while (info.op != PTRACE_SYSCALL_INFO_ENTRY || info.entry.nr != SYS_process_vm_writev);
    EXPECT_FALSE(mr->revoke(Clock::now() + 50ms));
    EXPECT_EQ(b.buffer[0], 0);
    ASSERT_EQ(::ptrace(PTRACE_SYSCALL, child->pid(), nullptr, nullptr), 0);
    child->expect_stop();  // behind it
    EXPECT_EQ(b.buffer[0], 77) << "that is what was waited for";
}

TEST_F(SoftLocalProcess, RegionsAndQueuePairsCanGoWhileItIsStoppedInside) {
    Side own(options_for("local"));
    auto stranger = b.make_qp();
    {
        auto qp = b.make_qp();
        auto mr = b.pd->register_memory(address(b.buffer.data()), 64, kAllAccess, {});
        const auto child = start_guest(*qp, mr->rkey());
        child->stop();
        const auto key = mr->rkey();
        mr.reset();
        qp.reset();
        // Its place in the table is not given to another region while it may look there.
        for (int i = 0; i < 100; ++i) {
            const auto other = b.pd->register_memory(address(b.buffer.data()), 64, kAllAccess, {});
            EXPECT_NE(slot_of(other->rkey()), slot_of(key));
        }
        expect_unhurt();
    }
}

// A child of the initiator's that holds copies of its descriptors.
TEST_F(SoftLocalProcess, CopiesOfDescriptorsInAForkedChildKeepNothingAlive) {
    auto initiator = a.make_qp();
    auto responder = b.make_qp();
    connect(*initiator, *responder);
    const Child child([] {});
    initiator->to_error();
    EXPECT_TRUE(eventually([&] { return responder->state() == QpState::Err; }));
    initiator.reset();
    // And the other way round.
    auto second = a.make_qp();
    auto second_responder = b.make_qp();
    connect(*second, *second_responder);
    const Child other([] {});
    EXPECT_TRUE(second_responder->fence(soon()));
    EXPECT_TRUE(eventually([&] {
        EXPECT_TRUE(a.quiet());
        return second->state() == QpState::Err;
    }));
}

// ---- Strangers at the listener ---------------------------------------------------------------

TEST_F(SoftLocalPort, PacketsThatMakeNoSenseCloseTheConnection) {
    std::mt19937 random(1);
    for (const std::size_t size : {0, 1, 100, 191, 192, 193, 5000, 60'000}) {
        for (int i = 0; i < 5; ++i) {
            Raw raw(listener());
            std::vector<std::uint8_t> noise(size);
            for (auto& byte : noise) byte = static_cast<std::uint8_t>(random());
            raw.send_bytes(noise);
            raw.expect_closed();
        }
    }
}

TEST_F(SoftLocalPort, AnOpenMustBeWellFormedAndNameAResponder) {
    auto qp = b.make_qp();
    auto stranger = b.make_qp();
    qp->accept(stranger->local_attributes());
    Message good;
    good.target = token_in(qp->local_attributes(), "token");
    good.initiator = token_in(stranger->local_attributes(), "token");
    const std::vector<std::function<void(Message&)>> mistakes = {
        [](Message& message) { message.magic ^= 1; },
        [](Message& message) { message.version += 1; },
        [](Message& message) { message.kind = Kind::Opened; },
        [](Message& message) { message.kind = Kind::Lend; },
        [](Message& message) { message.kind = static_cast<Kind>(999); },
        [](Message& message) { message.target[7] ^= 1; },
    };
    for (const Kind kind : {Kind::Open, Kind::Enter}) {
        for (const auto& mistake : mistakes) {
            Raw raw(listener());
            Message message = good;
            message.kind = kind;
            mistake(message);
            raw.send(message);
            raw.expect_closed();
        }
    }
    {
        Raw raw(listener());
        Message message = good;
        message.kind = Kind::Enter;
        message.initiator[0] ^= 1;
        raw.send(message);
        raw.expect_closed();
    }
    EXPECT_EQ(qp->state(), QpState::Rts) << "none of them has spoilt it";
    connect(*a.make_qp(), *b.make_qp());
}

TEST_F(SoftLocalPort, OnlyOneEnters) {
    auto qp = b.make_qp();
    RawGuest guest(b, *qp);
    Raw second(listener());
    second.send(guest.message);
    second.expect_closed();
    EXPECT_TRUE(guest.gate_open());
}

TEST_F(SoftLocalPort, WhoLooksAndLeavesSpoilsNothing) {
    auto stranger = b.make_qp();
    auto qp = b.make_qp();
    qp->accept(stranger->local_attributes());
    Message open;
    open.target = token_in(qp->local_attributes(), "token");
    open.initiator = token_in(stranger->local_attributes(), "token");
    open.kind = Kind::Open;
    for (int i = 0; i < 10; ++i) {
        Raw raw(listener());
        raw.send(open);
        EXPECT_EQ(raw.receive().kind, Kind::Offered);
    }
    EXPECT_EQ(qp->state(), QpState::Rts);
    stranger->connect(qp->local_attributes(), soon());
    EXPECT_STREQ(stranger->path(), "local");
}

TEST_F(SoftLocalPort, DescriptorsThatNobodyAskedForAreClosed) {
    int ends[2];
    ASSERT_EQ(::pipe2(ends, O_CLOEXEC), 0);
    const UniqueFd reader(ends[0]);
    UniqueFd writer(ends[1]);
    auto qp = b.make_qp();
    RawGuest guest(b, *qp);
    Message lend;
    lend.kind = Kind::Lend;
    guest.raw.send(lend, {writer.get(), writer.get(), writer.get()});
    Raw stranger(listener());
    stranger.send(lend, {writer.get()});
    writer.reset();
    char byte = 0;
    EXPECT_EQ(::read(reader.get(), &byte, 1), 0) << "somebody still holds the pipe";
}

TEST_F(SoftLocalPort, ACrowdThatNeverSpeaksKeepsNobodyOut) {
    std::vector<Raw> crowd;
    for (std::size_t i = 0; i < kMaxHellos + 50; ++i) {
        UniqueFd fd = open_packet_socket();
        const ListenerAddress address(listener());
        // Full for a moment, until the target's thread has its turn.
        EXPECT_TRUE(
            eventually([&] { return ::connect(fd.get(), address.get(), address.length) == 0; }));
        crowd.emplace_back(std::move(fd));
    }
    auto initiator = a.make_qp();
    auto responder = b.make_qp();
    connect(*initiator, *responder);
    EXPECT_STREQ(initiator->path(), "local");
    crowd.front().expect_closed();  // the oldest made room
}

// ---- What an initiator meets -----------------------------------------------------------------

// A device that is not what it says: attributes of a real responder, but another listener.
class SoftLocalImpostor : public SoftLocalPort {
  protected:
    SoftLocalImpostor() {
        responder_ = b.make_qp();
        initiator_ = a.make_qp();
        responder_->accept(initiator_->local_attributes());
        attributes_ = responder_->local_attributes();
        const Token& name = impostor_.name();
        attributes_["socket"] = Bytes(name.begin(), name.end());
    }
    // Connects while `answer` has the other end.
    int connect_while(const std::function<void(Raw&)>& answer) {
        std::thread thread([&] {
            pollfd entry{impostor_.fd(), POLLIN, 0};
            ::poll(&entry, 1, 60'000);
            Raw raw(UniqueFd(
                ::accept4(impostor_.fd(), nullptr, nullptr, SOCK_NONBLOCK | SOCK_CLOEXEC)));
            answer(raw);
        });
        int error = 0;
        try {
            initiator_->connect(attributes_, soon());
        } catch (const NativeError& failure) {
            error = failure.error();
        }
        thread.join();
        return error;
    }
    Message offer() const {
        Message message;
        message.kind = Kind::Offered;
        message.nonce = nonce_;
        message.nonce_addr = address(nonce_.data());
        message.regions = kLocalRegions;
        message.gates = kLocalGates;
        message.keys = kAnnouncedKeys;
        return message;
    }
    static Message opening() {
        Message message;
        message.kind = Kind::Opened;
        message.ticket = 1;
        return message;
    }

    Listener impostor_;
    std::unique_ptr<QueuePair> responder_;
    std::unique_ptr<QueuePair> initiator_;
    Attributes attributes_;
    const Token nonce_ = random_token();
};

TEST_F(SoftLocalImpostor, AnswersThatMakeNoSenseAreErrors) {
    const std::vector<std::pair<int, std::function<void(Raw&)>>> answers = {
        {ECONNREFUSED, [](Raw&) {}},
        {ECONNREFUSED,
         [](Raw& raw) {
             raw.send_bytes({1, 2, 3});
             raw.receive();
         }},
        {EPROTO,
         [](Raw& raw) {
             raw.send(opening());
             raw.receive();
         }},
        {EACCES,
         [](Raw& raw) {
             Message refused;
             refused.kind = Kind::Refused;
             refused.reason.fill('x');  // no end
             raw.send(refused);
             raw.receive();
         }},
        {EPROTO,
         [this](Raw& raw) {
             Message other = offer();
             other.regions *= 2;
             raw.send(other);
             raw.receive();
         }},
        {EACCES,
         [this](Raw& raw) {
             Message wrong = offer();
             wrong.nonce[0] ^= 1;
             raw.send(wrong);
             raw.receive();
         }},
        {EFAULT,
         [this](Raw& raw) {
             Message wrong = offer();
             wrong.nonce_addr = 8;
             raw.send(wrong);
             raw.receive();
         }},
        {ECONNREFUSED,
         [this](Raw& raw) {
             raw.send(offer());
             raw.receive();
             raw.receive();
         }},
    };
    for (std::size_t i = 0; i + 1 < answers.size(); ++i) {
        EXPECT_EQ(connect_while(answers[i].second), answers[i].first) << "answer " << i;
        EXPECT_EQ(initiator_->state(), QpState::Init);
    }
}

TEST_F(SoftLocalImpostor, FilesThatAreNotAsTheyMustBeAreErrors) {
    const UniqueFd small = create_memory_file("aioflagcx-test", 4096);
    const UniqueFd table = create_memory_file("aioflagcx-test", sizeof(Table));
    const UniqueFd page = create_memory_file("aioflagcx-test", sizeof(Announcement));
    const UniqueFd unsealed(::memfd_create("aioflagcx-test", MFD_CLOEXEC | MFD_ALLOW_SEALING));
    ASSERT_EQ(::ftruncate(unsealed.get(), sizeof(Table)), 0);
    const UniqueFd null(::open("/dev/null", O_RDWR | O_CLOEXEC));
    const std::vector<std::vector<int>> choices = {
        {},
        {table.get(), page.get()},
        {small.get(), page.get(), null.get()},
        {unsealed.get(), page.get(), null.get()},
        {null.get(), page.get(), null.get()},
        {table.get(), null.get(), null.get()},
        {table.get(), unsealed.get(), null.get()},
    };
    for (const std::vector<int>& files : choices) {
        const int error = connect_while([&](Raw& raw) {
            raw.receive();
            raw.send(offer());
            raw.receive();
            EXPECT_TRUE(send_message(raw.fd(), opening(), files));
            raw.receive();
        });
        EXPECT_EQ(error, EPROTO);
        EXPECT_EQ(initiator_->state(), QpState::Init);
    }
}

TEST_F(SoftLocalImpostor, NonsenseOnAnOpenConnectionIsHarmlessOrEndsTheQueuePair) {
    const UniqueFd table = create_memory_file("aioflagcx-test", sizeof(Table));
    const UniqueFd page = create_memory_file("aioflagcx-test", sizeof(Announcement));
    const UniqueFd small = create_memory_file("aioflagcx-test", 4096);
    const Mapping ours(table.get(), sizeof(Table), true);
    auto& entries = static_cast<Table*>(ours.get())->entries;
    static_cast<Table*>(ours.get())->gates[0].store(1);
    // A region that lies about its size, and says that there is a file.
    const std::uint32_t key = 12345;
    Entry& entry = entries[slot_of(key)];
    entry.addr.store(address(b.buffer.data()));
    entry.length.store(1 << 20);
    entry.access.store(kAllAccess);
    entry.mappable.store(1);
    entry.tag.store(open_tag(key));
    int ends[2];
    ASSERT_EQ(::socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0, ends), 0);
    const UniqueFd stream(ends[0]);
    const UniqueFd theirs(ends[1]);
    std::optional<Raw> control;
    ASSERT_EQ(connect_while([&](Raw& raw) {
                  raw.receive();
                  raw.send(offer());
                  raw.receive();
                  raw.send(opening(), {table.get(), page.get(), theirs.get()});
                  control.emplace(std::move(raw));
              }),
              0);
    SendWr wr = a.request(WrOpcode::RdmaWrite, b, 100);
    wr.rkey = key;
    initiator_->post_send({&wr, 1});
    EXPECT_EQ(a.take_one().status, WcStatus::Success);
    EXPECT_EQ(control->receive().kind, Kind::Lend);
    // Answers to what was not asked, a file that is too small, the same again, something unknown.
    Message message;
    for (const Kind kind : {Kind::Lent, Kind::Recall, Kind::Opened, Kind::Refused}) {
        message.kind = kind;
        message.key = key + 1;
        control->send(message, {small.get()});
    }
    message.key = key;
    message.kind = Kind::Lent;
    control->send(message, {small.get()});
    control->send(message);
    message.offset = 4096 - std::uint64_t{1 << 20};  // with the length, it wraps to the file's size
    control->send(message, {small.get()});
    EXPECT_TRUE(a.quiet());
    initiator_->post_send({&wr, 1});
    EXPECT_EQ(a.take_one().status, WcStatus::Success) << "it goes by system calls";
    control->send_bytes({1, 2, 3});
    EXPECT_TRUE(eventually([&] {
        EXPECT_TRUE(a.quiet());
        return initiator_->state() == QpState::Err;
    }));
}

}  // namespace
}  // namespace aioflagcx::verbs::soft::local
