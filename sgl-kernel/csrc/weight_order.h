// Which weights are read after which: a model reads them in the same order at every step.
#pragma once

#include <cstdint>

namespace dlite {

// To be called before weights are read: tells the team what was read after them the last time.
void weights_begin(const void* weights, int64_t bytes);

}  // namespace dlite
