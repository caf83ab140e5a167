#pragma once

#include <memory>
#include <string>

#include "comm/communicator.h"
#include "orlop/engine.h"

namespace orlop {

// Engine::open() as one of the given ranks. All ranks call it, with the same arguments but for what
// belongs to their machine.
std::unique_ptr<Engine> open_engine(const std::string& model_dir, const EngineConfig& config,
                                    std::shared_ptr<Communicator> ranks);

}  // namespace orlop
