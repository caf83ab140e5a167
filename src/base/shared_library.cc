#include "base/shared_library.h"

#include <dlfcn.h>
#include <fmt/format.h>

#include <filesystem>
#include <string_view>
#include <system_error>

namespace orlop {
namespace {

std::filesystem::path own_folder() {
  static const int address_in_this_file = 0;
  Dl_info info{};
  if (dladdr(&address_in_this_file, &info) == 0 || info.dli_fname == nullptr) return {};
  return std::filesystem::path(info.dli_fname).parent_path();
}

}  // namespace

SharedLibrary::SharedLibrary(const std::string& name) : name_(name) {
  const std::filesystem::path beside = own_folder() / name;
  std::error_code ignored;
  const bool is_beside = std::filesystem::exists(beside, ignored);
  handle_ = dlopen(is_beside ? beside.c_str() : name.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (handle_ == nullptr) error_ = dlerror();  // NOLINT(concurrency-mt-unsafe): per thread in glibc
}

void SharedLibrary::require_version(const char* function, const char* own) {
  const auto version = find<const char* (*)()>(function);
  if (version == nullptr || std::string_view(version()) == own) return;
  error_ = fmt::format("{} is of Orlop {}, what loads it of Orlop {}; install both from one build",
                       name_, version(), own);
}

void* SharedLibrary::find_address(const char* function) {
  if (handle_ == nullptr) return nullptr;
  void* address = dlsym(handle_, function);
  if (address == nullptr) error_ = fmt::format("{} is of another version of Orlop", name_);
  return address;
}

}  // namespace orlop
