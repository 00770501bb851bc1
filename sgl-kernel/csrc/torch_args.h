// Checks of tensors that become plain pointers; shared by the files that register operators.
#pragma once

#include <ATen/ATen.h>

#include <chrono>

#include "kernels.h"

namespace dlite {

using at::Tensor;

inline Dtype dtype_of(const Tensor& tensor, const char* name) {
  if (tensor.scalar_type() == at::kBFloat16) return Dtype::kBFloat16;
  TORCH_CHECK(tensor.scalar_type() == at::kFloat, name, " is ", tensor.scalar_type(),
              ", must be float32 or bfloat16");
  return Dtype::kFloat32;
}

inline void check_same(const Tensor& tensor, const Tensor& like, const char* name) {
  TORCH_CHECK(tensor.scalar_type() == like.scalar_type(), name, " is ", tensor.scalar_type(),
              ", must be ", like.scalar_type(), " as the input");
}

inline const bf16* bf16_data(const Tensor& tensor, const char* name) {
  TORCH_CHECK(tensor.scalar_type() == at::kBFloat16, name, " is ", tensor.scalar_type(),
              ", must be bfloat16");
  return static_cast<const bf16*>(tensor.const_data_ptr());
}

inline const int64_t* int64_data(const Tensor& tensor, int64_t count, const char* name) {
  TORCH_CHECK(tensor.scalar_type() == at::kLong && tensor.is_contiguous() &&
                  tensor.numel() == count && tensor.device().is_cpu(),
              name, " must be ", count, " contiguous int64 on the CPU");
  return tensor.const_data_ptr<int64_t>();
}

// Seconds spent in the kernels of each kind, in all threads' calls together; for `sglang-dlite
// profile`. Two clock reads a call are not noticed.
enum Part { kLinear, kAttention, kOther, kParts };

class PartTimer {
 public:
  explicit PartTimer(Part part) : part_(part), start_(std::chrono::steady_clock::now()) {}
  ~PartTimer() {
    const std::chrono::duration<double> spent = std::chrono::steady_clock::now() - start_;
    seconds[part_] += spent.count();
  }
  static double seconds[kParts];

 private:
  Part part_;
  std::chrono::steady_clock::time_point start_;
};

// The operators that other operators are made of (bindings.cpp).
Tensor linear(const Tensor& x, const Tensor& packed, int64_t out_features,
              const std::optional<Tensor>& bias);
Tensor silu_and_mul(const Tensor& x);
void rotary_(const Tensor& positions, Tensor query, Tensor key, int64_t head_dim,
             const Tensor& cos_sin, bool neox);
void store_kv(const Tensor& key, const Tensor& value, const Tensor& slots, Tensor key_cache,
              Tensor value_cache);
Tensor attention(const Tensor& query, const Tensor& key_cache, const Tensor& value_cache,
                 const Tensor& req_to_token, const Tensor& req_pool_indices,
                 const Tensor& seq_lens, const Tensor& query_starts, double scale, int64_t window);

}  // namespace dlite
