// The suite of tests/ops over the CUDA backend.
#include "base/bytes.h"
#include "gpu_environment.h"
#include "ops_suite.h"

namespace orlop::test {
namespace {

auto* const environment =
    static_cast<GpuEnvironment*>(testing::AddGlobalTestEnvironment(new GpuEnvironment(512 * kMiB)));

INSTANTIATE_TEST_SUITE_P(Cuda, OpsSuite, testing::ValuesIn(ops_cases("cuda", make_shared_backend)),
                         ops_case_name);

}  // namespace

GpuEnvironment& gpu() { return *environment; }

}  // namespace orlop::test
