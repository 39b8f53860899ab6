// A libibverbs.so.1 without hardware: its devices are here, and copy within this process. What the
// provider asks of it is remembered, and it fails as it is told.
#pragma once

#include <infiniband/verbs.h>

#include <cstdint>
#include <deque>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

namespace aioflagcx::testing {

struct FakeGid {
    std::uint32_t index = 0;
    std::uint32_t type = IBV_GID_TYPE_ROCE_V2;
    std::uint8_t raw[16] = {0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff, 10, 0, 0, 1};
};

struct FakeRegistration {
    std::string call;  // "ibv_reg_mr", ...
    std::uint64_t addr = 0;
    std::uint64_t length = 0;
    int access = 0;
    int fd = -1;               // of a dmabuf
    std::uint64_t offset = 0;  // in it
};

// All of it; `mutex` guards every member.
struct FakeVerbs {
    // Before the devices are opened.
    std::vector<std::string> names{"fake0", "fake1"};
    std::uint64_t max_mr_size = ~std::uint64_t{0};
    std::uint32_t max_qp_wr = 1024;
    std::uint32_t max_msg_sz = 1U << 30;
    std::uint16_t lid = 0;
    ibv_port_state port_state = IBV_PORT_ACTIVE;
    std::vector<FakeGid> gids{FakeGid{}};  // of every port
    ibv_fork_status fork_status = IBV_FORK_DISABLED;

    // Errors of what is called next; 0 for none.
    int register_error = 0;  // ibv_reg_mr, ibv_reg_mr_iova2
    int dmabuf_error = 0;    // ibv_reg_dmabuf_mr
    int modify_error = 0;    // ibv_modify_qp, as of a device that is gone
    bool hold = false;       // requests stay outstanding

    std::vector<std::string> calls;  // of ibv_fork_init and registrations, in order
    std::vector<FakeRegistration> registrations;
    std::vector<std::pair<ibv_qp_attr, int>> modified;  // attributes and mask
    std::vector<ibv_wr_opcode> posted;
    std::uint32_t longest = 0;      // bytes of one request
    std::uint32_t max_send_wr = 0;  // most of a queue pair's
    std::uint32_t last_qp_num = 0;
    int mrs = 0;  // that there are

    std::mutex mutex;

    // Reported by the context of `device` that was opened last.
    void report(std::size_t device, ibv_event_type type, std::uint32_t qp_num = 0);
};

FakeVerbs& fake_verbs();

}  // namespace aioflagcx::testing

// For Python: FakeVerbs::report(), and FakeVerbs::register_error.
extern "C" void fake_ibverbs_report(unsigned device, int type);
extern "C" void fake_ibverbs_fail_registrations(int error);
