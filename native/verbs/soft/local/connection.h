// The initiator's side of a local connection: how it begins, and the memory of the target it maps.
#pragma once

#include <sys/types.h>

#include <array>
#include <cstdint>
#include <memory>
#include <string>
#include <unordered_map>

#include "common/error.h"
#include "common/unique_fd.h"
#include "verbs/soft/local/guarded_copy.h"
#include "verbs/soft/local/layout.h"
#include "verbs/soft/local/memory_file.h"
#include "verbs/soft/local/packets.h"
#include "verbs/soft/token.h"
#include "verbs/verbs.h"

namespace aioflagcx::verbs::soft::local {

// The local path cannot be taken, for a reason that another path need not share.
class Unavailable : public NativeError {
  public:
    using NativeError::NativeError;
};

// One QP's connection to its target's process. Not thread-safe.
class Connection {
  public:
    // To the device whose listener is `socket`, as the initiator that `responder` was told of.
    // Throws Unavailable; NativeError (ETIMEDOUT, ECONNREFUSED) when another path would do no
    // better.
    Connection(const Token& socket, const Token& responder, const Token& initiator,
               Deadline deadline);

    pid_t pid() const noexcept { return pid_; }
    // Whether the target knows our threads by the ids that we know them by.
    bool same_ids() const noexcept { return same_ids_; }
    int control_fd() const noexcept { return control_.get(); }
    int process_fd() const noexcept { return process_.get(); }
    UniqueFd take_stream() noexcept { return std::move(stream_); }

    const Table& table() const noexcept { return *static_cast<const Table*>(table_.get()); }
    Announcement& announcement() const noexcept { return *static_cast<Announcement*>(page_.get()); }
    bool gate_open() const noexcept {
        return table().gates[gate_].load(std::memory_order_seq_cst) == ticket_;
    }
    Guard guard() const noexcept {
        const auto& word = table().revocations;
        return {&word, word.load(std::memory_order_seq_cst)};
    }
    // 0, or why the target is no more where it was: ESRCH, its process has ended; ECONNRESET, it
    // has closed the connection, which running another program (execve(2)) does, too.
    int loss() const noexcept;

    // Where the region behind `key` is mapped here, or null; then it is asked for. A region
    // that is being mapped, or cannot be, is reached by system calls.
    std::uint8_t* find_mapped(std::uint32_t key);
    // Takes in what the target sent. False when the connection has ended.
    bool receive();

  private:
    struct Window {  // one region of the target, mapped or asked for
        std::shared_ptr<Mapping> mapping;
        std::uint8_t* base = nullptr;
    };

    void open(const Token& socket, const Token& responder, const Token& initiator,
              Deadline deadline);
    Message ask(const Message& message, Kind expected, std::array<UniqueFd, kMaxDescriptors>& files,
                Deadline deadline);
    void check_peer();
    void prove_permission(std::uint64_t nonce_addr, const Token& nonce) const;
    void take_lent(std::uint32_t key, std::uint64_t offset, UniqueFd file);

    UniqueFd control_;
    UniqueFd process_;
    UniqueFd stream_;
    pid_t pid_ = 0;
    bool same_ids_ = false;
    Mapping table_;
    Mapping page_;
    std::uint32_t gate_ = 0;
    std::uint32_t ticket_ = 0;
    Token table_name_{};
    std::unordered_map<std::uint32_t, Window> windows_;
};

// Why the kernel refuses to copy between processes of one user, and what to do about it, given
// the content of /proc/sys/kernel/yama/ptrace_scope; empty where there is no such file.
std::string explain_refusal(const std::string& ptrace_scope);

}  // namespace aioflagcx::verbs::soft::local
