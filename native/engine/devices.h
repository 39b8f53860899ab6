// Which devices an engine opens.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "engine/options.h"
#include "verbs/verbs.h"

namespace aioflagcx::engine {

// What there is on this host besides soft devices, of which there are as many as one likes.
struct RdmaPorts {
    struct Port {
        std::string name;
        bool active = false;
        std::string state;
    };
    std::vector<Port> ports;
    std::string why_none;  // when there is none
};

struct DeviceChoice {
    std::vector<std::string> rdma;  // ports, in the order asked for
    std::uint32_t soft = 0;         // soft devices
    std::string reason;             // for the log
};

// `names` as in Config.devices: "auto", or names and patterns ("mlx5_*") of RDMA ports, or "soft",
// "soft:N" and "softI" for soft devices; not both kinds. Throws NativeError listing what there is.
DeviceChoice choose_devices(const std::vector<std::string>& names, const RdmaPorts& there);

struct OpenedDevices {
    std::vector<std::unique_ptr<verbs::Device>> devices;
    std::string reason;
};

// Opens what `options.devices` asks for. Throws NativeError.
OpenedDevices open_devices(const EngineOptions& options);

}  // namespace aioflagcx::engine
