#include "verbs/soft/initiator.h"

#include <array>
#include <mutex>

#include "verbs/soft/limits.h"

namespace aioflagcx::verbs::soft {

Clock::duration rnr_delay(std::uint8_t min_rnr_timer) noexcept {
    static constexpr std::array<std::uint32_t, 32> kMicroseconds = {
        655360, 10,    20,    30,    40,    60,     80,     120,    160,    240,   320,
        480,    640,   960,   1280,  1920,  2560,   3840,   5120,   7680,   10240, 15360,
        20480,  30720, 40960, 61440, 81920, 122880, 163840, 245760, 327680, 491520};
    return std::chrono::microseconds(kMicroseconds[min_rnr_timer & 31U]);
}

Initiator::Initiator(const Init& init)
    : cq_(*init.cq),
      queue_(*init.cq, init.qp_num, init.max_send_wr),
      mrs_(init.mrs),
      qp_num_(init.qp_num),
      rnr_retry_(init.rnr_retry),
      rnr_left_(init.rnr_retry) {}

std::size_t Initiator::post(std::span<const SendWr> requests) {
    const std::lock_guard lock(cq_.progress_mutex());
    std::size_t taken = 0;
    for (const SendWr& wr : requests) {
        if (in_error()) {
            if (lost_idle_) {
                queue_.reject(wr, WcStatus::RetryExcErr, static_cast<std::uint32_t>(lost_errno_));
                lost_idle_ = false;
            } else {
                queue_.reject(wr, WcStatus::WrFlushErr, 0);
            }
        } else {
            if (queue_.full() || cq_.full()) break;
            queue_.push(wr, check_local(mrs_, wr));
        }
        ++taken;
    }
    if (!in_error() && !waiting()) pump();
    queue_.report();
    return taken;
}

bool Initiator::try_now(const SendWr& wr) {
    // Not to wait for the worker, which may be copying for another queue pair.
    const std::unique_lock lock(cq_.progress_mutex(), std::try_to_lock);
    if (!lock || in_error() || waiting() || !queue_.empty()) return false;
    return check_local(mrs_, wr) == WcStatus::Success && execute_now(wr);
}

void Initiator::to_error() {
    const std::lock_guard lock(cq_.progress_mutex());
    if (in_error()) return;
    enter_error();
    queue_.flush();
    queue_.report();
}

void Initiator::progress(Clock::time_point now) {
    if (!in_error()) receive();
    if (resume_at_ <= now) {
        resume_at_ = Deadline::max();
        cq_.update_timer(*this);
    }
    if (!in_error() && !waiting()) pump();
    queue_.report();
}

void Initiator::detach() noexcept {
    const std::lock_guard lock(cq_.progress_mutex());
    close_path();
    error_.store(true, std::memory_order_release);
    resume_at_ = Deadline::max();
    cq_.forget(*this);
    cq_.discard(qp_num_);
}

void Initiator::fail(std::uint64_t seq, WcStatus status, int error) {
    if (in_error()) return;
    enter_error();
    queue_.fail(seq, status, static_cast<std::uint32_t>(error));
}

void Initiator::fail_oldest(WcStatus status, int error) {
    if (in_error()) return;
    enter_error();
    lost_idle_ = queue_.empty();
    lost_errno_ = error;
    queue_.fail(queue_.head(), status, static_cast<std::uint32_t>(error));
}

void Initiator::not_ready(std::uint8_t min_rnr_timer) {
    const std::uint64_t seq = queue_.head();
    if (seq != rnr_seq_) {
        rnr_seq_ = seq;
        rnr_left_ = rnr_retry_;
    }
    if (rnr_retry_ != 7) {
        if (rnr_left_ == 0) {
            fail(seq, WcStatus::RnrRetryExcErr);
            return;
        }
        --rnr_left_;
    }
    queue_.restart();
    resume_at_ = Clock::now() + rnr_delay(min_rnr_timer);
    cq_.update_timer(*this);
}

void Initiator::enter_error() noexcept {
    close_path();
    error_.store(true, std::memory_order_release);
    resume_at_ = Deadline::max();
    cq_.update_timer(*this);
}

}  // namespace aioflagcx::verbs::soft
