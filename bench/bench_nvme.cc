// The NVMe tier beside fio: the same swap file, block size and depth, O_DIRECT, in alternating
// pairs.
//
//   bench_nvme DIR [--mib 1024] [--pairs 7] [--blocks 256,1024,4096 (KiB)] [--depths 8,32]
//
// Counted are the bytes of the chunks, each moved once per run; GB is 1e9 bytes. The ceiling beside
// each figure is fio's, measured in the same minute; the ratio is the median over the pairs. CPU is
// user and system time of all threads of the process. The slots lie in a HostArena with huge pages,
// as in the engine; so do fio's buffers if the system has set enough of them aside
// (sysctl vm.nr_hugepages=256). fio uses depth x block bytes of memory over and over, the slots are
// 192 MiB: where those bytes stay in the processor's cache, a drive moves faster than into memory
// (a plain ring over 4 and over 192 MiB, blocks of 256 KiB, depth 16: 2.0 and 1.75 GB/s of reads),
// so that small blocks stay behind fio here. `orlop bench io` gives both sides the same memory.
#include <fmt/format.h>

#include <algorithm>
#include <cstdio>
#include <fstream>
#include <functional>
#include <nlohmann/json.hpp>
#include <optional>
#include <sstream>
#include <string>
#include <vector>

#include "base/bytes.h"
#include "base/check.h"
#include "bench/support/swap_rig.h"
#include "nvme/swapper.h"

namespace {

using namespace orlop;
using namespace orlop::nvme;
using bench::Figure;
using bench::Pattern;
using bench::SwapRig;
using bench::SwapRigOptions;

constexpr size_t kChunkBytes = 32 * kMiB;
constexpr size_t kFirstExtent = 4096;
constexpr size_t kHugePageBytes = 2 * kMiB;

struct Settings {
  std::string directory;
  size_t file_mib = 1024;
  int pairs = 7;
  std::vector<size_t> block_kib = {256, 1024, 4096};
  std::vector<unsigned> depths = {8, 32};
};

std::string_view pattern_name(Pattern pattern) {
  switch (pattern) {
    case Pattern::kRead:
      return "read";
    case Pattern::kWrite:
      return "write";
    case Pattern::kMixed:
      return "mixed";
  }
  return "?";
}

double median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

double median_of(const std::vector<Figure>& figures, double Figure::*member) {
  std::vector<double> values;
  for (const Figure& figure : figures) values.push_back(figure.*member);
  return median(values);
}

SwapRigOptions rig_options(const Settings& settings, size_t block_bytes, unsigned depth,
                           IoEngine engine) {
  SwapRigOptions options;
  options.directories = {settings.directory};
  options.bytes = settings.file_mib * kMiB;
  options.chunk_bytes = kChunkBytes;
  options.queue.block_bytes = block_bytes;
  options.queue.depth = depth;
  options.engine = engine;
  return options;
}

// Huge pages as ours, if the system has set enough aside: with small pages a request falls into
// more segments than many drives take at once.
std::string_view fio_memory(size_t block_bytes, unsigned depth) {
  std::ifstream meminfo("/proc/meminfo");
  size_t pages = 0;
  for (std::string line; std::getline(meminfo, line);) {
    if (line.starts_with("HugePages_Free:")) pages = std::stoul(line.substr(15));
  }
  return pages * kHugePageBytes > (depth + 1) * block_bytes ? "mmaphuge" : "malloc";
}

// fio on the extents of the same file. Empty when fio is not there.
std::optional<Figure> run_fio(const SwapRig& rig, Pattern pattern, size_t block_bytes,
                              unsigned depth) {
  const bool direct = rig.swapper().drives()[0].direct;
  const std::string command = fmt::format(
      "fio --name=peer --filename='{}' --offset={} --size={} --rw={} --bs={} --iodepth={} "
      "--direct={} "
      "--ioengine=io_uring --fixedbufs=1 --registerfiles=1 --thread=1 --invalidate=0 "
      "--scramble_buffers=0 --iomem={} "
      "--allow_file_create=0 --output-format=json 2>/dev/null",
      rig.swapper().drives()[0].path, kFirstExtent, rig.bytes(),
      pattern == Pattern::kRead    ? "read"
      : pattern == Pattern::kWrite ? "write"
                                   : "rw",
      block_bytes, depth, direct ? 1 : 0, fio_memory(block_bytes, depth));
  std::string text;
  FILE* pipe = ::popen(command.c_str(), "r");
  check(pipe != nullptr, ErrorCode::kInternal, "cannot start fio");
  char piece[4096];
  while (std::fgets(piece, sizeof piece, pipe)) text += piece;
  const int status = ::pclose(pipe);
  const auto report = nlohmann::json::parse(text, nullptr, false);
  if (status != 0 || report.is_discarded()) return std::nullopt;
  const auto& job = report["jobs"][0];
  double bytes = 0;
  double ms = 0;
  for (const char* way : {"read", "write"}) {
    bytes += job[way]["io_bytes"].get<double>();
    ms = std::max(ms, job[way]["runtime"].get<double>());
  }
  const double cpu_share = (job["usr_cpu"].get<double>() + job["sys_cpu"].get<double>()) / 100;
  const double gb = bytes * 1e-9;
  return Figure{gb / (ms * 1e-3), cpu_share * job["job_runtime"].get<double>() * 1e-3 / gb};
}

void compare_with_fio(const Settings& settings, size_t block_bytes, unsigned depth) {
  SwapRig rig(rig_options(settings, block_bytes, depth, IoEngine::kAuto));
  for (const Pattern pattern : {Pattern::kRead, Pattern::kWrite, Pattern::kMixed}) {
    std::vector<Figure> ours;
    std::vector<Figure> fio;
    std::vector<double> ratios;
    for (int pair = 0; pair < settings.pairs; ++pair) {
      // The order alternates too, so that neither always comes after the other.
      std::optional<Figure> peer;
      if (pair % 2 == 0) peer = run_fio(rig, pattern, block_bytes, depth);
      ours.push_back(rig.run(pattern));
      if (pair % 2 == 1) peer = run_fio(rig, pattern, block_bytes, depth);
      if (!peer) continue;
      fio.push_back(*peer);
      ratios.push_back(ours.back().gb_per_s / peer->gb_per_s);
    }
    const auto [least, most] = std::ranges::minmax(ours, {}, &Figure::gb_per_s);
    fmt::print("{:5}  block {:>8}  depth {:3}  {:5.2f} GB/s ({:.2f}..{:.2f})  {:.3f} CPU s/GB",
               pattern_name(pattern), format_bytes(block_bytes), depth,
               median_of(ours, &Figure::gb_per_s), least.gb_per_s, most.gb_per_s,
               median_of(ours, &Figure::cpu_s_per_gb));
    if (fio.empty()) {
      fmt::print("  (fio is not installed)\n");
    } else {
      fmt::print(
          "  | fio ({}) {:5.2f} GB/s  {:.3f} CPU s/GB | ratio {:.3f} ({:.2f}..{:.2f}, {} pairs)\n",
          fio_memory(block_bytes, depth), median_of(fio, &Figure::gb_per_s),
          median_of(fio, &Figure::cpu_s_per_gb), median(ratios), *std::ranges::min_element(ratios),
          *std::ranges::max_element(ratios), ratios.size());
    }
    std::fflush(stdout);
  }
}

// What a machine loses that forbids io_uring.
void compare_engines(const Settings& settings) {
  std::vector<Figure> ring[2];
  std::vector<Figure> threads[2];
  for (int pair = 0; pair < settings.pairs; ++pair) {
    for (auto* into : {&ring, &threads}) {
      SwapRig rig(
          rig_options(settings, kMiB, 32, into == &ring ? IoEngine::kUring : IoEngine::kThreads));
      (*into)[0].push_back(rig.run(Pattern::kRead));
      (*into)[1].push_back(rig.run(Pattern::kWrite));
    }
  }
  for (const int way : {0, 1}) {
    const double fast = median_of(ring[way], &Figure::gb_per_s);
    const double plain = median_of(threads[way], &Figure::gb_per_s);
    fmt::print("{:5}  io_uring {:.2f} GB/s  threads {:.2f} GB/s  {:.3f} CPU s/GB  ratio {:.2f}\n",
               way == 0 ? "read" : "write", fast, plain,
               median_of(threads[way], &Figure::cpu_s_per_gb), plain / fast);
  }
}

template <typename T>
std::vector<T> parse_list(const std::string& text) {
  std::vector<T> values;
  std::istringstream stream(text);
  for (std::string item; std::getline(stream, item, ',');) {
    values.push_back(static_cast<T>(std::stoul(item)));
  }
  return values;
}

Settings parse(int argc, char** argv) {
  check(argc >= 2, ErrorCode::kUsage,
        "usage: bench_nvme DIR [--mib N] [--pairs N] [--blocks KiB,..] "
        "[--depths N,..]");
  Settings settings;
  settings.directory = argv[1];
  for (int i = 2; i + 1 < argc; i += 2) {
    const std::string name = argv[i];
    const std::string value = argv[i + 1];
    if (name == "--mib") {
      settings.file_mib = std::stoul(value);
    } else if (name == "--pairs") {
      settings.pairs = std::stoi(value);
    } else if (name == "--blocks") {
      settings.block_kib = parse_list<size_t>(value);
    } else if (name == "--depths") {
      settings.depths = parse_list<unsigned>(value);
    } else {
      fail(ErrorCode::kUsage, "unknown option {}", name);
    }
  }
  check(settings.file_mib * kMiB >= 2 * kChunkBytes && settings.pairs > 0, ErrorCode::kUsage,
        "use at least --mib {} and --pairs 1", 2 * kChunkBytes / kMiB);
  return settings;
}

}  // namespace

int main(int argc, char** argv) {
  try {
    const Settings settings = parse(argc, argv);
    {
      const SwapRig rig(rig_options(settings, kMiB, 8, IoEngine::kAuto));
      const DriveInfo& drive = rig.swapper().drives()[0];
      fmt::print("{} on {}, {}, {}; {} per run in chunks of {}\n", drive.path, drive.file_system,
                 drive.direct ? "O_DIRECT" : "page cache (" + drive.why_not_direct + ")",
                 rig.swapper().backend_name(), format_bytes(rig.bytes()),
                 format_bytes(kChunkBytes));
    }
    for (const size_t kib : settings.block_kib) {
      for (const unsigned depth : settings.depths) {
        compare_with_fio(settings, kib * kKiB, depth);
      }
    }
    compare_engines(settings);
    return 0;
  } catch (const std::exception& error) {
    fmt::print(stderr, "bench_nvme: {}\n", error.what());
    return 1;
  }
}
