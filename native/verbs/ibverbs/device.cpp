#include <algorithm>
#include <cerrno>
#include <cstring>
#include <mutex>
#include <string>
#include <utility>

#include "common/error.h"
#include "verbs/ibverbs/address.h"
#include "verbs/ibverbs/async_events.h"
#include "verbs/ibverbs/completion_queue.h"
#include "verbs/ibverbs/handles.h"
#include "verbs/ibverbs/ibverbs.h"
#include "verbs/ibverbs/memory.h"
#include "verbs/ibverbs/queue_pair.h"

namespace aioflagcx::verbs::ibverbs {

namespace {

// Entries of a completion queue: 256 queue pairs of the default depth. Devices offer millions, at
// 64 bytes each.
constexpr std::uint32_t kMaxCqe = 65'536;
// Reads a queue pair may have under way, and answer. NICs offer 16, Soft-RoCE 128; with 16 of 64
// KiB that one reads at 0.7 of what it can.
constexpr int kMaxRdAtomic = 128;
// GIDs of one port that are looked at.
constexpr std::size_t kMaxGids = 1024;

using DeviceList = std::unique_ptr<ibv_device*, void (*)(ibv_device**)>;

DeviceList get_devices(int* count) {
    const Library& library = Library::get();
    ibv_device** const list = library.get_device_list(count);
    if (list == nullptr) {
        throw NativeError(
            "ibv_get_device_list", errno,
            errno == ENOSYS ? "the kernel has no RDMA support (modprobe ib_uverbs)" : "");
    }
    return {list, library.free_device_list};
}

std::shared_ptr<ibv_context> open_context(const std::string& name) {
    int count = 0;
    const DeviceList list = get_devices(&count);
    for (int i = 0; i < count; ++i) {
        if (name != Library::get().get_device_name(list.get()[i])) continue;
        ibv_context* const context = Library::get().open_device(list.get()[i]);
        if (context == nullptr) {
            throw NativeError(
                "ibv_open_device", errno,
                name + (errno == EACCES ? "; may this user open /dev/infiniband?" : ""));
        }
        return {context, Close()};
    }
    throw NativeError("ibv_open_device", ENODEV, "there is no RDMA device '" + name + "'");
}

std::vector<ibv_gid_entry> gids_of(ibv_context* context, std::uint8_t port) {
    std::vector<ibv_gid_entry> entries(kMaxGids);
    const ssize_t count = Library::get().query_gid_table(context, entries.data(), entries.size(), 0,
                                                         sizeof(ibv_gid_entry));
    if (count < 0) throw NativeError("ibv_query_gid_table", static_cast<int>(-count), "");
    entries.resize(static_cast<std::size_t>(count));
    std::erase_if(entries, [port](const auto& entry) { return entry.port_num != port; });
    return entries;
}

// Asks the port for what is its own and may change. Whether it is active.
bool look_up_address(Port& port) {
    const PortInfo& info = port.options.port;
    ibv_port_attr attributes{};
    const int error = Library::get().port_attributes(port.context.get(), info.port, &attributes);
    if (error != 0) throw NativeError("ibv_query_port", error, info.name);
    port.address.lid = attributes.lid;
    port.address.mtu = attributes.active_mtu;
    const ibv_gid_entry gid =
        choose_gid(gids_of(port.context.get(), info.port), port.options.gid_index, info.name);
    std::memcpy(port.address.gid.data(), gid.gid.raw, sizeof gid.gid.raw);
    port.address.kind = gid_kind(gid);
    port.gid_index = static_cast<std::uint8_t>(gid.gid_index);
    return attributes.state == IBV_PORT_ACTIVE;
}

std::shared_ptr<const Port> open_port(std::shared_ptr<ibv_context> context,
                                      const IbverbsOptions& options,
                                      const ibv_device_attr& device) {
    auto port = std::make_shared<Port>();
    port->options = options;
    port->context = std::move(context);
    look_up_address(*port);
    port->max_rd_atomic =
        static_cast<std::uint32_t>(std::clamp(device.max_qp_init_rd_atom, 1, kMaxRdAtomic));
    port->max_dest_rd_atomic =
        static_cast<std::uint32_t>(std::clamp(device.max_qp_rd_atom, 1, kMaxRdAtomic));
    port->address.rd_atomic = port->max_dest_rd_atomic;
    return port;
}

// A port whose address may change while it is in use. Lock: mutex_ guards the rest; a leaf.
class CurrentPort {
  public:
    explicit CurrentPort(std::shared_ptr<const Port> port) : port_(std::move(port)) {}

    std::shared_ptr<const Port> get() const {
        const std::lock_guard lock(mutex_);
        return port_;
    }

    // Looks the address up again after `event`, and tells what that means for its queue pairs.
    void look_again(DeviceEvent& event) {
        const std::lock_guard lock(mutex_);
        auto fresh = std::make_shared<Port>(*port_);
        bool active = false;
        try {
            active = look_up_address(*fresh);
        } catch (const NativeError& error) {
            lost_ = true;
            event.kind = DeviceEvent::Kind::PortDown;
            event.text += std::string("; ") + error.what();
            return;
        }
        const bool back = std::exchange(lost_, false);
        const bool same = fresh->address.gid == port_->address.gid &&
                          fresh->address.lid == port_->address.lid &&
                          fresh->gid_index == port_->gid_index;
        port_ = std::move(fresh);
        if (event.kind == DeviceEvent::Kind::PortActive) return;
        event.text += "; its address is " + gid_text(port_->address.gid) + " (" +
                      gid_kind_name(port_->address.kind) + ")";
        if (back && active) {
            event.kind = DeviceEvent::Kind::PortActive;
        } else if (same) {
            event.kind = DeviceEvent::Kind::Other;
        }
    }

  private:
    mutable std::mutex mutex_;
    std::shared_ptr<const Port> port_;
    bool lost_ = false;  // it has no address
};

class IbvProtectionDomain final : public ProtectionDomain {
  public:
    explicit IbvProtectionDomain(std::shared_ptr<const CurrentPort> current)
        : current_(std::move(current)) {
        const auto port = current_->get();
        ibv_pd* const pd = Library::get().alloc_pd(port->context.get());
        if (pd == nullptr) throw NativeError("ibv_alloc_pd", errno, port->options.port.name);
        // The context is held as long as the PD, whoever holds that.
        pd_ = {pd, [context = port->context](ibv_pd* object) { Close()(object); }};
        options_ = {port->options.port.name, port->options.relaxed_ordering};
    }

    std::unique_ptr<MemoryRegion> register_memory(std::uint64_t addr, std::uint64_t length,
                                                  std::uint32_t access,
                                                  const SharedMemory&) override {
        return ibverbs::register_memory(pd_, options_, addr, length, access);
    }
    bool takes_device_memory() const noexcept override { return true; }
    std::unique_ptr<QueuePair> create_qp(const QpInit& init) override {
        return std::make_unique<IbvQueuePair>(current_->get(), pd_, init);
    }

  private:
    const std::shared_ptr<const CurrentPort> current_;
    std::shared_ptr<ibv_pd> pd_;
    MemoryOptions options_;
};

class IbvDevice final : public Device {
  public:
    IbvDevice(std::shared_ptr<const Port> port, const ibv_device_attr& device)
        : port_(std::move(port)),
          current_(std::make_shared<CurrentPort>(port_)),
          events_(port_->context, port_->options.port.port) {
        attributes_.max_qp_wr = static_cast<std::uint32_t>(device.max_qp_wr);
        attributes_.max_cqe = std::min(static_cast<std::uint32_t>(device.max_cqe), kMaxCqe);
        attributes_.max_mr_size = device.max_mr_size != 0 ? device.max_mr_size : UINT64_MAX;
        ibv_port_attr port_attributes{};
        Library::get().port_attributes(port_->context.get(), port_->options.port.port,
                                       &port_attributes);
        attributes_.max_msg_size = port_attributes.max_msg_sz;
        attributes_.workers = 1;
    }
    ~IbvDevice() override { events_.set_handler(nullptr); }

    const std::string& name() const noexcept override { return port_->options.port.name; }
    const DeviceAttributes& attributes() const noexcept override { return attributes_; }
    Network network() const override {
        const Address own = current_->get()->address;
        return network_of(own.gid, own.kind, prefix_length(own.gid));
    }
    std::unique_ptr<ProtectionDomain> alloc_pd() override {
        return std::make_unique<IbvProtectionDomain>(current_);
    }
    std::unique_ptr<CompletionQueue> create_cq(std::uint32_t max_cqe) override {
        return std::make_unique<IbvCompletionQueue>(port_->context, max_cqe);
    }
    void on_event(std::function<void(const DeviceEvent&)> handler) override {
        if (!handler) return events_.set_handler(nullptr);
        events_.set_handler([current = current_, told = std::move(handler)](DeviceEvent event) {
            if (event.kind == DeviceEvent::Kind::AddressChange ||
                event.kind == DeviceEvent::Kind::PortActive) {
                current->look_again(event);
            }
            told(event);
        });
    }

  private:
    const std::shared_ptr<const Port> port_;  // as it was opened: its address may be another by now
    const std::shared_ptr<CurrentPort> current_;
    DeviceAttributes attributes_;
    AsyncEvents events_;
};

const char* state_name(ibv_port_state state) noexcept {
    switch (state) {
        case IBV_PORT_DOWN:
            return "down";
        case IBV_PORT_INIT:
            return "initializing";
        case IBV_PORT_ARMED:
            return "armed";
        case IBV_PORT_ACTIVE:
            return "active";
        case IBV_PORT_ACTIVE_DEFER:
            return "active, deferring";
        default:
            return "without state";
    }
}

}  // namespace

std::vector<PortInfo> list_ports(std::string* why_none) {
    std::vector<PortInfo> ports;
    try {
        int count = 0;
        const DeviceList list = get_devices(&count);
        for (int i = 0; i < count; ++i) {
            const std::string device = Library::get().get_device_name(list.get()[i]);
            ibv_context* const opened = Library::get().open_device(list.get()[i]);
            if (opened == nullptr) {
                *why_none = device + " cannot be opened: " + std::strerror(errno);
                continue;
            }
            const Handle<ibv_context> context(opened);
            ibv_device_attr attributes{};
            if (Library::get().query_device(context.get(), &attributes) != 0) continue;
            for (int port = 1; port <= attributes.phys_port_cnt; ++port) {
                PortInfo info;
                info.device = device;
                info.name = port == 1 ? device : device + ":" + std::to_string(port);
                info.port = static_cast<std::uint8_t>(port);
                ibv_port_attr state{};
                const int error = Library::get().port_attributes(context.get(), info.port, &state);
                info.active = error == 0 && state.state == IBV_PORT_ACTIVE;
                info.state = state_name(state.state);
                ports.push_back(std::move(info));
            }
        }
        if (ports.empty() && why_none->empty()) *why_none = "there is no RDMA device";
    } catch (const NativeError& error) {
        *why_none = error.what();
    }
    return ports;
}

std::unique_ptr<Device> open_ibverbs_device(const IbverbsOptions& options) {
    std::shared_ptr<ibv_context> context = open_context(options.port.device);
    ibv_device_attr attributes{};
    const int error = Library::get().query_device(context.get(), &attributes);
    if (error != 0) throw NativeError("ibv_query_device", error, options.port.device);
    auto port = open_port(std::move(context), options, attributes);
    return std::make_unique<IbvDevice>(std::move(port), attributes);
}

}  // namespace aioflagcx::verbs::ibverbs
