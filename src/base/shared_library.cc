#include "base/shared_library.h"

#include <dlfcn.h>
#include <fmt/format.h>

#include <filesystem>

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
  handle_ = dlopen((own_folder() / name).c_str(), RTLD_NOW | RTLD_LOCAL);
  if (handle_ == nullptr) handle_ = dlopen(name.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (handle_ == nullptr) error_ = dlerror();  // NOLINT(concurrency-mt-unsafe): per thread in glibc
}

void* SharedLibrary::find_address(const char* function) {
  if (handle_ == nullptr) return nullptr;
  void* address = dlsym(handle_, function);
  if (address == nullptr) error_ = fmt::format("{} is of another version of Orlop", name_);
  return address;
}

}  // namespace orlop
