#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <string>

#include "common/error.h"
#include "engine/allocation.h"
#include "engine/local_table.h"
#include "fake_device.h"

namespace aioflagcx::engine {
namespace {

constexpr std::uint64_t kMiB = 1 << 20;

std::uint8_t* bytes(const Allocation& allocation) {
    return reinterpret_cast<std::uint8_t*>(allocation.addr());
}

std::shared_ptr<Allocation> allocate(std::uint64_t size) {
    auto allocation = Allocation::make(size, false);
    allocation->populate(0, allocation->mapped());
    return allocation;
}

// What the memfd of this inode is open as in this process: 0 once nobody holds it.
int descriptors_of(ino_t inode) {
    int count = 0;
    for (const auto& entry : std::filesystem::directory_iterator("/proc/self/fd")) {
        struct stat status{};
        if (::stat(entry.path().c_str(), &status) == 0 && status.st_ino == inode) ++count;
    }
    return count;
}

struct stat status_of(int fd) {
    struct stat status{};
    EXPECT_EQ(::fstat(fd, &status), 0);
    return status;
}

TEST(Allocation, HasTheSizeAskedForInWholeZeroFilledPages) {
    const auto page = static_cast<std::uint64_t>(::sysconf(_SC_PAGESIZE));
    for (const std::uint64_t size : {std::uint64_t{1}, page, page + 1, 3 * kMiB}) {
        const auto allocation = allocate(size);
        EXPECT_EQ(allocation->size(), size);
        EXPECT_EQ(allocation->addr() % page, 0u);
        EXPECT_EQ(allocation->mapped(), (size + page - 1) / page * page);
        EXPECT_TRUE(std::all_of(bytes(*allocation), bytes(*allocation) + size,
                                [](std::uint8_t byte) { return byte == 0; }));
    }
}

TEST(Allocation, PopulatingMakesThePagesExist) {
    const auto allocation = Allocation::make(8 * kMiB, false);
    EXPECT_EQ(status_of(allocation->fd()).st_blocks, 0);
    allocation->populate(0, 4 * kMiB);
    EXPECT_EQ(status_of(allocation->fd()).st_blocks, 4 * kMiB / 512);
    allocation->populate(4 * kMiB, 100 * kMiB);  // no further than the end
    allocation->populate(8 * kMiB, 1);
    EXPECT_EQ(status_of(allocation->fd()).st_blocks, 8 * kMiB / 512);
}

TEST(Allocation, ItsSizeIsSealed) {
    const auto allocation = allocate(kMiB);
    const int seals = ::fcntl(allocation->fd(), F_GET_SEALS);
    const int wanted = F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL;
    EXPECT_EQ(seals & wanted, wanted);
    EXPECT_EQ(seals & F_SEAL_WRITE, 0);
    for (const off_t size : {off_t{0}, off_t{4096}, off_t{2 * kMiB}}) {
        EXPECT_EQ(::ftruncate(allocation->fd(), size), -1);
        EXPECT_EQ(errno, EPERM);
    }
    EXPECT_EQ(::fcntl(allocation->fd(), F_ADD_SEALS, F_SEAL_WRITE), -1);
    EXPECT_EQ(::fcntl(allocation->fd(), F_GETFD) & FD_CLOEXEC, FD_CLOEXEC);
}

TEST(Allocation, ASecondMappingSharesItsBytesAndOutlivesIt) {
    auto allocation = allocate(kMiB);
    void* second = ::mmap(nullptr, kMiB, PROT_READ | PROT_WRITE, MAP_SHARED, allocation->fd(), 0);
    ASSERT_NE(second, MAP_FAILED);
    auto* peer = static_cast<std::uint8_t*>(second);
    bytes(*allocation)[5] = 7;
    EXPECT_EQ(peer[5], 7);
    peer[kMiB - 1] = 9;
    EXPECT_EQ(bytes(*allocation)[kMiB - 1], 9);
    allocation.reset();
    const auto next = allocate(kMiB);  // by now the first one's mapping is gone
    peer[5] = 8;                       // a late write meets only pages that nobody else has
    EXPECT_EQ(peer[kMiB - 1], 9);
    EXPECT_EQ(bytes(*next)[5], 0);
    ::munmap(second, kMiB);
}

TEST(Allocation, TheLastHolderEndsIt) {
    auto allocation = allocate(kMiB);
    const std::uint64_t addr = allocation->addr();
    const ino_t inode = status_of(allocation->fd()).st_ino;
    EXPECT_EQ(descriptors_of(inode), 1);
    auto second = allocation;
    allocation.reset();
    EXPECT_EQ(descriptors_of(inode), 1);
    bytes(*second)[0] = 1;
    second.reset();
    allocate(1);  // waits until what ended before is gone
    EXPECT_EQ(descriptors_of(inode), 0);
    EXPECT_EQ(Allocation::holding(addr, kMiB), nullptr);
}

TEST(Allocation, IsFoundByAnyRangeInsideIt) {
    const auto a = allocate(10'000);
    const auto b = allocate(10'000);
    for (const auto& each : {a, b}) {
        EXPECT_EQ(Allocation::holding(each->addr(), 10'000), each);
        EXPECT_EQ(Allocation::holding(each->addr() + 9'999, 1), each);
        EXPECT_EQ(Allocation::holding(each->addr() + 1, 10'000), nullptr);
        EXPECT_EQ(Allocation::holding(each->addr() + 9'999, UINT64_MAX), nullptr);
    }
    EXPECT_EQ(Allocation::holding(1, 1), nullptr);
    EXPECT_EQ(Allocation::holding(UINT64_MAX, 1), nullptr);
}

TEST(Allocation, SizesThatCannotBeAreRefused) {
    for (const std::uint64_t size : {std::uint64_t{0}, std::uint64_t{1} << 62, UINT64_MAX}) {
        EXPECT_THROW(Allocation::make(size, false), NativeError);
    }
}

// The kernel either has huge pages for it, or says so at once: never a SIGBUS when touched.
TEST(Allocation, HugePagesAreThereOrItFails) {
    try {
        const auto allocation = Allocation::make(1, true);
        allocation->populate(0, allocation->mapped());
        EXPECT_GE(allocation->mapped(), kMiB);
        bytes(*allocation)[allocation->mapped() - 1] = 1;
    } catch (const NativeError& error) {
        EXPECT_TRUE(error.call() == "mmap" || error.call() == "memfd_create") << error.what();
    }
}

TEST(Allocation, EveryMrOfARangeInsideItKnowsItsPlaceInTheFile) {
    testing::FakePd pd{std::make_shared<testing::Script>()};
    testing::FakePd other{std::make_shared<testing::Script>()};
    LocalTable table({&pd, &other}, 4096);
    auto allocation = allocate(20'000);
    const std::uint64_t addr = allocation->addr();
    const int fd = allocation->fd();
    const auto ids = table.add(std::vector<RegionSpec>{
        {addr, 10'000, 3, true, {}}, {addr + 5'000, 100, 3, true, {}}, {4096, 100, 3, true, {}}});
    for (const testing::FakePd* each : {&pd, &other}) {
        std::vector<std::pair<int, std::uint64_t>> places;
        for (const auto& shared : each->registered) places.emplace_back(shared.fd, shared.offset);
        EXPECT_EQ(places, (std::vector<std::pair<int, std::uint64_t>>{
                              {fd, 0}, {fd, 4096}, {fd, 8192}, {fd, 5'000}, {-1, 0}}));
    }
    // Registered, it lives without any other holder; deregistered, it is gone even though
    // somebody still has the region.
    const ino_t inode = status_of(fd).st_ino;
    const auto region = table.snapshot()->regions[0];
    allocation.reset();
    EXPECT_EQ(descriptors_of(inode), 1);
    EXPECT_TRUE(table.remove(ids, verbs::Deadline::max()));
    allocate(1);
    EXPECT_EQ(descriptors_of(inode), 0);
}

}  // namespace
}  // namespace aioflagcx::engine
