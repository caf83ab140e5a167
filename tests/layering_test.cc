// Includes may only point down. The table below is the picture of the layers:
//
//   5  src/engine           wires everything; the only folder that names both columns
//   4  src/zero  src/optim  |  src/host  gpu     coordination | implementations
//   3  src/model            |
//   2  src/backend -> src/comm
//   1  nvme -> src/memory   cpu_adam   src/formats
//   0  src/base -> include/orlop
//
// bindings see include/orlop only; tests and bench see anything and are not read.

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <map>
#include <optional>
#include <regex>
#include <set>
#include <string>
#include <vector>

namespace {

namespace fs = std::filesystem;
using Folders = std::set<std::string>;

// Folder -> the folders that its files may include, beside itself.
const std::map<std::string, Folders>& allowed_includes() {
  static const std::map<std::string, Folders> table = [] {
    const auto plus = [](Folders base, const Folders& more) {
      base.insert(more.begin(), more.end());
      return base;
    };
    const Folders base{"include/orlop", "src/base"};
    const Folders leaves = plus(base, {"nvme", "src/memory", "cpu_adam", "src/formats"});
    const Folders interfaces = plus(leaves, {"src/backend", "src/comm"});
    const Folders coordination = plus(interfaces, {"src/model"});
    return std::map<std::string, Folders>{
        {"include/orlop", {}},
        {"src/base", {"include/orlop"}},
        {"src/memory", base},
        {"cpu_adam", base},
        {"src/formats", base},
        {"nvme", plus(base, {"src/memory"})},
        {"src/comm", leaves},
        {"src/backend", plus(leaves, {"src/comm"})},
        {"src/model", interfaces},
        {"src/zero", coordination},
        {"src/optim", coordination},
        {"src/host", interfaces},
        {"gpu", interfaces},
        {"src/engine", plus(coordination, {"src/zero", "src/optim", "src/host", "gpu"})},
        {"bindings", {"include/orlop"}},
    };
  }();
  return table;
}

// The folder of the table that holds `path` (relative to the root of the sources).
std::optional<std::string> folder_of(const fs::path& path) {
  std::string name = path.generic_string();
  for (const auto& [folder, unused] : allowed_includes()) {
    if (name.starts_with(folder + "/")) return folder;
  }
  return std::nullopt;
}

// The folder that an include line means: the path is searched below the including file's folder,
// include, src and the root, as the compiler does.
std::optional<std::string> folder_of_include(const fs::path& root, const fs::path& includer,
                                             const std::string& included) {
  for (const fs::path& base : {includer.parent_path(), root / "include", root / "src", root}) {
    const fs::path candidate = (base / included).lexically_normal();
    if (fs::is_regular_file(candidate)) return folder_of(candidate.lexically_relative(root));
  }
  return folder_of(included);
}

bool is_source(const fs::path& path) {
  static const Folders extensions{".h", ".cc", ".cu", ".cuh", ".inl"};
  return extensions.contains(path.extension().string());
}

struct Findings {
  int files = 0;
  int includes = 0;  // of the project's own headers
  std::vector<std::string> violations;
};

void read_file(const fs::path& root, const fs::path& path, const std::string& folder,
               Findings& findings) {
  static const std::regex include_line(R"(^\s*#\s*include\s*([<"])([^>"]+)[>"])");
  const Folders& allowed = allowed_includes().at(folder);
  std::ifstream in(path);
  int number = 0;
  for (std::string line; std::getline(in, line);) {
    ++number;
    std::smatch match;
    if (!std::regex_search(line, match, include_line)) continue;
    const std::string included = match[2];
    const auto target = folder_of_include(root, path, included);
    const bool is_own = target.has_value();
    const std::string place =
        path.lexically_relative(root).generic_string() + ":" + std::to_string(number);
    if (is_own) ++findings.includes;
    if (is_own && *target != folder && !allowed.contains(*target)) {
      findings.violations.push_back(place + ": " + folder + " may not include " + *target + " (\"" +
                                    included + "\")");
    }
    // A quoted path that is nobody's: a file of tests or bench, or one that was moved.
    if (!is_own && match[1] == "\"") {
      findings.violations.push_back(place + ": \"" + included + "\" is in no folder of the table");
    }
  }
}

Findings check_layers(const fs::path& root) {
  Findings findings;
  for (const char* top : {"include", "src", "cpu_adam", "nvme", "gpu", "bindings"}) {
    if (!fs::exists(root / top)) continue;
    for (const auto& entry : fs::recursive_directory_iterator(root / top)) {
      if (!entry.is_regular_file() || !is_source(entry.path())) continue;
      const fs::path relative = entry.path().lexically_relative(root);
      const auto folder = folder_of(relative);
      ++findings.files;
      if (!folder) {
        findings.violations.push_back(relative.generic_string() + ": in no folder of the table");
        continue;
      }
      read_file(root, entry.path(), *folder, findings);
    }
  }
  return findings;
}

TEST(Layering, EveryIncludePointsDown) {
  const Findings findings = check_layers(ORLOP_SOURCE_DIR);
  EXPECT_GT(findings.files, 20) << "the sources were not found";
  EXPECT_GT(findings.includes, 50);
  for (const std::string& violation : findings.violations) ADD_FAILURE() << violation;
}

TEST(Layering, TheTableHasNoCycle) {
  // What is allowed is allowed transitively, so a cycle would show as a folder that reaches itself.
  for (const auto& [folder, targets] : allowed_includes()) {
    for (const std::string& target : targets) {
      EXPECT_FALSE(allowed_includes().at(target).contains(folder)) << folder << " <-> " << target;
      for (const std::string& next : allowed_includes().at(target)) {
        EXPECT_TRUE(targets.contains(next)) << folder << " -> " << target << " -> " << next;
      }
    }
  }
}

// A tree of its own with planted faults: each is found with file and line, and nothing else is.
TEST(Layering, PlantedIncludesAreFound) {
  const fs::path root =
      fs::temp_directory_path() / ("orlop-layering-" + std::to_string(::getpid()));
  const auto plant = [&](const std::string& file, const std::string& text) {
    fs::create_directories((root / file).parent_path());
    std::ofstream(root / file) << text;
  };
  plant("include/orlop/types.h", "#pragma once\n");
  plant("src/base/check.h", "#include <vector>\n#include \"orlop/types.h\"\n");
  plant("src/base/bad.cc", "#include \"base/check.h\"\n\n#include \"memory/host_arena.h\"\n");
  plant("src/memory/host_arena.h", "#include \"base/check.h\"\n");
  plant("src/zero/plan.cc", "#include \"optim/queue.h\"\n#include \"model/block.h\"\n");
  plant("src/optim/queue.h", "  #  include \"../zero/plan.h\"\n");
  plant("src/zero/plan.h", "// #include \"engine/executor.h\" is only text here\n");
  plant("src/model/block.h", "#include \"backend/backend.h\"\n#include <host/host_backend.h>\n");
  plant("src/backend/backend.h", "");
  plant("src/host/host_backend.h", "#include \"gpu/cuda_backend.h\"\n");
  plant("gpu/cuda_backend.h", "#include \"nccl.h\"\n");
  plant("gpu/kernels/adam.cu", "#include <nccl.h>\n#include \"model/block.h\"\n");
  plant("bindings/module.cc", "#include \"orlop/types.h\"\n#include \"base/check.h\"\n");
  plant("src/extra/new.h", "");

  const Findings findings = check_layers(root);
  fs::remove_all(root);
  EXPECT_EQ(findings.files, 14);
  EXPECT_THAT(
      findings.violations,
      ::testing::UnorderedElementsAre(
          "src/base/bad.cc:3: src/base may not include src/memory (\"memory/host_arena.h\")",
          "src/zero/plan.cc:1: src/zero may not include src/optim (\"optim/queue.h\")",
          "src/optim/queue.h:1: src/optim may not include src/zero (\"../zero/plan.h\")",
          "src/model/block.h:2: src/model may not include src/host (\"host/host_backend.h\")",
          "src/host/host_backend.h:1: src/host may not include gpu (\"gpu/cuda_backend.h\")",
          "gpu/cuda_backend.h:1: \"nccl.h\" is in no folder of the table",
          "gpu/kernels/adam.cu:2: gpu may not include src/model (\"model/block.h\")",
          "bindings/module.cc:2: bindings may not include src/base (\"base/check.h\")",
          "src/extra/new.h: in no folder of the table"));
}

}  // namespace
