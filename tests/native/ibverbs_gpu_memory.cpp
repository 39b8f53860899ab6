// Memory of GPUs, by a fake CUDA driver.
#include <unistd.h>

#include <cerrno>
#include <cstring>

#include "common/error.h"
#include "fakes/cuda.h"
#include "rdma_fixture.h"
#include "verbs/cuda.h"

namespace aioflagcx::verbs::ibverbs {
namespace {

constexpr std::uint32_t kAll = kAccessLocalWrite | kAccessRemoteRead | kAccessRemoteWrite;
constexpr std::size_t kSize = 1 << 20;
constexpr int kNotSupported = 801;  // CUDA_ERROR_NOT_SUPPORTED

struct GpuMemoryTest : RdmaEngineTest {
    GpuMemoryTest() { fake_cuda_fail_exports(0); }
    ~GpuMemoryTest() override { fake_cuda_fail_exports(0); }

    const std::uint64_t gpu = fake_cuda_alloc(kSize);
    const int exports_before = fake_cuda_exports();
};

TEST_F(GpuMemoryTest, HostMemoryIsNone) {
    const std::vector<std::uint8_t> memory(64);
    EXPECT_FALSE(DeviceMemory::find(address_of(memory.data()), memory.size()));
    EXPECT_TRUE(DeviceMemory::find(gpu, kSize));
    EXPECT_TRUE(DeviceMemory::find(gpu + kSize - 1, 1));
}

TEST_F(GpuMemoryTest, WholePagesAreExportedInTheContextThatHasThem) {
    const auto page = static_cast<std::uint64_t>(::sysconf(_SC_PAGESIZE));
    const DmaBuf file = DeviceMemory::find(gpu + page + 100, page)->export_dmabuf();
    EXPECT_EQ(file.offset, 100U);
    EXPECT_EQ(fake_cuda_exported_address(), gpu + page);
    EXPECT_EQ(fake_cuda_exported_size(), 2 * page);
    EXPECT_EQ(fake_cuda_contexts_at_export(), 1);
    EXPECT_EQ(fake_cuda_contexts(), 0);
}

TEST_F(GpuMemoryTest, IsRegisteredByADmabufThatIsClosedOnceItIs) {
    const auto device = open("fake0");
    const auto pd = device->alloc_pd();
    const auto mr = pd->register_memory(gpu + 100, 5000, kAll, {});
    EXPECT_TRUE(mr->read_after_write());
    ASSERT_EQ(fake.registrations.size(), 1U);
    const auto& made = fake.registrations[0];
    EXPECT_EQ(made.call, "ibv_reg_dmabuf_mr");
    EXPECT_EQ(made.addr, gpu + 100);
    EXPECT_EQ(made.length, 5000U);
    EXPECT_EQ(made.offset, 100U);
    EXPECT_EQ(fake_cuda_exports(), exports_before + 1);
    EXPECT_EQ(fake_cuda_open_exports(), 0);
}

TEST_F(GpuMemoryTest, WhatIsNoDmabufIsLeftToThePeerMemoryModule) {
    const auto device = open("fake0");
    const auto pd = device->alloc_pd();
    set(&FakeVerbs::dmabuf_error, EOPNOTSUPP);
    pd->register_memory(gpu, kSize, kAll, {});
    fake_cuda_fail_exports(kNotSupported);
    pd->register_memory(gpu, kSize, kAll, {});
    ASSERT_EQ(fake.registrations.size(), 2U);
    for (const auto& made : fake.registrations) EXPECT_EQ(made.call, "ibv_reg_mr");
    EXPECT_EQ(fake_cuda_exports(), exports_before + 1);
    EXPECT_EQ(fake_cuda_open_exports(), 0);
}

TEST_F(GpuMemoryTest, WithoutThatModuleTheErrorTellsOfBothWays) {
    const auto device = open("fake0");
    const auto pd = device->alloc_pd();
    set(&FakeVerbs::register_error, EFAULT);
    set(&FakeVerbs::dmabuf_error, EOPNOTSUPP);
    const auto failure = [&] {
        try {
            pd->register_memory(gpu, kSize, kAll, {});
        } catch (const NativeError& error) {
            EXPECT_EQ(error.error(), EFAULT);
            return error.detail();
        }
        return std::string();
    };
    std::string text = failure();
    EXPECT_NE(text.find("nvidia-peermem"), std::string::npos) << text;
    EXPECT_NE(text.find("ibv_reg_dmabuf_mr: Operation not supported"), std::string::npos) << text;
    EXPECT_EQ(fake_cuda_open_exports(), 0);
    fake_cuda_fail_exports(kNotSupported);
    text = failure();
    EXPECT_NE(text.find("CUDA_ERROR_NOT_SUPPORTED"), std::string::npos) << text;
}

TEST_F(GpuMemoryTest, AWriteIntoItEndsWithAReadOnEachQueuePairUsed) {
    options.slice_size = 4096;
    start(2);
    std::vector<std::uint8_t> source(kSize);
    std::iota(source.begin(), source.end(), std::uint8_t{1});
    add(source.data(), kSize, engine::kTableAccessRead);
    engine->regions()->add(std::vector<engine::RegionSpec>{
        {gpu + 100, kSize - 100, engine::kTableAccessWrite, true, {}}});
    tell_table();
    connect(1, 0);
    connect(1, 1);
    const auto task = write(1, address_of(source.data()) + 100, gpu + 100, kSize - 100);
    wait_done(1);
    std::vector<std::uint8_t> there(kSize);
    fake_cuda_load(gpu, there.data(), kSize);
    EXPECT_TRUE(std::equal(source.begin() + 100, source.end(), there.begin() + 100));
    const auto posted = get(&FakeVerbs::posted);
    const auto reads = std::count(posted.begin(), posted.end(), IBV_WR_RDMA_READ);
    EXPECT_EQ(reads, static_cast<std::ptrdiff_t>(task->used.size()));
    EXPECT_EQ(posted.back(), IBV_WR_RDMA_READ);
}

}  // namespace
}  // namespace aioflagcx::verbs::ibverbs
