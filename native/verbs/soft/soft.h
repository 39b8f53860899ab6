// The embedded device: verbs' semantics without a NIC.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "verbs/verbs.h"

namespace aioflagcx::verbs::soft {

struct SoftOptions {
    std::string name = "soft0";
    std::string bind_address =
        "127.0.0.1";                // numeric IPv4 or IPv6 address of the TCP path's listener
    std::string advertise_address;  // what peers connect to; empty: bind_address
    std::vector<std::string> paths = {"process", "local", "tcp"};  // in order of preference
    std::uint32_t streams = 2;  // TCP streams per queue pair, at least 1
    // Let every process of the user copy into this one where Yama allows it to parents only
    // (PR_SET_PTRACER_ANY, prctl(2)); for the whole process, for good.
    bool allow_ptrace = false;
};

std::unique_ptr<Device> open_soft_device(const SoftOptions& options);

// For tests of what happens when a host loses a NIC. unplug() is as if one were taken out: its
// listeners close, its queue pairs go to ERR, and create_qp(), accept() and connect() fail with
// ENODEV until it is back. Registered memory stays registered. Any thread; both are idempotent.
void unplug(Device& device);
void plug(Device& device);

}  // namespace aioflagcx::verbs::soft
