#include "verbs/soft/token.h"

#include <pthread.h>
#include <sys/random.h>

#include <cerrno>
#include <mutex>

#include "common/error.h"

namespace aioflagcx::verbs::soft {

namespace {

// Guards the process token; held across fork(), so the child never inherits it locked by a thread
// it does not have.
std::mutex process_mutex;
Token process_value;
bool process_stale = true;

}  // namespace

void random_bytes(void* out, std::size_t size) {
    auto* next = static_cast<std::uint8_t*>(out);
    while (size > 0) {
        const ssize_t got = ::getrandom(next, size, 0);
        if (got < 0) {
            if (errno == EINTR) continue;
            throw NativeError("getrandom", errno, "");
        }
        next += got;
        size -= static_cast<std::size_t>(got);
    }
}

Token random_token() {
    Token token;
    random_bytes(token.data(), token.size());
    return token;
}

Token process_token() {
    static const int registered =
        ::pthread_atfork([] { process_mutex.lock(); }, [] { process_mutex.unlock(); },
                         [] {
                             process_stale = true;
                             process_mutex.unlock();
                         });
    if (registered != 0) throw NativeError("pthread_atfork", registered, "");
    const std::lock_guard lock(process_mutex);
    if (process_stale) {
        process_value = random_token();
        process_stale = false;
    }
    return process_value;
}

}  // namespace aioflagcx::verbs::soft
