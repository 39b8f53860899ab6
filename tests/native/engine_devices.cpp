#include <gtest/gtest.h>

#include "common/error.h"
#include "engine/devices.h"

namespace aioflagcx::engine {
namespace {

using Names = std::vector<std::string>;

const RdmaPorts kHost{
    {{"mlx5_0", true, "active"}, {"mlx5_1", false, "down"}, {"rxe0", true, "active"}}, ""};
const RdmaPorts kNone{{}, "there is no RDMA device"};

TEST(ChooseDevices, AutoTakesActiveRdmaPortsElseTheSoftDevice) {
    EXPECT_EQ(choose_devices({"auto"}, kHost).rdma, (Names{"mlx5_0", "rxe0"}));
    EXPECT_EQ(choose_devices({"auto"}, kHost).soft, 0U);
    const DeviceChoice soft = choose_devices({"auto"}, kNone);
    EXPECT_EQ(soft.soft, 1U);
    EXPECT_TRUE(soft.rdma.empty());
    EXPECT_EQ(soft.reason, "there is no RDMA device");
    const RdmaPorts down{{{"mlx5_1", false, "down"}}, ""};
    EXPECT_EQ(choose_devices({"auto"}, down).soft, 1U);
}

TEST(ChooseDevices, NamesAndPatterns) {
    EXPECT_EQ(choose_devices({"rxe0", "mlx5_0"}, kHost).rdma, (Names{"rxe0", "mlx5_0"}));
    EXPECT_EQ(choose_devices({"mlx5_*"}, kHost).rdma, (Names{"mlx5_0"}));
    EXPECT_EQ(choose_devices({"rxe0", "*"}, kHost).rdma, (Names{"rxe0", "mlx5_0"}));
    EXPECT_EQ(choose_devices({"mlx5_1"}, kHost).rdma, (Names{"mlx5_1"}));  // asked for by name
}

TEST(ChooseDevices, SoftDevices) {
    EXPECT_EQ(choose_devices({"soft"}, kHost).soft, 1U);
    EXPECT_EQ(choose_devices({"soft:3"}, kHost).soft, 3U);
    EXPECT_EQ(choose_devices({"soft0", "soft1"}, kNone).soft, 2U);
}

TEST(ChooseDevices, WhatIsNotThereIsToldWithWhatIs) {
    for (const Names& names : {Names{"mlx5_7"},
                               {"soft", "mlx5_0"},
                               {"soft:0"},
                               {"soft:17"},
                               {"soft:x"},
                               {"softy"},
                               {"soft:"},
                               {"soft:-1"},
                               {"nothing*"},
                               {"auto", "soft"}}) {
        try {
            choose_devices(names, kHost);
            ADD_FAILURE() << names.front();
        } catch (const NativeError& error) {
            EXPECT_NE(error.detail().find("mlx5_0 (active), mlx5_1 (down)"), std::string::npos);
        }
    }
    try {
        choose_devices({"mlx5_0"}, kNone);
        FAIL();
    } catch (const NativeError& error) {
        EXPECT_NE(error.detail().find("no RDMA device (there is no RDMA device)"),
                  std::string::npos);
    }
}

}  // namespace
}  // namespace aioflagcx::engine
