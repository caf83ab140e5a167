#include "cpu_adam/cpu_features.h"

#include <cpuid.h>
#include <hwloc.h>
#include <sched.h>

#include <algorithm>
#include <charconv>
#include <cmath>
#include <cstdlib>
#include <memory>
#include <string_view>

#include "base/check.h"

namespace orlop {
namespace {

struct TopologyDeleter {
  void operator()(hwloc_topology* topology) const { hwloc_topology_destroy(topology); }
};
using Topology = std::unique_ptr<hwloc_topology, TopologyDeleter>;

struct BitmapDeleter {
  void operator()(hwloc_bitmap_s* bitmap) const { hwloc_bitmap_free(bitmap); }
};
using Bitmap = std::unique_ptr<hwloc_bitmap_s, BitmapDeleter>;

Topology load_topology(const std::string& synthetic) {
  hwloc_topology_t raw = nullptr;
  check(hwloc_topology_init(&raw) == 0, ErrorCode::kInternal, "hwloc: no topology could be made");
  Topology topology(raw);
  if (!synthetic.empty()) {
    check(hwloc_topology_set_synthetic(raw, synthetic.c_str()) == 0, ErrorCode::kUsage,
          "hwloc does not understand the topology \"{}\"", synthetic);
  }
  // What finds devices are plugins of the machine's hwloc, which may be of another version than the
  // one that a wheel carries. Those that are not there cannot be forbidden, which does not matter.
  for (const char* finder : {"pci", "opencl", "cuda", "nvml", "rsmi", "levelzero", "gl"}) {
    static_cast<void>(
        hwloc_topology_set_components(raw, HWLOC_TOPOLOGY_COMPONENTS_FLAG_BLACKLIST, finder));
  }
  check(hwloc_topology_load(raw) == 0, ErrorCode::kInternal, "hwloc: {}", errno_text(errno));
  return topology;
}

// Clang's __builtin_cpu_supports does not know this one.
bool cpu_has_f16c() {
  unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
  return __get_cpuid(1, &eax, &ebx, &ecx, &edx) != 0 && (ecx & bit_F16C) != 0;
}

bool cpu_has_avx2() {
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && cpu_has_f16c();
}

bool cpu_has_avx512() {
  return cpu_has_avx2() && __builtin_cpu_supports("avx512f") &&
         __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
         __builtin_cpu_supports("avx512vl");
}

Isa widest_isa() {
  if (cpu_has_avx512()) return Isa::kAvx512;
  return cpu_has_avx2() ? Isa::kAvx2 : Isa::kScalar;
}

}  // namespace

const char* isa_name(Isa isa) {
  switch (isa) {
    case Isa::kScalar:
      return "scalar";
    case Isa::kAvx2:
      return "avx2";
    case Isa::kAvx512:
      return "avx512";
  }
  return "?";
}

Isa active_isa() {
  static const Isa widest = widest_isa();  // in a virtual machine the question takes microseconds
  const char* limit = std::getenv("ORLOP_MAX_ISA");
  if (limit == nullptr || *limit == '\0') return widest;
  for (const Isa isa : {Isa::kScalar, Isa::kAvx2, Isa::kAvx512}) {
    if (std::string_view(limit) == isa_name(isa)) return std::min(isa, widest);
  }
  fail(ErrorCode::kUsage, "ORLOP_MAX_ISA=\"{}\" is not one of scalar, avx2, avx512", limit);
}

int physical_cores(const std::vector<int>& allowed, const std::string& synthetic) {
  const Topology topology = load_topology(synthetic);
  const Bitmap mask(hwloc_bitmap_alloc());
  for (const int cpu : allowed) hwloc_bitmap_set(mask.get(), static_cast<unsigned>(cpu));
  int cores = 0;
  hwloc_obj_t core = nullptr;
  while ((core = hwloc_get_next_obj_by_type(topology.get(), HWLOC_OBJ_CORE, core)) != nullptr) {
    if (hwloc_bitmap_intersects(core->cpuset, mask.get())) ++cores;
  }
  // A virtual machine may hide its cores: then every logical CPU counts as one.
  return cores > 0 ? cores : static_cast<int>(allowed.size());
}

// The mask grows until the kernel's fits.
std::vector<int> allowed_cpus() {
  for (int capacity = 1024; capacity <= 1 << 20; capacity *= 2) {
    std::unique_ptr<cpu_set_t, decltype([](cpu_set_t* set) { CPU_FREE(set); })> set(
        CPU_ALLOC(static_cast<size_t>(capacity)));
    const size_t bytes = CPU_ALLOC_SIZE(static_cast<size_t>(capacity));
    if (sched_getaffinity(0, bytes, set.get()) != 0) continue;
    std::vector<int> cpus;
    for (int cpu = 0; cpu < capacity; ++cpu) {
      if (CPU_ISSET_S(static_cast<size_t>(cpu), bytes, set.get())) cpus.push_back(cpu);
    }
    return cpus;
  }
  return {};
}

std::vector<int> part_of_cpus(const std::vector<int>& allowed, int index, int parts,
                              const std::string& synthetic) {
  const Topology topology = load_topology(synthetic);
  std::vector<std::vector<int>> cores;  // in hwloc's logical order: by package, memory, core
  hwloc_obj_t core = nullptr;
  while ((core = hwloc_get_next_obj_by_type(topology.get(), HWLOC_OBJ_CORE, core)) != nullptr) {
    std::vector<int> cpus;
    for (const int cpu : allowed) {
      if (hwloc_bitmap_isset(core->cpuset, static_cast<unsigned>(cpu)) != 0) cpus.push_back(cpu);
    }
    if (!cpus.empty()) cores.push_back(std::move(cpus));
  }
  if (cores.empty()) {  // hidden by a virtual machine
    for (const int cpu : allowed) cores.push_back({cpu});
  }
  const size_t length = cores.size() / static_cast<size_t>(parts);
  std::vector<int> part;
  for (size_t i = 0; i < length; ++i) {
    const std::vector<int>& cpus = cores[static_cast<size_t>(index) * length + i];
    part.insert(part.end(), cpus.begin(), cpus.end());
  }
  return part;
}

int usable_cores() {
  int cores = std::max(physical_cores(allowed_cpus()), 1);
  if (const std::optional<double> quota = cgroup_cpu_quota()) {
    // Rounded down: one thread beyond the quota would have the whole team throttled.
    const double whole = std::max(std::floor(*quota), 1.0);
    if (whole < cores) cores = static_cast<int>(whole);
  }
  return cores;
}

int default_threads() {
  const char* text = std::getenv("OMP_NUM_THREADS");
  if (text == nullptr || *text == '\0') return usable_cores();
  const std::string_view all(text);
  const std::string_view first = all.substr(0, all.find(','));  // one number per nesting level
  int threads = 0;
  const auto [end, error] = std::from_chars(first.data(), first.data() + first.size(), threads);
  check(error == std::errc() && end == first.data() + first.size() && threads >= 1,
        ErrorCode::kUsage, "OMP_NUM_THREADS=\"{}\" is not a number of threads", text);
  return threads;
}

std::string cpu_summary() {
  std::string sets;
  const auto add = [&sets](bool has, const char* name) {
    if (has) sets += sets.empty() ? name : std::string(", ") + name;
  };
  add(__builtin_cpu_supports("avx2"), "avx2");
  add(__builtin_cpu_supports("avx512f"), "avx512f");
  add(__builtin_cpu_supports("avx512bf16"), "avx512_bf16");
  const Topology topology = load_topology("");
  const int nodes = std::max(hwloc_get_nbobjs_by_type(topology.get(), HWLOC_OBJ_NUMANODE), 1);
  const int cores = usable_cores();
  return fmt::format("{} ({}), {} core{}, {} NUMA node{}", isa_name(active_isa()),
                     sets.empty() ? "no AVX2" : sets, cores, cores == 1 ? "" : "s", nodes,
                     nodes == 1 ? "" : "s");
}

}  // namespace orlop
