// Two devices with connected queue pairs, for tests of what verbs.h promises whatever the device.
//
// By themselves the tests run on every path of the soft device. With AIOFLAGCX_TEST_RDMA=NEAR,FAR
// in the environment they run on those two RDMA devices instead.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "common/error.h"
#include "verbs/soft/soft.h"
#include "verbs/verbs.h"
#if AIOFLAGCX_IBVERBS
#include "verbs/ibverbs/ibverbs.h"
#endif

namespace aioflagcx::verbs {

inline constexpr std::uint32_t kAllAccess =
    kAccessLocalWrite | kAccessRemoteWrite | kAccessRemoteRead;
// Long enough that only a hang reaches it, sanitizers included.
inline constexpr std::chrono::seconds kPatience{60};

inline Deadline soon() { return Clock::now() + kPatience; }

inline std::uint64_t address(const void* pointer) {
    return reinterpret_cast<std::uint64_t>(pointer);
}

inline std::unique_ptr<Device> open_soft(const std::string& path, std::uint32_t streams) {
    soft::SoftOptions options;
    options.paths = {path};
    options.streams = streams;
    return soft::open_soft_device(options);
}

// An RDMA port by its name. Its queue pairs give up early: a second after their peer is gone.
inline std::unique_ptr<Device> open_rdma(const std::string& name) {
#if AIOFLAGCX_IBVERBS
    std::string why_none;
    for (const auto& port : ibverbs::list_ports(&why_none)) {
        if (port.name != name) continue;
        ibverbs::IbverbsOptions options;
        options.port = port;
        options.timeout = 14;  // 67 ms
        options.retry_cnt = 5;
        return ibverbs::open_ibverbs_device(options);
    }
    throw NativeError("open_rdma", ENODEV, name + " " + why_none);
#else
    throw NativeError("open_rdma", ENODEV, name + ": this build is without ibverbs");
#endif
}

// One end: a device with a PD, a CQ, a QP and a registered buffer.
struct Side {
    explicit Side(std::unique_ptr<Device> opened, std::size_t buffer_size = 1 << 20,
                  const QpInit& qp_init = defaults(), std::uint32_t access = kAllAccess)
        : device(std::move(opened)),
          pd(device->alloc_pd()),
          cq(device->create_cq(std::min(1U << 16, device->attributes().max_cqe))),
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

// What the tests run on: "process", "local", "tcp"; or "rdma".
inline std::vector<std::string> tested_devices() {
    if (std::getenv("AIOFLAGCX_TEST_RDMA") != nullptr) return {"rdma"};
    return {"process", "local", "tcp"};
}

// A test on two devices that reach each other.
class OnDevices : public ::testing::TestWithParam<std::string> {
  protected:
    bool soft() const { return GetParam() != "rdma"; }
    // See docs/softroce.md for what it does its own way.
    bool soft_roce() const { return !soft() && rdma_name(0).starts_with("rxe"); }
    bool local() const { return GetParam() == "local"; }
    // Of connected queue pairs.
    std::string path() const { return soft() ? GetParam() : "ibverbs"; }

    // `streams` is for those that have any.
    std::unique_ptr<Device> near(std::uint32_t streams = 2) const {
        return soft() ? open_soft(GetParam(), streams) : open_rdma(rdma_name(0));
    }
    std::unique_ptr<Device> far(std::uint32_t streams = 2) const {
        return soft() ? open_soft(GetParam(), streams) : open_rdma(rdma_name(1));
    }

  private:
    static std::string rdma_name(int end) {
        const std::string both = std::getenv("AIOFLAGCX_TEST_RDMA");
        const auto comma = both.find(',');
        return end == 0 ? both.substr(0, comma) : both.substr(comma + 1);
    }
};

#define VERBS_ON_EVERY_DEVICE(suite)                                         \
    INSTANTIATE_TEST_SUITE_P(, suite, ::testing::ValuesIn(tested_devices()), \
                             [](const auto& param) { return param.param; })

}  // namespace aioflagcx::verbs
