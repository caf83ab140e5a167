// Other end of safetensors_interop.py.
//   safetensors_interop write FILE      writes tensors that the script knows
//   safetensors_interop read FILE_OR_FOLDER   prints "name dtype shape sum" of every tensor; sum
//   weighs byte i with i + 1

#include <fmt/format.h>

#include <cstdint>
#include <cstdio>
#include <cstring>
#include <span>
#include <string>
#include <vector>

#include "formats/safetensors.h"
#include "formats/safetensors_writer.h"

namespace orlop {
namespace {

// numel consecutive numbers 0, 1, 2, ...
template <typename T>
void write_range(SafetensorsWriter& writer, const char* name, size_t numel) {
  std::vector<T> values(numel);
  for (size_t i = 0; i < numel; ++i) values[i] = static_cast<T>(i);
  writer.write(name, 0, std::as_bytes(std::span(values)));
}

void write(const char* path) {
  SafetensorsWriter writer(path,
                           {{"i8", DType::kI8, {5}},
                            {"f32", DType::kF32, {3, 7}},
                            {"i64 \"quoted\" \xc3\xa9", DType::kI64, {2, 1, 2}},
                            {"none", DType::kF16, {0, 3}},
                            {"scalar", DType::kF64, {}}},
                           {{"format", "pt"}, {"a \"key\"", "a\nvalue"}});
  write_range<int8_t>(writer, "i8", 5);
  write_range<float>(writer, "f32", 21);
  write_range<int64_t>(writer, "i64 \"quoted\" \xc3\xa9", 4);
  write_range<double>(writer, "scalar", 1);
  writer.finish();
}

void read(const char* path) {
  const SafetensorsReader reader(path);
  for (const TensorInfo& tensor : reader.tensors()) {
    std::vector<std::byte> bytes(tensor.bytes);
    reader.read(tensor, 0, bytes);
    uint64_t sum = 0;
    for (size_t i = 0; i < bytes.size(); ++i) sum += (i + 1) * static_cast<uint64_t>(bytes[i]);
    fmt::print("{} {} {} {}\n", tensor.name, dtype_name(tensor.dtype), shape_text(tensor.shape),
               sum);
  }
}

}  // namespace
}  // namespace orlop

int main(int argc, char** argv) {
  if (argc != 3) return 2;
  try {
    if (std::strcmp(argv[1], "write") == 0) {
      orlop::write(argv[2]);
    } else {
      orlop::read(argv[2]);
    }
  } catch (const std::exception& error) {
    fmt::print(stderr, "{}\n", error.what());
    return 1;
  }
  return 0;
}
