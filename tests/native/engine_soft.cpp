// Two whole engines on the soft device, by both of its paths: what the Python layer does with them,
// done by threads, so that the sanitizers see every lock and every lifetime.
#include <gtest/gtest.h>
#include <poll.h>

#include <algorithm>
#include <atomic>
#include <numeric>
#include <random>
#include <set>
#include <thread>

#include "common/error.h"
#include "engine/devices.h"
#include "engine/responder.h"
#include "engine/session.h"
#include "engine/transfer_engine.h"
#include "verbs/soft/soft.h"

namespace aioflagcx::engine {
namespace {

using namespace std::chrono_literals;

constexpr std::size_t kBytes = 8 << 20;

struct Shape {
    const char* path;
    std::size_t devices;
    std::uint32_t workers;
    std::uint32_t qps;
};

struct Side {
    explicit Side(const Shape& shape) {
        EngineOptions options;
        options.devices = {"soft:" + std::to_string(shape.devices)};
        options.workers_per_device = shape.workers;
        options.qps_per_endpoint = shape.qps;
        options.bind_address = options.advertise_address = "127.0.0.1";
        options.soft_paths = {shape.path};
        options.retry_count = 1000;
        if (shape.qps > 1) options.slice_size = 4096;  // each transfer on many queue pairs
        engine = TransferEngine::open(options, open_devices(options).devices);
        ids = engine->regions()->add(
            std::vector<RegionSpec>{{addr(), memory.size(), 3, true, "memory"}});
    }
    std::uint64_t addr() const { return reinterpret_cast<std::uint64_t>(memory.data()); }

    std::vector<std::uint8_t> memory = std::vector<std::uint8_t>(kBytes);
    std::shared_ptr<TransferEngine> engine;
    std::vector<std::uint64_t> ids;
};

struct SoftEngines : ::testing::TestWithParam<Shape> {
    Side initiator{GetParam()};
    Side target{GetParam()};
    std::shared_ptr<Session> session = initiator.engine->create_session("target");
    std::shared_ptr<Responder> responder =
        target.engine->create_responder("initiator", Liveness::Seconds(1), Liveness::Seconds(1000));
    std::uint64_t attempt = 0;
    std::vector<Epoch> epochs{GetParam().devices};  // by rail: the latest
    std::set<std::uint64_t> done;
    std::vector<TransferEvent> failed;
    bool lost = false;                  // nothing is recovered any more
    std::set<std::uint32_t> unplugged;  // devices that a test has taken away
    std::set<std::uint32_t> gone;       // rails that could not be connected again

    void SetUp() override {
        const std::string table = target.engine->regions()->since(0).table;
        session->update_table(true, 0, target.engine->regions()->generation(),
                              {reinterpret_cast<const std::uint8_t*>(table.data()), table.size()},
                              {});
        for (std::uint32_t rail = 0; rail < epochs.size(); ++rail) connect(rail);
        session->watch("127.0.0.1", target.engine->liveness().port(),
                       {responder->keepalive_token().begin(), responder->keepalive_token().end()});
    }
    void TearDown() override {
        session->close();
        responder->close(verbs::Deadline::max());
        initiator.engine->close();
        target.engine->close();
    }
    void connect(std::uint32_t rail) {
        epochs[rail] = {++attempt, rail};
        const auto reply = responder->accept(attempt, session->prepare(attempt, rail));
        EXPECT_EQ(session->establish(attempt, rail, reply, verbs::Clock::now() + 20s),
                  GetParam().path);
    }
    void connect_if_there(std::uint32_t rail) {
        try {
            connect(rail);
        } catch (const NativeError&) {
            if (unplugged.empty()) throw;
            gone.insert(rail);
        }
    }
    void fence(const Epoch& epoch) {
        responder->fence(epoch.attempt, epoch.rail, verbs::Deadline::max());
        session->fenced(epoch);
    }
    std::shared_ptr<TransferTask> submit(Op op, std::uint64_t id, std::uint64_t from,
                                         std::uint64_t to, std::uint64_t length) {
        const std::uint64_t local = initiator.addr() + from;
        const std::uint64_t remote = target.addr() + to;
        Request request(initiator.engine->regions(), op, {&local, 1, false}, {&remote, 1, false},
                        {&length, 1, false});
        return session->submit(request, id, 0);
    }
    // One batch of events, as the event loop takes them; recovers what is down.
    void turn() {
        pollfd fd{initiator.engine->ring().fd(), POLLIN, 0};
        if (::poll(&fd, 1, 20'000) != 1) throw std::runtime_error("no event came");
        take_events();
    }
    // Until `bytes` of it have moved, or all.
    void wait_bytes(const TransferTask& task, std::uint64_t bytes) {
        while (task.bytes_done.load() < std::min(bytes, task.bytes_total)) {
            take_events();
            std::this_thread::yield();
        }
    }
    void take_events() {
        auto [ids, events] = initiator.engine->ring().drain();
        done.insert(ids.begin(), ids.end());
        for (Event& event : events) {
            if (auto* transfer = std::get_if<TransferEvent>(&event)) failed.push_back(*transfer);
            if (auto* down = std::get_if<EndpointDown>(&event); down != nullptr && !lost) {
                fence(down->epoch);
                connect_if_there(down->epoch.rail);
            }
        }
    }
};

// Transfers that overlap, and slices posted again before the old attempt is fenced: with several
// rails several threads may write the same bytes at once. Memory does not mind, as with NICs.
struct SoftEnginesUnderStress : SoftEngines {};

TEST_P(SoftEngines, EveryByteArrivesBothWays) {
    std::iota(initiator.memory.begin(), initiator.memory.end(), std::uint8_t{3});
    submit(Op::Write, 1, 0, 0, kBytes);
    while (!done.contains(1)) turn();
    EXPECT_EQ(initiator.memory, target.memory);
    std::fill(initiator.memory.begin(), initiator.memory.end(), std::uint8_t{0});
    submit(Op::Read, 2, 0, 0, kBytes);
    while (!done.contains(2)) turn();
    EXPECT_EQ(initiator.memory, target.memory);
}

TEST_P(SoftEngines, ImmediatesReachTheResponder) {
    const std::uint64_t local = initiator.addr(), remote = target.addr(), length = 100;
    Request request(initiator.engine->regions(), Op::Write, {&local, 1, false}, {&remote, 1, false},
                    {&length, 1, false});
    const auto task = session->submit(request, 1, 42);
    while (!done.contains(1)) turn();
    if (!responder->expect(42, task->imm_count.load())) {
        pollfd fd{target.engine->ring().fd(), POLLIN, 0};
        ASSERT_EQ(::poll(&fd, 1, 20'000), 1);
        const auto events = target.engine->ring().drain().second;
        ASSERT_EQ(std::get<Immediates>(events.at(0)).imm, 42u);
    }
    EXPECT_FALSE(responder->expect(42, 1));  // taken once
}

// Stopped at random moments; whatever is reported ended must be quiet here and, once fenced, there.
TEST_P(SoftEnginesUnderStress, StoppedTransfersAreQuietAndOthersSurvive) {
    std::mt19937 random(11);
    std::uint64_t id = 0;
    for (int round = 0; round < 40; ++round) {
        std::fill(initiator.memory.begin(), initiator.memory.end(), std::uint8_t{1});
        const auto victim = submit(Op::Write, ++id, 0, 0, kBytes / 2);
        const std::uint64_t victim_id = id;
        const auto survivor = submit(Op::Write, ++id, kBytes / 2, kBytes / 2, kBytes / 4);
        const std::uint64_t until = random() % (kBytes / 2);
        wait_bytes(*victim, until);
        session->abort(victim);
        failed.clear();
        while (!done.contains(victim_id) && failed.empty()) turn();
        if (!failed.empty()) {
            ASSERT_EQ(failed[0].id, victim_id);
            ASSERT_EQ(failed[0].status, TaskStatus::Cancelled);
            for (const Epoch& unknown : failed[0].unknown_epochs) fence(unknown);
        }
        // Ended and fenced: the source may change, the destination must not.
        std::fill(initiator.memory.begin(), initiator.memory.begin() + kBytes / 2,
                  std::uint8_t{0xEE});
        std::fill(target.memory.begin(), target.memory.begin() + kBytes / 2, std::uint8_t{7});
        while (!done.contains(id)) turn();
        ASSERT_TRUE(std::all_of(target.memory.begin(), target.memory.begin() + kBytes / 2,
                                [](std::uint8_t byte) { return byte == 7; }));
        ASSERT_TRUE(std::all_of(target.memory.begin() + kBytes / 2,
                                target.memory.begin() + kBytes / 4 * 3,
                                [](std::uint8_t byte) { return byte == 1; }));
    }
}

TEST_P(SoftEnginesUnderStress, AResponderFencedUnderLoadIsTransparent) {
    std::iota(initiator.memory.begin(), initiator.memory.end(), std::uint8_t{5});
    for (std::uint64_t id = 1; id <= 20; ++id) {
        std::fill(target.memory.begin(), target.memory.end(), std::uint8_t{0});
        const auto task = submit(Op::Write, id, 0, 0, kBytes);
        wait_bytes(*task, kBytes / 4);
        const Epoch& epoch = epochs[id % epochs.size()];
        responder->fence(epoch.attempt, epoch.rail, verbs::Deadline::max());
        while (!done.contains(id)) turn();
        ASSERT_EQ(initiator.memory, target.memory);
    }
}

TEST_P(SoftEnginesUnderStress, NothingArrivesAfterDeregistration) {
    std::fill(initiator.memory.begin(), initiator.memory.end(), std::uint8_t{1});
    for (std::uint64_t id = 1; id <= 8; ++id) submit(Op::Write, id, 0, 0, kBytes);
    while (done.empty()) turn();
    ASSERT_TRUE(target.engine->regions()->remove(target.ids, verbs::Clock::now() + 20s));
    std::fill(target.memory.begin(), target.memory.end(), std::uint8_t{9});
    while (done.size() + failed.size() < 8) turn();
    EXPECT_TRUE(std::all_of(target.memory.begin(), target.memory.end(),
                            [](std::uint8_t byte) { return byte == 9; }));
    for (const TransferEvent& event : failed) EXPECT_EQ(event.status, TaskStatus::RemoteAccess);
}

TEST_P(SoftEnginesUnderStress, ManyThreadsMaySubmitCancelAndAbort) {
    std::atomic<std::uint64_t> next{0};
    constexpr std::uint64_t kEach = 100;
    constexpr std::uint64_t kPart = kBytes / (3 * kEach);  // of memory, for each transfer
    std::vector<std::thread> threads;
    for (unsigned seed = 0; seed < 3; ++seed) {
        threads.emplace_back([&, seed] {
            std::mt19937 random(seed);
            for (std::uint64_t i = 0; i < kEach; ++i) {
                const std::uint64_t id = next.fetch_add(1);
                const std::uint64_t length = 1 + random() % kPart;
                const std::uint64_t offset = id * kPart;
                const Op op = random() % 2 == 0 ? Op::Write : Op::Read;
                const auto task = submit(op, id, offset, offset, length);
                if (random() % 4 == 0) session->cancel(*task);
                if (random() % 16 == 0) session->abort(task);
            }
        });
    }
    while (done.size() + failed.size() < 3 * kEach) turn();
    for (std::thread& thread : threads) thread.join();
    EXPECT_EQ(done.size() + failed.size(), 3 * kEach);
    EXPECT_EQ(initiator.engine->stats().transfers_inflight.load(), 0u);
    EXPECT_EQ(initiator.engine->stats().bytes_inflight.load(), 0u);
}

TEST_P(SoftEngines, TheTargetsEndIsSeenAndEverythingEnds) {
    constexpr std::uint64_t kPart = kBytes / 4;
    for (std::uint64_t id = 1; id <= 4; ++id) {
        submit(Op::Write, id, (id - 1) * kPart, (id - 1) * kPart, kPart);
    }
    target.engine->close();
    while (!lost) {
        pollfd fd{initiator.engine->ring().fd(), POLLIN, 0};
        ASSERT_EQ(::poll(&fd, 1, 20'000), 1);
        auto [ids, events] = initiator.engine->ring().drain();
        done.insert(ids.begin(), ids.end());
        for (const Event& event : events) {
            lost |= std::holds_alternative<KeepaliveLost>(event);
            if (const auto* transfer = std::get_if<TransferEvent>(&event)) {
                failed.push_back(*transfer);
            }
        }
    }
    session->fail();
    while (done.size() + failed.size() < 4) turn();
}

struct SoftEnginesWithTwoRails : SoftEngines {};

TEST_P(SoftEnginesWithTwoRails, ADeviceTakenAwayUnderLoadLeavesItsSlicesToTheOther) {
    const auto failures = [&] { return initiator.engine->stats().endpoints_failed.load(); };
    const auto moved = [&] { return initiator.engine->rail_counters().snapshot()["soft1->soft1"]; };
    std::iota(initiator.memory.begin(), initiator.memory.end(), std::uint8_t{7});
    std::uint64_t id = 0;
    for (int round = 0; round < 6; ++round) {
        const Epoch healthy = epochs[0];
        const std::uint64_t before = failures();
        verbs::Device& device =
            (round % 2 == 0 ? target : initiator).engine->contexts()[1]->device();
        unplugged = {1};
        for (bool first = true; failures() == before; first = false) {
            std::fill(target.memory.begin(), target.memory.end(), std::uint8_t{0});
            const auto task = submit(Op::Write, ++id, 0, 0, kBytes);
            wait_bytes(*task, kBytes / 8);
            if (first) verbs::soft::unplug(device);
            while (!done.contains(id)) turn();
            ASSERT_EQ(initiator.memory, target.memory);
        }
        while (!gone.contains(1)) turn();
        EXPECT_EQ(failures(), before + 1);
        EXPECT_EQ(epochs[0], healthy);
        verbs::soft::plug(device);
        unplugged.clear();
        gone.clear();
        connect(1);
        for (const std::uint64_t bytes = moved(); moved() == bytes;) {
            submit(Op::Write, ++id, 0, 0, kBytes);
            while (!done.contains(id)) turn();
        }
        EXPECT_EQ(failures(), before + 1);
    }
    EXPECT_TRUE(failed.empty());
}

const Shape kOneRail[] = {{"process", 1, 1, 1}, {"local", 1, 1, 1}, {"tcp", 1, 1, 1}};
const Shape kTwoRails[] = {{"process", 2, 2, 4}, {"local", 2, 2, 4}, {"tcp", 2, 2, 4}};

std::string name_of(const ::testing::TestParamInfo<Shape>& shape) {
    return shape.param.path + std::to_string(shape.param.devices) + "x" +
           std::to_string(shape.param.qps);
}

INSTANTIATE_TEST_SUITE_P(OneRail, SoftEngines, ::testing::ValuesIn(kOneRail), name_of);
INSTANTIATE_TEST_SUITE_P(TwoRails, SoftEngines, ::testing::ValuesIn(kTwoRails), name_of);
INSTANTIATE_TEST_SUITE_P(OneRail, SoftEnginesUnderStress, ::testing::ValuesIn(kOneRail), name_of);
#if !defined(__SANITIZE_THREAD__)  // which does mind, see there
INSTANTIATE_TEST_SUITE_P(TwoRails, SoftEnginesUnderStress, ::testing::ValuesIn(kTwoRails), name_of);
INSTANTIATE_TEST_SUITE_P(, SoftEnginesWithTwoRails, ::testing::ValuesIn(kTwoRails), name_of);
#else  // but not where a copy is over before it is repeated
INSTANTIATE_TEST_SUITE_P(, SoftEnginesWithTwoRails, ::testing::Values(kTwoRails[0]), name_of);
#endif

}  // namespace
}  // namespace aioflagcx::engine
