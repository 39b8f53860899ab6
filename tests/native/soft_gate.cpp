// A closed gate has nobody inside, and lets nobody in again.
#include <gtest/gtest.h>

#include <atomic>
#include <cstdint>
#include <memory>
#include <thread>
#include <vector>

#include "verbs/soft/gate.h"

namespace aioflagcx::verbs::soft {
namespace {

TEST(SoftGate, NobodyIsInsideOnceItIsClosed) {
    constexpr int kRounds = 20000;
    constexpr int kUsers = 2;
    // Users that stay, so that each round costs no thread: they enter whatever gate is current.
    std::vector<std::unique_ptr<Gate>> gates;
    for (int i = 0; i < kRounds; ++i) gates.push_back(std::make_unique<Gate>(Gate::State::Open));
    std::atomic<int> current{0};
    std::atomic<std::uint64_t> entered{0};
    std::atomic<int> inside{0};
    std::vector<std::thread> users;
    for (int i = 0; i < kUsers; ++i) {
        users.emplace_back([&] {
            for (int round; (round = current.load()) < kRounds;) {
                const GateGuard guard(*gates[static_cast<std::size_t>(round)]);
                if (!guard) continue;
                inside.fetch_add(1, std::memory_order_relaxed);
                entered.fetch_add(1, std::memory_order_relaxed);
                for (int n = 0; n < 100; ++n) entered.load(std::memory_order_relaxed);
                inside.fetch_sub(1, std::memory_order_relaxed);
            }
        });
    }
    for (int round = 0; round < kRounds; ++round) {
        const std::uint64_t before = entered.load();
        if (round % 64 == 0) {
            while (entered.load() == before) std::this_thread::yield();
        }
        gates[static_cast<std::size_t>(round)]->close();
        // Looked at for a while: who came in unnoticed would show a little later.
        for (int i = 0; i < 200; ++i) ASSERT_EQ(inside.load(), 0) << "round " << round;
        ++current;
    }
    for (std::thread& user : users) user.join();
}

TEST(SoftGate, OpensOnceAndNeverAfterClosing) {
    Gate gate(Gate::State::Idle);
    EXPECT_FALSE(gate.enter());
    EXPECT_TRUE(gate.open());
    EXPECT_FALSE(gate.open());
    EXPECT_TRUE(gate.enter());
    gate.leave();
    gate.close();
    EXPECT_FALSE(gate.enter());
    EXPECT_FALSE(gate.open());
    Gate closed(Gate::State::Idle);
    closed.close();
    EXPECT_FALSE(closed.open());
}

}  // namespace
}  // namespace aioflagcx::verbs::soft
