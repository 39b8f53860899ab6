// What a device's queue pairs share, and whether the device is there at all.
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_set>
#include <vector>

#include "verbs/soft/io_thread.h"
#include "verbs/soft/token.h"
#include "verbs/verbs.h"

namespace aioflagcx::verbs::soft {

// Locks: mutex_ guards queue_pairs_, and the change of io_ against add(). It is held while unplug()
// moves queue pairs to ERR, so it comes before all locks of theirs: nobody who holds one of those
// creates or destroys a queue pair. io_mutex_ guards io_; a leaf.
class DeviceCore {
  public:
    DeviceCore(std::string name_, std::string host_, std::vector<std::string> paths_,
               std::uint32_t streams_, std::string bind_address);

    bool local() const noexcept;  // whether the local path is among `paths`

    // What listens for peers. Throws NativeError (ENODEV) when the device is not there.
    std::shared_ptr<IoThread> io(const char* call) const;
    // The same for those who are done with it: null then.
    std::shared_ptr<IoThread> io_or_null() const noexcept;

    // Every queue pair, as long as it lives. Throws NativeError (ENODEV).
    void add(QueuePair& qp);
    void remove(QueuePair& qp) noexcept;

    void unplug();
    void plug();
    void stop();  // joins the I/O thread

    const std::string name;
    const std::string host;                // what peers connect to
    const std::vector<std::string> paths;  // available ones, in order of preference
    const std::uint32_t streams;           // of an initiator
    const Token machine = machine_token();

  private:
    const std::string bind_address_;
    std::mutex mutex_;
    std::unordered_set<QueuePair*> queue_pairs_;
    mutable std::mutex io_mutex_;
    std::shared_ptr<IoThread> io_;  // null: unplugged
};

}  // namespace aioflagcx::verbs::soft
