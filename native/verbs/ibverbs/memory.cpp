#include "verbs/ibverbs/memory.h"

#include <sys/resource.h>

#include <cerrno>
#include <cstring>
#include <mutex>
#include <string>
#include <utility>

#include "common/error.h"
#include "verbs/cuda.h"

namespace aioflagcx::verbs::ibverbs {

namespace {

// Lock: mutex_ guards mr_.
class IbvMemoryRegion final : public MemoryRegion {
  public:
    IbvMemoryRegion(std::shared_ptr<ibv_pd> pd, ibv_mr* mr, bool read_after_write) noexcept
        : pd_(std::move(pd)),
          lkey_(mr->lkey),
          rkey_(mr->rkey),
          read_after_write_(read_after_write),
          mr_(mr) {}

    std::uint32_t lkey() const noexcept override { return lkey_; }
    std::uint32_t rkey() const noexcept override { return rkey_; }
    bool read_after_write() const noexcept override { return read_after_write_; }
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
    const bool read_after_write_;
    std::mutex mutex_;
    Handle<ibv_mr> mr_;
};

std::string why(int error, const std::string& device, std::uint64_t addr, std::uint64_t length) {
    std::string text = device + ": " + std::to_string(length) + " bytes at " + std::to_string(addr);
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
            "; not all of it is mapped, or it is mapped both shared and read-only (before Linux "
            "6.2), or it is device memory that the kernel cannot give to the NIC (no dmabuf, and "
            "no peer-memory module such as nvidia-peermem)";
    } else if (error == EACCES || error == EPERM) {
        text += "; it is mapped read-only";
    }
    return text;
}

// By way of a dmabuf or, where the library, the CUDA driver or the kernel has no such thing, by the
// address alone: then a peer-memory module of the kernel may know it.
ibv_mr* register_device_memory(ibv_pd* pd, const DeviceMemory& memory, std::uint64_t addr,
                               std::uint64_t length, int flags, std::string* why_no_dmabuf) {
    const Library& library = Library::get();
    if (library.reg_dmabuf_mr == nullptr) {
        *why_no_dmabuf = "libibverbs is too old for it (rdma-core 34)";
    } else {
        try {
            const DmaBuf file = memory.export_dmabuf();
            ibv_mr* const mr =
                library.reg_dmabuf_mr(pd, file.offset, length, addr, file.fd.get(), flags);
            if (mr != nullptr) return mr;
            *why_no_dmabuf = std::string("ibv_reg_dmabuf_mr: ") + std::strerror(errno);
        } catch (const NativeError& error) {
            *why_no_dmabuf = error.what();
        }
    }
    return library.reg_mr(pd, reinterpret_cast<void*>(addr), length,
                          flags & ~IBV_ACCESS_RELAXED_ORDERING);
}

}  // namespace

std::unique_ptr<MemoryRegion> register_memory(std::shared_ptr<ibv_pd> pd,
                                              const MemoryOptions& options, std::uint64_t addr,
                                              std::uint64_t length, std::uint32_t access) {
    const Library& library = Library::get();
    const auto device_memory = DeviceMemory::find(addr, length);
    const bool relaxed = options.relaxed_ordering && library.reg_mr_iova2 != nullptr;
    bool read_after_write = false;
    // By their values in verbs: types.h has the same.
    auto flags = static_cast<int>(access);
    if ((access & kAccessRemoteWrite) != 0 && (device_memory || relaxed)) {
        read_after_write = true;
        flags |= IBV_ACCESS_REMOTE_READ;  // the read that follows a peer's writes
        if (relaxed) flags |= IBV_ACCESS_RELAXED_ORDERING;
    }
    std::string why_no_dmabuf;
    ibv_mr* mr = nullptr;
    if (device_memory) {
        mr = register_device_memory(pd.get(), *device_memory, addr, length, flags, &why_no_dmabuf);
    } else if ((flags & IBV_ACCESS_RELAXED_ORDERING) != 0) {
        // This one leaves optional flags out where the kernel does not know them.
        mr = library.reg_mr_iova2(pd.get(), reinterpret_cast<void*>(addr), length, addr,
                                  static_cast<unsigned>(flags));
    } else {
        mr = library.reg_mr(pd.get(), reinterpret_cast<void*>(addr), length, flags);
    }
    if (mr == nullptr) {
        const int error = errno;
        std::string detail = why(error, options.device, addr, length);
        if (device_memory) detail += "; it is GPU memory, and as a dmabuf: " + why_no_dmabuf;
        throw NativeError("ibv_reg_mr", error, detail);
    }
    return std::make_unique<IbvMemoryRegion>(std::move(pd), mr, read_after_write);
}

}  // namespace aioflagcx::verbs::ibverbs
