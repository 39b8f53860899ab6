#include "engine/devices.h"

#include <fnmatch.h>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <optional>

#include "common/error.h"
#include "engine/limits.h"
#include "verbs/soft/soft.h"
#if AIOFLAGCX_IBVERBS
#include "verbs/ibverbs/ibverbs.h"
#endif

namespace aioflagcx::engine {

namespace {

bool matches(const std::string& pattern, const std::string& name) noexcept {
    return ::fnmatch(pattern.c_str(), name.c_str(), 0) == 0;
}

std::optional<std::uint32_t> to_number(std::string_view text) noexcept {
    std::uint32_t number = 0;
    const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), number);
    if (text.empty() || error != std::errc() || end != text.data() + text.size()) {
        return std::nullopt;
    }
    return number;
}

// How many soft devices a name stands for, so that the highest of them is among them; nothing for
// what names none.
std::optional<std::uint32_t> soft_devices(std::string_view name) {
    constexpr std::string_view kSoft = "soft";
    if (!name.starts_with(kSoft)) return std::nullopt;
    name.remove_prefix(kSoft.size());
    if (name.empty()) return 1;
    const bool is_count = name.front() == ':';
    if (is_count) name.remove_prefix(1);
    const auto number = to_number(name);
    if (!number) return std::nullopt;
    return is_count ? *number : *number + 1;
}

std::string list(const RdmaPorts& there) {
    std::string text;
    for (const auto& port : there.ports) text += port.name + " (" + port.state + "), ";
    if (there.ports.empty()) text = "no RDMA device (" + there.why_none + "), ";
    return text + "soft, soft:N";
}

[[noreturn]] void refuse(const std::string& why, const RdmaPorts& there) {
    throw NativeError("open devices", ENODEV, why + "; there are: " + list(there));
}

DeviceChoice choose_automatically(const RdmaPorts& there) {
    DeviceChoice choice;
    for (const auto& port : there.ports) {
        if (port.active) choice.rdma.push_back(port.name);
    }
    if (!choice.rdma.empty()) {
        choice.reason = "every active RDMA port";
        return choice;
    }
    choice.soft = 1;
    choice.reason = "no RDMA port is active";
    if (there.ports.empty()) choice.reason = there.why_none;
    return choice;
}

}  // namespace

DeviceChoice choose_devices(const std::vector<std::string>& names, const RdmaPorts& there) {
    if (names == std::vector<std::string>{"auto"}) return choose_automatically(there);
    DeviceChoice choice;
    choice.reason = "as configured";
    for (const std::string& name : names) {
        if (const auto count = soft_devices(name)) {
            if (*count == 0 || *count > kMaxSoftDevices) {
                refuse("'" + name + "': there can be 1 to " + std::to_string(kMaxSoftDevices) +
                           " soft devices",
                       there);
            }
            choice.soft = std::max(choice.soft, *count);
            continue;
        }
        bool found = false;
        for (const auto& port : there.ports) {
            if (!matches(name, port.name)) continue;
            found = true;
            // A pattern stands for those that can be used.
            if (!port.active && name != port.name) continue;
            if (std::find(choice.rdma.begin(), choice.rdma.end(), port.name) == choice.rdma.end()) {
                choice.rdma.push_back(port.name);
            }
        }
        if (!found) refuse("there is no device '" + name + "' here", there);
    }
    if (choice.soft != 0 && !choice.rdma.empty()) {
        refuse("RDMA and soft devices do not go together in one engine", there);
    }
    if (choice.soft == 0 && choice.rdma.empty()) {
        refuse("none of the devices named is active", there);
    }
    return choice;
}

namespace {

std::vector<std::unique_ptr<verbs::Device>> open_soft(const EngineOptions& options,
                                                      std::uint32_t count) {
    std::vector<std::unique_ptr<verbs::Device>> devices;
    for (std::uint32_t i = 0; i < count; ++i) {
        verbs::soft::SoftOptions soft;
        soft.name = "soft" + std::to_string(i);
        soft.bind_address = options.bind_address;
        soft.advertise_address = options.advertise_address;
        soft.paths = options.soft_paths;
        soft.streams = options.soft_streams;
        soft.allow_ptrace = options.allow_ptrace;
        devices.push_back(verbs::soft::open_soft_device(soft));
    }
    return devices;
}

}  // namespace

#if AIOFLAGCX_IBVERBS

OpenedDevices open_devices(const EngineOptions& options) {
    RdmaPorts there;
    const auto ports = verbs::ibverbs::list_ports(&there.why_none);
    for (const auto& port : ports) there.ports.push_back({port.name, port.active, port.state});
    const DeviceChoice choice = choose_devices(options.devices, there);
    OpenedDevices opened{open_soft(options, choice.soft), choice.reason};
    for (const std::string& name : choice.rdma) {
        verbs::ibverbs::IbverbsOptions ibverbs = options.ibverbs;
        ibverbs.port = *std::find_if(ports.begin(), ports.end(),
                                     [&](const auto& port) { return port.name == name; });
        opened.devices.push_back(verbs::ibverbs::open_ibverbs_device(ibverbs));
    }
    return opened;
}

#else

OpenedDevices open_devices(const EngineOptions& options) {
    RdmaPorts there;
    there.why_none = "this build is without ibverbs";
    const DeviceChoice choice = choose_devices(options.devices, there);
    return {open_soft(options, choice.soft), choice.reason};
}

#endif

}  // namespace aioflagcx::engine
