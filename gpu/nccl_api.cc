#include "gpu/nccl_api.h"

#include "base/check.h"

namespace orlop {

NcclApi::NcclApi() : library_("libnccl.so.2") {
  const auto find = [this]<typename Function>(Function& function, const char* name) {
    function = library_.find<Function>(name);
  };
  find(get_unique_id, "ncclGetUniqueId");
  find(comm_init_rank_config, "ncclCommInitRankConfig");
  find(comm_finalize, "ncclCommFinalize");
  find(comm_destroy, "ncclCommDestroy");
  find(comm_abort, "ncclCommAbort");
  find(comm_get_async_error, "ncclCommGetAsyncError");
  find(get_error_string, "ncclGetErrorString");
  find(get_last_error, "ncclGetLastError");
  find(all_gather, "ncclAllGather");
  find(reduce_scatter, "ncclReduceScatter");
  find(broadcast, "ncclBroadcast");
  find(group_start, "ncclGroupStart");
  find(group_end, "ncclGroupEnd");
  find(send, "ncclSend");
  find(recv, "ncclRecv");
  check(library_.loaded(), ErrorCode::kCommunicator,
        "several GPUs need NCCL, which cannot be loaded: {}; install it, or start one process",
        library_.error());
}

}  // namespace orlop
