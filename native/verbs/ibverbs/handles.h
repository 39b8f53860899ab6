// Sole owners of libibverbs' objects. Each is destroyed before what it was made from.
#pragma once

#include <memory>

#include "verbs/ibverbs/library.h"

namespace aioflagcx::verbs::ibverbs {

struct Close {
    void operator()(ibv_context* object) const noexcept { Library::get().close_device(object); }
    void operator()(ibv_pd* object) const noexcept { Library::get().dealloc_pd(object); }
    void operator()(ibv_mr* object) const noexcept { Library::get().dereg_mr(object); }
    void operator()(ibv_comp_channel* object) const noexcept {
        Library::get().destroy_comp_channel(object);
    }
    void operator()(ibv_cq* object) const noexcept { Library::get().destroy_cq(object); }
    void operator()(ibv_qp* object) const noexcept { Library::get().destroy_qp(object); }
};

template <typename Object>
using Handle = std::unique_ptr<Object, Close>;

}  // namespace aioflagcx::verbs::ibverbs
