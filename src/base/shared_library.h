#pragma once

#include <string>

namespace orlop {

// A part of Orlop in a library of its own, once loaded; stays for the life of the process.
class SharedLibrary {
 public:
  // Looks beside the file that holds this code, then where the loader looks. Never throws: error()
  // says why it is not there.
  explicit SharedLibrary(const std::string& name);

  bool loaded() const { return error_.empty(); }
  const std::string& error() const { return error_; }
  void explain(const std::string& more) { error_ += more; }

  // Whether `function`, which says what version of Orlop the library is of, says `own`; else an
  // error from then on.
  void require_version(const char* function, const char* own);

  // Null, and an error from then on, when the library does not have it.
  template <typename Function>
  Function find(const char* function) {
    return reinterpret_cast<Function>(find_address(function));
  }

 private:
  void* find_address(const char* function);

  std::string name_;
  void* handle_ = nullptr;
  std::string error_;
};

}  // namespace orlop
