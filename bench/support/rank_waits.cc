#include "bench/support/rank_waits.h"

#include <algorithm>
#include <array>
#include <string_view>
#include <utility>

#include "base/check.h"

namespace orlop::bench {
namespace {

constexpr std::string_view kWaitFor = "wait for ";
// Clocks that differ a little can make queues wait for each other in a circle.
constexpr int kLongestChain = 16;

struct Interval {
  double begin = 0;
  double end = 0;

  bool empty() const { return begin >= end; }
  double seconds() const { return std::max(0.0, end - begin); }
};

struct LaneSpan : Interval {
  std::string name;
  int collective = -1;  // which one of the rank's it is

  bool is_wait() const { return name.starts_with("wait"); }
};

// The queues of one rank by their names without the device's, spans in the order of time.
using Lanes = std::map<std::string, std::vector<LaneSpan>>;

bool is_collective(std::string_view name) {
  constexpr std::array<std::string_view, 4> kNames = {"all_gather", "reduce_scatter", "broadcast",
                                                      "all_to_all"};
  return std::find(kNames.begin(), kNames.end(), name) != kNames.end();
}

Lanes make_lanes(const std::vector<TraceSpan>& trace) {
  Lanes lanes;
  for (const TraceSpan& span : trace) {
    const std::string queue = span.lane.substr(span.lane.rfind(' ') + 1);
    lanes[queue].push_back({{span.begin, span.end}, span.name});
  }
  for (auto& [queue, spans] : lanes) {
    std::sort(spans.begin(), spans.end(),
              [](const LaneSpan& a, const LaneSpan& b) { return a.begin < b.begin; });
  }
  int collectives = 0;
  for (LaneSpan& span : lanes["comm"]) {
    if (is_collective(span.name)) span.collective = collectives++;
  }
  return lanes;
}

std::vector<const LaneSpan*> collectives_of(const Lanes& lanes) {
  std::vector<const LaneSpan*> spans;
  for (const LaneSpan& span : lanes.at("comm")) {
    if (span.collective >= 0) spans.push_back(&span);
  }
  return spans;
}

double sum(const WaitCauses& causes) {
  double seconds = 0;
  for (const auto& [cause, part] : causes) seconds += part;
  return seconds;
}

class Matching {
 public:
  explicit Matching(const std::vector<std::vector<TraceSpan>>& traces) {
    for (const std::vector<TraceSpan>& trace : traces) ranks_.push_back(make_lanes(trace));
    for (size_t rank = 0; rank < ranks_.size(); ++rank) join(rank);
  }

  RankWaits waits_of(size_t rank) const {
    RankWaits waits;
    const auto compute = ranks_[rank].find("compute");
    if (compute == ranks_[rank].end()) return waits;
    for (const LaneSpan& span : compute->second) {
      if (span.is_wait()) {
        attribute_span(span, {waits, rank, rank, "compute", 0}, span);
      } else {
        waits.compute_seconds += span.seconds();
      }
    }
    return waits;
  }

 private:
  struct LastJoin {
    std::string name;
    double seconds = 0;
    size_t rank = 0;
  };

  // A queue that is looked at because the one before it in a chain waits for it.
  struct Link {
    RankWaits& waits;
    size_t waiter;  // whose compute waits
    size_t rank;    // whose queue this is
    std::string queue;
    int length;  // of the chain

    void add(const std::string& cause, double seconds) const {
      if (seconds > 0) (rank == waiter ? waits.own : waits.others)[cause] += seconds;
    }
    Link next(size_t next_rank, std::string next_queue) const {
      return {waits, waiter, next_rank, std::move(next_queue), length + 1};
    }
  };

  void join(size_t rank) {
    const std::vector<const LaneSpan*> spans = collectives_of(ranks_[rank]);
    if (rank == 0) joined_.resize(spans.size());
    check(spans.size() == joined_.size(), ErrorCode::kUsage,
          "the trace of rank {} has {} collectives, that of rank 0 has {}", rank, spans.size(),
          joined_.size());
    for (size_t i = 0; i < spans.size(); ++i) {
      LastJoin& last = joined_[i];
      check(rank == 0 || last.name == spans[i]->name, ErrorCode::kUsage,
            "collective {} is {} on rank {} and {} on rank 0", i, spans[i]->name, rank, last.name);
      if (rank == 0 || spans[i]->begin > last.seconds) {
        last = {spans[i]->name, spans[i]->begin, rank};
      }
    }
  }

  // What the queue does in `when`, piece by piece.
  void attribute(Interval when, const Link& link) const {
    const auto lane = ranks_[link.rank].find(link.queue);
    if (lane == ranks_[link.rank].end() || link.length > kLongestChain) {
      link.add("idle", when.seconds());
      return;
    }
    const std::vector<LaneSpan>& spans = lane->second;
    auto span = std::partition_point(spans.begin(), spans.end(), [&](const LaneSpan& earlier) {
      return earlier.end <= when.begin;
    });
    for (; span != spans.end() && span->begin < when.end; ++span) {
      link.add("idle", Interval{when.begin, span->begin}.seconds());
      const Interval part{std::max(when.begin, span->begin), std::min(when.end, span->end)};
      if (!part.empty()) attribute_span(part, link, *span);
      when.begin = std::max(when.begin, part.end);
    }
    link.add("idle", when.seconds());
  }

  void attribute_span(const Interval& when, const Link& link, const LaneSpan& span) const {
    if (span.collective >= 0) {
      attribute_collective(when, link, span);
    } else if (span.name.starts_with(kWaitFor)) {
      attribute(when, link.next(link.rank, span.name.substr(kWaitFor.size())));
    } else {
      link.add(span.is_wait() ? "update" : link.queue, when.seconds());
    }
  }

  void attribute_collective(const Interval& when, const Link& link, const LaneSpan& span) const {
    const LastJoin& last = joined_[static_cast<size_t>(span.collective)];
    const Interval before{when.begin, std::min(when.end, last.seconds)};
    if (!before.empty()) attribute(before, link.next(last.rank, "comm"));
    link.waits.exposed_seconds += Interval{std::max(when.begin, last.seconds), when.end}.seconds();
  }

  std::vector<Lanes> ranks_;
  std::vector<LastJoin> joined_;
};

}  // namespace

double RankWaits::own_seconds() const { return sum(own); }
double RankWaits::others_seconds() const { return sum(others); }

std::vector<RankWaits> rank_waits(const std::vector<std::vector<TraceSpan>>& traces) {
  const Matching matching(traces);
  std::vector<RankWaits> waits;
  for (size_t rank = 0; rank < traces.size(); ++rank) waits.push_back(matching.waits_of(rank));
  return waits;
}

}  // namespace orlop::bench
