#include "verbs/soft/token.h"

#include <pthread.h>
#include <sys/random.h>

#include <cerrno>
#include <cstdlib>
#include <fstream>
#include <mutex>
#include <string>

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

Token machine_token() noexcept {
    Token token{};
    std::ifstream file("/proc/sys/kernel/random/boot_id");
    std::string text;
    if (!(file >> text)) return token;
    std::erase(text, '-');
    if (text.size() != 2 * token.size()) return token;
    for (std::size_t i = 0; i < token.size(); ++i) {
        token[i] =
            static_cast<std::uint8_t>(std::strtoul(text.substr(2 * i, 2).c_str(), nullptr, 16));
    }
    return token;
}

}  // namespace aioflagcx::verbs::soft
