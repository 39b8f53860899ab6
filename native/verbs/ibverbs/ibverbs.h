// RDMA NICs, by libibverbs.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "verbs/verbs.h"

namespace aioflagcx::verbs::ibverbs {

// One port of a device; ports after the first have the name "device:port".
struct PortInfo {
    std::string name;
    std::string device;
    std::uint8_t port = 1;
    bool active = false;
    std::string state;  // "PORT_ACTIVE", ...
};

// All ports there are. None where the library or the kernel's part of it is missing; `why_none`
// then says what.
std::vector<PortInfo> list_ports(std::string* why_none);

struct IbverbsOptions {
    PortInfo port;
    std::optional<std::uint32_t> gid_index;  // none: choose_gid()'s choice
    std::uint8_t traffic_class = 0;
    std::uint8_t service_level = 0;
    std::uint8_t timeout = 16;   // 4.096 us * 2^timeout, ibv_modify_qp(3)
    std::uint8_t retry_cnt = 6;  // transport retries before RETRY_EXC_ERR
    // IBV_ACCESS_RELAXED_ORDERING for what peers write, where library and kernel know it.
    bool relaxed_ordering = false;
};

// Throws NativeError.
std::unique_ptr<Device> open_ibverbs_device(const IbverbsOptions& options);

}  // namespace aioflagcx::verbs::ibverbs
