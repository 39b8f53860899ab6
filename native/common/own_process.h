// fork(2) copies memory but not threads: a forked child can neither use nor free what native
// threads work on, and must not touch the sockets it shares with its parent.
#pragma once

#include <unistd.h>

namespace aioflagcx {

// A deleter that frees in the process that made the object, and does nothing in a forked child.
template <typename T>
struct DeleteInOwnProcess {
    pid_t owner = ::getpid();

    void operator()(T* object) const {
        if (::getpid() == owner) delete object;
    }
};

}  // namespace aioflagcx
