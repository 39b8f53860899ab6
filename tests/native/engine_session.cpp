#include <algorithm>

#include "common/error.h"
#include "session_fixture.h"

namespace aioflagcx::engine {
namespace {

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
    session->fenced({1, 0});
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
    EXPECT_EQ(failed[0].unknown_epochs, (std::vector<Epoch>{{1, 0}}));
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
    session->fenced({1, 0});
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
    session->fenced({1, 0});
    establish(2);
    wait_done(2);
}

TEST_F(SessionTest, ATransportErrorIsRetriedUpToTheLimit) {
    start(1);
    fail_a_write(4, WcStatus::RetryExcErr);
    EXPECT_EQ(failed[0].status, TaskStatus::RetryExceeded);
    EXPECT_EQ(failed[0].cause, "IBV_WC_RETRY_EXC_ERR");
    EXPECT_EQ(failed[0].rail, "fake0->device 0");
}

TEST_F(SessionTest, ATransportErrorThatPassesIsNotSeen) {
    start(1);
    scripts[0]->fail_next(WcStatus::RetryExcErr);
    write(1, 0, source.size());
    wait_down(1);
    EXPECT_EQ(downs[0].epoch.attempt, 1u);
    session->fenced({1, 0});
    establish(2);
    wait_done(1);
    EXPECT_TRUE(same());
}

TEST_F(SessionTest, ASliceOfUnknownOutcomeCountsOnlyOnceItsAttemptIsFenced) {
    start(2);
    scripts[0]->set_hold(true);
    scripts[1]->set_hold(true);
    write(1, 0, 64 * kSlice);
    scripts[0]->wait_posted(8);
    scripts[1]->wait_posted(8);
    scripts[0]->break_now(WcStatus::RetryExcErr);
    scripts[1]->release();
    scripts[1]->wait_posted(64);  // the second rail has carried all of it
    write(2, 0, 0, 3);
    wait_done(2);
    EXPECT_FALSE(done.contains(1));
    session->fenced({1, 0});
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
    const auto task = write(1, 0, 64 * kSlice, 5);
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
    session->fenced({1, 0});
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
    EXPECT_EQ(failed[0].unknown_epochs, (std::vector<Epoch>{{1, 0}}));
    EXPECT_THROW(write(2, 0, 10), NativeError);
    EXPECT_THROW(session->prepare(2, 0), NativeError);
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

TEST_F(SessionTest, AnAttemptOfALostSessionSaysSo) {
    start(1);
    const auto other = engine->create_session("peer:2");
    const auto offer = other->prepare(1, 0);
    other->fail();
    try {
        other->establish(1, 0, offer, verbs::Deadline::max());
        FAIL();
    } catch (const NativeError& error) {
        EXPECT_NE(error.detail().find("is lost"), std::string::npos) << error.what();
    }
}

TEST_F(SessionTest, AClosedSessionIsNotCounted) {
    start(1);
    EXPECT_EQ(engine->stats().sessions.load(), 1u);
    session->close();
    EXPECT_EQ(engine->stats().sessions.load(), 0u);
    session->close();
    EXPECT_EQ(engine->stats().sessions.load(), 0u);
}

TEST_F(SessionTest, AStaleAttemptIsNotEstablished) {
    start(1);
    const auto other = engine->create_session("peer:2");
    const auto first = other->prepare(1, 0);
    other->prepare(2, 0);
    EXPECT_THROW(other->establish(1, 0, first, verbs::Deadline::max()), NativeError);
    EXPECT_THROW(session->prepare(2, 0), NativeError);  // it is up
}

}  // namespace
}  // namespace aioflagcx::engine
