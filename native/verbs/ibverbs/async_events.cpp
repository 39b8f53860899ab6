#include "verbs/ibverbs/async_events.h"

#include <fcntl.h>
#include <poll.h>

#include <utility>

#include "common/thread.h"

namespace aioflagcx::verbs::ibverbs {

namespace {

// Which member of the event's union says what it is about (ibv_get_async_event(3)).
bool is_of_port(ibv_event_type type) noexcept {
    switch (type) {
        case IBV_EVENT_PORT_ACTIVE:
        case IBV_EVENT_PORT_ERR:
        case IBV_EVENT_LID_CHANGE:
        case IBV_EVENT_PKEY_CHANGE:
        case IBV_EVENT_GID_CHANGE:
        case IBV_EVENT_SM_CHANGE:
        case IBV_EVENT_CLIENT_REREGISTER:
            return true;
        default:
            return false;
    }
}

bool is_of_queue_pair(ibv_event_type type) noexcept {
    switch (type) {
        case IBV_EVENT_QP_FATAL:
        case IBV_EVENT_QP_REQ_ERR:
        case IBV_EVENT_QP_ACCESS_ERR:
        case IBV_EVENT_COMM_EST:
        case IBV_EVENT_SQ_DRAINED:
        case IBV_EVENT_PATH_MIG:
        case IBV_EVENT_PATH_MIG_ERR:
        case IBV_EVENT_QP_LAST_WQE_REACHED:
            return true;
        default:
            return false;
    }
}

DeviceEvent::Kind kind_of(ibv_event_type type) noexcept {
    switch (type) {
        case IBV_EVENT_PORT_ACTIVE:
            return DeviceEvent::Kind::PortActive;
        case IBV_EVENT_PORT_ERR:
            return DeviceEvent::Kind::PortDown;
        case IBV_EVENT_GID_CHANGE:
        case IBV_EVENT_LID_CHANGE:
            return DeviceEvent::Kind::AddressChange;
        case IBV_EVENT_DEVICE_FATAL:
            return DeviceEvent::Kind::DeviceFatal;
        case IBV_EVENT_QP_FATAL:
        case IBV_EVENT_QP_REQ_ERR:
        case IBV_EVENT_QP_ACCESS_ERR:
            return DeviceEvent::Kind::QpFatal;
        default:
            return DeviceEvent::Kind::Other;
    }
}

}  // namespace

AsyncEvents::AsyncEvents(std::shared_ptr<ibv_context> context, std::uint8_t port)
    : context_(std::move(context)), port_(port) {
    const int flags = ::fcntl(context_->async_fd, F_GETFL);
    ::fcntl(context_->async_fd, F_SETFL, flags | O_NONBLOCK);
    thread_ = start_thread("afx-events", [this] { run(); });
}

AsyncEvents::~AsyncEvents() {
    stop_.signal();
    thread_.join();
}

void AsyncEvents::set_handler(std::function<void(const DeviceEvent&)> handler) {
    const std::lock_guard lock(mutex_);
    handler_ = std::move(handler);
}

void AsyncEvents::run() {
    for (;;) {
        pollfd fds[2] = {{stop_.fd(), POLLIN, 0}, {context_->async_fd, POLLIN, 0}};
        ::poll(fds, 2, -1);
        if (fds[0].revents != 0) return;
        if ((fds[1].revents & (POLLERR | POLLNVAL)) != 0) return;
        ibv_async_event event{};
        while (Library::get().get_async_event(context_.get(), &event) == 0) {
            report(event);
            // What the event names cannot be destroyed before this.
            Library::get().ack_async_event(&event);
        }
    }
}

void AsyncEvents::report(const ibv_async_event& event) {
    if (is_of_port(event.event_type) && event.element.port_num != port_) return;
    DeviceEvent told;
    told.kind = kind_of(event.event_type);
    told.text = Library::get().event_type_str(event.event_type);
    if (is_of_queue_pair(event.event_type)) told.qp_num = event.element.qp->qp_num;
    const std::lock_guard lock(mutex_);
    if (handler_) handler_(told);
}

}  // namespace aioflagcx::verbs::ibverbs
