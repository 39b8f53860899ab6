// Verbs' plain structs and constants. Names and values follow libibverbs' <infiniband/verbs.h>
// (ibv_post_send(3), ibv_poll_cq(3), ibv_modify_qp(3)), so the ibverbs provider converts by cast.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <variant>
#include <vector>

namespace aioflagcx::verbs {

enum class WrOpcode : std::uint8_t {  // ibv_wr_opcode
    RdmaWrite = 0,
    RdmaWriteWithImm = 1,
    Send = 2,
    RdmaRead = 4,
};

enum class WcOpcode : std::uint8_t {  // ibv_wc_opcode
    Send = 0,
    RdmaWrite = 1,
    RdmaRead = 2,
    Recv = 128,
    RecvRdmaWithImm = 129,
};

enum class WcStatus : std::uint8_t {  // ibv_wc_status
    Success = 0,
    LocLenErr = 1,
    LocQpOpErr = 2,
    LocEecOpErr = 3,
    LocProtErr = 4,
    WrFlushErr = 5,
    MwBindErr = 6,
    BadRespErr = 7,
    LocAccessErr = 8,
    RemInvReqErr = 9,
    RemAccessErr = 10,
    RemOpErr = 11,
    RetryExcErr = 12,
    RnrRetryExcErr = 13,
    LocRddViolErr = 14,
    RemInvRdReqErr = 15,
    RemAbortErr = 16,
    InvEecnErr = 17,
    InvEecStateErr = 18,
    FatalErr = 19,
    RespTimeoutErr = 20,
    GeneralErr = 21,
};

// "IBV_WC_REM_ACCESS_ERR" and so on; "IBV_WC_?" for a value outside the enum.
const char* wc_status_name(WcStatus status) noexcept;

enum class QpState : std::uint8_t {  // ibv_qp_state
    Reset = 0,
    Init = 1,
    Rtr = 2,
    Rts = 3,
    Err = 6,
};

// ibv_access_flags
inline constexpr std::uint32_t kAccessLocalWrite = 1;
inline constexpr std::uint32_t kAccessRemoteWrite = 2;
inline constexpr std::uint32_t kAccessRemoteRead = 4;

struct Sge {
    std::uint64_t addr = 0;
    std::uint32_t length = 0;
    std::uint32_t lkey = 0;
};

// One request. A zero-length request has sge.length 0, and its lkey is not looked at.
struct SendWr {
    std::uint64_t wr_id = 0;
    WrOpcode opcode = WrOpcode::RdmaWrite;
    bool signaled = true;  // unsignaled requests complete silently on success, never on error
    std::uint32_t imm = 0;
    std::uint32_t rkey = 0;
    std::uint64_t remote_addr = 0;
    Sge sge;
};

struct RecvWr {
    std::uint64_t wr_id = 0;
    Sge sge;  // length 0: takes immediates and empty sends only
};

struct WorkCompletion {
    std::uint64_t wr_id = 0;
    WcStatus status = WcStatus::Success;
    WcOpcode opcode = WcOpcode::Send;  // undefined on error, as in verbs
    bool with_imm = false;
    std::uint32_t imm = 0;
    std::uint32_t byte_len = 0;  // received bytes; only on receive completions
    std::uint32_t vendor_err = 0;
    std::uint32_t qp_num = 0;
};

// What one QP tells the other through the handshake: provider-specific, carried as a msgpack map.
using Bytes = std::vector<std::uint8_t>;
using AttributeValue = std::variant<std::uint64_t, std::string, Bytes, std::vector<std::string>>;
using Attributes = std::map<std::string, AttributeValue>;

}  // namespace aioflagcx::verbs
