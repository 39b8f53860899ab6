// What a device reports by itself: ports that come and go, addresses that change, its own end.
#pragma once

#include <functional>
#include <memory>
#include <mutex>
#include <thread>

#include "common/event_fd.h"
#include "verbs/ibverbs/handles.h"
#include "verbs/verbs.h"

namespace aioflagcx::verbs::ibverbs {

// One thread a device. Lock: mutex_ guards handler_, and is held while it is called, so that no
// call is under way once it has been changed.
class AsyncEvents {
  public:
    AsyncEvents(std::shared_ptr<ibv_context> context, std::uint8_t port);
    ~AsyncEvents();

    void set_handler(std::function<void(const DeviceEvent&)> handler);

  private:
    void run();
    void report(const ibv_async_event& event);

    const std::shared_ptr<ibv_context> context_;
    const std::uint8_t port_;
    EventFd stop_;
    std::mutex mutex_;
    std::function<void(const DeviceEvent&)> handler_;
    std::thread thread_;
};

}  // namespace aioflagcx::verbs::ibverbs
