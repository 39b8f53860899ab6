// Opens an initiator's streams.
#pragma once

#include <cstdint>
#include <vector>

#include "common/socket_address.h"
#include "common/unique_fd.h"
#include "verbs/soft/token.h"
#include "verbs/verbs.h"

namespace aioflagcx::verbs::soft {

// Connects `count` streams to the responder that `token` names and returns when it has bound all
// of them. Throws NativeError: ETIMEDOUT at the deadline, ECONNREFUSED when it does not know the
// token, or what the system says.
std::vector<UniqueFd> open_streams(const SocketAddress& address, const Token& token,
                                   std::uint32_t count, Deadline deadline);

}  // namespace aioflagcx::verbs::soft
