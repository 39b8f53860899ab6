#include "cuda.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>

namespace {

// Of cuda.h: CUresult, CUpointer_attribute, CUmemorytype, CUmemRangeHandleType.
constexpr int kInvalidValue = 1;
constexpr int kNotSupported = 801;
constexpr int kAttributeContext = 1;
constexpr int kAttributeMemoryType = 2;
constexpr unsigned kMemoryTypeDevice = 2;
constexpr int kDmaBuf = 1;

struct Memory {
    std::size_t size = 0;
    int file = -1;
};

struct State {
    std::mutex mutex;  // guards the rest
    std::map<unsigned long long, Memory> memory;
    std::set<int> exported;  // descriptors
    int exports = 0;
    unsigned long long exported_address = 0;
    std::size_t exported_size = 0;
    int contexts_at_export = 0;
    int error = 0;
};

thread_local int contexts = 0;  // a context is current on one thread

State& state() {
    static auto* const all = std::make_unique<State>().release();
    return *all;
}

// The memory that holds the range, or the end. The mutex is held.
auto holding(unsigned long long address, std::size_t size) {
    auto& memory = state().memory;
    auto found = memory.upper_bound(address);
    if (found == memory.begin()) return memory.end();
    --found;
    return address + size <= found->first + found->second.size ? found : memory.end();
}

}  // namespace

extern "C" {

unsigned long long fake_cuda_alloc(std::size_t size) {
    const std::lock_guard lock(state().mutex);
    // In whole pages, as the driver does.
    const auto page = static_cast<std::size_t>(::sysconf(_SC_PAGESIZE));
    size = (size + page - 1) / page * page;
    const int file = ::memfd_create("fake GPU memory", MFD_CLOEXEC);
    if (file < 0 || ::ftruncate(file, static_cast<off_t>(size)) != 0) return 0;
    void* const address =
        ::mmap(nullptr, size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    const auto number = reinterpret_cast<unsigned long long>(address);
    state().memory[number] = {size, file};
    return number;
}

void fake_cuda_store(unsigned long long address, const void* from, std::size_t size) {
    const std::lock_guard lock(state().mutex);
    const auto found = holding(address, size);
    [[maybe_unused]] const auto written =
        ::pwrite(found->second.file, from, size, static_cast<off_t>(address - found->first));
}

void fake_cuda_load(unsigned long long address, void* to, std::size_t size) {
    const std::lock_guard lock(state().mutex);
    const auto found = holding(address, size);
    [[maybe_unused]] const auto read =
        ::pread(found->second.file, to, size, static_cast<off_t>(address - found->first));
}

int fake_cuda_open_exports() {
    const std::lock_guard lock(state().mutex);
    return static_cast<int>(
        std::count_if(state().exported.begin(), state().exported.end(), [](int descriptor) {
            struct stat status{};
            if (::fstat(descriptor, &status) != 0) return false;
            // The number may be another file's by now.
            return std::any_of(state().memory.begin(), state().memory.end(), [&](const auto& each) {
                struct stat file{};
                return ::fstat(each.second.file, &file) == 0 && file.st_ino == status.st_ino &&
                       each.second.file != descriptor;
            });
        }));
}

int fake_cuda_exports() {
    const std::lock_guard lock(state().mutex);
    return state().exports;
}
unsigned long long fake_cuda_exported_address() {
    const std::lock_guard lock(state().mutex);
    return state().exported_address;
}
std::size_t fake_cuda_exported_size() {
    const std::lock_guard lock(state().mutex);
    return state().exported_size;
}
int fake_cuda_contexts_at_export() {
    const std::lock_guard lock(state().mutex);
    return state().contexts_at_export;
}
int fake_cuda_contexts() { return contexts; }
void fake_cuda_fail_exports(int error) {
    const std::lock_guard lock(state().mutex);
    state().error = error;
}

// The driver's.

int cuPointerGetAttribute(void* data, int attribute, unsigned long long address) {
    const std::lock_guard lock(state().mutex);
    const auto found = holding(address, 1);
    if (found == state().memory.end()) return kInvalidValue;
    if (attribute == kAttributeMemoryType) {
        *static_cast<unsigned*>(data) = kMemoryTypeDevice;
    } else if (attribute == kAttributeContext) {
        *static_cast<void**>(data) = &state();
    } else {
        return kInvalidValue;
    }
    return 0;
}

int cuMemGetHandleForAddressRange(void* handle, unsigned long long address, std::size_t size,
                                  int type, unsigned long long flags) {
    const std::lock_guard lock(state().mutex);
    const auto page = static_cast<unsigned long long>(::sysconf(_SC_PAGESIZE));
    if (state().error != 0) return state().error;
    if (type != kDmaBuf || flags != 0) return kNotSupported;
    const auto found = holding(address, size);
    if (found == state().memory.end() || address % page != 0 || size % page != 0) {
        return kInvalidValue;
    }
    state().exported_address = address;
    state().exported_size = size;
    state().contexts_at_export = contexts;
    ++state().exports;
    // The range alone is given away. That it does not begin where the file does is told by the
    // descriptor's position, which the fake libibverbs looks at.
    const std::string path = "/proc/self/fd/" + std::to_string(found->second.file);
    const int descriptor = ::open(path.c_str(), O_RDWR | O_CLOEXEC);
    ::lseek(descriptor, static_cast<off_t>(address - found->first), SEEK_SET);
    state().exported.insert(descriptor);
    *static_cast<int*>(handle) = descriptor;
    return 0;
}

int cuCtxPushCurrent_v2(void*) {
    ++contexts;
    return 0;
}

int cuCtxPopCurrent_v2(void** context) {
    *context = nullptr;
    --contexts;
    return 0;
}

int cuGetErrorName(int error, const char** name) {
    *name = error == kNotSupported ? "CUDA_ERROR_NOT_SUPPORTED" : "CUDA_ERROR_INVALID_VALUE";
    return 0;
}

}  // extern "C"
