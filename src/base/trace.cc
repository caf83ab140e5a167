#include "base/trace.h"

#include <fstream>

#include "base/check.h"

namespace orlop {
namespace {

std::string json_escaped(std::string_view text) {
  std::string out;
  for (const char c : text) {
    if (c == '"' || c == '\\') out += '\\';
    out += static_cast<unsigned char>(c) < 0x20 ? ' ' : c;
  }
  return out;
}

}  // namespace

void Tracer::start() {
  std::lock_guard lock(mutex_);
  if (!enabled()) {
    spans_.clear();
    origin_ = Clock::now();
  }
  enabled_.store(true, std::memory_order_relaxed);
}

int Tracer::lane(std::string_view name) {
  std::lock_guard lock(mutex_);
  for (size_t i = 0; i < lanes_.size(); ++i) {
    if (lanes_[i] == name) return static_cast<int>(i);
  }
  lanes_.emplace_back(name);
  return static_cast<int>(lanes_.size()) - 1;
}

void Tracer::add(int lane, std::string_view name, Clock::time_point begin, Clock::time_point end) {
  using std::chrono::duration_cast;
  using std::chrono::nanoseconds;
  std::lock_guard lock(mutex_);
  spans_.push_back({lane, std::string(name), duration_cast<nanoseconds>(begin - origin_).count(),
                    duration_cast<nanoseconds>(end - begin).count()});
}

void Tracer::write(const std::string& path) const {
  std::lock_guard lock(mutex_);
  std::ofstream out(path);
  const std::chrono::duration<double, std::micro> origin = origin_.time_since_epoch();
  out << fmt::format(R"({{"otherData":{{"originUs":"{:.3f}"}},"traceEvents":[)", origin.count());
  const char* separator = "\n";
  for (size_t i = 0; i < lanes_.size(); ++i) {
    out << separator
        << fmt::format(
               R"({{"ph":"M","pid":1,"tid":{},"name":"thread_name","args":{{"name":"{}"}}}})", i,
               json_escaped(lanes_[i]));
    separator = ",\n";
  }
  for (const Span& span : spans_) {
    out << separator
        << fmt::format(R"({{"ph":"X","pid":1,"tid":{},"name":"{}","ts":{:.3f},"dur":{:.3f}}})",
                       span.lane, json_escaped(span.name), static_cast<double>(span.begin_ns) / 1e3,
                       static_cast<double>(span.duration_ns) / 1e3);
    separator = ",\n";
  }
  out << "\n]}\n";
  out.flush();
  check(out.good(), ErrorCode::kIo, "trace: cannot write '{}': {}", path, errno_text(errno));
}

}  // namespace orlop
