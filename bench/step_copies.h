#pragma once

#include <string>

#include "orlop/config.h"

namespace orlop::bench {

// What a step does when copies are what it waits for: no weights resident and one micro-batch of
// one sequence. Prints the rate of
//   evaluation, whose uploads are the bound, beside uploads of pinned memory alone;
//   the backward pass, from its first gradient's way down to the last one's arrival, with weights
//   going up meanwhile, beside copies both ways at once;
// all in one run. With other options as `config` has them.
void measure_copies(const std::string& model_dir, EngineConfig config, int repeats);

}  // namespace orlop::bench
