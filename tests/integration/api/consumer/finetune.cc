// Fine-tunes a Hugging Face folder from C++: finetune MODEL_DIR DATA.tok OUT_DIR
#include <orlop/engine.h>

#include <cstdio>
#include <vector>

int main(int argc, char** argv) try {
  if (argc != 4) {
    std::fprintf(stderr, "usage: finetune MODEL_DIR DATA.tok OUT_DIR\n");
    return 2;
  }
  orlop::EngineConfig config;
  config.batch = {.micro_batch_size = 2, .sequence_length = 32, .accumulation_steps = 2};
  config.optimizer.learning_rate = 1e-3;
  config.schedule.total_steps = 20;
  config.placement.resident_blocks = 0;  // every block comes up from host memory when it is needed

  orlop::DataLoader loader(argv[2], config.batch, /*seed=*/0, /*shuffle=*/true);
  const auto engine = orlop::Engine::open(argv[1], config);
  std::puts(engine->plan().to_text().c_str());

  while (engine->steps_done() < config.schedule.total_steps) {
    std::vector<orlop::MicroBatch> batches;
    for (int64_t i = 0; i < config.batch.accumulation_steps; ++i) batches.push_back(loader.next());
    const orlop::StepResult result = engine->step(batches);
    std::printf("step %2lld  loss %.4f  norm %.3f\n", static_cast<long long>(result.step),
                result.loss, result.grad_norm);
  }
  engine->export_hf(argv[3]);
  return 0;
} catch (const orlop::Error& error) {
  std::fprintf(stderr, "error: %s\n", error.what());
  return orlop::exit_code(error.code());
}
