#pragma once

namespace orlop::test {

// Sanitizers take memory of their own: figures of resident memory say nothing under them.
inline bool memory_is_instrumented() {
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
  return true;
#elif defined(__has_feature)
  return __has_feature(address_sanitizer) || __has_feature(thread_sanitizer);
#else
  return false;
#endif
}

}  // namespace orlop::test
