// Faults that reviews found in the engine: each test fails without its remedy.
#include <algorithm>
#include <array>
#include <cstring>
#include <future>
#include <thread>

#include "common/error.h"
#include "session_fixture.h"

namespace aioflagcx::engine {
namespace {

bool give_table(Session& session, const TableData& data) {
    const std::string bytes = encode_table(data);
    return session.update_table(true, 0, data.generation,
                                {reinterpret_cast<const std::uint8_t*>(bytes.data()), bytes.size()},
                                {});
}

// ---- Queue pairs that fail in unusual ways ------------------------------------------------------

TEST_F(SessionTest, AQueuePairThatOnlyFlushesIsReplaced) {
    options.retry_count = 1;
    start(1);
    scripts[0]->set_hold(true);
    write(1, 0, 4 * kSlice);
    scripts[0]->wait_posted(4);
    scripts[0]->break_now(WcStatus::WrFlushErr);
    scripts[0]->set_hold(false);
    wait_down(1);
    EXPECT_EQ(downs[0].cause, "IBV_WC_WR_FLUSH_ERR");
    session->fenced({1, 0});
    establish(2);
    wait_done(1);
}

TEST_F(SessionTest, EveryFailureOfThePathUsesUpATry) {
    options.retry_count = 1;
    start(1);
    fail_a_write(2, WcStatus::RemAbortErr);
    EXPECT_EQ(failed[0].status, TaskStatus::RetryExceeded);
}

TEST_F(SessionTest, RailsThatFailTogetherUseUpOneTry) {
    options.retry_count = 1;
    start(3);
    for (const auto& script : scripts) script->set_hold(true);
    write(1, 0, 64 * kSlice);
    for (const auto& script : scripts) script->wait_posted(8);
    // One after the other, each before the others' slices can be posted again on it.
    for (const auto& script : scripts) script->break_now(WcStatus::RetryExcErr);
    wait_down(3);
    EXPECT_TRUE(failed.empty());
    for (const auto& script : scripts) script->set_hold(false);
    for (std::uint32_t rail = 0; rail < 3; ++rail) session->fenced({1, rail});
    establish(2);
    wait_done(1);
}

TEST_F(SessionTest, AQueuePairThatCannotPostIsReplaced) {
    options.retry_count = 1;
    start(1);
    scripts[0]->set_broken(true);  // nor can it be moved to ERR: it is destroyed
    write(1, 0, source.size());
    wait_down(1);
    EXPECT_EQ(downs[0].cause, "IBV_WC_GENERAL_ERR");
    scripts[0]->set_broken(false);
    session->fenced({1, 0});
    establish(2);
    wait_done(1);
    EXPECT_TRUE(same());
    EXPECT_EQ(engine->stats().bytes_inflight.load(), 0u);
}

TEST_F(SessionTest, AQueuePairThatCannotGoToErrIsDestroyed) {
    start(1);
    scripts[0]->set_hold(true);
    const auto task = write(1, 0, 4 * kSlice);
    scripts[0]->wait_posted(4);
    scripts[0]->set_broken(true);
    session->abort(task);
    wait_failed(1);
    EXPECT_EQ(failed[0].unknown_epochs, (std::vector<Epoch>{{1, 0}}));
    wait_down(1);
    const std::lock_guard lock(scripts[0]->mutex);
    EXPECT_TRUE(scripts[0]->queue_pairs.empty());
}

TEST_F(SessionTest, AQueuePairThatTakesNothingTriesAgain) {
    start(1);
    scripts[0]->set_refuse(true);  // as with a completion queue full of others' completions
    write(1, 0, source.size());
    std::this_thread::sleep_for(20ms);
    EXPECT_EQ(engine->stats().slices_reposted.load(), 0u);
    scripts[0]->set_refuse(false);
    wait_done(1);
    EXPECT_TRUE(same());
    EXPECT_EQ(engine->stats().slices_reposted.load(), 0u);
}

TEST_F(SessionTest, WhatOneRailDoesNotTakeAnotherCarries) {
    start(2);
    scripts[0]->set_refuse(true);
    write(1, 0, source.size());
    wait_done(1);
    EXPECT_TRUE(same());
    EXPECT_EQ(scripts[0]->posted_count(), 0u);
}

// ---- Lifetimes ----------------------------------------------------------------------------------

TEST_F(SessionTest, AnEngineClosesAlthoughARequestIsHeld) {
    start(1);
    const std::uint64_t addr = reinterpret_cast<std::uint64_t>(source.data()), length = 16;
    Request request(engine->regions(), Op::Write, {&addr, 1, false}, {&addr, 1, false},
                    {&length, 1, false});
    auto closed = std::async(std::launch::async, [&] { engine->close(); });
    const bool in_time = closed.wait_for(10s) == std::future_status::ready;
    EXPECT_TRUE(in_time);
    if (!in_time) request.release();
}

TEST_F(SessionTest, ARequestThatALostSessionRefusedKeepsItsRegions) {
    start(1);
    const std::uint64_t from = reinterpret_cast<std::uint64_t>(source.data());
    const std::uint64_t to = reinterpret_cast<std::uint64_t>(target.data()), length = 16;
    Request request(engine->regions(), Op::Write, {&from, 1, false}, {&to, 1, false},
                    {&length, 1, false});
    session->fail();
    EXPECT_THROW(session->submit(request, 1, 0), NativeError);
    EXPECT_FALSE(engine->regions()->remove(ids, verbs::Clock::now() + 5ms));
    request.release();
    EXPECT_TRUE(engine->regions()->remove(ids, verbs::Deadline::max()));
}

TEST_F(SessionTest, ASpentRequestIsRefused) {
    start(1);
    const std::uint64_t from = reinterpret_cast<std::uint64_t>(source.data());
    const std::uint64_t to = reinterpret_cast<std::uint64_t>(target.data()), length = 16;
    Request request(engine->regions(), Op::Write, {&from, 1, false}, {&to, 1, false},
                    {&length, 1, false});
    session->submit(request, 1, 0);
    EXPECT_THROW(session->submit(request, 2, 0), std::invalid_argument);
    Request released(engine->regions(), Op::Write, {&from, 1, false}, {&to, 1, false},
                     {&length, 1, false});
    released.release();
    EXPECT_THROW(session->submit(released, 3, 0), std::invalid_argument);
    wait_done(1);
}

// ---- What peers may send ------------------------------------------------------------------------

TEST_F(SessionTest, ATableMayNotChangeItsNumberOfDevices) {
    start(2);
    TableData data = session->table()->data();
    EXPECT_EQ(data.devices, 2u);
    for (const std::uint32_t devices : {0u, 1u}) {
        TableData other;
        other.devices = devices;
        other.generation = data.generation + 1;
        EXPECT_THROW(give_table(*session, other), std::invalid_argument);
    }
    write(1, 0, source.size());  // by both devices
    wait_done(1);
}

TEST_F(SessionTest, AResponderHoldsABoundedNumberOfQueuePairs) {
    start(1);
    const auto responder =
        engine->create_responder("peer", Liveness::Seconds(1), Liveness::Seconds(1000));
    const auto offer = [](std::uint64_t rail, std::size_t count) {
        return std::vector<verbs::Attributes>(count, {{"rail", rail}});
    };
    for (std::uint64_t rail = 0; rail < 16; ++rail) responder->accept(1, offer(rail, 64));
    EXPECT_THROW(responder->accept(2, offer(3, 65)), NativeError);
    EXPECT_THROW(responder->accept(2, offer(16, 1)), NativeError);
    responder->accept(2, offer(3, 64));  // in the old ones' place
    responder->close(verbs::Deadline::max());
}

}  // namespace
}  // namespace aioflagcx::engine
