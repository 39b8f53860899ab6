#include <pthread.h>

#include <array>
#include <csignal>
#include <thread>

#include "common/error.h"
#include "session_fixture.h"

namespace aioflagcx::engine {
namespace {

struct WaiterTest : SessionTest {
    std::shared_ptr<TransferTask> write_for(const std::shared_ptr<Waiter>& waiter, std::uint64_t id,
                                            std::uint64_t length) {
        const auto from = reinterpret_cast<std::uint64_t>(source.data());
        const auto to = reinterpret_cast<std::uint64_t>(target.data());
        Request request(engine->regions(), Op::Write, {&from, 1, false}, {&to, 1, false},
                        {&length, 1, false});
        return session->submit(request, id, 0, false, waiter);
    }

    std::shared_ptr<Waiter> waiter = std::make_shared<Waiter>();
};

TEST_F(WaiterTest, SuccessOpensItAndIsNotReportedOnTheRing) {
    start(1);
    write_for(waiter, 1, source.size());
    EXPECT_TRUE(waiter->wait(verbs::Deadline::max()));
    EXPECT_TRUE(same());
    EXPECT_EQ(session->take_back(*waiter), nullptr);
    EXPECT_EQ(waiter.use_count(), 1);  // the task has let go of it
    const auto [done_ids, events] = engine->ring().drain();
    EXPECT_TRUE(done_ids.empty());
    EXPECT_TRUE(events.empty());
    EXPECT_EQ(engine->stats().wakeups.load(), 0u);
}

TEST_F(WaiterTest, ATransferWithoutDataHasLandedWhenSubmitReturns) {
    start(1);
    write_for(waiter, 1, 0);
    EXPECT_TRUE(waiter->is_open());
}

TEST_F(WaiterTest, FailureGoesToTheRingAndLeavesItShut) {
    start(1);
    scripts[0]->fail_next(WcStatus::RemAccessErr);
    const auto task = write_for(waiter, 1, kSlice);
    wait_failed(1);
    EXPECT_EQ(failed[0].id, 1u);
    EXPECT_EQ(failed[0].status, TaskStatus::RemoteAccess);
    EXPECT_FALSE(waiter->is_open());
    EXPECT_EQ(session->take_back(*waiter), task);  // whoever handles the event looks at it
}

TEST_F(WaiterTest, TakenBackItEndsOnTheRing) {
    start(1);
    scripts[0]->set_hold(true);
    const auto task = write_for(waiter, 1, kSlice);
    EXPECT_EQ(session->take_back(*waiter), task);
    EXPECT_EQ(session->take_back(*waiter), task);
    scripts[0]->set_hold(false);
    session->abort(task);  // the held request is flushed
    wait_failed(1);
    EXPECT_EQ(failed[0].status, TaskStatus::Cancelled);
    EXPECT_FALSE(waiter->is_open());
}

TEST_F(WaiterTest, TakenBackItsSuccessIsReportedOnTheRing) {
    start(1);
    scripts[0]->set_hold(true);
    write_for(waiter, 1, kSlice);
    scripts[0]->wait_posted(1);
    EXPECT_NE(session->take_back(*waiter), nullptr);
    scripts[0]->release();
    wait_done(1);
    EXPECT_FALSE(waiter->is_open());
}

TEST_F(WaiterTest, TakenBackBeforeItWasSubmittedItIsRefused) {
    start(1);
    EXPECT_EQ(session->take_back(*waiter), nullptr);
    const auto from = reinterpret_cast<std::uint64_t>(source.data());
    const auto to = reinterpret_cast<std::uint64_t>(target.data());
    const std::uint64_t length = kSlice;
    Request request(engine->regions(), Op::Write, {&from, 1, false}, {&to, 1, false},
                    {&length, 1, false});
    EXPECT_THROW(session->submit(request, 1, 0, false, waiter), NativeError);
    EXPECT_EQ(scripts[0]->posted_count(), 0u);
    session->submit(request, 2, 0);  // it is as it was
    wait_done(2);
}

TEST_F(WaiterTest, ASessionThatIsLostEndsItOnTheRing) {
    start(1);
    scripts[0]->set_hold(true);
    write_for(waiter, 1, kSlice);
    session->fail();
    wait_failed(1);
    EXPECT_EQ(failed[0].status, TaskStatus::Lost);
    EXPECT_FALSE(waiter->is_open());
    EXPECT_THROW(write_for(std::make_shared<Waiter>(), 2, kSlice), NativeError);
}

TEST(Waiter, WakesAllWhoWait) {
    Waiter waiter;
    std::array<std::jthread, 8> threads;
    std::atomic<int> woken{0};
    for (auto& thread : threads) {
        thread = std::jthread([&] { woken += waiter.wait(verbs::Deadline::max()); });
    }
    waiter.open();
    for (auto& thread : threads) thread.join();
    EXPECT_EQ(woken.load(), 8);
    EXPECT_TRUE(waiter.wait(verbs::Clock::now()));
}

TEST(Waiter, GivesUpAtTheDeadline) {
    Waiter waiter;
    const auto deadline = verbs::Clock::now() + 20ms;
    EXPECT_FALSE(waiter.wait(deadline));
    EXPECT_GE(verbs::Clock::now(), deadline);
}

TEST(Waiter, ReturnsWhenASignalHasCome) {
    static std::atomic<bool> handled{false};
    struct sigaction action{};
    action.sa_handler = [](int) { handled = true; };
    struct sigaction before{};
    ASSERT_EQ(sigaction(SIGUSR1, &action, &before), 0);
    Waiter waiter;
    std::atomic<bool> returned{false};
    bool open = true;
    std::jthread thread([&] {
        open = waiter.wait(verbs::Deadline::max());
        returned = true;
    });
    while (!returned) {  // one that comes before it waits interrupts nothing
        ::pthread_kill(thread.native_handle(), SIGUSR1);
        std::this_thread::yield();
    }
    thread.join();
    EXPECT_TRUE(handled);
    EXPECT_FALSE(open);
    sigaction(SIGUSR1, &before, nullptr);
}

}  // namespace
}  // namespace aioflagcx::engine
