#pragma once

#include <cstdint>
#include <string>

#include "formats/hf_config.h"
#include "model/transformer_config.h"

namespace orlop {

// Types "default", "linear" and "llama3" over whole heads. Throws Error(kInvalidData) that names
// `file` and the field for any other type and for missing or impossible numbers.
RopeConfig make_rope_config(const HfRope& hf, int64_t head_dim, const std::string& file);

}  // namespace orlop
