#include "verbs/soft/tcp_initiator.h"

#include <mutex>

#include "verbs/soft/limits.h"

namespace aioflagcx::verbs::soft {

TcpInitiator::TcpInitiator(const Init& init, std::vector<UniqueFd> streams) : Initiator(init) {
    for (UniqueFd& fd : streams) {
        streams_.push_back(std::make_unique<SendStream>(std::move(fd), queue_, mrs_, *this));
    }
    const std::lock_guard lock(cq_.progress_mutex());
    std::size_t watched = 0;
    try {
        for (; watched < streams_.size(); ++watched) {
            cq_.watch(streams_[watched]->fd(), *streams_[watched]);
        }
    } catch (...) {
        while (watched > 0) cq_.unwatch(streams_[--watched]->fd());
        throw;
    }
}

void TcpInitiator::pump() {
    std::size_t budget = kTurnBytes * streams_.size();
    move(budget);
    // What stopped for the budget has no edge to wait for.
    if (budget == 0 && !in_error()) stream_ready();
}

void TcpInitiator::move(std::size_t& budget) {
    for (const auto& stream : streams_) {
        if (!settle(stream->send(budget))) return;
    }
    while (budget > 0 && queue_.may_start()) {
        SendStream* const stream = pick();
        if (stream == nullptr) return;  // an edge tells when one takes more
        if (!fill(*stream) || !settle(stream->send(budget))) return;
    }
}

bool TcpInitiator::fill(SendStream& stream) {
    do {
        const std::uint64_t seq = queue_.next();
        const WcStatus local = queue_.local_error(seq);
        if (local != WcStatus::Success) {
            fail(seq, local);
            return false;
        }
        stream.append(seq);
        queue_.start();
    } while (queue_.may_start() && stream.has_room(queue_.request(queue_.next()).sge.length));
    return true;
}

void TcpInitiator::receive() {
    // All streams first: when one brings the reason of a failure and another just ends, the
    // reason is what counts.
    std::optional<StreamFailure> ended;
    for (const auto& stream : streams_) {
        if (!stream->readable()) continue;
        const auto failure = stream->receive();
        if (!failure) continue;
        if (failure->seq) {
            settle(failure);
            return;
        }
        if (!ended) ended = failure;
    }
    settle(ended);
}

bool TcpInitiator::settle(const std::optional<StreamFailure>& failure) {
    if (!failure) return true;
    if (failure->seq) {
        fail(*failure->seq, failure->status, failure->error);
    } else {
        fail_oldest(failure->status, failure->error);
    }
    return false;
}

SendStream* TcpInitiator::pick() noexcept {
    SendStream* best = nullptr;
    for (const auto& stream : streams_) {
        if (!stream->idle()) continue;
        if (best == nullptr || stream->unacked() < best->unacked()) best = stream.get();
    }
    return best;
}

void TcpInitiator::close_path() noexcept {
    for (const auto& stream : streams_) {
        if (stream->fd() < 0) continue;
        cq_.unwatch(stream->fd());
        stream->close();
    }
}

}  // namespace aioflagcx::verbs::soft
