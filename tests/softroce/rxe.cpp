// What docs/softroce.md says of Soft-RoCE: where it does something else than a NIC, and what may be
// relied upon. By libibverbs alone, so that a failure of ours can be told from a kernel that has
// changed. Needs rxe0 and rxe1 at the two ends of one cable.
#include <gtest/gtest.h>
#include <infiniband/verbs.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstdint>
#include <cstring>
#include <memory>
#include <string>
#include <system_error>
#include <thread>
#include <vector>

namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;
using std::chrono::steady_clock;

constexpr seconds kPatience{60};
constexpr std::size_t KiB = 1024;
constexpr std::size_t MiB = 1024 * KiB;
constexpr int kAccess = IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ;

template <auto destroy>
struct Destroy {
    template <typename Object>
    void operator()(Object* object) const {
        destroy(object);
    }
};
using Context = std::unique_ptr<ibv_context, Destroy<ibv_close_device>>;
using Pd = std::unique_ptr<ibv_pd, Destroy<ibv_dealloc_pd>>;
using Cq = std::unique_ptr<ibv_cq, Destroy<ibv_destroy_cq>>;
using Mr = std::unique_ptr<ibv_mr, Destroy<ibv_dereg_mr>>;
using Qp = std::unique_ptr<ibv_qp, Destroy<ibv_destroy_qp>>;

template <typename Object>
Object* checked(Object* object, const char* what) {
    if (object == nullptr) throw std::system_error(errno, std::generic_category(), what);
    return object;
}

void checked(int error, const char* what) {
    if (error != 0) throw std::system_error(error, std::generic_category(), what);
}

ibv_context* open_device(const std::string& name) {
    const std::unique_ptr<ibv_device*, Destroy<ibv_free_device_list>> devices(
        checked(ibv_get_device_list(nullptr), "ibv_get_device_list"));
    for (ibv_device** device = devices.get(); *device != nullptr; ++device) {
        if (name == ibv_get_device_name(*device)) {
            return checked(ibv_open_device(*device), "ibv_open_device");
        }
    }
    throw std::runtime_error("no device " + name);
}

// Of the retransmissions; `timeout` is 4.096 us * 2^timeout, so 12 are 17 ms.
struct Retries {
    std::uint8_t retry_cnt = 6;
    std::uint8_t rnr_retry = 7;
    std::uint8_t timeout = 14;
};

// One end: a device with a PD, a CQ, a registered buffer and a QP.
struct End {
    explicit End(const std::string& name, std::size_t size)
        : context(open_device(name)),
          pd(checked(ibv_alloc_pd(context.get()), "ibv_alloc_pd")),
          cq(checked(ibv_create_cq(context.get(), 16384, nullptr, nullptr, 0), "ibv_create_cq")),
          buffer(size) {
        register_buffer();
        checked(ibv_query_port(context.get(), 1, &port), "ibv_query_port");
        make_qp(64);
    }

    void register_buffer() {
        mr.reset(
            checked(ibv_reg_mr(pd.get(), buffer.data(), buffer.size(), kAccess), "ibv_reg_mr"));
    }

    // The depth that the QP says it has.
    std::uint32_t make_qp(std::uint32_t depth) {
        qp.reset();
        ibv_qp_init_attr init{};
        init.send_cq = init.recv_cq = cq.get();
        init.qp_type = IBV_QPT_RC;
        init.cap = {depth, 64, 1, 1, 0};
        qp.reset(checked(ibv_create_qp(pd.get(), &init), "ibv_create_qp"));
        return init.cap.max_send_wr;
    }

    // The index of the GID that is an IPv4 address.
    std::uint8_t gid_index() const {
        static constexpr std::uint8_t kMapped[12] = {0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff};
        for (int index = 0; index < port.gid_tbl_len; ++index) {
            ibv_gid gid{};
            if (ibv_query_gid(context.get(), 1, index, &gid) == 0 &&
                std::memcmp(gid.raw, kMapped, sizeof kMapped) == 0) {
                return static_cast<std::uint8_t>(index);
            }
        }
        throw std::runtime_error("no GID of an IPv4 address");
    }

    void connect(const End& peer, const Retries& retries) {
        ibv_qp_attr attributes{};
        attributes.qp_state = IBV_QPS_INIT;
        attributes.port_num = 1;
        attributes.qp_access_flags = kAccess;
        checked(ibv_modify_qp(qp.get(), &attributes,
                              IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS),
                "to INIT");
        attributes = {};
        attributes.qp_state = IBV_QPS_RTR;
        attributes.path_mtu = port.active_mtu;
        attributes.dest_qp_num = peer.qp->qp_num;
        attributes.max_dest_rd_atomic = 1;
        attributes.min_rnr_timer = 1;  // 10 us
        attributes.ah_attr.is_global = 1;
        attributes.ah_attr.port_num = 1;
        attributes.ah_attr.grh.sgid_index = gid_index();
        attributes.ah_attr.grh.hop_limit = 64;
        checked(
            ibv_query_gid(peer.context.get(), 1, peer.gid_index(), &attributes.ah_attr.grh.dgid),
            "ibv_query_gid");
        checked(ibv_modify_qp(qp.get(), &attributes,
                              IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN |
                                  IBV_QP_RQ_PSN | IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER),
                "to RTR");
        attributes = {};
        attributes.qp_state = IBV_QPS_RTS;
        attributes.timeout = retries.timeout;
        attributes.retry_cnt = retries.retry_cnt;
        attributes.rnr_retry = retries.rnr_retry;
        attributes.max_rd_atomic = 1;
        checked(ibv_modify_qp(qp.get(), &attributes,
                              IBV_QP_STATE | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY |
                                  IBV_QP_SQ_PSN | IBV_QP_MAX_QP_RD_ATOMIC),
                "to RTS");
    }

    void to_state(ibv_qp_state state) {
        ibv_qp_attr attributes{};
        attributes.qp_state = state;
        checked(ibv_modify_qp(qp.get(), &attributes, IBV_QP_STATE), "ibv_modify_qp");
    }

    Context context;
    Pd pd;
    Cq cq;
    std::vector<std::uint8_t> buffer;
    Mr mr;
    Qp qp;
    ibv_port_attr port{};
};

class Rxe : public testing::Test {
  protected:
    explicit Rxe(std::size_t size = 16 * MiB) : near("rxe0", size), far("rxe1", size) {}

    void connect(const Retries& retries = {}) {
        near.connect(far, retries);
        far.connect(near, retries);
    }

    // 0, or the errno of a request that `near` could not post.
    int post(ibv_wr_opcode opcode, std::uint64_t id, std::size_t size, std::uint32_t rkey,
             std::size_t offset = 0) {
        ibv_sge piece{};
        piece.addr = reinterpret_cast<std::uint64_t>(near.buffer.data());
        piece.length = static_cast<std::uint32_t>(size);
        piece.lkey = near.mr->lkey;
        ibv_send_wr request{};
        request.wr_id = id;
        request.sg_list = &piece;
        request.num_sge = 1;
        request.opcode = opcode;
        request.send_flags = IBV_SEND_SIGNALED;
        request.wr.rdma.remote_addr = reinterpret_cast<std::uint64_t>(far.buffer.data()) + offset;
        request.wr.rdma.rkey = rkey;
        ibv_send_wr* refused = nullptr;
        return ibv_post_send(near.qp.get(), &request, &refused);
    }

    int write(std::uint64_t id, std::size_t size) {
        return post(IBV_WR_RDMA_WRITE, id, size, far.mr->rkey);
    }

    // The next `count` completions at `near`, or those that there are within `patience`.
    std::vector<ibv_wc> completions(std::size_t count,
                                    steady_clock::duration patience = kPatience) {
        const auto deadline = steady_clock::now() + patience;
        std::vector<ibv_wc> found;
        while (found.size() < count && steady_clock::now() < deadline) {
            ibv_wc completion{};
            if (ibv_poll_cq(near.cq.get(), 1, &completion) > 0) found.push_back(completion);
        }
        return found;
    }

    template <typename Stop>
    int late_changes(int rounds, const Stop& stop);

    ibv_wc_status next_status() {
        const auto found = completions(1);
        if (found.empty()) throw std::runtime_error("no completion");
        return found[0].status;
    }

    End near;
    End far;
};

class RxeLarge : public Rxe {
  protected:
    RxeLarge() : Rxe(80 * MiB) {}
};

TEST_F(Rxe, SevenRetriesAreWithoutEnd) {
    connect({.retry_cnt = 7, .timeout = 10});  // 4 ms
    far.qp.reset();                            // packets to it are dropped
    ASSERT_EQ(write(0, KiB), 0);
    EXPECT_TRUE(completions(1, seconds(3)).empty());
    near.to_state(IBV_QPS_ERR);
    EXPECT_EQ(next_status(), IBV_WC_WR_FLUSH_ERR);
}

TEST_F(Rxe, SixRetriesComeToAnEnd) {
    connect({.retry_cnt = 6, .timeout = 10});
    far.qp.reset();
    ASSERT_EQ(write(0, KiB), 0);
    EXPECT_EQ(next_status(), IBV_WC_RETRY_EXC_ERR);
}

// By the verbs' rules an rnr_retry of 7 has no end. Here the retransmission timer goes on running
// while the receiver is not ready, so retry_cnt ends it.
TEST_F(Rxe, AReceiverThatIsNotReadyUsesUpRetries) {
    connect({.retry_cnt = 6, .rnr_retry = 7, .timeout = 10});
    ASSERT_EQ(post(IBV_WR_RDMA_WRITE_WITH_IMM, 0, 0, far.mr->rkey), 0);
    EXPECT_EQ(next_status(), IBV_WC_RETRY_EXC_ERR);
}

TEST_F(Rxe, AReceiverThatIsNotReadyIsWaitedForWithSevenRetries) {
    connect({.retry_cnt = 7, .rnr_retry = 7, .timeout = 10});
    ASSERT_EQ(post(IBV_WR_RDMA_WRITE_WITH_IMM, 0, 0, far.mr->rkey), 0);
    EXPECT_TRUE(completions(1, seconds(3)).empty());
    ibv_recv_wr receive{};
    ibv_recv_wr* refused = nullptr;
    ASSERT_EQ(ibv_post_recv(far.qp.get(), &receive, &refused), 0);
    EXPECT_EQ(next_status(), IBV_WC_SUCCESS);
}

TEST_F(RxeLarge, MessagesLargerThanThePortAllowsAreMoved) {
    connect();
    const std::size_t size = near.port.max_msg_sz + 1 * MiB;
    ASSERT_LE(size, near.buffer.size());
    near.buffer[size - 1] = 1;
    ASSERT_EQ(write(0, size), 0);
    EXPECT_EQ(next_status(), IBV_WC_SUCCESS);
    EXPECT_EQ(far.buffer[size - 1], 1);
}

TEST_F(Rxe, TheSendQueueIsDeeperThanAskedAndThanItSays) {
    constexpr std::uint32_t kAsked = 2048;
    const std::uint32_t said = near.make_qp(kAsked);
    connect({.retry_cnt = 7});
    far.qp.reset();
    std::uint32_t posted = 0;
    int error = 0;
    while (posted < 10 * kAsked && (error = write(posted, KiB)) == 0) ++posted;
    EXPECT_EQ(error, ENOMEM);
    EXPECT_EQ(said, kAsked);
    EXPECT_GT(posted, kAsked);
    near.to_state(IBV_QPS_ERR);
    EXPECT_EQ(completions(posted).size(), posted);
}

TEST_F(Rxe, AnAccessErrorFlushesWhatFollowsInOrder) {
    connect();
    ASSERT_EQ(write(0, 256 * KiB), 0);
    ASSERT_EQ(post(IBV_WR_RDMA_WRITE, 1, KiB, far.mr->rkey ^ 0xff00), 0);
    ASSERT_EQ(write(2, KiB), 0);
    const auto found = completions(3);
    ASSERT_EQ(found.size(), 3u);
    const ibv_wc_status statuses[] = {IBV_WC_SUCCESS, IBV_WC_REM_ACCESS_ERR, IBV_WC_WR_FLUSH_ERR};
    for (std::size_t i = 0; i < 3; ++i) {
        EXPECT_EQ(found[i].wr_id, i);
        EXPECT_EQ(found[i].status, statuses[i]);
    }
}

// How often memory of `far` still changes after `stop` has returned, which is called in the midst
// of writes to it, in `rounds` rounds. A round whose writes were over first does not count.
template <typename Stop>
int Rxe::late_changes(int rounds, const Stop& stop) {
    constexpr std::size_t kPacket = 4 * KiB;
    constexpr int kTries = 250;  // a buffer is filled with the number of the try
    int late = 0;
    int in_time = 0;
    for (int round = 1; round <= kTries && in_time < rounds; ++round) {
        near.make_qp(64);
        far.make_qp(64);
        if (!far.mr) far.register_buffer();
        connect({.timeout = 10});
        std::fill(near.buffer.begin(), near.buffer.end(), static_cast<std::uint8_t>(round));
        for (std::size_t offset = 0; offset < far.buffer.size(); offset += MiB) {
            checked(post(IBV_WR_RDMA_WRITE, offset, MiB, far.mr->rkey, offset), "ibv_post_send");
        }
        // Packets arrive in order, and each is copied from its first byte to its last.
        const volatile std::uint8_t* memory = far.buffer.data();
        const auto arrived = [&] {
            std::size_t end = kPacket;
            while (end <= far.buffer.size() && memory[end - 1] == round) end += kPacket;
            return end;
        };
        const auto patience = steady_clock::now() + kPatience;
        while (memory[64 * KiB] != round && steady_clock::now() < patience) continue;
        stop();
        const std::size_t then = arrived();
        std::this_thread::sleep_for(milliseconds(20));
        late += arrived() != then;
        in_time += then < far.buffer.size();
        completions(far.buffer.size() / MiB);
    }
    EXPECT_EQ(in_time, rounds) << "the writes were over before they could be stopped";
    return late;
}

TEST_F(Rxe, ATargetIsQuietOnceItsQueuePairIsDestroyed) {
    EXPECT_EQ(late_changes(20, [this] { far.qp.reset(); }), 0);
}

TEST_F(Rxe, ATargetIsQuietOnceItsMemoryIsDeregistered) {
    EXPECT_EQ(late_changes(20, [this] { far.mr.reset(); }), 0);
}

}  // namespace
