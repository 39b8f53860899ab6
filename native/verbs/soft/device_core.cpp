#include "verbs/soft/device_core.h"

#include <algorithm>
#include <cerrno>
#include <utility>

#include "common/error.h"
#include "verbs/soft/path_choice.h"

namespace aioflagcx::verbs::soft {

DeviceCore::DeviceCore(std::string name_, std::string host_, std::vector<std::string> paths_,
                       std::uint32_t streams_, std::string bind_address)
    : name(std::move(name_)),
      host(std::move(host_)),
      paths(std::move(paths_)),
      streams(streams_),
      bind_address_(std::move(bind_address)),
      io_(std::make_shared<IoThread>(bind_address_, local())) {}

bool DeviceCore::local() const noexcept {
    return std::find(paths.begin(), paths.end(), path_name(Path::Local)) != paths.end();
}

std::shared_ptr<IoThread> DeviceCore::io(const char* call) const {
    auto io = io_or_null();
    if (!io) throw NativeError(call, ENODEV, name + " is gone");
    return io;
}

std::shared_ptr<IoThread> DeviceCore::io_or_null() const noexcept {
    const std::lock_guard lock(io_mutex_);
    return io_;
}

void DeviceCore::add(QueuePair& qp) {
    const std::lock_guard lock(mutex_);
    io("create_qp");
    queue_pairs_.insert(&qp);
}

void DeviceCore::remove(QueuePair& qp) noexcept {
    const std::lock_guard lock(mutex_);
    queue_pairs_.erase(&qp);
}

void DeviceCore::unplug() {
    std::shared_ptr<IoThread> io;
    {
        const std::lock_guard lock(mutex_);
        {
            const std::lock_guard io_lock(io_mutex_);
            io.swap(io_);
        }
        // One that is just being accepted or connected is moved to ERR when that is through.
        for (QueuePair* const qp : queue_pairs_) qp->to_error();
    }
    if (io) io->stop();  // also for those who hold it a moment longer
}

void DeviceCore::plug() {
    const std::lock_guard lock(mutex_);
    if (io_or_null()) return;
    auto io = std::make_shared<IoThread>(bind_address_, local());
    const std::lock_guard io_lock(io_mutex_);
    io_ = std::move(io);
}

void DeviceCore::stop() {
    if (const auto io = io_or_null()) io->stop();
}

}  // namespace aioflagcx::verbs::soft
