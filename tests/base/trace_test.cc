#include "base/trace.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <string>
#include <thread>
#include <vector>

#include "base/check.h"
#include "base/log.h"

namespace orlop {
namespace {

using namespace std::chrono_literals;
using nlohmann::json;
using ::testing::HasSubstr;

json written_document(const Tracer& tracer) {
  const std::string path =
      (std::filesystem::temp_directory_path() / fmt::format("orlop-trace-{}.json", ::getpid()))
          .string();
  tracer.write(path);
  json parsed = json::parse(std::ifstream(path));
  std::filesystem::remove(path);
  return parsed;
}

json written(const Tracer& tracer) { return written_document(tracer)["traceEvents"]; }

TEST(Tracer, StartForgetsWhatWasRecordedBefore) {
  Tracer tracer;
  const int lane = tracer.lane("compute");
  tracer.start();
  const auto now = Tracer::Clock::now();
  tracer.add(lane, "first", now, now + 1ms);
  tracer.start();  // on already: goes on
  tracer.add(lane, "second", now, now + 1ms);
  EXPECT_EQ(written(tracer).size(), 3u);
  tracer.stop();
  tracer.start();
  tracer.add(lane, "third", now, now + 1ms);
  const json events = written(tracer);
  ASSERT_EQ(events.size(), 2u);
  EXPECT_EQ(events[1]["name"], "third");
}

TEST(Tracer, WritesLanesAndSpans) {
  Tracer tracer;
  EXPECT_FALSE(tracer.enabled());
  tracer.start();
  EXPECT_TRUE(tracer.enabled());
  const int compute = tracer.lane("compute");
  const int upload = tracer.lane("upload \"H2D\"\\\n");
  EXPECT_EQ(tracer.lane("compute"), compute);
  EXPECT_NE(upload, compute);
  const auto begin = Tracer::Clock::now();
  tracer.add(compute, "layer.7 forward", begin, begin + 1500ns);
  tracer.add(upload, "a \"quoted\" \t name", begin + 1ms, begin + 3ms);
  tracer.stop();
  EXPECT_FALSE(tracer.enabled());

  const json events = written(tracer);
  ASSERT_EQ(events.size(), 4u);
  EXPECT_EQ(events[0]["ph"], "M");
  EXPECT_EQ(events[0]["args"]["name"], "compute");
  EXPECT_EQ(events[0]["tid"], compute);
  EXPECT_THAT(events[1]["args"]["name"].get<std::string>(), HasSubstr("upload \"H2D\"\\"));
  EXPECT_EQ(events[2]["ph"], "X");
  EXPECT_EQ(events[2]["name"], "layer.7 forward");
  EXPECT_EQ(events[2]["tid"], compute);
  EXPECT_DOUBLE_EQ(events[2]["dur"].get<double>(), 1.5);
  EXPECT_GE(events[2]["ts"].get<double>(), 0.0);
  EXPECT_EQ(events[3]["tid"], upload);
  EXPECT_DOUBLE_EQ(events[3]["dur"].get<double>(), 2000.0);
  EXPECT_NEAR(events[3]["ts"].get<double>() - events[2]["ts"].get<double>(), 1000.0, 0.002);
}

// Two tracers of one machine, started at different times, tell the same time of one moment.
TEST(Tracer, TracesShareAClock) {
  Tracer early;
  early.start();
  std::this_thread::sleep_for(2ms);
  Tracer late;
  late.start();
  const auto begin = Tracer::Clock::now();
  std::vector<double> moments;
  for (Tracer* tracer : {&early, &late}) {
    tracer->add(tracer->lane("compute"), "work", begin, begin + 1ms);
    const json document = written_document(*tracer);
    moments.push_back(std::stod(document["otherData"]["originUs"].get<std::string>()) +
                      document["traceEvents"][1]["ts"].get<double>());
  }
  EXPECT_NEAR(moments[0], moments[1], 0.01);
  const std::chrono::duration<double, std::micro> now = begin.time_since_epoch();
  EXPECT_NEAR(moments[0], now.count(), 0.01);
}

// Every state of a trace is valid JSON: nothing, lanes alone, spans alone.
TEST(Tracer, AnEmptyTraceParses) {
  Tracer tracer;
  EXPECT_EQ(written(tracer), json::array());
  tracer.lane("compute");
  EXPECT_EQ(written(tracer).size(), 1u);
}

TEST(Tracer, NamesOutsideAsciiStayValid) {
  Tracer tracer;
  tracer.start();
  tracer.lane("Kernkraft \xc3\xa9");
  EXPECT_EQ(written(tracer)[0]["args"]["name"], "Kernkraft \xc3\xa9");
}

TEST(Tracer, IsSafeUnderThreads) {
  Tracer tracer;
  tracer.start();
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&tracer, t] {
      const int lane = tracer.lane(fmt::format("lane {}", t % 2));
      for (int i = 0; i < 500; ++i) {
        const auto now = Tracer::Clock::now();
        tracer.add(lane, "span", now, now);
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(written(tracer).size(), 2u + 4 * 500);
}

TEST(Tracer, AnUnwritablePathIsAnError) {
  const Tracer tracer;
  try {
    tracer.write("/no/such/folder/trace.json");
    FAIL() << "no error";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kIo);
    EXPECT_THAT(error.what(), HasSubstr("/no/such/folder/trace.json"));
    EXPECT_THAT(error.what(), HasSubstr("No such file"));
  }
}

TEST(Log, WarningsGoToStandardErrorAndInfoIsQuiet) {
  ::testing::internal::CaptureStderr();
  log_info("quiet {}", 1);
  log_warning("loud {} {{}}", 2);
  log_line(LogLevel::kError, "braces {} stay");
  const std::string text = ::testing::internal::GetCapturedStderr();
  EXPECT_THAT(text, ::testing::Not(HasSubstr("quiet")));
  EXPECT_THAT(text, HasSubstr("[orlop] [warning] loud 2 {}"));
  EXPECT_THAT(text, HasSubstr("braces {} stay"));
}

}  // namespace
}  // namespace orlop
