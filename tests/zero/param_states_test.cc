#include "zero/param_states.h"

#include <gtest/gtest.h>

#include <bit>
#include <cstring>
#include <random>

#include "orlop/error.h"

namespace orlop {
namespace {

std::vector<float> random_floats(size_t count) {
  std::mt19937 random(7);
  std::vector<float> values(count);
  for (float& value : values) {
    do {
      value = std::bit_cast<float>(static_cast<uint32_t>(random()));
    } while (!(value == value) || value - value != 0.0f);
  }
  return values;
}

TEST(ParamStates, MasterSurvivesExactlyInEveryComputeDtype) {
  const std::vector<float> values = random_floats(4096);
  for (const DType dtype : {DType::kBF16, DType::kF16, DType::kF32}) {
    const StatePlanes planes = state_planes(4096, dtype, DType::kF32);
    EXPECT_EQ(planes.bytes(), 4096u * (dtype == DType::kF16 ? 14 : 12));
    // The two parts apart, as they are on the way to a drive.
    std::vector<std::byte> copy(planes.copy_bytes);
    std::vector<std::byte> rest(planes.rest_bytes);
    const StateAddress states{copy.data(), rest.data()};
    write_plane(planes, states, Plane::kMaster, 0, values);
    write_plane(planes, states, Plane::kExpAvg, 0, values);
    std::vector<float> back(4096);
    read_plane(planes, states, Plane::kMaster, 0, back);
    for (size_t i = 0; i < back.size(); ++i) {
      ASSERT_EQ(std::bit_cast<uint32_t>(back[i]), std::bit_cast<uint32_t>(values[i]))
          << dtype_name(dtype) << " element " << i;
    }
    read_plane(planes, states, Plane::kExpAvg, 0, back);
    EXPECT_EQ(back, values);
  }
}

TEST(ParamStates, ComputeCopyOfBf16RoundsHalfUp) {
  const StatePlanes planes = state_planes(128, DType::kBF16, DType::kF32);
  std::vector<std::byte> states(planes.bytes());
  const float tie = std::bit_cast<float>(0x3f808000u);
  write_plane(planes, state_address(planes, states.data()), Plane::kMaster, 5, {&tie, 1});
  uint16_t copy = 0;
  std::memcpy(&copy, states.data() + 5 * sizeof copy, sizeof copy);
  EXPECT_EQ(copy, 0x3f81);
}

// The compute copy alone has the bits of the one beside a master.
TEST(ParamStates, CopyAloneTakesAMasterRounded) {
  std::vector<float> values = random_floats(4096);
  values[7] = std::bit_cast<float>(0x3f808000u);  // a tie in bf16
  values[8] = 1.0f + 0x1p-11f;                    // and in fp16
  for (const DType dtype : {DType::kBF16, DType::kF16, DType::kF32}) {
    const StatePlanes whole = state_planes(4096, dtype, DType::kF32);
    const StatePlanes alone = state_planes(4096, dtype, DType::kF32, true);
    ASSERT_EQ(alone.bytes(), 4096u * dtype_bytes(dtype));
    std::vector<std::byte> states(whole.bytes());
    std::vector<std::byte> copy(alone.bytes());
    write_plane(whole, state_address(whole, states.data()), Plane::kMaster, 0, values);
    const StateAddress address = state_address(alone, copy.data());
    write_plane(alone, address, Plane::kMaster, 0, values);
    EXPECT_EQ(std::memcmp(copy.data(), states.data(), copy.size()), 0) << dtype_name(dtype);
    EXPECT_EQ(plane_parts(alone, address, Plane::kMaster).size(), 1u);
    EXPECT_THROW(write_plane(alone, address, Plane::kExpAvg, 0, values), Error);
    EXPECT_THROW(read_plane(alone, address, Plane::kMaster, 0, values), Error);
  }
}

TEST(ParamStates, DecayRunsCoverTheFlatParam) {
  FlatParamLayout flat;
  flat.numel = 512;
  const auto add = [&](int64_t offset, int64_t numel, bool decay) {
    Segment segment;
    segment.offset = offset;
    segment.numel = numel;
    segment.decay = decay;
    flat.segments.push_back(segment);
  };
  add(0, 100, true);
  add(128, 128, true);
  add(256, 64, false);
  add(384, 64, false);
  const std::vector<DecayRun> runs = decay_runs(flat, shard_range(flat.numel, 0, 1));
  ASSERT_EQ(runs.size(), 2u);
  EXPECT_EQ(runs[0].begin, 0);
  EXPECT_EQ(runs[0].numel, 256);
  EXPECT_TRUE(runs[0].decay);
  EXPECT_EQ(runs[1].begin, 256);
  EXPECT_EQ(runs[1].numel, 256);
  EXPECT_FALSE(runs[1].decay);
}

}  // namespace
}  // namespace orlop
