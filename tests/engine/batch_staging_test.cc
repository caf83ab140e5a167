#include "engine/batch_staging.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstddef>
#include <map>
#include <random>
#include <vector>

#include "base/bytes.h"
#include "tests/support/tiny_model.h"
#include "zero/step_plan.h"

namespace orlop::test {
namespace {

// Staging of one micro-batch with guard bytes behind it; "device" memory is the staging itself.
class StagedBatch {
 public:
  StagedBatch(int64_t rows, int64_t sequence, int64_t vocab, int64_t positions)
      : staging(rows, sequence, vocab, positions),
        memory_(staging.bytes() + 2 * kDeviceAlignment, std::byte{0x5a}) {}

  BatchView fill(const MicroBatch& batch) {
    staging.fill(batch, host(), 0);
    return staging.view(host(), host());
  }

  bool guard_is_intact() const {
    const auto guard = memory_.end() - static_cast<std::ptrdiff_t>(kDeviceAlignment);
    return std::all_of(guard, memory_.end(),
                       [](std::byte byte) { return byte == std::byte{0x5a}; });
  }

  BatchStaging staging;

 private:
  std::byte* host() {
    const auto address = reinterpret_cast<uintptr_t>(memory_.data());
    return memory_.data() + (align_up(address, kDeviceAlignment) - address);
  }

  std::vector<std::byte> memory_;
};

std::vector<int32_t> copied(const int32_t* values, int64_t count) {
  return {values, values + count};
}

// The rows of every value, in rising order: what a run is to hold.
std::map<int32_t, std::vector<int32_t>> rows_of(const std::vector<int32_t>& values) {
  std::map<int32_t, std::vector<int32_t>> rows;
  for (size_t i = 0; i < values.size(); ++i) rows[values[i]].push_back(static_cast<int32_t>(i));
  return rows;
}

std::map<int32_t, std::vector<int32_t>> runs_of(const int32_t* rows, const int32_t* begins,
                                                const int32_t* indices, int64_t runs) {
  std::map<int32_t, std::vector<int32_t>> found;
  for (int64_t run = 0; run < runs; ++run) {
    found[indices[run]] = copied(rows + begins[run], begins[run + 1] - begins[run]);
  }
  return found;
}

TEST(BatchStaging, LaysOutTokensLabelsPositionsAndSortedRuns) {
  const BatchConfig shape{.micro_batch_size = 3, .sequence_length = 16, .accumulation_steps = 1};
  StagedBatch staged(48, 16, 61, 20);
  for (const MicroBatch& batch : random_batches(20, shape, 61, 5)) {
    const BatchView view = staged.fill(batch);
    EXPECT_EQ(view.rows, 48);
    EXPECT_EQ(copied(view.tokens, 48), batch.tokens);
    EXPECT_EQ(copied(view.labels, 48), batch.labels);
    EXPECT_TRUE(std::equal(view.cu_seqlens_host.begin(), view.cu_seqlens_host.end(),
                           batch.cu_seqlens.begin(), batch.cu_seqlens.end()));
    std::vector<int32_t> positions;
    for (size_t s = 0; s + 1 < batch.cu_seqlens.size(); ++s) {
      for (int32_t i = 0; i < batch.cu_seqlens[s + 1] - batch.cu_seqlens[s]; ++i)
        positions.push_back(i);
    }
    EXPECT_EQ(copied(view.positions, 48), positions);
    EXPECT_EQ(runs_of(view.token_rows, view.token_run_begin, view.token_run_index, view.token_runs),
              rows_of(batch.tokens));
    EXPECT_EQ(runs_of(view.position_rows, view.position_run_begin, view.position_run_index,
                      view.position_runs),
              rows_of(positions));
    EXPECT_EQ(
        staged.staging.labelled_tokens(),
        std::count_if(batch.labels.begin(), batch.labels.end(), [](int32_t l) { return l >= 0; }));
    EXPECT_TRUE(staged.guard_is_intact());
  }
}

TEST(BatchStaging, WithoutBoundsEveryRowIsADocument) {
  StagedBatch staged(48, 16, 61, 16);
  MicroBatch batch;
  batch.tokens.assign(48, 7);
  batch.labels.assign(48, kIgnoredLabel);
  const BatchView view = staged.fill(batch);
  EXPECT_EQ(copied(view.cu_seqlens, 4), (std::vector<int32_t>{0, 16, 32, 48}));
  EXPECT_EQ(view.cu_seqlens_host.size(), 4u);
  EXPECT_EQ(view.positions[17], 1);
  EXPECT_EQ(view.token_runs, 1);
  EXPECT_EQ(view.position_runs, 16);
  EXPECT_EQ(staged.staging.labelled_tokens(), 0);
}

// The plan reserves batch_bytes() for what fill() writes.
TEST(BatchStaging, FitsWhatThePlanReserves) {
  for (const int64_t rows : {1, 7, 63, 64, 65, 4096}) {
    PlanInput input;
    input.shape = {rows, rows};
    EXPECT_LE(BatchStaging(rows, rows, 100, rows).bytes(), input.batch_bytes()) << rows;
  }
}

// Bounds that leave the batch before they come back must not be followed.
TEST(BatchStaging, RefusesWildBoundsWithoutWritingOutside) {
  StagedBatch staged(32, 16, 61, 16);
  MicroBatch batch;
  batch.tokens.assign(32, 1);
  batch.labels.assign(32, 1);
  std::mt19937_64 random(3);
  for (int round = 0; round < 200; ++round) {
    batch.cu_seqlens = {0};
    for (int i = 0; i < 30; ++i) {
      const auto step = static_cast<int32_t>(random() % 20) - (round % 3 == 0 ? 8 : 0);
      batch.cu_seqlens.push_back(batch.cu_seqlens.back() + step);
    }
    batch.cu_seqlens.push_back(32);
    EXPECT_THROW(staged.fill(batch), Error) << round;
    EXPECT_TRUE(staged.guard_is_intact()) << round;
  }
}

}  // namespace
}  // namespace orlop::test
