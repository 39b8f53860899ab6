// The local path's own ways: copies of many pieces, memory that peers map, memory that is not
// there.
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <fstream>

#include "soft_fixture.h"
#include "verbs/soft/local/connection.h"
#include "verbs/soft/local/layout.h"
#include "verbs/soft/memory.h"

namespace aioflagcx::verbs::soft {
namespace {

constexpr std::size_t kPage = 4096;

// An anonymous file of a name of its own, mapped.
class MappedFile {
  public:
    explicit MappedFile(std::size_t size, int seals = F_SEAL_SHRINK)
        : name_("aioflagcx-test-" + std::to_string(count_++)),
          fd_(::memfd_create(name_.c_str(), MFD_CLOEXEC | MFD_ALLOW_SEALING)),
          size_(size) {
        EXPECT_EQ(::ftruncate(fd_.get(), static_cast<off_t>(size)), 0);
        if (seals != 0) EXPECT_EQ(::fcntl(fd_.get(), F_ADD_SEALS, seals), 0);
        data_ = static_cast<std::uint8_t*>(
            ::mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_SHARED, fd_.get(), 0));
        EXPECT_NE(data_, MAP_FAILED);
    }
    ~MappedFile() {
        if (data_ != nullptr) ::munmap(data_, size_);
    }
    MappedFile(const MappedFile&) = delete;
    MappedFile& operator=(const MappedFile&) = delete;

    int fd() const { return fd_.get(); }
    std::uint8_t* data() const { return data_; }
    std::size_t size() const { return size_; }
    void unmap() {
        ::munmap(data_, size_);
        data_ = nullptr;
    }
    std::uint8_t byte_at(std::size_t offset) const {
        std::uint8_t byte = 0;
        EXPECT_EQ(::pread(fd_.get(), &byte, 1, static_cast<off_t>(offset)), 1);
        return byte;
    }
    // The mappings of it in this process that allow what `permissions` ("rw-s", say) allows.
    std::size_t mappings(const std::string& permissions) const {
        std::ifstream maps("/proc/self/maps");
        std::size_t count = 0;
        for (std::string line; std::getline(maps, line);) {
            count += line.find("/memfd:" + name_ + " ") != std::string::npos &&
                     line.find(' ' + permissions + ' ') != std::string::npos;
        }
        return count;
    }

  private:
    static inline int count_ = 0;
    const std::string name_;
    UniqueFd fd_;
    const std::size_t size_;
    std::uint8_t* data_;
};

// Anonymous memory that can be unmapped page by page.
class Pages {
  public:
    explicit Pages(std::size_t count)
        : data_(static_cast<std::uint8_t*>(::mmap(nullptr, count * kPage, PROT_READ | PROT_WRITE,
                                                  MAP_PRIVATE | MAP_ANONYMOUS, -1, 0))),
          size_(count * kPage) {
        EXPECT_NE(data_, MAP_FAILED);
    }
    ~Pages() { ::munmap(data_, size_); }
    Pages(const Pages&) = delete;
    Pages& operator=(const Pages&) = delete;

    std::uint8_t* data() const { return data_; }
    std::size_t size() const { return size_; }
    // Unreachable, but not free for others to take: the tests' own threads map memory, too.
    void take_away(std::size_t page) {
        EXPECT_EQ(::mprotect(data_ + page * kPage, kPage, PROT_NONE), 0);
    }

  private:
    std::uint8_t* data_;
    std::size_t size_;
};

class SoftLocal : public ::testing::Test {
  protected:
    explicit SoftLocal(std::size_t size = 1 << 20)
        : a(options_for("local"), size), b(options_for("local"), size) {
        connect(*a.qp, *b.qp);
    }
    std::unique_ptr<MemoryRegion> share(const MappedFile& file, std::size_t offset,
                                        std::size_t length, std::uint32_t access = kAllAccess) {
        return b.pd->register_memory(address(file.data()) + offset, length, access,
                                     {file.fd(), offset});
    }
    WcStatus run(SendWr wr) {
        EXPECT_EQ(a.qp->post_send({&wr, 1}), 1U);
        return a.take_one().status;
    }
    // A request at `remote` instead of in b's buffer.
    SendWr request(WrOpcode opcode, const MemoryRegion& mr, std::uint64_t remote,
                   std::uint32_t length, std::uint64_t local_offset = 0) {
        SendWr wr = a.request(opcode, b, length, 0, local_offset);
        wr.rkey = mr.rkey();
        wr.remote_addr = remote;
        return wr;
    }
    // Polls, until `condition` holds.
    template <typename Condition>
    bool eventually(Condition condition) {
        const Deadline deadline = soon();
        while (!condition()) {
            if (Clock::now() > deadline) return false;
            EXPECT_TRUE(a.quiet());
        }
        return true;
    }

    Side a;
    Side b;
};

// ---- Copies ----------------------------------------------------------------------------------

class SoftLocalCopies : public SoftLocal {
  protected:
    SoftLocalCopies() : SoftLocal(16 << 20) {}
};

TEST_F(SoftLocalCopies, MoreKeysThanOneAnnouncementHolds) {
    constexpr std::size_t kRegions = 3 * kAnnouncedKeys + 5;
    std::vector<std::unique_ptr<MemoryRegion>> theirs;
    std::vector<SendWr> requests;
    a.fill(1);
    for (std::size_t i = 0; i < kRegions; ++i) {
        theirs.push_back(
            b.pd->register_memory(address(b.buffer.data()) + i * 100, 100, kAllAccess, {}));
        requests.push_back(request(WrOpcode::RdmaWrite, *theirs.back(),
                                   address(b.buffer.data()) + i * 100, 100, i * 100));
    }
    // Twice, so that keys that were used before come again.
    const std::size_t half = requests.size();
    for (std::size_t i = 0; i < half; ++i) requests.push_back(requests[i]);
    ASSERT_EQ(a.qp->post_send(requests), requests.size());
    for (const auto& wc : a.take(requests.size())) EXPECT_EQ(wc.status, WcStatus::Success);
    EXPECT_EQ(std::memcmp(a.buffer.data(), b.buffer.data(), kRegions * 100), 0);
}

TEST_F(SoftLocalCopies, MoreLocalRegionsThanOneCopyPins) {
    constexpr std::size_t kRegions = 200;
    std::vector<std::unique_ptr<MemoryRegion>> ours;
    std::vector<SendWr> requests;
    b.fill(2);
    for (std::size_t i = 0; i < kRegions; ++i) {
        ours.push_back(
            a.pd->register_memory(address(a.buffer.data()) + i * 50, 50, kAllAccess, {}));
        requests.push_back(a.request(WrOpcode::RdmaRead, b, 50, i, i * 50, i * 50));
        requests.back().sge.lkey = ours.back()->lkey();
    }
    ASSERT_EQ(a.qp->post_send(requests), requests.size());
    for (const auto& wc : a.take(requests.size())) EXPECT_EQ(wc.status, WcStatus::Success);
    EXPECT_EQ(std::memcmp(a.buffer.data(), b.buffer.data(), kRegions * 50), 0);
}

TEST_F(SoftLocalCopies, MorePiecesThanOneCallTakesSomeOfThemEmpty) {
    constexpr std::size_t kPieces = 3 * kCallPieces + 7;
    std::vector<SendWr> requests;
    a.fill(3);
    std::size_t at = 0;
    for (std::size_t i = 0; i < kPieces; ++i) {
        const auto size = static_cast<std::uint32_t>(i % 5);  // 0 to 4 bytes
        requests.push_back(a.request(WrOpcode::RdmaWrite, b, size, i, at, at));
        at += size;
    }
    ASSERT_EQ(a.qp->post_send(requests), requests.size());
    const auto done = a.take(requests.size());
    for (std::size_t i = 0; i < done.size(); ++i) {
        ASSERT_EQ(done[i].status, WcStatus::Success);
        ASSERT_EQ(done[i].wr_id, i);
    }
    EXPECT_EQ(std::memcmp(a.buffer.data(), b.buffer.data(), at), 0);
    EXPECT_EQ(b.buffer[at], 0);
}

TEST_F(SoftLocalCopies, MoreBytesThanOneCallMoves) {
    a.fill(4);
    const auto size = static_cast<std::uint32_t>(a.buffer.size());
    ASSERT_GT(size, 3 * kCallBytes);
    EXPECT_EQ(run(a.request(WrOpcode::RdmaWrite, b, size)), WcStatus::Success);
    EXPECT_EQ(a.buffer, b.buffer);
    b.fill(5);
    EXPECT_EQ(run(a.request(WrOpcode::RdmaRead, b, size)), WcStatus::Success);
    EXPECT_EQ(a.buffer, b.buffer);
}

TEST_F(SoftLocalCopies, ReadsAndWritesInOnePostKeepTheirOrder) {
    a.fill(6);
    const auto original = a.buffer;
    // Each byte goes there, comes back one further, and goes there again.
    std::vector<SendWr> requests;
    constexpr std::uint32_t kSize = 10'000;
    for (std::uint64_t i = 0; i < 100; ++i) {
        requests.push_back(a.request(WrOpcode::RdmaWrite, b, kSize, 2 * i, i, i));
        requests.push_back(a.request(WrOpcode::RdmaRead, b, kSize, 2 * i + 1, i + 1, i));
    }
    ASSERT_EQ(a.qp->post_send(requests), requests.size());
    const auto done = a.take(requests.size());
    for (std::size_t i = 0; i < done.size(); ++i) EXPECT_EQ(done[i].wr_id, i);
    EXPECT_EQ(std::memcmp(a.buffer.data() + 100, original.data(), kSize), 0);
}

TEST_F(SoftLocalCopies, SendsAndImmediatesTakeTheirTurnAmongCopiesWhileTheReceiverIsNotReady) {
    constexpr std::size_t kRounds = 50;
    a.fill(7);
    std::vector<SendWr> requests;
    for (std::uint32_t i = 0; i < kRounds; ++i) {
        const std::uint64_t at = i * 1000;
        requests.push_back(a.request(WrOpcode::RdmaWrite, b, 1000, 3 * i, at, at));
        if (i % 2 == 0) {
            requests.push_back(a.request(WrOpcode::RdmaWriteWithImm, b, 0, 3 * i + 1));
            requests.back().imm = i;
        } else {
            requests.push_back(a.request(WrOpcode::Send, b, 10, 3 * i + 1, at));
        }
        requests.push_back(a.request(WrOpcode::RdmaRead, b, 100, 3 * i + 2, 8 << 20, at));
    }
    ASSERT_EQ(a.qp->post_send(requests), requests.size());
    for (std::uint32_t i = 0; i < kRounds; ++i) {
        // It is tried again until there is a receive; nothing after it has been copied meanwhile.
        for (int j = 0; j < 20; ++j) a.cq->poll({});
        const std::uint64_t next = (i + 1) * 1000;
        if (i + 1 < kRounds)
            EXPECT_EQ(std::count(&b.buffer[next], &b.buffer[next + 1000], 0), 1000);
        const RecvWr receive = b.receive(i, 10, 9 << 20);
        b.qp->post_recv({&receive, 1});
        WorkCompletion wc;
        const Deadline deadline = soon();
        while (b.cq->poll({&wc, 1}) == 0 && Clock::now() < deadline) a.cq->poll({});
        EXPECT_EQ(wc.status, WcStatus::Success);
        EXPECT_EQ(wc.wr_id, i);
        EXPECT_EQ(wc.with_imm, i % 2 == 0);
        if (wc.with_imm) EXPECT_EQ(wc.imm, i);
        EXPECT_EQ(std::memcmp(&a.buffer[i * 1000], &b.buffer[i * 1000], 1000), 0);
    }
    const auto done = a.take(requests.size());
    for (std::size_t i = 0; i < done.size(); ++i) {
        EXPECT_EQ(done[i].wr_id, i);
        EXPECT_EQ(done[i].status, WcStatus::Success);
    }
}

// ---- Memory that is registered, but not there ------------------------------------------------

TEST_F(SoftLocal, TargetMemoryThatIsGoneFailsTheRequestThatMeetsIt) {
    for (const WrOpcode opcode : {WrOpcode::RdmaWrite, WrOpcode::RdmaRead}) {
        Side own(options_for("local"));
        Pages there(4);
        const auto mr = b.pd->register_memory(address(there.data()), there.size(), kAllAccess, {});
        auto responder = b.make_qp();
        connect(*own.qp, *responder);
        std::memset(there.data(), 1, there.size());
        std::memset(own.buffer.data(), 2, own.buffer.size());
        there.take_away(2);
        std::vector<SendWr> requests;
        for (std::uint64_t i = 0; i < 4; ++i) {
            requests.push_back(own.request(opcode, b, kPage, i, i * kPage));
            requests.back().rkey = mr->rkey();
            requests.back().remote_addr = address(there.data()) + i * kPage;
        }
        ASSERT_EQ(own.qp->post_send(requests), requests.size());
        const auto done = own.take(4);
        EXPECT_EQ(done[0].status, WcStatus::Success);
        EXPECT_EQ(done[1].status, WcStatus::Success);
        EXPECT_EQ(done[2].status, WcStatus::RemOpErr);
        EXPECT_EQ(done[3].status, WcStatus::WrFlushErr);
        const auto* moved = opcode == WrOpcode::RdmaWrite ? there.data() : own.buffer.data();
        const std::uint8_t value = opcode == WrOpcode::RdmaWrite ? 2 : 1;
        EXPECT_EQ(std::count(moved, moved + 2 * kPage, value), 2 * std::ptrdiff_t{kPage});
        EXPECT_NE(moved[3 * kPage], value);
    }
}

TEST_F(SoftLocal, OneRequestThatRunsIntoAHoleFails) {
    Pages there(3);
    const auto mr = b.pd->register_memory(address(there.data()), there.size(), kAllAccess, {});
    there.take_away(1);
    EXPECT_EQ(run(request(WrOpcode::RdmaWrite, *mr, address(there.data()), 3 * kPage)),
              WcStatus::RemOpErr);
}

TEST_F(SoftLocal, LocalMemoryThatIsGoneIsALocalError) {
    for (const WrOpcode opcode : {WrOpcode::RdmaWrite, WrOpcode::RdmaRead}) {
        Side own(options_for("local"));
        auto responder = b.make_qp();
        connect(*own.qp, *responder);
        Pages here(2);
        const auto mr = own.pd->register_memory(address(here.data()), here.size(), kAllAccess, {});
        here.take_away(1);
        std::vector<SendWr> requests(2, own.request(opcode, b, kPage));
        for (std::uint64_t i = 0; i < 2; ++i) {
            requests[i].sge.addr = address(here.data()) + i * kPage;
            requests[i].sge.lkey = mr->lkey();
        }
        ASSERT_EQ(own.qp->post_send(requests), 2U);
        EXPECT_EQ(own.take_one().status, WcStatus::Success);
        EXPECT_EQ(own.take_one().status, WcStatus::LocProtErr);
    }
}

// ---- Mapped memory ---------------------------------------------------------------------------

TEST_F(SoftLocal, AFileIsMappedAndThenReachedWithoutSystemCalls) {
    MappedFile file(16 * kPage);
    constexpr std::size_t kOffset = 2 * kPage + 300;  // regions need not begin with a page
    const auto mr = share(file, kOffset, 8 * kPage);
    const std::uint64_t remote = address(file.data()) + kOffset;
    a.fill(1);
    EXPECT_EQ(run(request(WrOpcode::RdmaWrite, *mr, remote, 8 * kPage)), WcStatus::Success);
    EXPECT_EQ(std::memcmp(file.data() + kOffset, a.buffer.data(), 8 * kPage), 0);
    ASSERT_TRUE(eventually([&] { return file.mappings("rw-s") == 2; }));
    // Only a mapping of its own lets the initiator in now.
    file.unmap();
    a.fill(2);
    EXPECT_EQ(run(request(WrOpcode::RdmaWrite, *mr, remote + 5, 7 * kPage)), WcStatus::Success);
    for (const std::size_t i : {0UL, 1UL, kPage, 7 * kPage - 1}) {
        EXPECT_EQ(file.byte_at(kOffset + 5 + i), a.buffer[i]);
    }
    EXPECT_EQ(run(request(WrOpcode::RdmaRead, *mr, remote + 5, 7 * kPage, 512 << 10)),
              WcStatus::Success);
    EXPECT_EQ(std::memcmp(&a.buffer[512 << 10], a.buffer.data(), 7 * kPage), 0);
    EXPECT_EQ(run(request(WrOpcode::RdmaWrite, *mr, remote + 1, 8 * kPage)),
              WcStatus::RemAccessErr);
}

TEST_F(SoftLocal, ADeregisteredRegionIsUnmappedAndItsMemoryLetGo) {
    MappedFile file(4 * kPage);
    auto mr = share(file, 0, 4 * kPage);
    EXPECT_EQ(run(request(WrOpcode::RdmaWrite, *mr, address(file.data()), 8)), WcStatus::Success);
    ASSERT_TRUE(eventually([&] { return file.mappings("rw-s") == 2; }));
    const SendWr late = request(WrOpcode::RdmaWrite, *mr, address(file.data()), 8);
    EXPECT_TRUE(mr->revoke(soon()));
    mr.reset();
    EXPECT_TRUE(eventually([&] { return file.mappings("rw-s") == 1; }));
    file.data()[0] = 77;
    EXPECT_EQ(run(late), WcStatus::RemAccessErr);
    EXPECT_EQ(file.data()[0], 77);
}

TEST_F(SoftLocal, AMappingThatWasAskedForAndCameTooLateIsNotKept) {
    MappedFile file(kPage);
    for (int round = 0; round < 50; ++round) {
        auto mr = share(file, 0, kPage);
        SendWr wr = request(WrOpcode::RdmaWrite, *mr, address(file.data()), 8);
        ASSERT_EQ(a.qp->post_send({&wr, 1}), 1U);  // asks, and does not look for the answer
        EXPECT_TRUE(mr->revoke(soon()));
        mr.reset();
        EXPECT_EQ(a.take_one().status, WcStatus::Success);
        ASSERT_TRUE(eventually([&] { return file.mappings("rw-s") == 1; }));
    }
}

TEST_F(SoftLocal, ARegionPeersMayOnlyReadIsMappedReadOnly) {
    MappedFile file(kPage);
    const auto mr = share(file, 0, kPage, kAccessLocalWrite | kAccessRemoteRead);
    std::memset(file.data(), 9, kPage);
    EXPECT_EQ(run(request(WrOpcode::RdmaRead, *mr, address(file.data()), kPage)),
              WcStatus::Success);
    ASSERT_TRUE(eventually([&] { return file.mappings("r--s") == 1; }));
    std::memset(file.data(), 10, kPage);
    EXPECT_EQ(run(request(WrOpcode::RdmaRead, *mr, address(file.data()), kPage)),
              WcStatus::Success);
    EXPECT_EQ(a.buffer[100], 10);
    EXPECT_EQ(file.mappings("rw-s"), 1U) << "besides the owner's";
    EXPECT_EQ(run(request(WrOpcode::RdmaWrite, *mr, address(file.data()), 1)),
              WcStatus::RemAccessErr);
}

TEST_F(SoftLocal, QueuePairsShareAMapping) {
    MappedFile file(kPage);
    const auto mr = share(file, 0, kPage);
    const SendWr wr = request(WrOpcode::RdmaWrite, *mr, address(file.data()), 8);
    std::vector<std::unique_ptr<QueuePair>> pairs;
    for (int i = 0; i < 3; ++i) {
        pairs.push_back(a.make_qp());
        pairs.push_back(b.make_qp());
        connect(*pairs[pairs.size() - 2], *pairs.back());
        pairs[pairs.size() - 2]->post_send({&wr, 1});
        EXPECT_EQ(a.take_one().status, WcStatus::Success);
    }
    ASSERT_TRUE(eventually([&] { return file.mappings("rw-s") == 2; }));
    file.unmap();
    for (std::size_t i = 0; i < pairs.size(); i += 2) {
        // Each has its own answer to wait for; until then it would need the owner's mapping.
        const Deadline deadline = soon();
        while (!pairs[i]->try_now(wr) && Clock::now() < deadline) a.quiet();
        ASSERT_TRUE(pairs[i]->try_now(wr));
    }
    EXPECT_EQ(file.mappings("rw-s"), 1U);
    pairs.clear();
    EXPECT_EQ(file.mappings("rw-s"), 0U);
}

TEST_F(SoftLocal, AFileThatMightShrinkIsNotMapped) {
    MappedFile might(kPage, 0);
    MappedFile cannot(kPage);
    const auto mr = share(might, 0, kPage);
    const auto second = share(cannot, 0, kPage);
    const SendWr wr = request(WrOpcode::RdmaWrite, *mr, address(might.data()), 8);
    EXPECT_EQ(run(wr), WcStatus::Success);
    EXPECT_EQ(run(request(WrOpcode::RdmaWrite, *second, address(cannot.data()), 8)),
              WcStatus::Success);
    // Answers come in order: with the second, the first has come.
    ASSERT_TRUE(eventually([&] { return cannot.mappings("rw-s") == 2; }));
    EXPECT_EQ(might.mappings("rw-s"), 1U) << "only the owner's";
    EXPECT_EQ(run(wr), WcStatus::Success);
}

// ---- The table -------------------------------------------------------------------------------

TEST(SoftLocalTable, AFullTableRefusesOneMoreRegionAndTakesItWhenOneHasGone) {
    MrTable table(true);
    std::vector<MrRef> regions;
    for (std::size_t i = 0; i < kLocalRegions / 2; ++i) {
        regions.push_back(table.add(4096, 1, kAllAccess, {}));
    }
    try {
        table.add(4096, 1, kAllAccess, {});
        FAIL() << "there was room for one more";
    } catch (const NativeError& error) {
        EXPECT_EQ(error.error(), ENOMEM);
    }
    table.close(regions.back());
    ASSERT_TRUE(table.wait_unused(regions.back(), soon()));
    table.remove(regions.back(), true);
    const MrRef last = table.add(4096, 1, kAllAccess, {});
    EXPECT_NE(last->key, regions.back()->key) << "a key does not come again soon";
    EXPECT_EQ(table.find(last->key), last);
    EXPECT_EQ(table.find(regions.back()->key), nullptr);
}

TEST(SoftLocalTable, NeighbouringKeysHaveNeighbouringPlaces) {
    MrTable table(true);
    const MrRef first = table.add(4096, 1, kAllAccess, {});
    const MrRef second = table.add(4096, 1, kAllAccess, {});
    EXPECT_EQ((local::slot_of(first->key) + 1) % kLocalRegions, local::slot_of(second->key));
}

// ---- Permission ------------------------------------------------------------------------------

TEST(SoftLocalPermission, ARefusalSaysWhoForbidsItAndWhatHelps) {
    using local::explain_refusal;
    EXPECT_NE(explain_refusal("1").find("ptrace_scope is 1"), std::string::npos);
    EXPECT_NE(explain_refusal("1").find("allow_ptrace=True"), std::string::npos);
    EXPECT_NE(explain_refusal("1").find("AIOFLAGCX_ALLOW_PTRACE=1"), std::string::npos);
    EXPECT_NE(explain_refusal("2").find("CAP_SYS_PTRACE"), std::string::npos);
    EXPECT_NE(explain_refusal("3").find("forbids"), std::string::npos);
    for (const char* without : {"2", "3", "0", "", "nonsense"}) {
        EXPECT_EQ(explain_refusal(without).find("allow_ptrace"), std::string::npos)
            << "it would not help";
    }
    for (const char* no_yama : {"0", ""}) {
        EXPECT_NE(explain_refusal(no_yama).find("PR_SET_DUMPABLE"), std::string::npos);
    }
}

TEST(SoftLocalPermission, AllowPtraceDoesNoHarmWithoutYama) {
    SoftOptions options = options_for("local");
    options.allow_ptrace = true;
    Side a(options);
    Side b(options);
    connect(*a.qp, *b.qp);
    const SendWr wr = a.request(WrOpcode::RdmaWrite, b, 10);
    a.qp->post_send({&wr, 1});
    EXPECT_EQ(a.take_one().status, WcStatus::Success);
}

}  // namespace
}  // namespace aioflagcx::verbs::soft
