#pragma once

#include <memory>
#include <span>
#include <vector>

#include "nvme/io_queue.h"
#include "nvme/shard_file.h"

namespace orlop::nvme {

// How the bytes of a swapper are shared between its files.
struct DriveWeights {
  std::vector<double> weights;  // by file
  bool are_known = false;       // bandwidths, as given or measured; else all alike
};

// `given`: of the files, or empty; then they are measured if the files lie on several drives, in
// the files, which are reserved anew afterwards. Throws Error(kUsage) for one that is not above 0,
// and as ShardFile::reserve() does.
DriveWeights drive_weights(IoQueue& queue, std::span<const std::unique_ptr<ShardFile>> files,
                           const std::vector<double>& given);

}  // namespace orlop::nvme
