// What a deployment may tune; Python's Config carries the defaults and their reasons.
#pragma once

#include <chrono>
#include <cstdint>
#include <string>
#include <vector>

#include "verbs/ibverbs/ibverbs.h"

namespace aioflagcx::engine {

struct EngineOptions {
    std::vector<std::string> devices;
    std::string device_choice;      // why those that are open were chosen, for the log
    std::string bind_address;       // numeric
    std::string advertise_address;  // numeric; where peers find data and keepalive listeners
    std::vector<std::string> soft_paths;
    std::uint32_t soft_streams = 2;
    bool allow_ptrace = false;
    verbs::ibverbs::IbverbsOptions ibverbs;  // its port aside
    std::uint32_t slice_size = 65'536;       // bytes
    std::uint32_t workers_per_device = 0;    // 0: what the device asks for
    std::uint32_t qps_per_endpoint = 0;      // 0: one for each worker
    std::uint32_t max_wr_per_qp = 256;
    std::uint64_t max_inflight_bytes_per_endpoint = 8ull << 20;
    std::uint32_t post_batch = 16;  // work requests an endpoint may post per round of its worker
    std::chrono::microseconds spin{20};
    std::uint32_t retry_count = 3;
    std::uint8_t rnr_retry = 7;
    std::chrono::duration<double> keepalive_interval{1.0};
    std::chrono::duration<double> keepalive_timeout{5.0};
};

}  // namespace aioflagcx::engine
