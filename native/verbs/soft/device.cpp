#include <sys/prctl.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <thread>

#include "common/error.h"
#include "common/socket_address.h"
#include "verbs/soft/completion_queue.h"
#include "verbs/soft/limits.h"
#include "verbs/soft/memory.h"
#include "verbs/soft/path_choice.h"
#include "verbs/soft/queue_pair.h"
#include "verbs/soft/soft.h"

namespace aioflagcx::verbs::soft {

namespace {

class SoftProtectionDomain final : public ProtectionDomain {
  public:
    explicit SoftProtectionDomain(std::shared_ptr<DeviceCore> core)
        : core_(std::move(core)), mrs_(std::make_shared<MrTable>(core_->local())) {}

    std::unique_ptr<MemoryRegion> register_memory(std::uint64_t addr, std::uint64_t length,
                                                  std::uint32_t access,
                                                  const SharedMemory& shared) override {
        return make_memory_region(mrs_, addr, length, access, shared);
    }
    std::unique_ptr<QueuePair> create_qp(const QpInit& init) override {
        return std::make_unique<SoftQueuePair>(core_, mrs_, init);
    }

  private:
    const std::shared_ptr<DeviceCore> core_;
    const std::shared_ptr<MrTable> mrs_;
};

class SoftDevice final : public Device {
  public:
    explicit SoftDevice(std::shared_ptr<DeviceCore> core) : core_(std::move(core)) {
        attributes_.max_qp_wr = kMaxQpWr;
        attributes_.max_cqe = kMaxCqe;
        attributes_.max_inline = 0;
        attributes_.max_mr_size = kMaxMrSize;
        attributes_.max_msg_size = kMaxMessage;
        attributes_.workers = std::clamp(std::thread::hardware_concurrency(), 1U, kMaxWorkers);
    }
    // Explicitly, since QPs that outlive their device against the rules hold the core too.
    ~SoftDevice() override { core_->stop(); }

    const std::string& name() const noexcept override { return core_->name; }
    const DeviceAttributes& attributes() const noexcept override { return attributes_; }
    Network network() const override { return {"soft", {}}; }
    std::unique_ptr<ProtectionDomain> alloc_pd() override {
        return std::make_unique<SoftProtectionDomain>(core_);
    }
    std::unique_ptr<CompletionQueue> create_cq(std::uint32_t max_cqe) override {
        return std::make_unique<SoftCompletionQueue>(max_cqe);
    }

    DeviceCore& core() noexcept { return *core_; }

  private:
    const std::shared_ptr<DeviceCore> core_;
    DeviceAttributes attributes_;
};

DeviceCore& core_of(Device& device, const char* call) {
    auto* const soft = dynamic_cast<SoftDevice*>(&device);
    if (soft == nullptr) throw NativeError(call, EINVAL, device.name() + " is no soft device");
    return soft->core();
}

}  // namespace

std::unique_ptr<Device> open_soft_device(const SoftOptions& options) {
    if (options.streams == 0 || options.streams > kMaxStreams) {
        throw NativeError("open_soft_device", EINVAL, "streams must be 1 to 64");
    }
    const std::string& host =
        options.advertise_address.empty() ? options.bind_address : options.advertise_address;
    SocketAddress::numeric(host, 0);  // peers refuse what is not a numeric address
    // EINVAL: there is no Yama, so nothing to permit.
    if (options.allow_ptrace && ::prctl(PR_SET_PTRACER, PR_SET_PTRACER_ANY, 0, 0, 0) != 0 &&
        errno != EINVAL) {
        throw NativeError("prctl", errno, "PR_SET_PTRACER, for allow_ptrace");
    }
    return std::make_unique<SoftDevice>(std::make_shared<DeviceCore>(
        options.name, host, available_paths(options.paths), options.streams, options.bind_address));
}

void unplug(Device& device) { core_of(device, "unplug").unplug(); }
void plug(Device& device) { core_of(device, "plug").plug(); }

}  // namespace aioflagcx::verbs::soft
