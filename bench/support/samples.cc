#include "bench/support/samples.h"

#include <algorithm>

#include "base/check.h"

namespace orlop::bench {

Summary summarize(std::vector<double> samples) {
  check(!samples.empty(), ErrorCode::kUsage, "a summary needs at least one sample");
  std::sort(samples.begin(), samples.end());
  const size_t middle = samples.size() / 2;
  const double median =
      samples.size() % 2 == 1 ? samples[middle] : (samples[middle - 1] + samples[middle]) / 2;
  return {median, samples.front(), samples.back()};
}

}  // namespace orlop::bench
