// A verbs provider for tests of the engine: copies within the process, and does what a script
// says instead: hold requests, fail them, lose a device.
#pragma once

#include <atomic>
#include <cerrno>
#include <chrono>
#include <condition_variable>
#include <cstring>
#include <deque>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "common/error.h"
#include "common/event_fd.h"
#include "verbs/verbs.h"

namespace aioflagcx::testing {

class FakeQp;

// What a device does with requests. Shared by test and device; mutex guards everything.
struct Script {
    std::mutex mutex;
    std::condition_variable changed;
    bool hold = false;                                // keep requests outstanding
    verbs::WcStatus fail = verbs::WcStatus::Success;  // status for the next request, once
    bool refuse = false;                              // post_send() takes nothing
    bool broken = false;                              // post_send() and to_error() throw
    bool gone = false;                                // create_qp() throws
    bool relaxed = false;                             // MRs ask for a read after each write
    std::vector<verbs::SendWr> posted;                // every request ever posted
    std::vector<FakeQp*> queue_pairs;                 // alive

    void set_hold(bool value) {
        const std::lock_guard lock(mutex);
        hold = value;
    }
    void set_refuse(bool value) {
        const std::lock_guard lock(mutex);
        refuse = value;
    }
    void set_broken(bool value) {
        const std::lock_guard lock(mutex);
        broken = value;
    }
    void set_gone(bool value) {
        const std::lock_guard lock(mutex);
        gone = value;
    }
    void fail_next(verbs::WcStatus status) {
        const std::lock_guard lock(mutex);
        fail = status;
    }
    void wait_posted(std::size_t count) {
        std::unique_lock lock(mutex);
        const auto enough = [&] { return posted.size() >= count; };
        if (!changed.wait_for(lock, std::chrono::seconds(20), enough)) {
            throw std::runtime_error("only " + std::to_string(posted.size()) + " requests posted");
        }
    }
    std::size_t posted_count() {
        const std::lock_guard lock(mutex);
        return posted.size();
    }
    // No more holding: what is outstanding is carried out.
    void release();
    // The oldest `count` outstanding requests of each queue pair are carried out.
    void complete(std::size_t count);
    // The oldest outstanding request of each queue pair ends with `status`, the others flushed.
    void break_now(verbs::WcStatus status);
};

class FakeMr final : public verbs::MemoryRegion {
  public:
    FakeMr(std::uint32_t key, bool relaxed) : key_(key), relaxed_(relaxed) {}
    std::uint32_t lkey() const noexcept override { return key_; }
    std::uint32_t rkey() const noexcept override { return key_ + 1; }
    bool revoke(verbs::Deadline) override { return true; }
    bool read_after_write() const noexcept override { return relaxed_; }

  private:
    std::uint32_t key_;
    bool relaxed_;
};

class FakeCq final : public verbs::CompletionQueue {
  public:
    std::size_t poll(std::span<verbs::WorkCompletion> out) override {
        const std::lock_guard lock(mutex_);
        std::size_t count = 0;
        while (count < out.size() && !queue_.empty()) {
            out[count++] = queue_.front();
            queue_.pop_front();
        }
        return count;
    }
    void arm() override { armed_.store(true); }
    void disarm() override {
        armed_.store(false);
        event_.clear();
    }
    int fd() const noexcept override { return event_.fd(); }

    void push(const verbs::WorkCompletion& wc) {
        {
            const std::lock_guard lock(mutex_);
            queue_.push_back(wc);
        }
        if (armed_.load()) event_.signal();
    }

  private:
    std::mutex mutex_;
    std::deque<verbs::WorkCompletion> queue_;
    std::atomic<bool> armed_{false};
    EventFd event_;
};

class FakeQp final : public verbs::QueuePair {
  public:
    FakeQp(std::shared_ptr<Script> script, FakeCq* cq) : script_(std::move(script)), cq_(cq) {
        const std::lock_guard lock(script_->mutex);
        script_->queue_pairs.push_back(this);
    }
    ~FakeQp() override {
        const std::lock_guard lock(script_->mutex);
        std::erase(script_->queue_pairs, this);
    }

    std::uint32_t num() const noexcept override { return 1; }
    verbs::QpState state() const noexcept override { return state_; }
    verbs::Attributes local_attributes() const override {
        return {{"provider", std::string("fake")}};
    }
    void accept(const verbs::Attributes&) override { state_ = verbs::QpState::Rts; }
    void connect(const verbs::Attributes&, verbs::Deadline) override {
        state_ = verbs::QpState::Rts;
    }
    const char* path() const noexcept override { return "fake"; }

    std::size_t post_send(std::span<const verbs::SendWr> requests) override {
        const std::lock_guard lock(script_->mutex);
        if (script_->broken) throw NativeError("post_send", EIO, "as the script says");
        if (script_->refuse) return 0;
        for (const verbs::SendWr& wr : requests) {
            script_->posted.push_back(wr);
            outstanding_.push_back(wr);
        }
        script_->changed.notify_all();
        if (script_->fail != verbs::WcStatus::Success && !outstanding_.empty()) {
            break_locked(std::exchange(script_->fail, verbs::WcStatus::Success));
        } else if (!script_->hold) {
            carry_out_locked();
        }
        return requests.size();
    }
    void post_recv(std::span<const verbs::RecvWr>) override {}
    void to_error() override {
        const std::lock_guard lock(script_->mutex);
        if (script_->broken) throw NativeError("to_error", EIO, "as the script says");
        flush();
    }
    bool fence(verbs::Deadline) override {
        state_ = verbs::QpState::Err;
        return true;
    }

    // The script's mutex is held.
    void carry_out_locked() {
        while (!outstanding_.empty()) {
            carry_out(outstanding_.front());
            outstanding_.pop_front();
        }
    }
    void complete_locked(std::size_t count) {
        for (; count > 0 && !outstanding_.empty(); --count) {
            carry_out(outstanding_.front());
            outstanding_.pop_front();
        }
    }
    void break_locked(verbs::WcStatus status) {
        if (outstanding_.empty()) return;
        complete(outstanding_.front(), status);
        outstanding_.pop_front();
        flush();
    }

  private:
    void carry_out(const verbs::SendWr& wr) {
        if (state_ == verbs::QpState::Err) return complete(wr, verbs::WcStatus::WrFlushErr);
        void* local = reinterpret_cast<void*>(wr.sge.addr);
        void* remote = reinterpret_cast<void*>(wr.remote_addr);
        if (wr.opcode == verbs::WrOpcode::RdmaWrite) std::memcpy(remote, local, wr.sge.length);
        if (wr.opcode == verbs::WrOpcode::RdmaRead) std::memcpy(local, remote, wr.sge.length);
        complete(wr, verbs::WcStatus::Success);
    }
    void complete(const verbs::SendWr& wr, verbs::WcStatus status) {
        verbs::WorkCompletion wc;
        wc.wr_id = wr.wr_id;
        wc.status = status;
        cq_->push(wc);
    }
    void flush() {
        state_ = verbs::QpState::Err;
        for (const verbs::SendWr& wr : outstanding_) complete(wr, verbs::WcStatus::WrFlushErr);
        outstanding_.clear();
    }

    std::shared_ptr<Script> script_;
    FakeCq* cq_;
    std::atomic<verbs::QpState> state_{verbs::QpState::Init};
    std::deque<verbs::SendWr> outstanding_;
};

inline void Script::release() {
    const std::lock_guard lock(mutex);
    hold = false;
    for (FakeQp* qp : queue_pairs) qp->carry_out_locked();
}

inline void Script::complete(std::size_t count) {
    const std::lock_guard lock(mutex);
    for (FakeQp* qp : queue_pairs) qp->complete_locked(count);
}

inline void Script::break_now(verbs::WcStatus status) {
    const std::lock_guard lock(mutex);
    for (FakeQp* qp : queue_pairs) qp->break_locked(status);
}

class FakePd final : public verbs::ProtectionDomain {
  public:
    explicit FakePd(std::shared_ptr<Script> script) : script_(std::move(script)) {}
    std::unique_ptr<verbs::MemoryRegion> register_memory(
        std::uint64_t, std::uint64_t, std::uint32_t, const verbs::SharedMemory& shared) override {
        registered.push_back(shared);
        const std::lock_guard lock(script_->mutex);
        return std::make_unique<FakeMr>(next_key_.fetch_add(2), script_->relaxed);
    }
    std::unique_ptr<verbs::QueuePair> create_qp(const verbs::QpInit& init) override {
        {
            const std::lock_guard lock(script_->mutex);
            if (script_->gone) throw NativeError("create_qp", ENODEV, "as the script says");
        }
        return std::make_unique<FakeQp>(script_, static_cast<FakeCq*>(init.send_cq));
    }

    std::vector<verbs::SharedMemory> registered;  // what backs each range, in order

  private:
    std::shared_ptr<Script> script_;
    std::atomic<std::uint32_t> next_key_{1000};
};

class FakeDevice final : public verbs::Device {
  public:
    FakeDevice(std::string name, std::shared_ptr<Script> script, std::uint64_t max_mr_size)
        : name_(std::move(name)), script_(std::move(script)) {
        attributes_.max_qp_wr = 1024;
        attributes_.max_cqe = 1 << 20;
        attributes_.max_mr_size = max_mr_size;
        attributes_.max_msg_size = 1u << 31;
    }
    const std::string& name() const noexcept override { return name_; }
    const verbs::DeviceAttributes& attributes() const noexcept override { return attributes_; }
    verbs::Network network() const override { return {"fake", {}}; }
    std::unique_ptr<verbs::ProtectionDomain> alloc_pd() override {
        return std::make_unique<FakePd>(script_);
    }
    std::unique_ptr<verbs::CompletionQueue> create_cq(std::uint32_t) override {
        return std::make_unique<FakeCq>();
    }

  private:
    std::string name_;
    std::shared_ptr<Script> script_;
    verbs::DeviceAttributes attributes_;
};

}  // namespace aioflagcx::testing
