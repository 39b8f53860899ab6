// GPU memory, as the CUDA driver knows it. The driver is looked for when the program runs; without
// it there is no GPU memory.
#pragma once

#include <cstdint>
#include <optional>

#include "common/unique_fd.h"

namespace aioflagcx::verbs {

// Memory of which an RDMA device gets at `fd`, from `offset` on.
struct DmaBuf {
    UniqueFd fd;
    std::uint64_t offset = 0;  // bytes
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

}  // namespace aioflagcx::verbs
