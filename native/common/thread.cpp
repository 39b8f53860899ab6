#include "common/thread.h"

#include <pthread.h>

#include <csignal>
#include <system_error>
#include <utility>

#include "common/error.h"

namespace aioflagcx {

std::thread start_thread(const std::string& name, std::function<void()> body) {
    sigset_t all;
    sigset_t before;
    ::sigfillset(&all);
    ::pthread_sigmask(SIG_SETMASK, &all, &before);
    std::thread thread;
    int error = 0;
    try {
        thread = std::thread(std::move(body));
    } catch (const std::system_error& failure) {
        error = failure.code().value();
    }
    ::pthread_sigmask(SIG_SETMASK, &before, nullptr);
    if (error != 0) throw NativeError("start thread", error, name);
    ::pthread_setname_np(thread.native_handle(), name.substr(0, 15).c_str());
    return thread;
}

}  // namespace aioflagcx
