#pragma once

#include <gtest/gtest.h>

#include <concepts>
#include <string>

#include "orlop/error.h"

namespace orlop::test {

// Runs `action`, which must throw Error(code), and returns its text.
template <std::invocable Action>
std::string error_of(ErrorCode code, Action&& action) {
  try {
    action();
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), code) << error.what();
    return error.what();
  }
  ADD_FAILURE() << "no error";
  return "";
}

}  // namespace orlop::test
