#include "verbs/soft/registry.h"

namespace aioflagcx::verbs::soft {

Registry& Registry::process() {
    // Never destroyed: threads may still use it while the process exits.
    static Registry* const registry = std::make_unique<Registry>().release();
    return *registry;
}

void Registry::add(const std::shared_ptr<Responder>& responder) {
    const std::lock_guard lock(mutex_);
    responders_[responder->token()] = responder;
}

void Registry::remove(const Token& token) noexcept {
    const std::lock_guard lock(mutex_);
    responders_.erase(token);
}

std::shared_ptr<Responder> Registry::find(const Token& token) const {
    const std::lock_guard lock(mutex_);
    const auto found = responders_.find(token);
    return found == responders_.end() ? nullptr : found->second.lock();
}

}  // namespace aioflagcx::verbs::soft
