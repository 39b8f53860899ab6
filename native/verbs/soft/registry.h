// Responders by token: how an initiator's connect() finds the QP that accepted it.
#pragma once

#include <memory>
#include <mutex>
#include <unordered_map>

#include "verbs/soft/responder.h"
#include "verbs/soft/token.h"

namespace aioflagcx::verbs::soft {

class Registry {
  public:
    // The one of this process, for the process path.
    static Registry& process();

    void add(const std::shared_ptr<Responder>& responder);
    void remove(const Token& token) noexcept;
    std::shared_ptr<Responder> find(const Token& token) const;  // null when unknown or gone

  private:
    mutable std::mutex mutex_;  // guards responders_; nothing else is taken while it is held
    std::unordered_map<Token, std::weak_ptr<Responder>, TokenHash> responders_;
};

}  // namespace aioflagcx::verbs::soft
