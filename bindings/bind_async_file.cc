#include <Python.h>
#include <pybind11/numpy.h>

#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "bindings/bind.h"
#include "orlop/swapper.h"

namespace py = pybind11;

namespace orlop::python {
namespace {

// The part of the DLPack ABI (dlpack.h, version 0.x) that tells where a tensor lies.
struct DlTensor {
  void* data;
  int32_t device_type;
  int32_t device_id;
  int32_t ndim;
  uint8_t type_code;
  uint8_t type_bits;
  uint16_t type_lanes;
  int64_t* shape;
  int64_t* strides;  // in elements; null: row after row
  uint64_t byte_offset;
};
constexpr int32_t kDlCpu = 1;
constexpr int32_t kDlCudaHost = 3;

// Contiguous memory of a Python object, which cannot be freed or moved meanwhile. Made and
// destroyed under the interpreter lock.
class HeldBuffer {
 public:
  HeldBuffer(const py::object& source, bool writable) {
    if (PyObject_CheckBuffer(source.ptr()) != 0) {
      if (PyObject_GetBuffer(source.ptr(), &view_, writable ? PyBUF_WRITABLE : PyBUF_SIMPLE) != 0) {
        throw py::error_already_set();
      }
      data_ = view_.buf;
      bytes_ = static_cast<size_t>(view_.len);
    } else if (py::hasattr(source, "__dlpack__")) {
      hold_tensor(source);
    } else {
      throw Error(ErrorCode::kUsage,
                  "AsyncFile: a buffer is a numpy array, an object with the buffer protocol or a "
                  "CPU tensor with __dlpack__");
    }
  }
  ~HeldBuffer() {
    if (view_.obj != nullptr) PyBuffer_Release(&view_);
  }
  HeldBuffer(const HeldBuffer&) = delete;
  HeldBuffer& operator=(const HeldBuffer&) = delete;

  void* data() const { return data_; }
  size_t bytes() const { return bytes_; }

 private:
  void hold_tensor(const py::object& source) {
    capsule_ = source.attr("__dlpack__")();
    const auto* tensor =
        static_cast<const DlTensor*>(PyCapsule_GetPointer(capsule_.ptr(), "dltensor"));
    if (tensor == nullptr) throw py::error_already_set();
    if (tensor->device_type != kDlCpu && tensor->device_type != kDlCudaHost) {
      throw Error(ErrorCode::kUsage, "AsyncFile: the tensor is not in host memory");
    }
    int64_t numel = 1;
    for (int32_t i = tensor->ndim - 1; i >= 0; --i) {
      if (tensor->strides != nullptr && tensor->shape[i] != 1 && tensor->strides[i] != numel) {
        throw Error(ErrorCode::kUsage, "AsyncFile: the tensor is not contiguous");
      }
      numel *= tensor->shape[i];
    }
    data_ = static_cast<std::byte*>(tensor->data) + tensor->byte_offset;
    bytes_ = static_cast<size_t>(numel) * tensor->type_bits * tensor->type_lanes / 8;
  }

  void* data_ = nullptr;
  size_t bytes_ = 0;
  Py_buffer view_{};
  py::object capsule_;  // its owner frees the tensor when the capsule goes
};

std::string path_of(const py::object& path) {
  return py::module_::import("os").attr("fspath")(path).cast<std::string>();
}

// AsyncFile with the buffers of its transfers under way.
class AsyncFileHandle {
 public:
  explicit AsyncFileHandle(const AsyncFileOptions& options)
      : file_(std::make_unique<AsyncFile>(options)) {}
  ~AsyncFileHandle() {
    const py::gil_scoped_release release;
    file_.reset();  // ends what is in flight before its buffers go
  }
  AsyncFileHandle(const AsyncFileHandle&) = delete;
  AsyncFileHandle& operator=(const AsyncFileHandle&) = delete;

  AsyncFile& file() { return *file_; }

  // `target`: a path, or, for an async call, an open file descriptor.
  size_t transfer(bool reads, const py::object& buffer, const py::object& target, bool validate,
                  bool async, uint64_t offset) {
    auto held = std::make_unique<HeldBuffer>(buffer, reads);
    void* const data = held->data();
    const size_t bytes = held->bytes();
    size_t count = 0;
    if (py::isinstance<py::int_>(target)) {
      const int fd = target.cast<int>();
      const py::gil_scoped_release release;
      count = reads ? file_->async_pread(data, bytes, fd, offset)
                    : file_->async_pwrite(data, bytes, fd, offset);
    } else {
      const std::string path = path_of(target);
      const py::gil_scoped_release release;
      count = reads ? file_->pread(data, bytes, path, validate, async, offset)
                    : file_->pwrite(data, bytes, path, validate, async, offset);
    }
    if (async) held_.push_back(std::move(held));
    return count;
  }

  size_t wait() {
    const auto drop = std::exchange(held_, {});
    const py::gil_scoped_release release;
    return file_->wait();
  }

  // An array, or a tensor where `example` is one of torch's, of `numel` elements in locked memory
  // that lives as long as this object, or until it is freed.
  static py::object new_locked(const py::object& self, int64_t numel, const py::object& example) {
    auto& handle = self.cast<AsyncFileHandle&>();
    if (numel < 0) throw Error(ErrorCode::kUsage, "new_cpu_locked_tensor: num_elem is negative");
    const bool is_array = py::isinstance<py::array>(example);
    const size_t element = is_array ? example.attr("itemsize").cast<size_t>()
                                    : example.attr("element_size")().cast<size_t>();
    const size_t bytes = static_cast<size_t>(numel) * element;
    void* memory = handle.file().new_cpu_locked_tensor(bytes);
    const py::array_t<uint8_t> raw(static_cast<py::ssize_t>(bytes),
                                   static_cast<const uint8_t*>(memory), self);
    if (is_array) return raw.attr("view")(example.attr("dtype"));
    return py::module_::import("torch").attr("frombuffer")(
        raw, py::arg("dtype") = example.attr("dtype"));
  }

 private:
  std::vector<std::unique_ptr<HeldBuffer>> held_;
  std::unique_ptr<AsyncFile> file_;
};

void bind_transfers(py::class_<AsyncFileHandle>& file) {
  using Handle = AsyncFileHandle;
  for (const bool reads : {true, false}) {
    const auto name = [&](const char* prefix, const char* suffix = "") {
      return std::string(prefix) + (reads ? "read" : "write") + suffix;
    };
    const std::string direction = reads ? "Reads a whole buffer from a file"
                                        : "Writes a whole buffer to a file, which it may lengthen";
    file.def(
            name("p").c_str(),
            [reads](Handle& self, const py::object& buffer, const py::object& filename,
                    bool validate, bool async, uint64_t offset) {
              return self.transfer(reads, buffer, filename, validate, async, offset);
            },
            py::arg("buffer"), py::arg("filename"), py::arg("validate"), py::arg("async_"),
            py::arg("file_offset") = 0,
            (direction + ". async_: returns 0 at once, and the buffer is held until wait().")
                .c_str())
        .def(
            name("").c_str(),
            [reads](Handle& self, const py::object& buffer, const py::object& filename,
                    bool validate, uint64_t offset) {
              return self.transfer(reads, buffer, filename, validate, false, offset);
            },
            py::arg("buffer"), py::arg("filename"), py::arg("validate") = false,
            py::arg("file_offset") = 0,
            (direction + " and returns 1. validate: reads the file once more and compares.")
                .c_str())
        .def(
            name("sync_p").c_str(),
            [reads](Handle& self, const py::object& buffer, const py::object& filename,
                    uint64_t offset) {
              return self.transfer(reads, buffer, filename, false, false, offset);
            },
            py::arg("buffer"), py::arg("filename"), py::arg("file_offset") = 0,
            (direction + " and returns 1.").c_str())
        .def(
            name("async_p").c_str(),
            [reads](Handle& self, const py::object& buffer, const py::object& target,
                    uint64_t offset) {
              return self.transfer(reads, buffer, target, false, true, offset);
            },
            py::arg("buffer"), py::arg("file"), py::arg("file_offset") = 0,
            (direction + ", given by path or as an open descriptor; returns 0 at once. The buffer "
                         "is held until wait().")
                .c_str());
  }
}

}  // namespace

void bind_async_file(py::module_& module) {
  py::class_<AsyncFileHandle> file(
      module, "AsyncFile",
      "Moves whole buffers to and from files, deep in the queue of the drive, past the page cache "
      "where that is possible. Buffers: numpy arrays, whatever has the buffer protocol, CPU "
      "tensors "
      "by DLPack; contiguous, of any length, alignment and dtype. The verbs are those of "
      "DeepSpeed's "
      "aio_handle; single_submit, overlap_events and intra_op_parallelism are taken and have no "
      "effect. engine: auto, io_uring or threads. Used by one thread at a time; waits without the "
      "interpreter lock.");
  file.def(py::init([](size_t block_size, unsigned queue_depth, bool, bool, int, bool direct,
                       const std::string& engine) {
             return std::make_unique<AsyncFileHandle>(
                 AsyncFileOptions{block_size, queue_depth, direct, engine});
           }),
           py::arg("block_size") = AsyncFileOptions{}.block_bytes,
           py::arg("queue_depth") = AsyncFileOptions{}.queue_depth,
           py::arg("single_submit") = false, py::arg("overlap_events") = false,
           py::arg("intra_op_parallelism") = 1, py::kw_only(), py::arg("direct") = true,
           py::arg("engine") = "auto");
  bind_transfers(file);
  file.def(
          "wait", &AsyncFileHandle::wait,
          "Waits for the async calls since the last wait() and returns how many there were. Raises "
          "the first error after all have ended.")
      .def("new_cpu_locked_tensor", &AsyncFileHandle::new_locked, py::arg("num_elem"),
           py::arg("example"),
           "An array, or torch tensor, like `example` of so many elements in page-aligned memory "
           "that is locked where the limits allow it.")
      .def(
          "free_cpu_locked_tensor",
          [](AsyncFileHandle& self, const py::object& tensor) {
            void* const memory = HeldBuffer(tensor, false).data();
            self.file().free_cpu_locked_tensor(memory);
          },
          py::arg("tensor"), "Frees such a tensor, which must not be used any more.")
      .def("get_block_size", [](AsyncFileHandle& self) { return self.file().block_bytes(); })
      .def("get_queue_depth", [](AsyncFileHandle& self) { return self.file().queue_depth(); })
      .def("get_single_submit", [](AsyncFileHandle&) { return false; })
      .def("get_overlap_events", [](AsyncFileHandle&) { return true; })
      .def("get_intra_op_parallelism", [](AsyncFileHandle&) { return 1; })
      .def("get_alignment", [](AsyncFileHandle& self) { return self.file().alignment(); })
      .def_property_readonly("backend", [](AsyncFileHandle& self) { return self.file().backend(); })
      .def_property_readonly("backend_reason",
                             [](AsyncFileHandle& self) { return self.file().backend_reason(); });
}

}  // namespace orlop::python
