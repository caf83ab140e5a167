#include <pybind11/numpy.h>

#include <limits>
#include <memory>
#include <string>
#include <vector>

#include "bindings/bind.h"
#include "orlop/engine.h"
#include "orlop/token_writer.h"

namespace py = pybind11;

namespace orlop::python {
namespace {

// Any integer array (numpy, a sequence, or a CPU tensor by DLPack), flattened row by row. Ids that
// int32 cannot hold are refused rather than cut.
std::vector<int32_t> to_int32(const py::object& source, const std::string& name) {
  const py::module_ numpy = py::module_::import("numpy");
  const bool is_array = py::isinstance<py::array>(source);
  const bool by_dlpack = !is_array && py::hasattr(source, "__dlpack__");
  const py::array array = numpy.attr(by_dlpack ? "from_dlpack" : "asarray")(source);
  const char kind = array.dtype().kind();
  if (array.size() == 0) return {};
  if (kind != 'i' && kind != 'u') {
    throw Error(ErrorCode::kUsage, name + ": expected integers, got dtype " +
                                       py::str(array.dtype()).cast<std::string>());
  }
  // One cast for every width; what uint64 alone can hold is above int32 anyway and turns negative
  // below.
  const auto wide = py::array_t<int64_t, py::array::c_style | py::array::forcecast>(array);
  std::vector<int32_t> values(static_cast<size_t>(wide.size()));
  const int64_t* data = wide.data();
  for (size_t i = 0; i < values.size(); ++i) {
    if (data[i] < std::numeric_limits<int32_t>::min() ||
        data[i] > std::numeric_limits<int32_t>::max()) {
      throw Error(ErrorCode::kUsage, name + "[" + std::to_string(i) +
                                         "] = " + std::to_string(data[i]) + " does not fit int32");
    }
    values[i] = static_cast<int32_t>(data[i]);
  }
  return values;
}

// A view of one member that keeps its batch alive.
py::array_t<int32_t> view(const py::object& batch, std::vector<int32_t>& values) {
  return py::array_t<int32_t>(static_cast<py::ssize_t>(values.size()), values.data(), batch);
}

void bind_micro_batch(py::module_& module) {
  py::class_<MicroBatch> batch(
      module, "MicroBatch",
      "One micro-batch of micro_batch_size * sequence_length tokens, row after row.\n\n"
      "tokens: ids. labels: the id that each position is to predict (already shifted), or "
      "IGNORED_LABEL. cu_seqlens: offsets of packed documents, from 0 to the number of tokens; "
      "tokens "
      "attend inside their own document only; empty: every row is one document.");
  batch
      .def(py::init([](const py::object& tokens, const py::object& labels,
                       const py::object& cu_seqlens) {
             return MicroBatch{.tokens = to_int32(tokens, "MicroBatch.tokens"),
                               .labels = to_int32(labels, "MicroBatch.labels"),
                               .cu_seqlens = to_int32(cu_seqlens, "MicroBatch.cu_seqlens")};
           }),
           py::arg("tokens"), py::arg("labels"), py::arg("cu_seqlens") = py::tuple())
      .def_property_readonly(
          "tokens",
          [](const py::object& self) { return view(self, self.cast<MicroBatch&>().tokens); })
      .def_property_readonly(
          "labels",
          [](const py::object& self) { return view(self, self.cast<MicroBatch&>().labels); })
      .def_property_readonly("cu_seqlens", [](const py::object& self) {
        return view(self, self.cast<MicroBatch&>().cu_seqlens);
      });
}

void append_document(TokenWriter& writer, const py::object& tokens, const py::object& loss_mask) {
  const std::vector<int32_t> ids = to_int32(tokens, "TokenWriter.append: tokens");
  std::vector<uint8_t> mask;
  if (!loss_mask.is_none()) {
    const auto flags = py::array_t<bool, py::array::c_style | py::array::forcecast>(loss_mask);
    mask.assign(flags.data(), flags.data() + flags.size());
  }
  const py::gil_scoped_release release;
  writer.append(ids, mask);
}

void bind_token_files(py::module_& module) {
  py::class_<TokenWriter>(module, "TokenWriter",
                          "Writes a token file (.tok) document by document; nothing appears under "
                          "`path` before finish().\n\n"
                          "tokenizer_file: its hash goes into the header; '': unknown.")
      .def(py::init([](const std::string& path, int64_t vocab_size, bool loss_mask,
                       const std::string& tokenizer_file) {
             return std::make_unique<TokenWriter>(
                 path, TokenWriterConfig{vocab_size, loss_mask, tokenizer_file});
           }),
           py::arg("path"), py::arg("vocab_size"), py::arg("loss_mask") = false,
           py::arg("tokenizer_file") = "")
      .def("append", &append_document, py::arg("tokens"), py::arg("loss_mask") = py::none(),
           "One document of integer ids, with one boolean per token or None: every token counts.")
      .def("finish", &TokenWriter::finish, py::call_guard<py::gil_scoped_release>());

  py::class_<TokenFileSummary>(module, "TokenFileSummary")
      .def_readonly("tokens", &TokenFileSummary::tokens)
      .def_readonly("documents", &TokenFileSummary::documents)
      .def_readonly("vocab_size", &TokenFileSummary::vocab_size)
      .def_readonly("bits_per_token", &TokenFileSummary::bits_per_token)
      .def_readonly("has_loss_mask", &TokenFileSummary::has_loss_mask)
      .def_readonly("hash_matches", &TokenFileSummary::hash_matches);
  module.def("describe_token_file", &describe_token_file, py::arg("path"),
             py::call_guard<py::gil_scoped_release>(),
             "What a token file (.tok, or one of llm.c) holds. Raises InvalidDataError.");
}

}  // namespace

void bind_data(py::module_& module) {
  bind_micro_batch(module);
  bind_token_files(module);

  py::class_<DataPosition> position(module, "DataPosition", "Where a DataLoader stands.");
  def_keyword_init<DataPosition>(position);
  position.def_readwrite("epoch", &DataPosition::epoch).def_readwrite("row", &DataPosition::row);

  using Release = py::call_guard<py::gil_scoped_release>;
  py::class_<DataLoader>(module, "DataLoader",
                         "Deterministic batches from a token file. Documents are shuffled per "
                         "epoch by (seed, epoch), laid "
                         "end to end and cut into rows; a document never attends to another. The "
                         "last, incomplete row of an epoch is padded with IGNORED_LABEL.")
      .def(py::init([](const std::string& token_file, const BatchConfig& batch, uint64_t seed,
                       bool shuffle, int rank, int world_size) {
             return std::make_unique<DataLoader>(token_file, batch, seed, shuffle,
                                                 DataShare{rank, world_size});
           }),
           py::arg("token_file"), py::arg("batch"), py::arg("seed"), py::arg("shuffle"),
           py::arg("rank") = 0, py::arg("world_size") = 1, Release(),
           "Of several ranks, each gets every world_size-th micro-batch of one stream.")
      .def("rows_per_epoch", &DataLoader::rows_per_epoch)
      .def("tokens", &DataLoader::tokens)
      .def("vocab_size", &DataLoader::vocab_size)
      .def("next", &DataLoader::next, Release(),
           "The next micro-batch; goes on into the next epoch.")
      .def("position", &DataLoader::position,
           "Where next() goes on: the same for all ranks after as many calls.")
      .def("seek", &DataLoader::seek, py::arg("position"), Release());
}

}  // namespace orlop::python
