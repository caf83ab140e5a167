#include "ops_suite.h"

#include <cmath>
#include <limits>

namespace orlop::test {

// Instantiated where the backends are: in this folder for the host, in tests/gpu for CUDA.
GTEST_ALLOW_UNINSTANTIATED_PARAMETERIZED_TEST(OpsSuite);

std::ostream& operator<<(std::ostream& out, const OpsCase& c) {
  return out << c.name << " " << dtype_name(c.dtype);
}

std::vector<OpsCase> ops_cases(const std::string& name,
                               std::function<std::unique_ptr<Backend>()> make) {
  return {{name, make, DType::kF32}, {name, make, DType::kBF16}, {name, make, DType::kF16}};
}

std::string ops_case_name(const testing::TestParamInfo<OpsCase>& info) {
  return info.param.name + "_" + std::string(dtype_name(info.param.dtype));
}

void OpsSuite::SetUp() {
  auto backend = GetParam().make();
  if (!backend) GTEST_SKIP() << "no device for " << GetParam().name;
  device_ = std::make_unique<TestDevice>(std::move(backend));
}

double OpsSuite::tolerance() const {
  switch (dtype()) {
    case DType::kBF16:
      return 1e-2;
    case DType::kF16:
      return 1.5e-3;
    default:
      return kF32Tolerance;
  }
}

Values scatter(const Values& dense, int64_t rows, int64_t width, int64_t stride, int64_t offset) {
  Values result(static_cast<size_t>(rows * stride), std::numeric_limits<double>::quiet_NaN());
  for (int64_t r = 0; r < rows; ++r) {
    for (int64_t c = 0; c < width; ++c) {
      result[static_cast<size_t>(r * stride + offset + c)] =
          dense[static_cast<size_t>(r * width + c)];
    }
  }
  return result;
}

Values gather(const Values& strided, int64_t rows, int64_t width, int64_t stride, int64_t offset) {
  Values result(static_cast<size_t>(rows * width));
  for (int64_t r = 0; r < rows; ++r) {
    for (int64_t c = 0; c < width; ++c) {
      result[static_cast<size_t>(r * width + c)] =
          strided[static_cast<size_t>(r * stride + offset + c)];
    }
  }
  return result;
}

void expect_gaps_poisoned(const Values& strided, int64_t rows, int64_t width, int64_t stride) {
  for (int64_t r = 0; r < rows; ++r) {
    for (int64_t c = width; c < stride; ++c) {
      ASSERT_TRUE(std::isnan(strided[static_cast<size_t>(r * stride + c)]))
          << "the gap after row " << r << " was written at column " << c;
    }
  }
}

}  // namespace orlop::test
