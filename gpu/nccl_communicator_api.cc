#include "gpu/cuda_backend_api.h"
#include "gpu/nccl_communicator.h"
#include "orlop/export.h"

extern "C" ORLOP_EXPORT orlop::Communicator* orlop_make_nccl_communicator(
    const orlop::NcclOptions* options) {
  return new orlop::NcclCommunicator(options->device_index, *options->host,
                                     options->timeout_seconds);
}
