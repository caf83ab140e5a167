#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "bench/support/samples.h"
#include "orlop/config.h"
#include "orlop/engine.h"

namespace orlop::bench {

// Words of the command line: --name value.
struct Options {
  std::map<std::string, std::string> values;

  std::string get(const std::string& name, const std::string& fallback) const;
  int64_t number(const std::string& name, int64_t fallback) const;
  bool has(const std::string& name) const { return values.contains(name); }
};
Options parse_options(int argc, char** argv);

// A folder with the config.json of a named shape, whose weights are random; any other name is a
// folder itself.
std::string shape_folder(const std::string& shape);

// The engine as the options ask for it; `tokens` are those of one optimizer step.
EngineConfig make_config(const Options& options, int64_t tokens);

// Of one full step. Other seeds, other tokens.
std::vector<MicroBatch> random_batches(const EngineConfig& config, int64_t vocab_size,
                                       uint32_t seed = 1);

// Bytes per element.
double gradient_bytes(const EngineConfig& config);  // as it leaves the device
// Of host memory, that an update reads and writes: states twice, the gradient once.
double update_bytes(const EngineConfig& config);

void print_row(const char* what, const Summary& seconds, double tokens, double flops);

}  // namespace orlop::bench
