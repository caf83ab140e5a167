// What a process holds while it reads a model that is larger than the memory it may take.

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <string>
#include <vector>

#include "formats/safetensors.h"
#include "formats/safetensors_writer.h"
#include "tests/engine/measured_peak.h"
#include "tests/formats/support.h"
#include "tests/support/tiny_model.h"

namespace orlop::test {
namespace {

// Replaces the model's one file by files of at most `shard_bytes`; returns how many.
size_t split_into_shards(const std::filesystem::path& folder, size_t shard_bytes) {
  std::vector<TensorSpec> specs;
  std::vector<std::vector<std::byte>> values;
  {
    const SafetensorsReader reader(folder);
    for (const TensorInfo& tensor : reader.tensors()) {
      specs.push_back({tensor.name, tensor.dtype, tensor.shape});
      reader.read(tensor, 0, values.emplace_back(tensor.bytes));
    }
  }
  ShardedSafetensorsWriter writer(folder, specs, shard_bytes, {{"format", "pt"}});
  for (size_t i = 0; i < specs.size(); ++i) writer.write(specs[i].name, 0, values[i]);
  return writer.finish().size();
}

// Case C-21: shards of more than three times the memory that there is, states and weights on a
// drive. What opening, training and saving take is what was planned, so nothing of the files stays.
TEST(ImportedModel, StreamsThroughMemoryThatHoldsAThirdOfIt) {
  if (kSanitized) GTEST_SKIP() << "sanitizers take memory of their own";
  const TempFolder folder;
  TinyShape shape;
  shape.hidden = 256;
  shape.intermediate = 704;
  shape.layers = 30;
  shape.vocab = 500;
  write_tiny_model(folder / "large", TinyFamily::kLlama, shape);
  const auto file_bytes =
      static_cast<double>(std::filesystem::file_size(folder / "large" / kSafetensorsFileName));
  EXPECT_GT(split_into_shards(folder / "large", size_t{8} << 20), 5U);
  std::filesystem::create_directory(folder / "tiny");
  spill(folder / "tiny" / "config.json", tiny_config(TinyFamily::kLlama));
  MeasuredPeak taken = measure("memory-tight", (folder / "large").string(), {"0.04", "0"});
  taken.peak -= measure("memory", (folder / "tiny").string(), {"-1", "0"}).peak;
  expect_as_planned(taken, fmt::format("shards of {:.1f} MiB", file_bytes / 1048576));
  EXPECT_LT(taken.peak, 0.3 * file_bytes);
}

}  // namespace
}  // namespace orlop::test
