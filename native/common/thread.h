// How the native core starts its threads.
#pragma once

#include <functional>
#include <string>
#include <thread>

namespace aioflagcx {

// With every signal blocked: signals are the application's business, and its handlers must not run
// on a thread of ours. `name` shows in ps(1); its first 15 bytes. Throws NativeError.
std::thread start_thread(const std::string& name, std::function<void()> body);

}  // namespace aioflagcx
