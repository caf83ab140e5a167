#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "orlop/config.h"
#include "orlop/error.h"
#include "orlop/export.h"
#include "orlop/plan.h"
#include "orlop/stats.h"

namespace orlop {

class Communicator;

inline constexpr int32_t kIgnoredLabel = -100;

// One micro-batch of micro_batch_size * sequence_length tokens, row after row.
//   tokens      token ids
//   labels      the id that each position is to predict (already shifted), or kIgnoredLabel
//   cu_seqlens  offsets of packed documents, ascending from 0 to the number of tokens; tokens
//               attend inside their own document only. Empty: every row is one
//               document.
struct MicroBatch {
  std::vector<int32_t> tokens;
  std::vector<int32_t> labels;
  std::vector<int32_t> cu_seqlens;
};

struct StepResult {
  int64_t step = 0;      // the number of this step, from 1
  double loss = 0;       // mean over the labelled tokens of the step, in nats
  double grad_norm = 0;  // global, before clipping
  double clip = 1;       // factor that clipping applied
  double learning_rate = 0;
  double loss_scale = 1;
  // A gradient was not finite. With clipping, or in fp16, no state changed and the step does not
  // count; else only the blocks whose gradients were finite were updated, and it counts.
  bool skipped = false;
  std::string nonfinite;  // the first such tensor, its block and the element; or empty
  int64_t tokens = 0;
  int64_t labelled_tokens = 0;
  double seconds = 0;
};

struct EvalResult {
  double loss = 0;  // mean over the labelled tokens, in nats
  int64_t labelled_tokens = 0;
};

enum class StateKind : uint8_t { kMaster, kExpAvg, kExpAvgSq };

// When save_checkpoint returns.
enum class SaveMode : uint8_t {
  kWait,        // when the checkpoint is complete
  kBackground,  // at once: it is written beside the steps that follow
};

struct TensorDescription {
  std::string name;
  std::vector<int64_t> shape;
  bool weight_decay = false;
};

// Trains one model, alone or as one rank of several that share it: each keeps and updates its part
// of all states and works on micro-batches of its own. Functions that all ranks must call together
// say so. Opened from a Hugging Face folder (config.json and safetensors); owns all
// states, the device and its threads. Called by one thread at a time. Every failure is an
// orlop::Error; after a failed step the engine refuses further steps, and the last checkpoint is as
// it was. In a forked child every call that works with states throws Error(kUsage) and the
// destructor does nothing. With EngineConfig::evaluate_only it evaluates and exports, and step(),
// read_state() and save_checkpoint() throw Error(kUsage).
class ORLOP_EXPORT Engine {
 public:
  // Plans, takes the memory of the plan, reads the weights. Throws Error(kDoesNotFit) with the
  // shortage per tier and the smallest change that fits before anything big is allocated.
  // A process that torchrun, mpirun or srun has started with others joins them; budgets for host
  // memory are then for all ranks of a machine together.
  static std::unique_ptr<Engine> open(const std::string& model_dir, const EngineConfig& config);

  // The plan that open() would make, from config.json alone; for each of `ranks` on this machine.
  static PlanReport plan(const std::string& model_dir, const EngineConfig& config, int ranks = 1);

  ~Engine();

  const PlanReport& plan() const;
  const EngineConfig& config() const;

  // One optimizer step over accumulation_steps micro-batches (a last step may have fewer). The
  // update of the optimizer may still run when this returns; whatever reads states waits for it.
  // All ranks together, each with its own micro-batches, or with none where the data ends: losses,
  // norms and tokens are those of all.
  StepResult step(std::span<const MicroBatch> batches);

  // Returns when the update of the last step is over and on its drives. Throws its error.
  void synchronize();

  // Mean loss without touching any state. All ranks together, with any number of micro-batches.
  EvalResult evaluate(std::span<const MicroBatch> batches);

  int64_t steps_done() const;

  int rank() const;
  int world_size() const;

  // Tensors by name, in file order; states as fp32. `values` has the tensor's number of elements.
  // States are read by all ranks together; all get the values.
  std::vector<TensorDescription> tensors() const;
  void read_state(const std::string& tensor, StateKind kind, std::span<float> values);

  // Writes run_dir/step-N/ (states, manifest last, rename) and keeps the newest `keep`.
  // `user_state` is stored in the manifest and given back by load_checkpoint: the place for the
  // data loader's position. Returns the folder's path. Until the manifest is written and the folder
  // has its name, the last checkpoint is the newest. All ranks together, into one folder that all
  // of them see; each writes its part.
  //
  // In the background the next step's update of a block waits until the block is written, or copied
  // to LimitsConfig::snapshot_bytes; plan().save_stall_seconds is what that is expected to cost. An
  // error reaches the caller, once, at the next call, and harms neither the run nor older
  // checkpoints. One save runs at a time: the next one waits for it, and so does the destructor.
  std::string save_checkpoint(const std::string& run_dir, const std::string& user_state, int keep,
                              SaveMode mode = SaveMode::kWait);

  // Returns when no save runs. Throws the error of the one that ran.
  void wait_for_save();

  // Reads one step-N folder into the present placement, whatever placement and number of ranks
  // wrote it. Returns user_state. All ranks together. An engine that only evaluates reads the
  // masters alone, rounded to its precision.
  std::string load_checkpoint(const std::string& step_dir);

  // The newest complete checkpoint of a run, or "". Newest is the one written last: after going
  // back to an older checkpoint, its successors and not those that were left behind.
  static std::string latest_checkpoint(const std::string& run_dir);

  // Writes a complete Hugging Face folder: weights in EngineConfig::precision, in files of at most
  // max_shard_bytes with an index where that makes several, config.json and the tokenizer files of
  // the folder the engine was opened from. All ranks together; rank 0 writes.
  void export_hf(const std::string& out_dir, size_t max_shard_bytes = size_t{5} << 30);

  Stats stats() const;

  // Records one lane per queue and thread until write_trace, which writes Chrome trace JSON.
  void start_trace();
  void write_trace(const std::string& path);

 private:
  class Impl;
  explicit Engine(std::unique_ptr<Impl> impl);
  friend std::unique_ptr<Engine> open_engine(const std::string& model_dir,
                                             const EngineConfig& config,
                                             std::shared_ptr<Communicator> ranks);
  std::unique_ptr<Impl> impl_;
};

// Where a DataLoader stands; plain numbers so that a checkpoint can hold them.
struct DataPosition {
  int64_t epoch = 0;
  int64_t row = 0;  // rows of this epoch that were handed out
};

// Of the micro-batches of all ranks, in the order of one stream, those of one: every world_size-th.
struct DataShare {
  int rank = 0;
  int world_size = 1;
};

// Deterministic batches from a token file (.tok). Documents are shuffled per epoch by (seed,
// epoch), laid end to end and cut into rows of sequence_length; a document never attends to
// another. The last, incomplete row of an epoch is padded with ignored labels.
class ORLOP_EXPORT DataLoader {
 public:
  DataLoader(const std::string& token_file, const BatchConfig& batch, uint64_t seed, bool shuffle,
             const DataShare& share = {});
  ~DataLoader();

  int64_t rows_per_epoch() const;
  int64_t tokens() const;
  int64_t vocab_size() const;  // as the file states it

  // This rank's next micro-batch; goes on into the next epoch. Passes over those of the other
  // ranks, so that after the same number of calls all ranks stand at the same position, from which
  // any number of ranks can go on.
  MicroBatch next();

  DataPosition position() const;
  void seek(const DataPosition& position);

 private:
  class Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace orlop
