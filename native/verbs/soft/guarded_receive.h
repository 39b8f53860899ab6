// Receiving that a stopped thread does not go on with when its peer has given up meanwhile.
//
// An initiator that fails or stops a transfer resets its streams, so the kernel of the target knows
// that nothing of what is still unread is wanted, while the target's process may be stopped and not
// know. When it goes on, it looks first. Its thread may also have been stopped between that look
// and the system call; as in local/guarded_copy.h, the kernel then does not let it go on there.
#pragma once

#include <sys/uio.h>

#include <span>

namespace aioflagcx::verbs::soft {

// As receive_pieces() of socket.h; but -1 and ECONNRESET, and nothing is stored, when the peer has
// reset or shut down the stream.
ssize_t receive_wanted(int fd, std::span<iovec> pieces) noexcept;

}  // namespace aioflagcx::verbs::soft
