// The target's side of local connections: the listener, and what is answered on each.
#pragma once

#include <cstdint>
#include <memory>

#include "common/unique_fd.h"
#include "verbs/soft/local/packets.h"
#include "verbs/soft/local/shared_table.h"
#include "verbs/soft/registry.h"
#include "verbs/soft/responder.h"

namespace aioflagcx::verbs::soft::local {

// A device's listener, by a random name.
class Listener {
  public:
    Listener();  // throws NativeError

    const Token& name() const noexcept { return name_; }
    int fd() const noexcept { return fd_.get(); }
    void close() noexcept { fd_.reset(); }

  private:
    Token name_;
    UniqueFd fd_;
};

// What came of a message on a connection that has not been admitted yet.
struct Answer {
    bool more = false;  // it may send another; without that or a responder it is of no use
    // It has been admitted: the responder it belongs to, whose guest has taken the connection over,
    // and our end of its stream.
    std::shared_ptr<Responder> responder = nullptr;
    UniqueFd stream = {};
};

// Answers an Open or Enter: admits the initiator, or tells it why not. Throws what running out of
// memory throws.
Answer answer_stranger(UniqueFd& connection, const Registry& exposed);

// Answers what a guest asks for, so much of it that others get their turn. False when its
// connection has ended, or makes no sense.
bool answer_guest(Responder& responder, LocalGuest& guest);

}  // namespace aioflagcx::verbs::soft::local
