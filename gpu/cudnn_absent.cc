// In place of cudnn_attention.cc where the build found no cuDNN or no cudnn-frontend headers.
#include "base/log.h"
#include "gpu/attention_backend.h"

namespace orlop {

std::unique_ptr<AttentionBackend> make_cudnn_attention(bool) {
  log_info("attention: built without cuDNN, plain kernels are used");
  return nullptr;
}

}  // namespace orlop
