// Several rails: each fails, is fenced and comes back by itself.
#include <algorithm>
#include <cstring>
#include <set>
#include <thread>

#include "common/error.h"
#include "engine/limits.h"
#include "session_fixture.h"

namespace aioflagcx::engine {
namespace {

std::set<testing::FakeQp*> queue_pairs(Script& script) {
    const std::lock_guard lock(script.mutex);
    return {script.queue_pairs.begin(), script.queue_pairs.end()};
}

TEST_F(SessionTest, AFailedRailLeavesTheOtherAlone) {
    start(2);
    const auto healthy = queue_pairs(*scripts[1]);
    for (const auto& script : scripts) script->set_hold(true);
    write(1, 0, 64 * kSlice);
    for (const auto& script : scripts) script->wait_posted(8);
    scripts[0]->break_now(WcStatus::RetryExcErr);
    wait_down(1);
    EXPECT_EQ(downs[0].epoch, (Epoch{1, 0}));
    EXPECT_EQ(scripts[1]->posted_count(), 8u);
    scripts[0]->set_hold(false);
    session->fenced({1, 0});
    establish(2, 0);  // carries its slices anew; the other's are where they were
    scripts[0]->wait_posted(64);
    EXPECT_FALSE(done.contains(1));
    scripts[1]->release();
    wait_done(1);
    EXPECT_EQ(scripts[1]->posted_count(), 8u);
    EXPECT_EQ(queue_pairs(*scripts[1]), healthy);
    EXPECT_EQ(downs.size(), 1u);
    EXPECT_EQ(engine->stats().slices_reposted.load(), 8u);
}

TEST_F(SessionTest, OnlyTheFenceOfTheRailThatFailedIsWaitedFor) {
    start(2);
    for (const auto& script : scripts) script->set_hold(true);
    write(1, 0, 64 * kSlice);
    for (const auto& script : scripts) script->wait_posted(8);
    scripts[0]->break_now(WcStatus::RetryExcErr);
    scripts[1]->release();
    scripts[1]->wait_posted(64);
    session->fenced({1, 1});  // of another rail,
    session->fenced({2, 0});  // of another attempt: neither says anything about this one
    write(2, 0, 0, 3);
    wait_done(2);
    EXPECT_FALSE(done.contains(1));
    session->fenced({1, 0});
    wait_done(1);
}

TEST_F(SessionTest, ARailThatFailsAgainAndAgainFailsNoTransferWhileAnotherWorks) {
    options.retry_count = 1;
    start(2);
    for (const auto& script : scripts) script->set_hold(true);
    write(1, 0, 64 * kSlice);
    for (const auto& script : scripts) script->wait_posted(8);
    for (std::uint64_t attempt = 1; attempt <= 2; ++attempt) {
        scripts[0]->wait_posted(8 * attempt);
        scripts[0]->break_now(WcStatus::RetryExcErr);
        wait_down(attempt);
        session->fenced({attempt, 0});
        establish(attempt + 1, 0);
    }
    // It has failed too often under this one, but not under others.
    write(2, 0, kSlice);
    scripts[0]->wait_posted(17);
    EXPECT_EQ(scripts[0]->posted_count(), 17u);
    EXPECT_TRUE(failed.empty());
    for (const auto& script : scripts) script->release();
    wait([&] { return done.size() == 2; });
    EXPECT_EQ(scripts[0]->posted_count(), 17u);
    EXPECT_TRUE(std::equal(source.begin(), source.begin() + 64 * kSlice, target.begin()));
}

TEST_F(SessionTest, ARailThatFailedTooOftenIsUsedWhenNoOtherIsUp) {
    options.retry_count = 0;
    start(2);
    for (const auto& script : scripts) script->set_hold(true);
    const auto other = write(1, 0, 32 * kSlice);
    write(2, 32 * kSlice, 32 * kSlice);
    for (const auto& script : scripts) script->wait_posted(8);
    scripts[0]->break_now(WcStatus::RetryExcErr);
    wait_down(1);
    session->fenced({1, 0});
    scripts[0]->set_hold(false);
    establish(2, 0);
    session->abort(other);  // and with it the rail that still worked
    wait_failed(1);
    wait_down(2);
    session->fenced({1, 1});
    wait_done(2);
    EXPECT_EQ(failed[0].id, 1u);
    EXPECT_TRUE(std::equal(source.begin() + 32 * kSlice, source.begin() + 64 * kSlice,
                           target.begin() + 32 * kSlice));
}

TEST_F(SessionTest, WhatARailHasLeftToAnotherItTakesWhenThatFails) {
    options.retry_count = 0;
    start(2);
    scripts[1]->set_hold(true);
    scripts[0]->set_refuse(true);
    const auto other = write(1, 0, 8 * kSlice);  // all that the second rail may have in flight
    scripts[1]->wait_posted(8);
    scripts[0]->set_hold(true);
    scripts[0]->set_refuse(false);
    write(2, 8 * kSlice, 8 * kSlice);
    scripts[0]->wait_posted(8);
    scripts[0]->break_now(WcStatus::RetryExcErr);
    wait_down(1);
    session->fenced({1, 0});
    scripts[0]->set_hold(false);
    establish(2, 0);
    write(3, 16 * kSlice, kSlice);  // by the first rail, which has thus looked at what there is
    wait_done(3);
    EXPECT_FALSE(done.contains(2));
    session->abort(other);
    wait_done(2);
    EXPECT_TRUE(std::equal(source.begin() + 8 * kSlice, source.begin() + 16 * kSlice,
                           target.begin() + 8 * kSlice));
}

TEST_F(SessionTest, ATransferThatFailsOnEveryRailIsGivenUp) {
    options.retry_count = 1;
    start(2);
    std::uint64_t attempt = 1;
    for (const auto& script : scripts) script->fail_next(WcStatus::RetryExcErr);
    write(1, 0, kSlice);
    while (failed.empty()) {
        ASSERT_LT(attempt, 10u) << "it goes on for ever";
        wait_down(attempt);
        const Epoch down = downs[attempt - 1].epoch;
        scripts[down.rail]->fail_next(WcStatus::RetryExcErr);
        session->fenced(down);
        establish(++attempt, down.rail);
    }
    EXPECT_EQ(failed[0].status, TaskStatus::RetryExceeded);
    EXPECT_TRUE(done.empty());
    for (const auto& script : scripts) script->fail_next(WcStatus::Success);
}

TEST_F(SessionTest, ASlowRailGetsFewerSlices) {
    start(2);
    for (const auto& script : scripts) script->set_hold(true);
    write(1, 0, 64 * kSlice);
    for (const auto& script : scripts) script->wait_posted(8);
    // The one completes three while the other completes one.
    while (scripts[0]->posted_count() + scripts[1]->posted_count() < 64) {
        const std::size_t posted = scripts[0]->posted_count() + scripts[1]->posted_count();
        scripts[0]->complete(1);
        scripts[1]->complete(3);
        while (scripts[0]->posted_count() + scripts[1]->posted_count() < posted + 4) {
            std::this_thread::yield();
        }
    }
    for (const auto& script : scripts) script->release();
    wait_done(1);
    EXPECT_EQ(scripts[0]->posted_count(), 8u + 12u);
    EXPECT_EQ(scripts[1]->posted_count(), 8u + 36u);
    const auto bytes = engine->rail_counters().snapshot();
    EXPECT_EQ(bytes.at("fake0->device 0"), 20 * kSlice);
    EXPECT_EQ(bytes.at("fake1->device 1"), 44 * kSlice);
    EXPECT_TRUE(std::equal(source.begin(), source.begin() + 64 * kSlice, target.begin()));
}

TEST_F(SessionTest, MemoryTakesTheRailsOfTheDevicesNextToIt) {
    nearest = 1U << 1;
    start(3);
    for (std::uint64_t id = 1; id <= 8; ++id) {
        write(id, 0, 64 * kSlice);
        wait_done(id);
    }
    EXPECT_EQ(scripts[0]->posted_count(), 0u);
    EXPECT_EQ(scripts[1]->posted_count(), 8 * 64u);
    EXPECT_EQ(scripts[2]->posted_count(), 0u);
}

TEST_F(SessionTest, MemoryTakesOtherRailsWhileNoneOfTheNearestIsUp) {
    nearest = 1U << 1;
    start(2);
    for (const auto& script : scripts) script->set_hold(true);
    write(1, 0, 64 * kSlice);
    scripts[1]->wait_posted(8);
    EXPECT_EQ(scripts[0]->posted_count(), 0u);
    scripts[0]->set_hold(false);
    scripts[1]->break_now(WcStatus::RetryExcErr);
    wait_down(1);
    scripts[0]->wait_posted(64);  // all of it
    session->fenced({1, 1});
    wait_done(1);
    scripts[1]->set_hold(false);
    establish(2, 1);
    write(2, 0, 64 * kSlice);
    wait_done(2);
    EXPECT_EQ(scripts[0]->posted_count(), 64u);
}

verbs::Attributes device(const std::string& name, const std::string& kind = "fake",
                         const std::string& subnet = "") {
    return {{"name", name}, {"kind", kind}, {"subnet", subnet}};
}

TEST_F(SessionTest, RailsAreMadeOfWhatThePeerHas) {
    start(2);
    EXPECT_EQ(session->rails(), 2u);
    const auto other = engine->create_session("peer:2");
    EXPECT_EQ(other->rails(), 2u);  // the peer's are not known yet
    EXPECT_EQ(other->rail_name(1), "fake1->device 1");
    other->meet({device("x"), device("y"), device("z")});
    EXPECT_EQ(other->rails(), 3u);
    EXPECT_EQ(other->rail_name(2), "fake0->z");
    EXPECT_EQ(other->local_device(1), 1u);
    EXPECT_EQ(other->local_device(2), 0u);
    TableData data;
    data.generation = 1;
    const auto update = [&](std::uint32_t devices) {
        data.devices = devices;
        const std::string table = encode_table(data);
        other->update_table(
            true, 0, 1, {reinterpret_cast<const std::uint8_t*>(table.data()), table.size()}, {});
    };
    EXPECT_THROW(update(2), std::invalid_argument);
    update(3);
    auto remote = other->prepare(1, 2);
    EXPECT_EQ(std::get<std::uint64_t>(remote[0].at("device")), 2u);
    remote[0]["name"] = std::string("nic2");
    other->establish(1, 2, remote, verbs::Deadline::max());
    EXPECT_EQ(other->rail_name(2), "fake0->nic2");
    EXPECT_THROW(other->prepare(1, 3), NativeError);
    EXPECT_THROW(other->prepare(2, 2), NativeError);  // it is up
    other->close();
}

TEST_F(SessionTest, DevicesThatMakeNoSenseAreRefused) {
    start(1);
    const auto other = engine->create_session("peer:2");
    EXPECT_THROW(other->meet({}), NativeError);
    verbs::Attributes without = device("x");
    without.erase("subnet");
    EXPECT_THROW(other->meet({without}), NativeError);
    without = device("x");
    without["kind"] = std::uint64_t{1};
    EXPECT_THROW(other->meet({without}), NativeError);
    other->meet({device("bad\nname")});
    EXPECT_EQ(other->rail_name(0), "fake0->device 0");
    other->close();
}

TEST_F(SessionTest, AReplyByAnotherDeviceThanAskedForIsRefused) {
    start(1);
    const auto other = engine->create_session("peer:2");
    other->meet({device("x", "other"), device("y", "fake")});
    EXPECT_EQ(other->rails(), 1u);
    TableData data;
    data.generation = 1;
    data.devices = 2;
    const std::string table = encode_table(data);
    other->update_table(true, 0, 1,
                        {reinterpret_cast<const std::uint8_t*>(table.data()), table.size()}, {});
    auto remote = other->prepare(1, 0);
    EXPECT_EQ(std::get<std::uint64_t>(remote[0].at("device")), 1u);
    remote[0]["device"] = std::uint64_t{0};
    EXPECT_THROW(other->establish(1, 0, remote, verbs::Deadline::max()), NativeError);
    remote = other->prepare(2, 0);
    other->establish(2, 0, remote, verbs::Deadline::max());
    EXPECT_EQ(other->rail_name(0), "fake0->device 1");
    other->close();
}

TEST_F(SessionTest, AResponderTakesTheDeviceThatIsAskedFor) {
    start(2);
    const auto responder =
        engine->create_responder("peer", Liveness::Seconds(1), Liveness::Seconds(1000));
    const auto asking = [](std::uint64_t rail, std::uint64_t device) {
        return verbs::Attributes{{"rail", rail}, {"device", device}};
    };
    const auto reply =
        responder->accept(1, {asking(0, 1), asking(1, 0), {{"rail", std::uint64_t{3}}}});
    EXPECT_EQ(std::get<std::string>(reply[0].at("name")), "fake1");
    EXPECT_EQ(std::get<std::string>(reply[1].at("name")), "fake0");
    EXPECT_EQ(std::get<std::string>(reply[2].at("name")), "fake1");
    EXPECT_EQ(std::get<std::uint64_t>(reply[0].at("device")), 1u);
    EXPECT_THROW(responder->accept(2, {asking(0, 2)}), NativeError);
    EXPECT_THROW(responder->accept(2, {asking(0, 0), asking(0, 1)}), NativeError);
    EXPECT_THROW(responder->accept(2, {{{"rail", std::uint64_t{0}}, {"device", std::string("x")}}}),
                 NativeError);
    responder->close(verbs::Deadline::max());
}

TEST_F(SessionTest, ARailThatThePeerRefusesSaysWhy) {
    start(1);
    scripts[0]->fail_next(WcStatus::RetryExcErr);
    write(1, 0, kSlice);
    wait_down(1);
    session->fenced({1, 0});
    session->prepare(2, 0);
    try {
        session->establish(
            2, 0, {{{"device", std::uint64_t{0}}, {"refused", std::string("no such device")}}},
            verbs::Deadline::max());
        FAIL();
    } catch (const NativeError& error) {
        EXPECT_NE(error.detail().find("no such device"), std::string::npos) << error.what();
    }
    establish(3);
    wait_done(1);
}

TEST_F(SessionTest, AResponderRefusesWhatItsDeviceRefusesAndAcceptsTheRest) {
    start(2);
    const auto responder =
        engine->create_responder("peer", Liveness::Seconds(1), Liveness::Seconds(1000));
    scripts[1]->set_gone(true);
    const auto reply = responder->accept(
        1,
        {{{"rail", std::uint64_t{0}}}, {{"rail", std::uint64_t{1}}}, {{"rail", std::uint64_t{2}}}});
    ASSERT_EQ(reply.size(), 3u);
    EXPECT_FALSE(reply[0].contains("refused"));
    EXPECT_FALSE(reply[2].contains("refused"));  // by the first device
    EXPECT_NE(std::get<std::string>(reply[1].at("refused")).find("create_qp"), std::string::npos);
    EXPECT_EQ(std::get<std::string>(reply[1].at("name")), "fake1");
    scripts[1]->set_gone(false);
    EXPECT_FALSE(responder->accept(2, {{{"rail", std::uint64_t{1}}}})[0].contains("refused"));
    responder->close(verbs::Deadline::max());
}

TEST_F(SessionTest, AResponderFencesOneRailOfOneAttempt) {
    start(2);
    const auto ours = queue_pairs(*scripts[0]);
    const auto responder =
        engine->create_responder("peer", Liveness::Seconds(1), Liveness::Seconds(1000));
    responder->accept(1, {{{"rail", std::uint64_t{0}}}, {{"rail", std::uint64_t{1}}}});
    const auto states = [&] {
        std::vector<bool> rts;
        for (const auto& script : scripts) {
            const std::lock_guard lock(script->mutex);
            // The session's queue pair is the first of its device, the responder's the second.
            rts.push_back(script->queue_pairs.size() == 2 &&
                          script->queue_pairs[1]->state() == verbs::QpState::Rts);
        }
        return rts;
    };
    EXPECT_EQ(states(), (std::vector{true, true}));
    responder->fence(2, 0, verbs::Deadline::max());
    responder->fence(1, 2, verbs::Deadline::max());
    EXPECT_EQ(states(), (std::vector{true, true}));
    responder->fence(1, 0, verbs::Deadline::max());
    EXPECT_EQ(states(), (std::vector{false, true}));
    responder->close(verbs::Deadline::max());
}

// Slices of 64 KiB, and 16 MiB of them: many times what a rail of unknown speed may have.
struct RailSpeed : SessionTest {
    static constexpr std::size_t kSlices = 256;
    static constexpr std::size_t kFirst = kFirstWindow / 65'536;

    RailSpeed() {
        options.slice_size = 65'536;
        options.max_inflight_bytes_per_endpoint = 8u << 20;
        source.resize(kSlices * 65'536);
        target.resize(source.size());
    }
    void write_all() { write(1, 0, kSlices * 65'536); }
};

TEST_F(RailSpeed, ARailThatCompletesNothingIsGivenLittle) {
    start(2);
    for (const auto& script : scripts) script->set_hold(true);
    write_all();
    for (const auto& script : scripts) script->wait_posted(kFirst);
    scripts[0]->release();
    scripts[0]->wait_posted(kSlices - kFirst);
    EXPECT_EQ(scripts[1]->posted_count(), kFirst);
    scripts[1]->release();
    wait_done(1);
}

TEST_F(RailSpeed, ARailMayHaveOutstandingWhatItCompletesInProportion) {
    start(2);
    for (const auto& script : scripts) script->set_hold(true);
    write_all();
    for (const auto& script : scripts) script->wait_posted(kFirst);
    scripts[0]->complete(kFirst);
    scripts[0]->wait_posted(kFirst + 128);  // the fastest: its limit of 8 MiB
    scripts[1]->complete(kFirst / 2);
    scripts[1]->wait_posted(kFirst / 2 + 64);
    EXPECT_EQ(scripts[0]->posted_count(), kFirst + 128);
    EXPECT_EQ(scripts[1]->posted_count(), kFirst / 2 + 64);
    for (const auto& script : scripts) script->release();
    wait_done(1);
}

TEST_F(RailSpeed, ASingleRailHasItsLimitAtOnce) {
    start(1);
    scripts[0]->set_hold(true);
    write_all();
    scripts[0]->wait_posted(128);
    EXPECT_EQ(scripts[0]->posted_count(), 128u);
    scripts[0]->release();
    wait_done(1);
}

}  // namespace
}  // namespace aioflagcx::engine
