#pragma once

#include <map>
#include <string>

namespace orlop::bench {

// Seconds of every operation of a trace that Engine::write_trace wrote: "lane: name" -> sum of its
// spans. Numbers at the end of a name (which FlatParam) do not count as part of it.
std::map<std::string, double> trace_times(const std::string& path);

}  // namespace orlop::bench
