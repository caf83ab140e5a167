#pragma once

#include <chrono>
#include <utility>
#include <vector>

namespace orlop::bench {

// What a bench reports of repeated measurements. The spread is (max - min) / median.
struct Summary {
  double median = 0;
  double min = 0;
  double max = 0;
  double spread() const { return median == 0 ? 0 : (max - min) / median; }
};

// At least one sample.
Summary summarize(std::vector<double> samples);

// Wall-clock seconds of one call.
template <typename Work>
double seconds_of(Work&& work) {
  const auto begin = std::chrono::steady_clock::now();
  std::forward<Work>(work)();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
}

}  // namespace orlop::bench
