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

// A connection that has been admitted: the responder it belongs to, and our end of its stream.
struct Admitted {
    std::shared_ptr<Responder> responder;
    UniqueFd stream;
};

// Answers an Open: admits the initiator or tells it why not. Without a responder: the connection is
// of no use any more. The connection itself goes over to the responder's guest.
Admitted answer_open(UniqueFd& connection, const Registry& exposed);

// Answers what a guest asks for. False when its connection has ended, or makes no sense.
bool answer_guest(Responder& responder, LocalGuest& guest);

}  // namespace aioflagcx::verbs::soft::local
