#pragma once

#include <cstddef>

namespace orlop::test {

// Whether this is a build with a sanitizer. Its task is memory and races, not numbers: runs are
// shorter there.
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
inline constexpr bool kSanitized = true;
#elif defined(__has_feature)
inline constexpr bool kSanitized =
    __has_feature(address_sanitizer) || __has_feature(thread_sanitizer);
#else
inline constexpr bool kSanitized = false;
#endif

// Whether a test tries variant `variant` in case `which` of `cases`, both from 0. It tries every
// pair; but of memory and races a pair tells no more than the two of which it is made, so under a
// sanitizer the variants are dealt to the cases: every case and every variant runs, each variant in
// one case.
constexpr bool is_tried(size_t variant, size_t which, size_t cases) {
  return !kSanitized || variant % cases == which;
}

}  // namespace orlop::test
