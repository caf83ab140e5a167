#pragma once

#include <gtest/gtest.h>

#include <cstring>
#include <deque>
#include <memory>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "base/half.h"
#include "orlop/error.h"
#include "orlop/tensor_optimizer.h"
#include "orlop/weight_drives.h"
#include "tests/support/error_of.h"

namespace orlop::test {

using Bytes = std::vector<std::byte>;
inline constexpr StatePlane kPlanes[] = {StatePlane::kExpAvg, StatePlane::kExpAvgSq,
                                         StatePlane::kMasterRest};
// Below a sector, of one chunk, at the edges of one, and of many.
inline constexpr int64_t kSizes[] = {0, 1, 63, 129, 1664, 1665, 40001};

inline Bytes random_values(int64_t numel, DType dtype, uint32_t seed) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal;
  Bytes bytes(static_cast<size_t>(numel) * dtype_bytes(dtype));
  for (size_t i = 0; i < static_cast<size_t>(numel); ++i) {
    const float value = normal(random);
    if (dtype == DType::kF32) {
      std::memcpy(bytes.data() + 4 * i, &value, 4);
    } else {
      const uint16_t half = dtype == DType::kF16 ? float_to_fp16(value) : float_to_bf16(value);
      std::memcpy(bytes.data() + 2 * i, &half, 2);
    }
  }
  return bytes;
}

// One tensor of each size, whose weights are the caller's, the optimizer's own or on drives.
struct Model {
  Model(TensorOptimizer& made_for, DType type, DType moments, bool on_drives, bool own = false,
        std::shared_ptr<WeightDrives> weights_on = nullptr)
      : optimizer(made_for),
        dtype(type),
        moment_dtype(moments),
        weight_drives(std::move(weights_on)) {
    std::vector<TensorSpec> specs;
    for (const int64_t numel : kSizes) {
      weights.push_back(random_values(numel, dtype, static_cast<uint32_t>(numel)));
      TensorSpec spec;
      spec.name = "w" + std::to_string(numel);
      spec.dtype = dtype;
      spec.moment_dtype = moments;
      spec.numel = numel;
      spec.weights = own ? nullptr : weights.back().data();
      spec.seed = static_cast<uint64_t>(numel);
      spec.on_drives = on_drives;
      on_weight_drives.push_back(-1);
      if (weight_drives != nullptr && numel > 0) {
        const DriveWeight place{spec.name, weights.back().size()};
        spec.weights = nullptr;
        spec.weight_drives = weight_drives;
        spec.drive_weight = on_weight_drives.back() = weight_drives->add({&place, 1});
        weight_drives->write(spec.drive_weight, weights.back());
      }
      specs.push_back(spec);
    }
    first = optimizer.add(specs);
    for (size_t i = 0; own && i < weights.size(); ++i) {
      optimizer.adopt_weights(index(i), weights[i].data());
    }
  }

  int64_t index(size_t i) const { return first + static_cast<int64_t>(i); }

  // Returns when it is submitted; the gradients stay.
  void update(int64_t step, bool is_written = true) {
    std::vector<TensorUpdate> updates;
    for (size_t i = 0; i < weights.size(); ++i) {
      const auto seed = static_cast<uint32_t>(100 * step) + static_cast<uint32_t>(i);
      gradients.push_back(random_values(kSizes[i], dtype, seed));
      AdamHyper hyper;
      hyper.step = step;
      hyper.weight_decay = 0.1;
      updates.push_back(
          {index(i), {gradients.back().data(), dtype, kSizes[i]}, hyper, {}, is_written});
    }
    optimizer.update(updates, 0.5f, step);
  }

  Bytes plane(size_t i, StatePlane which) const {
    if (which == StatePlane::kMasterRest && dtype == DType::kF32) return {};
    const size_t element = which != StatePlane::kMasterRest ? dtype_bytes(moment_dtype)
                           : dtype == DType::kBF16          ? 2
                                                            : 4;
    Bytes values(static_cast<size_t>(kSizes[i]) * element);
    optimizer.read_state(index(i), which, 0, values);
    return values;
  }

  std::vector<float> master(size_t i) const {
    std::vector<float> values(static_cast<size_t>(kSizes[i]));
    optimizer.read_master(index(i), values);
    return values;
  }

  Bytes copy(size_t i) const {
    const TensorStates states = optimizer.states(index(i));
    Bytes values(weights[i].size());
    if (on_weight_drives[i] >= 0) {
      weight_drives->read(on_weight_drives[i], values);
      return values;
    }
    if (!values.empty()) std::memcpy(values.data(), states.weights, values.size());
    return values;
  }

  TensorOptimizer& optimizer;
  DType dtype, moment_dtype;
  std::shared_ptr<WeightDrives> weight_drives;
  std::vector<int64_t> on_weight_drives;  // by tensor: its index there, or -1
  int64_t first = 0;
  std::vector<Bytes> weights;
  std::deque<Bytes> gradients;
};

inline void expect_same(const Model& host, const Model& drives, const std::string& when) {
  host.optimizer.synchronize();
  drives.optimizer.synchronize();
  for (size_t i = 0; i < std::size(kSizes); ++i) {
    const std::string what = when + ", " + std::to_string(kSizes[i]) + " elements";
    ASSERT_TRUE(host.copy(i) == drives.copy(i)) << "weights " << what;
    for (const StatePlane plane : kPlanes) {
      ASSERT_TRUE(host.plane(i, plane) == drives.plane(i, plane))
          << "plane " << static_cast<int>(plane) << " " << what;
    }
    const std::vector<float> expected = host.master(i), found = drives.master(i);
    ASSERT_TRUE(expected.empty() ||
                std::memcmp(expected.data(), found.data(), 4 * expected.size()) == 0)
        << "master " << what;
  }
}

inline StateDrives small_slots(std::vector<std::string> paths, const std::string& engine = "auto") {
  StateDrives drives;
  drives.nvme.paths = std::move(paths);
  drives.nvme.engine = engine;
  drives.nvme.block_bytes = 8192;
  drives.nvme.verify = "full";
  drives.slot_bytes = 5 * 4096;  // 1664 elements of 12 bytes and less
  drives.host_bytes = 4 * drives.slot_bytes;
  return drives;
}

}  // namespace orlop::test
