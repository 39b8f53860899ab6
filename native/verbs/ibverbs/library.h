// libibverbs, found when the program runs: the same build works on hosts without it.
#pragma once

#include <infiniband/verbs.h>

#include <string>

namespace aioflagcx::verbs::ibverbs {

// Every exported function we call. What verbs.h defines inline (ibv_post_send, ibv_poll_cq, ...)
// goes through the device's own table and needs no symbol.
#define AIOFLAGCX_IBVERBS_FUNCTIONS(X) \
    X(get_device_list)                 \
    X(free_device_list)                \
    X(get_device_name)                 \
    X(open_device)                     \
    X(close_device)                    \
    X(query_device)                    \
    X(query_port)                      \
    X(get_async_event)                 \
    X(ack_async_event)                 \
    X(event_type_str)                  \
    X(alloc_pd)                        \
    X(dealloc_pd)                      \
    X(reg_mr)                          \
    X(dereg_mr)                        \
    X(create_comp_channel)             \
    X(destroy_comp_channel)            \
    X(create_cq)                       \
    X(destroy_cq)                      \
    X(get_cq_event)                    \
    X(ack_cq_events)                   \
    X(create_qp)                       \
    X(modify_qp)                       \
    X(destroy_qp)                      \
    X(fork_init)

struct Library {
    // Loads it once a process. Throws NativeError (ENOENT) when there is none, naming the package,
    // and (ENOSYS) when it is too old.
    static const Library& get();

#define AIOFLAGCX_DECLARE(name) decltype(&::ibv_##name) name = nullptr;
    AIOFLAGCX_IBVERBS_FUNCTIONS(AIOFLAGCX_DECLARE)
#undef AIOFLAGCX_DECLARE
    decltype(&::_ibv_query_gid_table) query_gid_table = nullptr;
    // Newer than the oldest version we work with: each may be null.
    decltype(&::ibv_reg_mr_iova2) reg_mr_iova2 = nullptr;
    decltype(&::ibv_reg_dmabuf_mr) reg_dmabuf_mr = nullptr;
    decltype(&::ibv_is_fork_initialized) is_fork_initialized = nullptr;

    // As ibv_query_port(3), which the header defines as a call of what must not be linked to.
    // 0 or an errno value.
    int port_attributes(ibv_context* context, std::uint8_t port, ibv_port_attr* out) const;
};

// Done once the library is loaded, so before anything is registered: a registered page must not be
// copied away from the device when the process forks. Kernels since 5.12 see to that; for others
// the library does, if it is told.
void protect_from_fork(const Library& library);

}  // namespace aioflagcx::verbs::ibverbs
