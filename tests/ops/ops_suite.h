#pragma once

#include <gtest/gtest.h>

#include <functional>
#include <memory>
#include <ostream>
#include <string>
#include <vector>

#include "ops_reference.h"
#include "test_device.h"

// One suite for every implementation of Ops. A folder instantiates it with its backends:
//   INSTANTIATE_TEST_SUITE_P(Host, OpsSuite, testing::ValuesIn(ops_cases("host", make)),
//   ops_case_name);
namespace orlop::test {

struct OpsCase {
  std::string name;
  std::function<std::unique_ptr<Backend>()> make;  // null result: the hardware is not there
  DType dtype = DType::kF32;
};
std::ostream& operator<<(std::ostream& out, const OpsCase& c);

// One case per compute dtype.
std::vector<OpsCase> ops_cases(const std::string& name,
                               std::function<std::unique_ptr<Backend>()> make);
std::string ops_case_name(const testing::TestParamInfo<OpsCase>& info);

class OpsSuite : public testing::TestWithParam<OpsCase> {
 protected:
  void SetUp() override;

  DType dtype() const { return GetParam().dtype; }
  TestDevice& device() { return *device_; }
  Ops& ops() { return device_->ops(); }
  Queue& queue() { return device_->queue(); }

  Values random(int64_t numel, double deviation = 1.0) {
    return random_values(random_, numel, dtype(), deviation);
  }
  // Relative Frobenius error that one rounding to the dtype, after sums in fp32, may leave. The
  // unit roundoffs are 2^-24, 2^-11 and 2^-8; results of these sizes stay well below.
  double tolerance() const;
  // Of fp32 results (gradients of weights, row statistics, losses): inputs were exact.
  static constexpr double kF32Tolerance = 1e-5;

  std::mt19937_64 random_{20240501};

 private:
  std::unique_ptr<TestDevice> device_;
};

// (rows, width) placed with `stride` elements between rows, NaN in the gaps; and back. gather()
// also asserts that the gaps are still NaN.
Values scatter(const Values& dense, int64_t rows, int64_t width, int64_t stride,
               int64_t offset = 0);
Values gather(const Values& strided, int64_t rows, int64_t width, int64_t stride,
              int64_t offset = 0);
void expect_gaps_poisoned(const Values& strided, int64_t rows, int64_t width, int64_t stride);

}  // namespace orlop::test
