#include "ibverbs.h"

#include <sys/eventfd.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <map>
#include <memory>

// Macros of verbs.h, in place of what is defined here.
#undef ibv_query_port
#undef ibv_reg_mr
#undef ibv_get_device_list

namespace aioflagcx::testing {

namespace {

struct Device {
    ibv_device device{};
};

struct Context {
    ibv_context context{};
    std::size_t number = 0;
    std::deque<ibv_async_event> events;
};

struct Cq {
    ibv_cq cq{};
    std::deque<ibv_wc> entries;
    bool armed = false;
};

struct Qp {
    ibv_qp qp{};
    std::uint32_t dest = 0;
    std::deque<ibv_recv_wr> receives;
    std::deque<ibv_send_wr> held;  // without their scatter lists
};

struct Mr {
    ibv_mr mr{};
    std::uint8_t* base = nullptr;  // where its bytes are
    bool mapped = false;           // by us, as those of a dmabuf
    int access = 0;
};

struct State : FakeVerbs {
    std::vector<std::unique_ptr<Device>> devices;
    std::vector<Context*> contexts;  // open
    std::map<std::uint32_t, Qp*> qps;
    std::map<std::uint32_t, Mr*> memory;  // by key, which is lkey and rkey
    std::uint32_t next_key = 100;
    // What a queue pair's event names may be gone by the time it is read.
    std::map<std::uint32_t, ibv_qp> named;
};

State& state() {
    // Never freed: devices may be closed by static destructors.
    static auto* const all = std::make_unique<State>().release();
    return *all;
}

// The mutex is held in all that follows, up to the exported functions.

void complete(Cq& cq, const ibv_wc& wc) {
    cq.entries.push_back(wc);
    if (std::exchange(cq.armed, false)) {
        const std::uint64_t one = 1;
        [[maybe_unused]] const auto written = ::write(cq.cq.channel->fd, &one, sizeof one);
    }
}

void complete(Qp& qp, const ibv_send_wr& wr, ibv_wc_status status) {
    if (status != IBV_WC_SUCCESS) qp.qp.state = IBV_QPS_ERR;
    if (status == IBV_WC_SUCCESS && (wr.send_flags & IBV_SEND_SIGNALED) == 0) return;
    ibv_wc wc{};
    wc.wr_id = wr.wr_id;
    wc.status = status;
    wc.vendor_err = status == IBV_WC_SUCCESS ? 0 : 0x81;
    wc.opcode = wr.opcode == IBV_WR_RDMA_READ ? IBV_WC_RDMA_READ : IBV_WC_RDMA_WRITE;
    wc.qp_num = qp.qp.qp_num;
    complete(*reinterpret_cast<Cq*>(qp.qp.send_cq), wc);
}

// Where a range is, or null for one that the key does not grant.
std::uint8_t* find(std::uint32_t key, std::uint64_t addr, std::uint64_t length, int access) {
    const auto found = state().memory.find(key);
    if (found == state().memory.end()) return nullptr;
    const Mr& mr = *found->second;
    const auto begin = reinterpret_cast<std::uint64_t>(mr.mr.addr);
    if (addr < begin || addr + length > begin + mr.mr.length) return nullptr;
    if ((mr.access & access) != access) return nullptr;
    return mr.base + (addr - begin);
}

ibv_wc_status carry_out(const Qp& qp, const ibv_send_wr& wr) {
    if (wr.num_sge > 0) {
        const bool reads = wr.opcode == IBV_WR_RDMA_READ;
        const ibv_sge& sge = wr.sg_list[0];
        auto* const local =
            find(sge.lkey, sge.addr, sge.length, reads ? IBV_ACCESS_LOCAL_WRITE : 0);
        if (local == nullptr) return IBV_WC_LOC_PROT_ERR;
        auto* const remote = find(wr.wr.rdma.rkey, wr.wr.rdma.remote_addr, sge.length,
                                  reads ? IBV_ACCESS_REMOTE_READ : IBV_ACCESS_REMOTE_WRITE);
        if (remote == nullptr) return IBV_WC_REM_ACCESS_ERR;
        if (reads) {
            std::memmove(local, remote, sge.length);
        } else {
            std::memmove(remote, local, sge.length);
        }
    }
    if (wr.opcode != IBV_WR_RDMA_WRITE_WITH_IMM) return IBV_WC_SUCCESS;
    const auto peer = state().qps.find(qp.dest);
    if (peer == state().qps.end()) return IBV_WC_RETRY_EXC_ERR;
    if (peer->second->receives.empty()) return IBV_WC_RNR_RETRY_EXC_ERR;
    ibv_wc wc{};
    wc.wr_id = peer->second->receives.front().wr_id;
    peer->second->receives.pop_front();
    wc.opcode = IBV_WC_RECV_RDMA_WITH_IMM;
    wc.wc_flags = IBV_WC_WITH_IMM;
    wc.imm_data = wr.imm_data;
    wc.qp_num = peer->first;
    complete(*reinterpret_cast<Cq*>(peer->second->qp.recv_cq), wc);
    return IBV_WC_SUCCESS;
}

void flush(Qp& qp) {
    for (const ibv_send_wr& wr : std::exchange(qp.held, {})) {
        complete(qp, wr, IBV_WC_WR_FLUSH_ERR);
    }
    for (const ibv_recv_wr& wr : std::exchange(qp.receives, {})) {
        ibv_wc wc{};
        wc.wr_id = wr.wr_id;
        wc.status = IBV_WC_WR_FLUSH_ERR;
        wc.qp_num = qp.qp.qp_num;
        complete(*reinterpret_cast<Cq*>(qp.qp.recv_cq), wc);
    }
}

int post_send(ibv_qp* handle, ibv_send_wr* wr, ibv_send_wr**) {
    State& all = state();
    const std::lock_guard lock(all.mutex);
    Qp& qp = *reinterpret_cast<Qp*>(handle);
    for (; wr != nullptr; wr = wr->next) {
        all.posted.push_back(wr->opcode);
        if (wr->num_sge > 0) all.longest = std::max(all.longest, wr->sg_list[0].length);
        if (all.hold) {
            qp.held.push_back(*wr);
        } else if (qp.qp.state == IBV_QPS_ERR) {
            complete(qp, *wr, IBV_WC_WR_FLUSH_ERR);
        } else {
            complete(qp, *wr, carry_out(qp, *wr));
        }
    }
    return 0;
}

int post_recv(ibv_qp* handle, ibv_recv_wr* wr, ibv_recv_wr**) {
    const std::lock_guard lock(state().mutex);
    for (; wr != nullptr; wr = wr->next) reinterpret_cast<Qp*>(handle)->receives.push_back(*wr);
    return 0;
}

int poll_cq(ibv_cq* handle, int count, ibv_wc* wc) {
    const std::lock_guard lock(state().mutex);
    auto& entries = reinterpret_cast<Cq*>(handle)->entries;
    const auto taken = std::min(entries.size(), static_cast<std::size_t>(count));
    std::copy_n(entries.begin(), taken, wc);
    entries.erase(entries.begin(), entries.begin() + static_cast<std::ptrdiff_t>(taken));
    return static_cast<int>(taken);
}

int req_notify_cq(ibv_cq* handle, int) {
    const std::lock_guard lock(state().mutex);
    reinterpret_cast<Cq*>(handle)->armed = true;
    return 0;
}

int take_event(int fd) {
    std::uint64_t count = 0;
    return ::read(fd, &count, sizeof count) == sizeof count ? 0 : -1;
}

ibv_mr* add_mr(ibv_pd* pd, const FakeRegistration& registration, std::uint8_t* base, bool mapped) {
    State& all = state();
    all.calls.push_back(registration.call);
    all.registrations.push_back(registration);
    auto mr = std::make_unique<Mr>();
    mr->mr.context = pd->context;
    mr->mr.pd = pd;
    mr->mr.addr = reinterpret_cast<void*>(registration.addr);
    mr->mr.length = registration.length;
    mr->mr.lkey = mr->mr.rkey = all.next_key++;
    mr->base = base;
    mr->mapped = mapped;
    mr->access = registration.access;
    all.memory[mr->mr.lkey] = mr.get();
    ++all.mrs;
    return &mr.release()->mr;
}

}  // namespace

FakeVerbs& fake_verbs() { return state(); }

void FakeVerbs::report(std::size_t device, ibv_event_type type, std::uint32_t qp_num) {
    State& all = state();
    const std::lock_guard lock(mutex);
    for (auto context = all.contexts.rbegin(); context != all.contexts.rend(); ++context) {
        if ((*context)->number != device) continue;
        ibv_async_event event{};
        event.event_type = type;
        if (qp_num != 0) {
            all.named[qp_num].qp_num = qp_num;
            event.element.qp = &all.named[qp_num];
        } else {
            event.element.port_num = 1;
        }
        (*context)->events.push_back(event);
        const std::uint64_t one = 1;
        [[maybe_unused]] const auto written =
            ::write((*context)->context.async_fd, &one, sizeof one);
        return;
    }
}

}  // namespace aioflagcx::testing

using namespace aioflagcx::testing;

extern "C" {

void fake_ibverbs_report(unsigned device, int type) {
    fake_verbs().report(device, static_cast<ibv_event_type>(type));
}

void fake_ibverbs_fail_registrations(int error) {
    const std::lock_guard lock(fake_verbs().mutex);
    fake_verbs().register_error = error;
}

ibv_device** ibv_get_device_list(int* count) {
    State& all = state();
    const std::lock_guard lock(all.mutex);
    all.devices.resize(std::max(all.devices.size(), all.names.size()));
    auto list = std::make_unique<ibv_device*[]>(all.names.size() + 1);
    for (std::size_t i = 0; i < all.names.size(); ++i) {
        if (!all.devices[i]) all.devices[i] = std::make_unique<Device>();
        std::strncpy(all.devices[i]->device.name, all.names[i].c_str(), IBV_SYSFS_NAME_MAX - 1);
        list[i] = &all.devices[i]->device;
    }
    *count = static_cast<int>(all.names.size());
    return list.release();
}

void ibv_free_device_list(ibv_device** list) { const std::unique_ptr<ibv_device*[]> freed(list); }

const char* ibv_get_device_name(ibv_device* device) { return device->name; }

ibv_context* ibv_open_device(ibv_device* device) {
    State& all = state();
    const std::lock_guard lock(all.mutex);
    auto context = std::make_unique<Context>();
    for (std::size_t i = 0; i < all.devices.size(); ++i) {
        if (&all.devices[i]->device == device) context->number = i;
    }
    context->context.device = device;
    context->context.async_fd = ::eventfd(0, EFD_SEMAPHORE | EFD_CLOEXEC);
    context->context.ops.post_send = &post_send;
    context->context.ops.post_recv = &post_recv;
    context->context.ops.poll_cq = &poll_cq;
    context->context.ops.req_notify_cq = &req_notify_cq;
    all.contexts.push_back(context.get());
    return &context.release()->context;
}

int ibv_close_device(ibv_context* handle) {
    const std::lock_guard lock(state().mutex);
    const std::unique_ptr<Context> context(reinterpret_cast<Context*>(handle));
    std::erase(state().contexts, context.get());
    ::close(handle->async_fd);
    return 0;
}

int ibv_query_device(ibv_context*, ibv_device_attr* attributes) {
    const std::lock_guard lock(state().mutex);
    *attributes = {};
    attributes->max_qp_wr = static_cast<int>(state().max_qp_wr);
    attributes->max_cqe = 65536;
    attributes->max_mr_size = state().max_mr_size;
    attributes->max_qp_rd_atom = attributes->max_qp_init_rd_atom = 16;
    attributes->phys_port_cnt = 1;
    return 0;
}

int ibv_query_port(ibv_context*, std::uint8_t, _compat_ibv_port_attr* attributes) {
    const std::lock_guard lock(state().mutex);
    auto* const port = reinterpret_cast<ibv_port_attr*>(attributes);
    port->lid = state().lid;
    port->state = state().port_state;
    port->active_mtu = port->max_mtu = IBV_MTU_4096;
    port->max_msg_sz = state().max_msg_sz;
    port->link_layer = IBV_LINK_LAYER_ETHERNET;
    return 0;
}

ssize_t _ibv_query_gid_table(ibv_context*, ibv_gid_entry* entries, size_t most, std::uint32_t,
                             size_t) {
    const std::lock_guard lock(state().mutex);
    std::size_t count = 0;
    for (const FakeGid& gid : state().gids) {
        if (count == most) break;
        ibv_gid_entry& entry = entries[count++];
        entry = {};
        entry.gid_index = gid.index;
        entry.gid_type = gid.type;
        entry.port_num = 1;
        std::memcpy(entry.gid.raw, gid.raw, sizeof gid.raw);
    }
    return static_cast<ssize_t>(count);
}

int ibv_get_async_event(ibv_context* handle, ibv_async_event* event) {
    if (take_event(handle->async_fd) != 0) return -1;
    const std::lock_guard lock(state().mutex);
    auto& events = reinterpret_cast<Context*>(handle)->events;
    *event = events.front();
    events.pop_front();
    return 0;
}

void ibv_ack_async_event(ibv_async_event*) {}

const char* ibv_event_type_str(ibv_event_type type) {
    switch (type) {
        case IBV_EVENT_PORT_ERR:
            return "port error";
        case IBV_EVENT_PORT_ACTIVE:
            return "port active";
        case IBV_EVENT_GID_CHANGE:
            return "GID table change";
        case IBV_EVENT_DEVICE_FATAL:
            return "local catastrophic error";
        case IBV_EVENT_QP_FATAL:
            return "local work queue catastrophic error";
        default:
            return "another event";
    }
}

ibv_pd* ibv_alloc_pd(ibv_context* context) {
    auto pd = std::make_unique<ibv_pd>();
    pd->context = context;
    return pd.release();
}

int ibv_dealloc_pd(ibv_pd* pd) {
    const std::unique_ptr<ibv_pd> freed(pd);
    return 0;
}

ibv_mr* ibv_reg_mr(ibv_pd* pd, void* addr, size_t length, int access) {
    const std::lock_guard lock(state().mutex);
    if (const int error = state().register_error) {
        errno = error;
        return nullptr;
    }
    return add_mr(pd, {"ibv_reg_mr", reinterpret_cast<std::uint64_t>(addr), length, access, -1, 0},
                  static_cast<std::uint8_t*>(addr), false);
}

ibv_mr* ibv_reg_mr_iova2(ibv_pd* pd, void* addr, size_t length, std::uint64_t,
                         unsigned int access) {
    const std::lock_guard lock(state().mutex);
    if (const int error = state().register_error) {
        errno = error;
        return nullptr;
    }
    return add_mr(pd,
                  {"ibv_reg_mr_iova2", reinterpret_cast<std::uint64_t>(addr), length,
                   static_cast<int>(access), -1, 0},
                  static_cast<std::uint8_t*>(addr), false);
}

ibv_mr* ibv_reg_dmabuf_mr(ibv_pd* pd, std::uint64_t offset, size_t length, std::uint64_t iova,
                          int fd, int access) {
    const std::lock_guard lock(state().mutex);
    if (const int error = state().dmabuf_error) {
        errno = error;
        return nullptr;
    }
    const auto page = static_cast<std::uint64_t>(::sysconf(_SC_PAGESIZE));
    const std::uint64_t before = offset % page;
    // A fake dmabuf begins at its descriptor's position.
    const off_t start = ::lseek(fd, 0, SEEK_CUR) + static_cast<off_t>(offset - before);
    void* const mapped =
        ::mmap(nullptr, length + before, PROT_READ | PROT_WRITE, MAP_SHARED, fd, start);
    if (mapped == MAP_FAILED) return nullptr;
    return add_mr(pd, {"ibv_reg_dmabuf_mr", iova, length, access, fd, offset},
                  static_cast<std::uint8_t*>(mapped) + before, true);
}

int ibv_dereg_mr(ibv_mr* handle) {
    State& all = state();
    const std::lock_guard lock(all.mutex);
    const std::unique_ptr<Mr> mr(reinterpret_cast<Mr*>(handle));
    all.memory.erase(mr->mr.lkey);
    --all.mrs;
    if (mr->mapped) {
        const auto page = static_cast<std::uint64_t>(::sysconf(_SC_PAGESIZE));
        const auto before = reinterpret_cast<std::uint64_t>(mr->base) % page;
        ::munmap(mr->base - before, mr->mr.length + before);
    }
    return 0;
}

ibv_comp_channel* ibv_create_comp_channel(ibv_context* context) {
    auto channel = std::make_unique<ibv_comp_channel>();
    channel->context = context;
    channel->fd = ::eventfd(0, EFD_SEMAPHORE | EFD_CLOEXEC);
    return channel.release();
}

int ibv_destroy_comp_channel(ibv_comp_channel* handle) {
    const std::unique_ptr<ibv_comp_channel> channel(handle);
    ::close(channel->fd);
    return 0;
}

ibv_cq* ibv_create_cq(ibv_context* context, int, void*, ibv_comp_channel* channel, int) {
    auto cq = std::make_unique<Cq>();
    cq->cq.context = context;
    cq->cq.channel = channel;
    return &cq.release()->cq;
}

int ibv_destroy_cq(ibv_cq* handle) {
    const std::unique_ptr<Cq> cq(reinterpret_cast<Cq*>(handle));
    return 0;
}

int ibv_get_cq_event(ibv_comp_channel* channel, ibv_cq** cq, void**) {
    *cq = nullptr;
    return take_event(channel->fd);
}

void ibv_ack_cq_events(ibv_cq*, unsigned int) {}

ibv_qp* ibv_create_qp(ibv_pd* pd, ibv_qp_init_attr* init) {
    State& all = state();
    const std::lock_guard lock(all.mutex);
    if (init->cap.max_send_wr > all.max_qp_wr || init->cap.max_recv_wr > all.max_qp_wr) {
        errno = EINVAL;
        return nullptr;
    }
    all.max_send_wr = std::max(all.max_send_wr, init->cap.max_send_wr);
    auto qp = std::make_unique<Qp>();
    qp->qp.context = pd->context;
    qp->qp.pd = pd;
    qp->qp.send_cq = init->send_cq;
    qp->qp.recv_cq = init->recv_cq;
    qp->qp.qp_num = ++all.last_qp_num;
    all.qps[qp->qp.qp_num] = qp.get();
    return &qp.release()->qp;
}

int ibv_modify_qp(ibv_qp* handle, ibv_qp_attr* attributes, int mask) {
    State& all = state();
    const std::lock_guard lock(all.mutex);
    if (all.modify_error != 0) return all.modify_error;
    Qp& qp = *reinterpret_cast<Qp*>(handle);
    all.modified.emplace_back(*attributes, mask);
    if ((mask & IBV_QP_DEST_QPN) != 0) qp.dest = attributes->dest_qp_num;
    if ((mask & IBV_QP_STATE) != 0) qp.qp.state = attributes->qp_state;
    if (qp.qp.state == IBV_QPS_ERR) flush(qp);
    return 0;
}

int ibv_destroy_qp(ibv_qp* handle) {
    const std::lock_guard lock(state().mutex);
    const std::unique_ptr<Qp> qp(reinterpret_cast<Qp*>(handle));
    state().qps.erase(qp->qp.qp_num);
    return 0;
}

int ibv_fork_init() {
    const std::lock_guard lock(state().mutex);
    state().calls.push_back("ibv_fork_init");
    return 0;
}

ibv_fork_status ibv_is_fork_initialized() {
    const std::lock_guard lock(state().mutex);
    return state().fork_status;
}

}  // extern "C"
