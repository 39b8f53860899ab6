#include "verbs/cuda.h"

#include <dlfcn.h>
#include <unistd.h>

#include <cerrno>
#include <mutex>
#include <string>

#include "common/error.h"

namespace aioflagcx::verbs {

namespace {

// Of the CUDA Driver API (cuda.h): CUresult, CUpointer_attribute, CUmemorytype,
// CUmemRangeHandleType.
constexpr int kSuccess = 0;
constexpr int kAttributeContext = 1;
constexpr int kAttributeMemoryType = 2;
constexpr unsigned kMemoryTypeDevice = 2;
constexpr int kHandleTypeDmaBuf = 1;

struct Driver {
    int (*pointer_get_attribute)(void* data, int attribute, unsigned long long address) = nullptr;
    int (*get_handle_for_range)(void* handle, unsigned long long address, std::size_t size,
                                int type, unsigned long long flags) = nullptr;
    int (*push_context)(void* context) = nullptr;
    int (*pop_context)(void** context) = nullptr;
    int (*error_name)(int error, const char** name) = nullptr;
};

template <typename Function>
void find_symbol(void* handle, const char* name, Function& out) noexcept {
    out = reinterpret_cast<Function>(::dlsym(handle, name));
}

// Looked for until it is there: the application may load it later.
Driver get_driver() {
    static std::mutex mutex;  // guards `driver`
    static Driver driver;
    const std::lock_guard lock(mutex);
    if (driver.pointer_get_attribute != nullptr) return driver;
    if (void* const handle = ::dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL)) {
        find_symbol(handle, "cuPointerGetAttribute", driver.pointer_get_attribute);
        find_symbol(handle, "cuMemGetHandleForAddressRange", driver.get_handle_for_range);
        find_symbol(handle, "cuCtxPushCurrent_v2", driver.push_context);
        find_symbol(handle, "cuCtxPopCurrent_v2", driver.pop_context);
        find_symbol(handle, "cuGetErrorName", driver.error_name);
    }
    return driver;
}

// The context that made the memory, current on this thread as long as this lives: threads of ours
// have none. Memory that belongs to none (cuMemCreate) needs none.
class CurrentContext {
  public:
    CurrentContext(const Driver& driver, std::uint64_t addr) : pop_(driver.pop_context) {
        void* context = nullptr;
        if (driver.push_context == nullptr || pop_ == nullptr ||
            driver.pointer_get_attribute(&context, kAttributeContext, addr) != kSuccess ||
            context == nullptr) {
            return;
        }
        pushed_ = driver.push_context(context) == kSuccess;
    }
    CurrentContext(const CurrentContext&) = delete;
    CurrentContext& operator=(const CurrentContext&) = delete;
    ~CurrentContext() {
        void* context = nullptr;
        if (pushed_) pop_(&context);
    }

  private:
    int (*pop_)(void**);
    bool pushed_ = false;
};

std::string name_of(const Driver& driver, int error) {
    const char* name = nullptr;
    if (driver.error_name == nullptr || driver.error_name(error, &name) != kSuccess ||
        name == nullptr) {
        return "error " + std::to_string(error);
    }
    return name;
}

}  // namespace

std::optional<DeviceMemory> DeviceMemory::find(std::uint64_t addr, std::uint64_t length) {
    const Driver driver = get_driver();
    if (driver.pointer_get_attribute == nullptr) return std::nullopt;
    unsigned type = 0;
    if (driver.pointer_get_attribute(&type, kAttributeMemoryType, addr) != kSuccess ||
        type != kMemoryTypeDevice) {
        return std::nullopt;
    }
    return DeviceMemory(addr, length);
}

DmaBuf DeviceMemory::export_dmabuf() const {
    const Driver driver = get_driver();
    if (driver.get_handle_for_range == nullptr) {
        throw NativeError("cuMemGetHandleForAddressRange", ENOSYS,
                          "the CUDA driver is too old to export memory (11.7)");
    }
    // Whole pages are exported.
    const auto page = static_cast<std::uint64_t>(::sysconf(_SC_PAGESIZE));
    const std::uint64_t first = addr_ & ~(page - 1);
    const std::uint64_t end = (addr_ + length_ + page - 1) & ~(page - 1);
    const CurrentContext current(driver, addr_);
    int fd = -1;
    const int error = driver.get_handle_for_range(&fd, first, end - first, kHandleTypeDmaBuf, 0);
    if (error != kSuccess) {
        throw NativeError("cuMemGetHandleForAddressRange", 0,
                          name_of(driver, error) + " for " + std::to_string(length_) +
                              " bytes at " + std::to_string(addr_) +
                              "; does this GPU export memory (open kernel modules)?");
    }
    return {UniqueFd(fd), addr_ - first};
}

}  // namespace aioflagcx::verbs
