// GPU memory as the RDMA device gets at it: exported by the CUDA driver as a dmabuf. The driver is
// looked for when the program runs; without it there is no GPU memory.
#pragma once

#include <cstdint>
#include <optional>

#include "common/unique_fd.h"

namespace aioflagcx::verbs::ibverbs {

struct DmaBuf {
    UniqueFd fd;
    std::uint64_t offset = 0;  // of the range in it, bytes
};

// A range that the CUDA driver knows as device memory.
class DeviceMemory {
  public:
    // Nothing for host memory, or where there is no CUDA driver.
    static std::optional<DeviceMemory> find(std::uint64_t addr, std::uint64_t length);

    // By cuMemGetHandleForAddressRange. Throws NativeError.
    DmaBuf export_dmabuf() const;

  private:
    DeviceMemory(std::uint64_t addr, std::uint64_t length) noexcept
        : addr_(addr), length_(length) {}

    std::uint64_t addr_;
    std::uint64_t length_;
};

// The library that is opened instead of libcuda.so.1 from now on, for tests.
void use_cuda_library(const char* path);

}  // namespace aioflagcx::verbs::ibverbs
