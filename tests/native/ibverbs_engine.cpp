// The engine on the ibverbs provider: what Config says reaches the queue pairs, and what devices
// report reaches the rails.
#include <algorithm>
#include <cerrno>
#include <cstring>

#include "common/error.h"
#include "rdma_fixture.h"
#include "verbs/ibverbs/address.h"

namespace aioflagcx::verbs::ibverbs {
namespace {

constexpr std::size_t kSize = 200'000;

struct RailsTest : RdmaEngineTest {
    void start(std::size_t devices) {
        RdmaEngineTest::start(devices);
        std::iota(source.begin(), source.end(), std::uint8_t{1});
        add(source.data(), kSize, engine::kTableAccessRead);
        target_id = add(target.data(), kSize, engine::kTableAccessWrite | engine::kTableAccessRead);
        tell_table();
        for (std::uint32_t rail = 0; rail < devices; ++rail) connect(1, rail);
    }
    void write(std::uint64_t id, std::uint32_t imm = 0) {
        RdmaEngineTest::write(id, address_of(source.data()), address_of(target.data()), kSize, imm);
    }
    void set_address(std::uint8_t last) {
        testing::FakeGid gid;
        gid.raw[15] = last;
        set(&FakeVerbs::gids, std::vector{gid});
    }

    std::vector<std::uint8_t> source = std::vector<std::uint8_t>(kSize);
    std::vector<std::uint8_t> target = std::vector<std::uint8_t>(kSize);
    std::uint64_t target_id = 0;
};

TEST_F(RailsTest, EveryByteArrivesAndTheImmediateAfterIt) {
    start(2);
    write(1, 7);
    wait_done(1);
    EXPECT_EQ(source, target);
    EXPECT_EQ(get(&FakeVerbs::posted).back(), IBV_WR_RDMA_WRITE_WITH_IMM);
}

TEST_F(RailsTest, QueuePairsHaveWhatTheConfigSays) {
    options.ibverbs.traffic_class = 106;
    options.ibverbs.service_level = 3;
    options.ibverbs.timeout = 17;
    options.ibverbs.retry_cnt = 5;
    options.rnr_retry = 4;
    testing::FakeGid other;
    other.index = 0;
    other.type = IBV_GID_TYPE_ROCE_V1;
    testing::FakeGid wanted;
    wanted.index = 2;
    set(&FakeVerbs::gids, std::vector{other, wanted});
    start(1);
    int to_rtr = 0;
    int to_rts = 0;
    for (const auto& [attributes, mask] : get(&FakeVerbs::modified)) {
        if ((mask & IBV_QP_AV) != 0) {
            ++to_rtr;
            EXPECT_EQ(attributes.ah_attr.grh.traffic_class, 106);
            EXPECT_EQ(attributes.ah_attr.grh.sgid_index, 2);
            EXPECT_EQ(attributes.ah_attr.is_global, 1);
            EXPECT_EQ(attributes.ah_attr.sl, 3);
            EXPECT_EQ(attributes.path_mtu, IBV_MTU_4096);
        }
        if ((mask & IBV_QP_TIMEOUT) != 0) {
            ++to_rts;
            EXPECT_EQ(attributes.timeout, 17);
            EXPECT_EQ(attributes.retry_cnt, 5);
            // The initiator's; what a responder has there is of no use.
            if (to_rts == 2) EXPECT_EQ(attributes.rnr_retry, 4);
        }
    }
    EXPECT_EQ(to_rtr, 2);
    EXPECT_EQ(to_rts, 2);
}

// What the queue pairs went to RTR with.
std::vector<ibv_qp_attr> addressed(FakeVerbs& fake) {
    const std::lock_guard lock(fake.mutex);
    std::vector<ibv_qp_attr> all;
    for (const auto& [attributes, mask] : fake.modified) {
        if ((mask & IBV_QP_AV) != 0) all.push_back(attributes);
    }
    return all;
}

TEST_F(RailsTest, ThePathMtuIsTheSmallerOfBothPorts) {
    start(1);
    const auto other = engine->create_session("peer:2");
    tell_table(*other);
    const auto offer = other->prepare(1, 0);
    auto reply = responder->accept(2, offer);
    reply[0]["mtu"] = std::uint64_t{IBV_MTU_1024};
    other->establish(1, 0, reply, Deadline::max());
    EXPECT_EQ(addressed(fake).back().path_mtu, IBV_MTU_1024);
    other->close();
}

TEST_F(RailsTest, InfiniBandHasAGlobalHeaderOnlyBetweenSubnets) {
    testing::FakeGid gid;
    gid.type = IBV_GID_TYPE_IB;
    set(&FakeVerbs::gids, std::vector{gid});
    set(&FakeVerbs::lid, std::uint16_t{17});
    start(1);
    for (const ibv_qp_attr& attributes : addressed(fake)) {
        EXPECT_EQ(attributes.ah_attr.is_global, 0);
        EXPECT_EQ(attributes.ah_attr.dlid, 17);
    }
    const auto other = engine->create_session("peer:2");
    tell_table(*other);
    auto reply = responder->accept(2, other->prepare(1, 0));
    std::get<Bytes>(reply[0].at("gid"))[0] = 1;  // of another subnet's prefix
    other->establish(1, 0, reply, Deadline::max());
    EXPECT_EQ(addressed(fake).back().ah_attr.is_global, 1);
    EXPECT_EQ(addressed(fake).back().ah_attr.grh.dgid.raw[0], 1);
    other->close();
}

TEST_F(RailsTest, WhatADeviceDoesNotTakeIsNotAskedOfIt) {
    set(&FakeVerbs::max_qp_wr, 200U);
    set(&FakeVerbs::max_msg_sz, 5000U);
    options.max_wr_per_qp = 1000;
    start(1);
    write(1);
    wait_done(1);
    EXPECT_EQ(source, target);
    EXPECT_EQ(get(&FakeVerbs::longest), 5000U);
    EXPECT_EQ(get(&FakeVerbs::max_send_wr), 200U);
}

TEST_F(RailsTest, AnErrorTellsStatusVendorErrorRailAndSlice) {
    options.slice_size = 1 << 16;
    start(1);
    const std::vector<std::uint64_t> gone{target_id};
    engine->regions()->remove(gone, Deadline::max());  // of which the session has not heard
    write(1);
    wait([&] { return !failed.empty(); });
    EXPECT_EQ(failed[0].status, engine::TaskStatus::RemoteAccess);
    EXPECT_EQ(failed[0].cause, "IBV_WC_REM_ACCESS_ERR");
    EXPECT_EQ(failed[0].vendor_err, 0x81U);
    EXPECT_EQ(failed[0].rail, "fake0->fake0");
    EXPECT_EQ(failed[0].address, address_of(target.data()));
    EXPECT_EQ(failed[0].length, 65'536U);
    wait_downs(1);
    EXPECT_EQ(downs[0].cause, "IBV_WC_REM_ACCESS_ERR");
    EXPECT_EQ(downs[0].vendor_err, 0x81U);
}

TEST_F(RailsTest, APortThatGoesDownTakesItsRailsDownAndNoOther) {
    start(2);
    fake.report(1, IBV_EVENT_PORT_ERR);
    wait_downs(1);
    EXPECT_EQ(downs[0].epoch.rail, 1U);
    EXPECT_EQ(downs[0].cause, "IBV_WC_FATAL_ERR");
    EXPECT_EQ(downs[0].rail, "fake1->fake1");
    wait_notes(1);
    EXPECT_EQ(notes[0].name, "fake1");
    EXPECT_EQ(notes[0].text, "port error");
    EXPECT_TRUE(notes[0].bad);
    EXPECT_FALSE(notes[0].back);
    write(1);
    wait_done(1);
    fake.report(1, IBV_EVENT_PORT_ACTIVE);
    wait_notes(2);
    EXPECT_EQ(notes[1].device, 1U);
    EXPECT_EQ(notes[1].text, "port active");
    EXPECT_FALSE(notes[1].bad);
    EXPECT_TRUE(notes[1].back);
    connect(2, 1);
    EXPECT_EQ(downs.size(), 1U);
}

TEST_F(RailsTest, AnotherAddressIsWhatNewQueuePairsHave) {
    start(1);
    set_address(9);
    fake.report(0, IBV_EVENT_GID_CHANGE);
    wait_downs(1);
    wait_notes(1);
    EXPECT_NE(notes[0].text.find("::ffff:10.0.0.9"), std::string::npos) << notes[0].text;
    EXPECT_TRUE(notes[0].bad);
    EXPECT_TRUE(notes[0].back);
    const auto offer = session->prepare(2, 0);
    EXPECT_EQ(std::get<Bytes>(offer[0].at("gid")).back(), 9);
    session->establish(2, 0, responder->accept(2, offer), Deadline::max());
    write(1);
    wait_done(1);
}

TEST_F(RailsTest, AnAddressThatIsNotTheirsDoesNotMindQueuePairs) {
    start(1);
    testing::FakeGid more;
    more.index = 1;
    more.raw[10] = more.raw[11] = 0;  // a global IPv6 address
    set(&FakeVerbs::gids, std::vector{testing::FakeGid{}, more});
    fake.report(0, IBV_EVENT_GID_CHANGE);
    wait_notes(1);
    EXPECT_FALSE(notes[0].bad);
    EXPECT_FALSE(notes[0].back);
    write(1);
    wait_done(1);
    EXPECT_TRUE(downs.empty());
}

TEST_F(RailsTest, APortWithoutAddressIsDownUntilItHasOne) {
    start(1);
    set(&FakeVerbs::gids, std::vector<testing::FakeGid>{});
    fake.report(0, IBV_EVENT_GID_CHANGE);
    wait_downs(1);
    wait_notes(1);
    EXPECT_NE(notes[0].text.find("has no GID"), std::string::npos) << notes[0].text;
    EXPECT_FALSE(notes[0].back);
    set_address(1);
    fake.report(0, IBV_EVENT_GID_CHANGE);
    wait_notes(2);
    EXPECT_FALSE(notes[1].bad);
    EXPECT_TRUE(notes[1].back);
    connect(2, 0);
    write(1);
    wait_done(1);
}

TEST_F(RailsTest, AnAddressOfAPortThatIsDownBringsNothingBack) {
    start(1);
    set(&FakeVerbs::gids, std::vector<testing::FakeGid>{});
    set(&FakeVerbs::port_state, IBV_PORT_DOWN);
    fake.report(0, IBV_EVENT_GID_CHANGE);
    wait_notes(1);
    set_address(1);
    fake.report(0, IBV_EVENT_GID_CHANGE);
    wait_notes(2);
    EXPECT_FALSE(notes[1].back);
    set(&FakeVerbs::port_state, IBV_PORT_ACTIVE);
    fake.report(0, IBV_EVENT_PORT_ACTIVE);
    wait_notes(3);
    EXPECT_TRUE(notes[2].back);
}

TEST_F(RailsTest, APortThatIsDownIsUsedByNobodyUntilItIsBack) {
    start(2);
    fake.report(0, IBV_EVENT_PORT_ERR);
    wait_downs(1);
    wait_notes(1);
    EXPECT_TRUE(engine->contexts()[0]->down());
    EXPECT_FALSE(engine->contexts()[1]->down());
    try {
        session->prepare(2, 0);
        FAIL();
    } catch (const NativeError& error) {
        EXPECT_EQ(error.error(), ENETDOWN);
        EXPECT_NE(error.detail().find("fake0"), std::string::npos) << error.detail();
    }
    const auto other = engine->create_session("peer:2");
    auto offer = other->prepare(2, 1);
    offer[0]["device"] = std::uint64_t{0};
    const auto refused = responder->accept(2, offer);
    EXPECT_NE(std::get<std::string>(refused.at(0).at("refused")).find("fake0 is down"),
              std::string::npos);
    other->close();
    fake.report(0, IBV_EVENT_PORT_ACTIVE);
    wait_notes(2);
    connect(2, 0);
    write(1);
    wait_done(1);
}

TEST_F(RailsTest, AQueuePairThatFailsByItselfTakesItsRailDownAndNoOther) {
    start(2);
    // The session's of the second rail is the last but one, the responder's the last.
    const std::uint32_t ours = get(&FakeVerbs::last_qp_num) - 1;
    fake.report(0, IBV_EVENT_QP_FATAL, ours);  // of another device: means nothing
    fake.report(0, IBV_EVENT_LID_CHANGE);
    wait_notes(2);  // so the first is over
    EXPECT_EQ(engine->stats().endpoints_failed.load(), 0U);
    fake.report(1, IBV_EVENT_QP_FATAL, ours);
    wait_downs(1);
    EXPECT_EQ(downs[0].epoch.rail, 1U);
    wait_notes(3);
    EXPECT_TRUE(notes[2].bad);
    write(1);
    wait_done(1);
    EXPECT_EQ(downs.size(), 1U);
}

TEST_F(RailsTest, WhatADeadDeviceHoldsIsGivenUp) {
    start(2);
    set(&FakeVerbs::hold, true);
    write(1);
    const auto both = [&] {
        const std::lock_guard lock(fake.mutex);
        return fake.posted.size() >= 4;
    };
    while (!both()) std::this_thread::yield();
    set(&FakeVerbs::hold, false);
    set(&FakeVerbs::modify_error, EIO);
    for (const std::size_t device : {0, 1}) fake.report(device, IBV_EVENT_DEVICE_FATAL);
    wait_downs(2);  // without a single completion
    wait_notes(2);
    EXPECT_TRUE(notes[0].bad);
    set(&FakeVerbs::modify_error, 0);
    EXPECT_THROW(session->prepare(2, 0), NativeError);
    for (const std::size_t device : {0, 1}) fake.report(device, IBV_EVENT_PORT_ACTIVE);
    wait_notes(4);
    for (const std::uint32_t rail : {0U, 1U}) {
        session->fenced({1, rail});
        connect(2, rail);
    }
    wait_done(1);
    EXPECT_EQ(source, target);
}

}  // namespace
}  // namespace aioflagcx::verbs::ibverbs
