#include <gtest/gtest.h>
#include <poll.h>

#include <algorithm>
#include <numeric>
#include <set>
#include <stdexcept>

#include "common/error.h"
#include "engine/responder.h"
#include "engine/session.h"
#include "engine/transfer_engine.h"
#include "fake_device.h"

namespace aioflagcx::engine {
namespace {

using namespace std::chrono_literals;
using testing::FakeDevice;
using testing::Script;
using verbs::WcStatus;

constexpr std::uint64_t kSlice = 4096;

// An engine on fake devices, a session whose peer is the engine itself, two buffers.
struct SessionTest : ::testing::Test {
    void start(std::size_t devices, std::uint64_t max_mr_size = UINT64_MAX / 2) {
        EngineOptions options;
        options.bind_address = options.advertise_address = "127.0.0.1";
        options.slice_size = kSlice;
        options.max_inflight_bytes_per_endpoint = 8 * kSlice;
        options.post_batch = 4;
        std::vector<std::unique_ptr<verbs::Device>> opened;
        for (std::size_t i = 0; i < devices; ++i) {
            scripts.push_back(std::make_shared<Script>());
            opened.push_back(std::make_unique<FakeDevice>("fake" + std::to_string(i),
                                                          scripts.back(), max_mr_size));
        }
        engine = std::make_shared<TransferEngine>(options, std::move(opened));
        const auto addr_of = [](auto& buffer) { return reinterpret_cast<std::uint64_t>(buffer.data()); };
        std::iota(source.begin(), source.end(), std::uint8_t{1});
        ids = engine->regions()->add(std::vector<RegionSpec>{
            {addr_of(source), source.size(), kTableAccessRead, true, "source"},
            {addr_of(target), target.size(), kTableAccessRead | kTableAccessWrite, true, "target"}});
        session = engine->create_session("peer:1");
        const std::string table = engine->regions()->since(0).table;
        session->update_table(true, 0, engine->regions()->generation(),
                              {reinterpret_cast<const std::uint8_t*>(table.data()), table.size()},
                              {});
        establish(1);
    }
    void TearDown() override {
        for (const auto& script : scripts) script->set_hold(false);
        session->close();
        engine->close();
    }

    void establish(std::uint64_t attempt) {
        auto remote = session->prepare(attempt);
        for (auto& attributes : remote) attributes["device"] = attributes["rail"];
        session->establish(attempt, remote, verbs::Deadline::max());
    }
    std::shared_ptr<TransferTask> write(std::uint64_t id, std::uint64_t offset,
                                        std::uint64_t length, std::uint32_t imm = 0) {
        const std::uint64_t from = reinterpret_cast<std::uint64_t>(source.data()) + offset;
        const std::uint64_t to = reinterpret_cast<std::uint64_t>(target.data()) + offset;
        Request request(engine->regions(), Op::Write, {&from, 1, false}, {&to, 1, false},
                        {&length, 1, false});
        return session->submit(request, id, imm);
    }

    // Collects events until `enough` says so.
    template <typename Enough>
    void wait(Enough enough) {
        while (!enough()) {
            pollfd fd{engine->ring().fd(), POLLIN, 0};
            if (::poll(&fd, 1, 20'000) != 1) throw std::runtime_error("no event came");
            auto [ids_done, events] = engine->ring().drain();
            done.insert(ids_done.begin(), ids_done.end());
            for (Event& event : events) {
                if (auto* transfer = std::get_if<TransferEvent>(&event)) failed.push_back(*transfer);
                if (auto* down = std::get_if<EndpointDown>(&event)) downs.push_back(*down);
            }
        }
    }
    void wait_done(std::uint64_t id) { wait([&] { return done.contains(id); }); }
    void wait_failed(std::size_t count) { wait([&] { return failed.size() >= count; }); }
    void wait_down(std::size_t count) { wait([&] { return downs.size() >= count; }); }
    bool same() const { return source == target; }

    std::vector<std::shared_ptr<Script>> scripts;
    std::vector<std::uint8_t> source = std::vector<std::uint8_t>(64 * kSlice + 17);
    std::vector<std::uint8_t> target = std::vector<std::uint8_t>(64 * kSlice + 17);
    std::vector<std::uint64_t> ids;
    std::shared_ptr<TransferEngine> engine;
    std::shared_ptr<Session> session;
    std::set<std::uint64_t> done;
    std::vector<TransferEvent> failed;
    std::vector<EndpointDown> downs;
};

TEST_F(SessionTest, EveryByteArrivesInSlicesThatNeverCrossAnMr) {
    start(1, 10'000);
    const auto task = write(1, 0, source.size());
    wait_done(1);
    EXPECT_TRUE(same());
    EXPECT_EQ(task->bytes_done.load(), source.size());
    for (const verbs::SendWr& wr : scripts[0]->posted) {
        EXPECT_LE(wr.sge.length, kSlice);
        for (const auto base : {reinterpret_cast<std::uint64_t>(source.data())}) {
            const std::uint64_t offset = wr.sge.addr - base;
            EXPECT_EQ(offset / 10'000, (offset + wr.sge.length - 1) / 10'000);
        }
    }
}

TEST_F(SessionTest, BytesInFlightStayWithinTheBound) {
    start(1);
    scripts[0]->set_hold(true);
    const auto task = write(1, 0, source.size());
    scripts[0]->wait_posted(8);
    session->abort(task);
    wait_failed(1);
    EXPECT_EQ(scripts[0]->posted_count(), 8u);
}

TEST_F(SessionTest, ASmallWriteDoesNotWaitBehindALargeOne) {
    start(1);
    scripts[0]->set_hold(true);
    const auto large = write(1, 0, 60 * kSlice);
    scripts[0]->wait_posted(8);
    write(2, 61 * kSlice, 100);
    scripts[0]->set_hold(false);
    session->abort(large);  // frees the lane; the small one goes on after the next establish
    wait_down(1);
    session->fenced(1);
    establish(2);
    wait_done(2);
    EXPECT_EQ(scripts[0]->posted.back().sge.length, 100u);
}

TEST_F(SessionTest, CancelDropsWhatIsNotPostedAndWaitsForTheRest) {
    start(1);
    scripts[0]->set_hold(true);
    const auto task = write(1, 0, source.size());
    scripts[0]->wait_posted(8);
    session->cancel(*task);
    EXPECT_TRUE(engine->ring().drain().second.empty());  // still posted
    session->abort(task);
    wait_failed(1);
    EXPECT_EQ(failed[0].status, TaskStatus::Cancelled);
    EXPECT_EQ(failed[0].unknown_attempts, std::vector<std::uint64_t>{1});
    wait_down(1);
    EXPECT_EQ(downs[0].cause, "");
}

TEST_F(SessionTest, OthersOnAnAbortedQueuePairSurvive) {
    start(1);
    scripts[0]->set_hold(true);
    const auto first = write(1, 0, 4 * kSlice);
    const auto second = write(2, 4 * kSlice, 4 * kSlice);
    scripts[0]->wait_posted(8);
    session->abort(first);
    wait_failed(1);
    wait_down(1);
    scripts[0]->set_hold(false);
    establish(2);  // not fenced yet: the data may land, but must not count
    scripts[0]->wait_posted(12);
    EXPECT_FALSE(done.contains(2));
    session->fenced(1);
    wait_done(2);
    EXPECT_TRUE(std::equal(source.begin() + 4 * kSlice, source.begin() + 8 * kSlice,
                           target.begin() + 4 * kSlice));
}

TEST_F(SessionTest, ARemoteAccessErrorFailsItsTransferAndNoOther) {
    start(1);
    scripts[0]->set_hold(true);
    write(1, 0, kSlice);
    scripts[0]->wait_posted(1);
    scripts[0]->fail_next(WcStatus::RemAccessErr);
    write(2, kSlice, kSlice);
    wait_failed(1);
    EXPECT_EQ(failed[0].id, 1u);
    EXPECT_EQ(failed[0].status, TaskStatus::RemoteAccess);
    EXPECT_EQ(failed[0].cause, "IBV_WC_REM_ACCESS_ERR");
    EXPECT_EQ(failed[0].address, reinterpret_cast<std::uint64_t>(target.data()));
    EXPECT_EQ(failed[0].length, kSlice);
    wait_down(1);
    scripts[0]->set_hold(false);
    session->fenced(1);
    establish(2);
    wait_done(2);
}

TEST_F(SessionTest, ATransportErrorIsRetriedUpToTheLimit) {
    start(1);
    for (std::uint64_t attempt = 1; attempt <= 4; ++attempt) {
        scripts[0]->fail_next(WcStatus::RetryExcErr);
        if (attempt == 1) {
            write(1, 0, kSlice);
        } else {
            establish(attempt);
        }
        wait_down(attempt);
        session->fenced(attempt);
    }
    wait_failed(1);
    EXPECT_EQ(failed[0].status, TaskStatus::RetryExceeded);
    EXPECT_EQ(failed[0].cause, "IBV_WC_RETRY_EXC_ERR");
    EXPECT_EQ(failed[0].rail, "fake0");
}

TEST_F(SessionTest, ATransportErrorThatPassesIsNotSeen) {
    start(1);
    scripts[0]->fail_next(WcStatus::RetryExcErr);
    write(1, 0, source.size());
    wait_down(1);
    EXPECT_EQ(downs[0].attempt, 1u);
    session->fenced(1);
    establish(2);
    wait_done(1);
    EXPECT_TRUE(same());
}

TEST_F(SessionTest, ASliceOfUnknownOutcomeCountsOnlyOnceItsAttemptIsFenced) {
    start(2);
    scripts[0]->set_hold(true);
    write(1, 0, 64 * kSlice);
    scripts[0]->wait_posted(8);  // the second rail carries the other 56
    scripts[0]->break_now(WcStatus::RetryExcErr);
    scripts[1]->wait_posted(64);
    write(2, 0, 0, 3);
    wait_done(2);
    EXPECT_FALSE(done.contains(1));
    session->fenced(1);
    wait_done(1);
    EXPECT_TRUE(std::equal(source.begin(), source.begin() + 64 * kSlice, target.begin()));
}

TEST_F(SessionTest, AnImmediateFollowsTheData) {
    start(1);
    const auto task = write(1, 0, 5 * kSlice, 77);
    wait_done(1);
    ASSERT_EQ(task->imm_count.load(), 1u);
    const verbs::SendWr& last = scripts[0]->posted.back();
    EXPECT_EQ(last.opcode, verbs::WrOpcode::RdmaWriteWithImm);
    EXPECT_EQ(last.imm, 77u);
    EXPECT_EQ(scripts[0]->posted.size(), 6u);
}

TEST_F(SessionTest, AnImmediateGoesOutOnEachQueuePairUsed) {
    start(2);
    scripts[0]->set_hold(true);
    scripts[1]->set_hold(true);
    const auto task = write(1, 0, 16 * kSlice, 5);
    scripts[0]->wait_posted(8);
    scripts[1]->wait_posted(8);
    EXPECT_EQ(scripts[0]->posted_count() + scripts[1]->posted_count(), 16u);
    session->abort(task);
    wait_failed(1);
}

TEST_F(SessionTest, AnImmediateWithoutDataIsSentOnOneQueuePair) {
    start(2);
    Request request(engine->regions(), Op::Write, {nullptr, 0, false}, {nullptr, 0, false},
                    {nullptr, 0, false});
    const auto task = session->submit(request, 1, 9);
    wait_done(1);
    EXPECT_EQ(task->imm_count.load(), 1u);
    EXPECT_EQ(scripts[0]->posted_count() + scripts[1]->posted_count(), 1u);
}

TEST_F(SessionTest, AnImmediateOfUnknownOutcomeIsSentOnceMore) {
    start(1);
    write(1, 0, kSlice);
    wait_done(1);
    scripts[0]->fail_next(WcStatus::RetryExcErr);
    Request request(engine->regions(), Op::Write, {nullptr, 0, false}, {nullptr, 0, false},
                    {nullptr, 0, false});
    session->submit(request, 2, 9);
    wait_down(1);
    session->fenced(1);
    establish(2);
    wait_done(2);
}

TEST_F(SessionTest, ALostSessionEndsEveryTransferAndRefusesMore) {
    start(1);
    scripts[0]->set_hold(true);
    write(1, 0, 2 * kSlice);
    scripts[0]->wait_posted(2);
    session->fail();
    wait_failed(1);
    EXPECT_EQ(failed[0].status, TaskStatus::Lost);
    EXPECT_EQ(failed[0].unknown_attempts, std::vector<std::uint64_t>{1});
    EXPECT_THROW(write(2, 0, 10), NativeError);
    EXPECT_THROW(session->prepare(2), NativeError);
    session->close();
    EXPECT_TRUE(downs.empty());
}

TEST_F(SessionTest, AFinishedTransferLetsGoOfItsRegions) {
    start(1);
    scripts[0]->set_hold(true);
    const auto task = write(1, 0, kSlice);
    scripts[0]->wait_posted(1);
    EXPECT_FALSE(engine->regions()->remove(ids, verbs::Clock::now() + 5ms));
    session->abort(task);
    wait_failed(1);
    EXPECT_TRUE(engine->regions()->remove(ids, verbs::Deadline::max()));
}

TEST_F(SessionTest, AMissNamesThePieceAndMovesNothing) {
    start(1);
    const std::uint64_t from[2] = {reinterpret_cast<std::uint64_t>(source.data()),
                                   reinterpret_cast<std::uint64_t>(source.data())};
    const std::uint64_t to[2] = {reinterpret_cast<std::uint64_t>(target.data()), 64};
    const std::uint64_t length = 16;
    Request request(engine->regions(), Op::Write, {from, 2, false}, {to, 2, false},
                    {&length, 1, false});
    try {
        session->submit(request, 1, 0);
        FAIL();
    } catch (const AddressMiss& miss) {
        EXPECT_TRUE(miss.remote);
        EXPECT_EQ(miss.index, 1u);
        EXPECT_EQ(miss.address, 64u);
        EXPECT_EQ(miss.length, 16u);
    }
    EXPECT_EQ(scripts[0]->posted_count(), 0u);
    // A region that grants reading only is no target of a write.
    EXPECT_THROW(Request(engine->regions(), Op::Write, {to + 1, 1, false}, {to, 1, false},
                         {&length, 1, false}),
                 AddressMiss);
}

TEST_F(SessionTest, ArgumentsOutOfRangeAreNamedByIndex) {
    start(1);
    const auto refused = [&](std::uint64_t from, std::uint64_t to, std::uint64_t length,
                             bool is_signed, const char* what) {
        try {
            Request(engine->regions(), Op::Write, {&from, 1, is_signed}, {&to, 1, is_signed},
                    {&length, 1, is_signed});
            FAIL() << what;
        } catch (const std::invalid_argument& error) {
            EXPECT_NE(std::string(error.what()).find(what), std::string::npos) << error.what();
        }
    };
    refused(static_cast<std::uint64_t>(-4), 0, 1, true, "local[0] is negative: -4");
    refused(0, static_cast<std::uint64_t>(-4), 1, false, "remote[0] is over 2**63");
    refused(0, 0, (1ull << 63) + 1, false, "lens[0] is over 2**63");
}

TEST_F(SessionTest, NeighbouringPiecesAreMerged) {
    start(1);
    const std::uint64_t base_from = reinterpret_cast<std::uint64_t>(source.data());
    const std::uint64_t base_to = reinterpret_cast<std::uint64_t>(target.data());
    std::vector<std::uint64_t> from, to;
    for (std::uint64_t i = 0; i < 64; ++i) {
        from.push_back(base_from + i * 64);
        to.push_back(base_to + i * 64);
    }
    const std::uint64_t length = 64;
    Request request(engine->regions(), Op::Write, {from.data(), 64, false}, {to.data(), 64, false},
                    {&length, 1, false});
    session->submit(request, 1, 0);
    wait_done(1);
    EXPECT_EQ(scripts[0]->posted_count(), 1u);
}

TEST_F(SessionTest, AStaleAttemptIsNotEstablished) {
    start(1);
    const auto first = session->prepare(2);
    session->prepare(3);
    EXPECT_THROW(session->establish(2, first, verbs::Deadline::max()), NativeError);
}

}  // namespace
}  // namespace aioflagcx::engine
