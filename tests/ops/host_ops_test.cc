#include "host/host_backend.h"
#include "ops_suite.h"

namespace orlop::test {
namespace {

auto host_backend(bool reference, int threads) {
  return [=] {
    return make_host_backend(
        {.device_bytes = size_t{64} << 20, .threads = threads, .reference_ops = reference});
  };
}

INSTANTIATE_TEST_SUITE_P(Reference, OpsSuite,
                         testing::ValuesIn(ops_cases("reference", host_backend(true, 2))),
                         ops_case_name);
INSTANTIATE_TEST_SUITE_P(Host, OpsSuite,
                         testing::ValuesIn(ops_cases("host", host_backend(false, 2))),
                         ops_case_name);

}  // namespace
}  // namespace orlop::test
