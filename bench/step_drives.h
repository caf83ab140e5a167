#pragma once

#include <string>
#include <vector>

#include "bench/step_setup.h"

namespace orlop::bench {

// Puts the states of all blocks, or of the last --nvme-optimizer and --nvme-params, on the drives
// of --nvme. Without it changes nothing.
void set_drives(const Options& options, const std::string& model_dir, EngineConfig& config);

// Measures and prints the update phase of steps: from the moment the norm is known to the last
// swap_out, beside the time that the drives need to move the same bytes, half of them each way,
// with nothing else to do. The two by turns.
void print_swap_phase(Engine& engine, const std::vector<MicroBatch>& batches, int steps);

}  // namespace orlop::bench
