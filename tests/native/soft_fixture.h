// Two soft devices with connected queue pairs, for tests of what the device promises.
#pragma once

#include <gtest/gtest.h>

#include <chrono>
#include <cstdint>
#include <cstring>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "common/error.h"
#include "verbs/soft/soft.h"

namespace aioflagcx::verbs::soft {

inline constexpr std::uint32_t kAllAccess =
    kAccessLocalWrite | kAccessRemoteWrite | kAccessRemoteRead;
// Long enough that only a hang reaches it, sanitizers included.
inline constexpr std::chrono::seconds kPatience{60};

inline Deadline soon() { return Clock::now() + kPatience; }

inline std::uint64_t address(const void* pointer) {
    return reinterpret_cast<std::uint64_t>(pointer);
}

inline SoftOptions options_for(const std::string& path, std::uint32_t streams = 2) {
    SoftOptions options;
    options.paths = {path};
    options.streams = streams;
    return options;
}

// One end: a device with a PD, a CQ, a QP and a registered buffer.
struct Side {
    explicit Side(const SoftOptions& options, std::size_t buffer_size = 1 << 20,
                  const QpInit& qp_init = defaults(), std::uint32_t access = kAllAccess)
        : device(open_soft_device(options)),
          pd(device->alloc_pd()),
          cq(device->create_cq(1 << 16)),
          buffer(buffer_size),
          mr(pd->register_memory(address(buffer.data()), buffer.size(), access, {})),
          qp(make_qp(qp_init)) {}

    static QpInit defaults() {
        QpInit init;
        init.max_send_wr = 4096;
        init.max_recv_wr = 1024;
        return init;
    }

    std::unique_ptr<QueuePair> make_qp(QpInit init = defaults()) {
        init.send_cq = init.recv_cq = cq.get();
        return pd->create_qp(init);
    }

    // A request on the first bytes of both buffers.
    SendWr request(WrOpcode opcode, const Side& peer, std::uint32_t length, std::uint64_t id = 0,
                   std::uint64_t local_offset = 0, std::uint64_t remote_offset = 0) const {
        SendWr wr;
        wr.wr_id = id;
        wr.opcode = opcode;
        wr.rkey = peer.mr->rkey();
        wr.remote_addr = address(peer.buffer.data()) + remote_offset;
        wr.sge = {address(buffer.data()) + local_offset, length, mr->lkey()};
        return wr;
    }
    RecvWr receive(std::uint64_t id, std::uint32_t length = 0, std::uint64_t offset = 0) const {
        return {id, {address(buffer.data()) + offset, length, mr->lkey()}};
    }

    void fill(std::uint32_t seed) {
        std::mt19937 random(seed);
        std::size_t i = 0;
        for (; i + 4 <= buffer.size(); i += 4) {
            const std::uint32_t word = random();
            std::memcpy(buffer.data() + i, &word, 4);
        }
        for (; i < buffer.size(); ++i) buffer[i] = static_cast<std::uint8_t>(random());
    }

    // The next `count` completions, in the order polled.
    std::vector<WorkCompletion> take(std::size_t count) {
        std::vector<WorkCompletion> all(count);
        std::size_t have = 0;
        const Deadline deadline = soon();
        while (have < count && Clock::now() < deadline) {
            have += cq->poll(std::span(all).subspan(have));
        }
        EXPECT_EQ(have, count) << "completions are missing";
        all.resize(have);
        return all;
    }
    WorkCompletion take_one() {
        const auto all = take(1);
        return all.empty() ? WorkCompletion{.status = WcStatus::GeneralErr} : all.front();
    }
    bool quiet() {
        WorkCompletion wc;
        return cq->poll({&wc, 1}) == 0;
    }

    // Posts all, polling to `sink` while the send queue is full.
    void post_all(std::span<const SendWr> requests, std::vector<WorkCompletion>& sink) {
        const Deadline deadline = soon();
        while (!requests.empty() && Clock::now() < deadline) {
            requests = requests.subspan(qp->post_send(requests));
            WorkCompletion out[64];
            const std::size_t count = cq->poll(out);
            sink.insert(sink.end(), out, out + count);
        }
        EXPECT_TRUE(requests.empty()) << "the send queue stays full";
    }

    std::unique_ptr<Device> device;
    std::unique_ptr<ProtectionDomain> pd;
    std::unique_ptr<CompletionQueue> cq;
    std::vector<std::uint8_t> buffer;
    std::unique_ptr<MemoryRegion> mr;
    std::unique_ptr<QueuePair> qp;
};

inline void connect(QueuePair& initiator, QueuePair& responder) {
    responder.accept(initiator.local_attributes());
    initiator.connect(responder.local_attributes(), soon());
}

// Runs on every path: GetParam() is its name.
class OnPath : public ::testing::TestWithParam<const char*> {
  protected:
    bool tcp() const { return std::string(GetParam()) == "tcp"; }
    bool local() const { return std::string(GetParam()) == "local"; }
    SoftOptions options(std::uint32_t streams = 2) const {
        return options_for(GetParam(), streams);
    }
};

#define SOFT_ON_EVERY_PATH(suite)                                                   \
    INSTANTIATE_TEST_SUITE_P(, suite, ::testing::Values("process", "local", "tcp"), \
                             [](const auto& param) { return std::string(param.param); })

}  // namespace aioflagcx::verbs::soft
