#include "weight_order.h"

#include <mutex>
#include <unordered_map>

#include "thread_pool.h"

namespace dlite {
namespace {

struct Weights {
  const void* data = nullptr;
  int64_t bytes = 0;
};

}  // namespace

void weights_begin(const void* weights, int64_t bytes) {
  static std::mutex mutex;
  static std::unordered_map<const void*, Weights> successor;
  static const void* previous = nullptr;
  const std::unique_lock<std::mutex> lock(mutex, std::try_to_lock);
  if (!lock.owns_lock()) return;  // another thread computes as well: no order to speak of
  if (previous != nullptr) successor[previous] = {weights, bytes};
  previous = weights;
  const auto next = successor.find(weights);
  // Only prefetched, never read: weights that were freed since do no harm.
  if (next == successor.end()) expect_next(nullptr, 0);
  else expect_next(next->second.data, next->second.bytes);
}

}  // namespace dlite
