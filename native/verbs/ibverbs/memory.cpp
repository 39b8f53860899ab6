#include "verbs/ibverbs/memory.h"

#include <sys/resource.h>

#include <cerrno>
#include <mutex>
#include <string>
#include <utility>

#include "common/error.h"
#include "verbs/ibverbs/cuda.h"

namespace aioflagcx::verbs::ibverbs {

namespace {

// Lock: mutex_ guards mr_.
class IbvMemoryRegion final : public MemoryRegion {
  public:
    IbvMemoryRegion(std::shared_ptr<ibv_pd> pd, ibv_mr* mr) noexcept
        : pd_(std::move(pd)), lkey_(mr->lkey), rkey_(mr->rkey), mr_(mr) {}

    std::uint32_t lkey() const noexcept override { return lkey_; }
    std::uint32_t rkey() const noexcept override { return rkey_; }
    // The device has let go of the memory when ibv_dereg_mr(3) returns.
    bool revoke(Deadline) override {
        const std::lock_guard lock(mutex_);
        mr_.reset();
        return true;
    }

  private:
    const std::shared_ptr<ibv_pd> pd_;  // outlives mr_
    const std::uint32_t lkey_;
    const std::uint32_t rkey_;
    std::mutex mutex_;
    Handle<ibv_mr> mr_;
};

std::string why(int error, std::uint64_t addr, std::uint64_t length) {
    std::string text = std::to_string(length) + " bytes at " + std::to_string(addr);
    if (error == ENOMEM || error == EAGAIN) {
        rlimit limit{};
        ::getrlimit(RLIMIT_MEMLOCK, &limit);
        text += limit.rlim_cur == RLIM_INFINITY
                    ? "; the device or the system is out of memory for it"
                    : "; this process may lock " + std::to_string(limit.rlim_cur) +
                          " bytes of memory: raise the limit (ulimit -l unlimited, or "
                          "LimitMEMLOCK=infinity of a systemd service)";
    } else if (error == EFAULT) {
        text +=
            "; not all of it is mapped, or it is device memory that the kernel cannot give to "
            "the NIC (no dmabuf, and no peer-memory module such as nvidia-peermem)";
    } else if (error == EACCES || error == EPERM) {
        text += "; it is mapped read-only";
    }
    return text;
}

}  // namespace

std::unique_ptr<MemoryRegion> register_memory(std::shared_ptr<ibv_pd> pd, std::uint64_t addr,
                                              std::uint64_t length, std::uint32_t access) {
    const Library& library = Library::get();
    // By their values in verbs: types.h has the same.
    const int flags = static_cast<int>(access);
    ibv_mr* mr = nullptr;
    if (const auto memory = DeviceMemory::find(addr, length)) {
        if (library.reg_dmabuf_mr == nullptr) {
            throw NativeError("ibv_reg_dmabuf_mr", ENOSYS,
                              "libibverbs is too old to register device memory (rdma-core 34)");
        }
        const DmaBuf file = memory->export_dmabuf();
        mr = library.reg_dmabuf_mr(pd.get(), file.offset, length, addr, file.fd.get(), flags);
    } else {
        mr = library.reg_mr(pd.get(), reinterpret_cast<void*>(addr), length, flags);
    }
    if (mr == nullptr) {
        const int error = errno;
        throw NativeError("ibv_reg_mr", error, why(error, addr, length));
    }
    return std::make_unique<IbvMemoryRegion>(std::move(pd), mr);
}

}  // namespace aioflagcx::verbs::ibverbs
