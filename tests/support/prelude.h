#pragma once

// What most tests include, for the builds that precompile it.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <fstream>
#include <nlohmann/json.hpp>
#include <random>

#include "base/prelude.h"
