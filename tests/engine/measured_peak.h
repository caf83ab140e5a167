#pragma once

#include <gtest/gtest.h>

#include <cstdio>
#include <sstream>
#include <string>
#include <vector>

#include "tests/formats/support.h"
#include "tests/support/process.h"

namespace orlop::test {

struct MeasuredPeak {
  double peak = 0;
  double planned = 0;
  double read = 0;  // from files while opening; of memory-ranks alone
};

// Peak resident bytes of a process that opens the model and trains two steps, as train_worker says
// under `mode`.
inline MeasuredPeak measure(const std::string& mode, const std::string& model,
                            const std::vector<std::string>& how) {
  std::vector<std::string> command = {ORLOP_TRAIN_WORKER, mode, model};
  if (mode != "memory-ranks") command.push_back(model + "/run");
  command.insert(command.end(), how.begin(), how.end());
  ChildProcess worker(command);
  const std::string line = worker.read_line().value_or("");
  EXPECT_EQ(worker.wait(), 0);
  MeasuredPeak measured;
  std::string word;
  std::istringstream(line) >> word >> measured.peak >> measured.planned >> measured.read;
  EXPECT_EQ(word, "peak") << line;
  return measured;
}

// What the model in folder / "large" takes beyond the one in folder / "tiny", beside its own plan.
inline MeasuredPeak measure_beyond_tiny(const std::string& mode, const TempFolder& folder,
                                        const std::vector<std::string>& how) {
  MeasuredPeak measured = measure(mode, (folder / "large").string(), how);
  measured.peak -= measure(mode, (folder / "tiny").string(), how).peak;
  return measured;
}

inline void expect_as_planned(const MeasuredPeak& taken, const std::string& what) {
  std::printf("%s: %.1f MiB planned, %.1f MiB taken\n", what.c_str(), taken.planned / 1048576,
              taken.peak / 1048576);
  EXPECT_NEAR(taken.peak, taken.planned, 0.05 * taken.planned) << what;
}

}  // namespace orlop::test
