// The few socket calls both ends of the TCP path share.
#pragma once

#include <sys/socket.h>
#include <sys/uio.h>

#include <cstddef>
#include <span>

#include "common/unique_fd.h"
#include "verbs/verbs.h"

namespace aioflagcx::verbs::soft {

UniqueFd open_socket(int family);  // non-blocking, close-on-exec
void set_no_delay(int fd) noexcept;

// Waits for `events` of poll(2); throws NativeError (ETIMEDOUT) at the deadline.
void wait_for(int fd, short events, Deadline deadline);

// sendmsg and recvmsg that retry after signals, never raise SIGPIPE and never wait. -1 and errno
// on failure.
ssize_t send_pieces(int fd, std::span<iovec> pieces) noexcept;
ssize_t receive_pieces(int fd, std::span<iovec> pieces) noexcept;
// Ends the connection at once, for copies of the descriptor that fork()ed children may hold as
// well: what is not sent yet is not sent, and the peer is told that nothing unread is wanted.
void reset_connection(int fd) noexcept;

// Takes `size` bytes from the stream without storing them anywhere.
ssize_t discard_bytes(int fd, std::size_t size) noexcept;

}  // namespace aioflagcx::verbs::soft
