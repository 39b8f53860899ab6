#include "verbs/ibverbs/library.h"

#include <dlfcn.h>

#include <cerrno>
#include <cstring>
#include <memory>

#include "common/error.h"

namespace aioflagcx::verbs::ibverbs {

namespace {

constexpr const char* kName = "libibverbs.so.1";

template <typename Function>
bool find(void* handle, const char* symbol, Function& out) noexcept {
    out = reinterpret_cast<Function>(::dlsym(handle, symbol));
    return out != nullptr;
}

template <typename Function>
void require(void* handle, const char* symbol, Function& out) {
    if (find(handle, symbol, out)) return;
    throw NativeError(
        "dlsym", ENOSYS,
        std::string(kName) + " has no " + symbol + ": rdma-core 32 or newer is needed");
}

Library load() {
    // Never closed: its threads and devices may outlive every object of ours.
    void* const handle = ::dlopen(kName, RTLD_NOW | RTLD_LOCAL);
    if (handle == nullptr) {
        const char* const why = ::dlerror();
        throw NativeError("dlopen", ENOENT,
                          std::string(why == nullptr ? kName : why) +
                              "; install libibverbs1 and ibverbs-providers (rdma-core)");
    }
    Library library;
#define AIOFLAGCX_REQUIRE(name) require(handle, "ibv_" #name, library.name);
    AIOFLAGCX_IBVERBS_FUNCTIONS(AIOFLAGCX_REQUIRE)
#undef AIOFLAGCX_REQUIRE
    require(handle, "_ibv_query_gid_table", library.query_gid_table);
    find(handle, "ibv_reg_mr_iova2", library.reg_mr_iova2);
    find(handle, "ibv_reg_dmabuf_mr", library.reg_dmabuf_mr);
    find(handle, "ibv_is_fork_initialized", library.is_fork_initialized);
    protect_from_fork(library);
    return library;
}

}  // namespace

void protect_from_fork(const Library& library) {
    if (library.is_fork_initialized != nullptr &&
        library.is_fork_initialized() == IBV_FORK_UNNEEDED) {
        return;
    }
    library.fork_init();  // fails once memory has been registered by others: it is theirs to decide
}

const Library& Library::get() {
    // Not kept when it throws: the library may be installed later.
    static const Library* const library = std::make_unique<Library>(load()).release();
    return *library;
}

int Library::port_attributes(ibv_context* context, std::uint8_t port, ibv_port_attr* out) const {
    std::memset(out, 0, sizeof *out);
    if (const verbs_context* extended = verbs_get_ctx_op(context, query_port)) {
        return extended->query_port(context, port, out, sizeof *out);
    }
    return query_port(context, port, reinterpret_cast<_compat_ibv_port_attr*>(out));
}

}  // namespace aioflagcx::verbs::ibverbs
