#include "engine/event_ring.h"

namespace aioflagcx::engine {

void EventRing::wake_locked() {
    if (woken_) return;
    woken_ = true;
    add(stats_.wakeups);
    fd_.signal();
}

void EventRing::push_done(std::uint64_t id) {
    const std::lock_guard lock(mutex_);
    done_.push_back(id);
    wake_locked();
}

void EventRing::push(Event event) {
    const std::lock_guard lock(mutex_);
    events_.push_back(std::move(event));
    wake_locked();
}

std::pair<std::vector<std::uint64_t>, std::vector<Event>> EventRing::drain() {
    const std::lock_guard lock(mutex_);
    if (woken_) fd_.clear();  // under the lock: a later push signals again
    woken_ = false;
    return {std::exchange(done_, {}), std::exchange(events_, {})};
}

}  // namespace aioflagcx::engine
