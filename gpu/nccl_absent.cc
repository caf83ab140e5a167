#include "base/check.h"
#include "gpu/cuda_backend_api.h"
#include "orlop/export.h"

extern "C" ORLOP_EXPORT orlop::Communicator* orlop_make_nccl_communicator(
    const orlop::NcclOptions*) {
  orlop::fail(orlop::ErrorCode::kCommunicator,
              "this build has no NCCL: several GPUs need a build with ORLOP_NCCL=ON; use one "
              "process");
}
