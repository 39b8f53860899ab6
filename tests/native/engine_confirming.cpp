// Writes whose data is visible to the peer only once a read has followed it.
#include <algorithm>

#include "session_fixture.h"

namespace aioflagcx::engine {
namespace {

struct ConfirmingTest : SessionTest {
    ConfirmingTest() { relaxed = true; }

    std::ptrdiff_t reads(Script& script) {
        const std::lock_guard lock(script.mutex);
        return std::count_if(script.posted.begin(), script.posted.end(),
                             [](const auto& wr) { return wr.opcode == verbs::WrOpcode::RdmaRead; });
    }
};

TEST_F(ConfirmingTest, ASmallReadFollowsTheDataOnEachQueuePairUsed) {
    start(2);
    for (const auto& script : scripts) script->set_hold(true);
    write(1, 5, 60 * kSlice);
    for (const auto& script : scripts) script->wait_posted(8);
    for (const auto& script : scripts) script->release();
    wait_done(1);
    for (const auto& script : scripts) {
        EXPECT_EQ(reads(*script), 1);
        const verbs::SendWr& last = script->posted.back();
        EXPECT_EQ(last.opcode, verbs::WrOpcode::RdmaRead);
        EXPECT_EQ(last.sge.length, 1U);
        EXPECT_EQ(last.remote_addr, reinterpret_cast<std::uint64_t>(target.data()) + 5);
    }
    EXPECT_TRUE(
        std::equal(source.begin() + 5, source.begin() + 5 + 60 * kSlice, target.begin() + 5));
}

TEST_F(ConfirmingTest, ItIsNotDoneBeforeTheReadIs) {
    start(1);
    scripts[0]->set_hold(true);
    write(1, 0, kSlice);
    scripts[0]->wait_posted(1);
    scripts[0]->complete(1);
    scripts[0]->wait_posted(2);
    EXPECT_TRUE(engine->ring().drain().first.empty());
    scripts[0]->release();
    wait_done(1);
}

TEST_F(ConfirmingTest, ANotificationNeedsNone) {
    start(1);
    const auto task = write(1, 0, kSlice, 7);
    wait_done(1);
    EXPECT_EQ(reads(*scripts[0]), 0);
    EXPECT_EQ(task->imm_count.load(), 1U);
}

TEST_F(ConfirmingTest, AReadNeedsNone) {
    start(1);
    const std::uint64_t to = reinterpret_cast<std::uint64_t>(target.data());
    const std::uint64_t from = reinterpret_cast<std::uint64_t>(source.data());
    const std::uint64_t length = kSlice;
    Request request(engine->regions(), Op::Read, {&to, 1, false}, {&from, 1, false},
                    {&length, 1, false});
    session->submit(request, 1, 0);
    wait_done(1);
    EXPECT_EQ(reads(*scripts[0]), 1);
}

TEST_F(ConfirmingTest, OrdinaryMemoryNeedsNone) {
    relaxed = false;
    start(1);
    write(1, 0, kSlice);
    wait_done(1);
    EXPECT_EQ(reads(*scripts[0]), 0);
}

TEST_F(ConfirmingTest, AReadOfUnknownOutcomeIsMadeOnceMore) {
    start(1);
    scripts[0]->set_hold(true);
    write(1, 0, kSlice);
    scripts[0]->wait_posted(1);
    scripts[0]->complete(1);
    scripts[0]->wait_posted(2);
    scripts[0]->break_now(WcStatus::RetryExcErr);
    scripts[0]->set_hold(false);
    wait_down(1);
    session->fenced({1, 0});
    establish(2);
    wait_done(1);
    EXPECT_EQ(reads(*scripts[0]), 2);
}

TEST_F(ConfirmingTest, AReadThatIsRefusedFailsTheWrite) {
    start(1);
    scripts[0]->set_hold(true);
    write(1, 0, kSlice);
    scripts[0]->wait_posted(1);
    scripts[0]->complete(1);
    scripts[0]->wait_posted(2);
    scripts[0]->break_now(WcStatus::RemAccessErr);
    wait_failed(1);
    EXPECT_EQ(failed[0].status, TaskStatus::RemoteAccess);
    EXPECT_EQ(failed[0].address, reinterpret_cast<std::uint64_t>(target.data()));
}

}  // namespace
}  // namespace aioflagcx::engine
