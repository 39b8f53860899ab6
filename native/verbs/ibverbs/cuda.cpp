#include "verbs/ibverbs/cuda.h"

#include <dlfcn.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <mutex>
#include <string>

#include "common/error.h"

namespace aioflagcx::verbs::ibverbs {

namespace {

// Of the CUDA Driver API (cuda.h): CUpointer_attribute, CUmemorytype, CUmemRangeHandleType.
constexpr int kSuccess = 0;
constexpr int kAttributeMemoryType = 2;
constexpr unsigned kMemoryTypeDevice = 2;
constexpr int kHandleTypeDmaBuf = 1;

struct Driver {
    int (*pointer_get_attribute)(void* data, int attribute, unsigned long long address) = nullptr;
    int (*get_handle_for_range)(void* handle, unsigned long long address, std::size_t size,
                                int type, unsigned long long flags) = nullptr;
};

std::mutex mutex;  // guards what follows
std::string path = "libcuda.so.1";
bool loaded = false;
Driver driver;

template <typename Function>
void find_symbol(void* handle, const char* name, Function& out) noexcept {
    out = reinterpret_cast<Function>(::dlsym(handle, name));
}

Driver get_driver() {
    const std::lock_guard lock(mutex);
    if (!loaded) {
        loaded = true;
        driver = {};
        if (void* const handle = ::dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL)) {
            find_symbol(handle, "cuPointerGetAttribute", driver.pointer_get_attribute);
            find_symbol(handle, "cuMemGetHandleForAddressRange", driver.get_handle_for_range);
        }
    }
    return driver;
}

}  // namespace

void use_cuda_library(const char* other) {
    const std::lock_guard lock(mutex);
    path = other;
    loaded = false;
}

std::optional<DeviceMemory> DeviceMemory::find(std::uint64_t addr, std::uint64_t length) {
    const Driver found = get_driver();
    if (found.pointer_get_attribute == nullptr) return std::nullopt;
    unsigned type = 0;
    if (found.pointer_get_attribute(&type, kAttributeMemoryType, addr) != kSuccess ||
        type != kMemoryTypeDevice) {
        return std::nullopt;
    }
    return DeviceMemory(addr, length);
}

DmaBuf DeviceMemory::export_dmabuf() const {
    const Driver found = get_driver();
    if (found.get_handle_for_range == nullptr) {
        throw NativeError("cuMemGetHandleForAddressRange", ENOSYS,
                          "the CUDA driver is too old to export memory (11.7)");
    }
    // Whole pages are exported.
    const auto page = static_cast<std::uint64_t>(::sysconf(_SC_PAGESIZE));
    const std::uint64_t first = addr_ & ~(page - 1);
    const std::uint64_t end = (addr_ + length_ + page - 1) & ~(page - 1);
    int fd = -1;
    const int error = found.get_handle_for_range(&fd, first, end - first, kHandleTypeDmaBuf, 0);
    if (error != kSuccess) {
        throw NativeError("cuMemGetHandleForAddressRange", 0,
                          "error " + std::to_string(error) + " for " + std::to_string(length_) +
                              " bytes at " + std::to_string(addr_));
    }
    return {UniqueFd(fd), addr_ - first};
}

}  // namespace aioflagcx::verbs::ibverbs
