// Memory for packed weights, on huge pages where the system allows them.
#pragma once

#include <cstddef>
#include <memory>

namespace tokenmill {

// At least `num_bytes` of zeroed memory, aligned to a cache line. Small buffers share large chunks,
// each given back when its last buffer is gone; memory of a single buffer is not used again.
// Throws std::bad_alloc.
std::shared_ptr<void> allocate_weights(std::size_t num_bytes);

}  // namespace tokenmill
