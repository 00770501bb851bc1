// The two halves of a decoder layer as one operator each: between their parts lies no Python, which
// on a small model costs as much as the arithmetic.
#include <torch/library.h>

#include "thread_pool.h"
#include "torch_args.h"

namespace dlite {
namespace {

// down(silu(gate) * up) of x [rows, in], gate and up packed as one matrix.
Tensor mlp(const Tensor& x, const Tensor& gate_up, const std::optional<Tensor>& gate_up_bias,
           int64_t wide_features, const Tensor& down, const std::optional<Tensor>& down_bias,
           int64_t out_features) {
  return linear(silu_and_mul(linear(x, gate_up, wide_features, gate_up_bias)), down, out_features,
                down_bias);
}

// RMS norm of every head of `heads` [rows, count * size] in place; rows may be strided.
void norm_heads(const Tensor& heads, const Tensor& weight, double eps) {
  const PartTimer timer(kOther);
  const int64_t size = weight.numel(), count = heads.size(1) / size;
  bf16* data = const_cast<bf16*>(bf16_data(heads, "heads"));
  RmsNormArgs args{};
  args.x_stride = size;
  args.weight = bf16_data(weight, "norm weight");
  args.rows = count;
  args.size = size;
  args.eps = static_cast<float>(eps);
  args.dtype = Dtype::kBFloat16;
  constexpr int64_t kRows = 16;
  parallel_for((heads.size(0) + kRows - 1) / kRows, [&](int64_t chunk) {
    RmsNormArgs own = args;
    for (int64_t r = chunk * kRows; r < std::min((chunk + 1) * kRows, heads.size(0)); ++r) {
      own.x = own.y = data + r * heads.stride(0);
      kernels().rms_norm(own);
    }
  });
}

// o_proj(attention(rotary(norm(qkv_proj(x))))), with K and V written to their slots on the way.
// Both norms, or neither, are given.
Tensor attention_block(const Tensor& x, const Tensor& qkv_packed,
                       const std::optional<Tensor>& qkv_bias, int64_t num_heads,
                       const std::optional<Tensor>& query_norm,
                       const std::optional<Tensor>& key_norm, double eps, const Tensor& positions,
                       const Tensor& cos_sin, bool neox, const Tensor& slots,
                       const Tensor& key_cache, const Tensor& value_cache,
                       const Tensor& req_to_token, const Tensor& req_pool_indices,
                       const Tensor& seq_lens, const Tensor& query_starts, double scale,
                       int64_t window, const Tensor& o_packed,
                       const std::optional<Tensor>& o_bias, int64_t out_features) {
  TORCH_CHECK(key_cache.dim() == 3 && value_cache.dim() == 3, "the caches must be [slots, kv_heads, head_dim]");
  const int64_t head_dim = key_cache.size(2), value_dim = value_cache.size(2);
  const int64_t kv_heads = key_cache.size(1), rows = x.size(0);
  const int64_t query_size = num_heads * head_dim, key_size = kv_heads * head_dim;
  const int64_t value_size = kv_heads * value_dim;
  const Tensor qkv = linear(x, qkv_packed, query_size + key_size + value_size, qkv_bias);
  Tensor query = qkv.narrow(1, 0, query_size), key = qkv.narrow(1, query_size, key_size);
  if (query_norm) norm_heads(query, *query_norm, eps);
  if (key_norm) norm_heads(key, *key_norm, eps);
  rotary_(positions, query, key, head_dim, cos_sin, neox);
  store_kv(key.view({rows, kv_heads, head_dim}),
           qkv.narrow(1, query_size + key_size, value_size).view({rows, kv_heads, value_dim}),
           slots, key_cache, value_cache);
  const Tensor out = attention(query.view({rows, num_heads, head_dim}), key_cache, value_cache,
                               req_to_token, req_pool_indices, seq_lens, query_starts, scale,
                               window);
  return linear(out.view({rows, num_heads * value_dim}), o_packed, out_features, o_bias);
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(sglang_dlite_kernel, m) {
  m.def("mlp(Tensor x, Tensor gate_up, Tensor? gate_up_bias, int wide_features, Tensor down, "
        "Tensor? down_bias, int out_features) -> Tensor");
  m.def("attention_block(Tensor x, Tensor qkv_packed, Tensor? qkv_bias, int num_heads, "
        "Tensor? query_norm, Tensor? key_norm, float eps, Tensor positions, Tensor cos_sin, "
        "bool neox, Tensor slots, Tensor(a!) key_cache, Tensor(b!) value_cache, "
        "Tensor req_to_token, Tensor req_pool_indices, Tensor seq_lens, Tensor query_starts, "
        "float scale, int window, Tensor o_packed, Tensor? o_bias, int out_features) -> Tensor");
}

TORCH_LIBRARY_IMPL(sglang_dlite_kernel, CPU, m) {
  m.impl("mlp", &mlp);
  m.impl("attention_block", &attention_block);
}

}  // namespace dlite
