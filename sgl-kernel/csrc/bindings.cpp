// torch.ops.sglang_dlite_kernel: checks the tensors and hands their pointers to the kernels.
#include <Python.h>
#include <sys/mman.h>

#include <torch/library.h>

#include <cstring>

#include "thread_pool.h"
#include "torch_args.h"

namespace dlite {

double PartTimer::seconds[kParts] = {};

namespace {

// x [..., size] as rows: elements between two of them, where the leading dimensions allow one.
struct Rows {
  Tensor tensor;
  int64_t rows;
  int64_t stride;
};

Rows as_rows(const Tensor& x, const char* name) {
  TORCH_CHECK(x.device().is_cpu(), name, " is on ", x.device(), ", must be on the CPU");
  TORCH_CHECK(x.dim() >= 1, name, " is a scalar");
  const int64_t size = x.size(-1), rows = size == 0 ? 0 : x.numel() / size;
  if (x.dim() == 2 && x.stride(1) == 1) return {x, rows, x.stride(0)};
  return {x.contiguous(), rows, size};
}

int64_t packed_size(int64_t out_features, int64_t in_features) {
  return packed_elements(out_features, in_features);
}

void pack(const Tensor& weight, Tensor packed) {
  TORCH_CHECK(weight.dim() == 2, "weight has ", weight.dim(), " dimensions, must have 2");
  const Tensor source = weight.contiguous();
  const int64_t out = source.size(0), in = source.size(1);
  bf16_data(packed, "packed");
  TORCH_CHECK(packed.is_contiguous() && packed.numel() == packed_elements(out, in),
              "packed must be ", packed_elements(out, in), " contiguous elements");
  pack_linear(bf16_data(source, "weight"), out, in, static_cast<bf16*>(packed.data_ptr()));
}

// Streaming 200 MB through 4 KB pages costs a third of the bandwidth in address translation. Memory
// that was not touched yet gets 2 MB pages, where the system has them; elsewhere nothing happens.
void advise_huge_pages(Tensor memory) {
  constexpr uintptr_t kHugePage = 2 << 20;
  const uintptr_t begin = reinterpret_cast<uintptr_t>(memory.data_ptr());
  const uintptr_t first = (begin + kHugePage - 1) / kHugePage * kHugePage;
  const uintptr_t end = (begin + memory.nbytes()) / kHugePage * kHugePage;
  if (first < end) madvise(reinterpret_cast<void*>(first), end - first, MADV_HUGEPAGE);
}

}  // namespace

Tensor linear(const Tensor& x, const Tensor& packed, int64_t out_features,
              const std::optional<Tensor>& bias) {
  const Rows rows = as_rows(x, "x");
  const int64_t in_features = x.size(-1);
  TORCH_CHECK(packed.numel() == packed_elements(out_features, in_features), "packed has ",
              packed.numel(), " elements, must have ", packed_elements(out_features, in_features),
              " for ", out_features, " outputs of ", in_features, " inputs");
  if (bias) {
    TORCH_CHECK(bias->numel() == out_features && bias->is_contiguous(), "bias must be [",
                out_features, "] and contiguous");
  }
  auto shape = x.sizes().vec();
  shape.back() = out_features;
  Tensor y = at::empty(shape, x.options());
  const PartTimer timer(kLinear);
  kernels().linear({bf16_data(rows.tensor, "x"), rows.stride, bf16_data(packed, "packed"),
                    bias ? bf16_data(*bias, "bias") : nullptr, static_cast<bf16*>(y.data_ptr()),
                    out_features, rows.rows, in_features, out_features});
  return y;
}

namespace {

RmsNormArgs norm_args(const Rows& rows, const Tensor& weight, double eps, Tensor& y) {
  const int64_t size = y.size(-1);
  check_same(weight, rows.tensor, "weight");
  TORCH_CHECK(weight.numel() == size && weight.is_contiguous(), "weight must be [", size,
              "] and contiguous");
  RmsNormArgs args{};
  args.x = rows.tensor.const_data_ptr();
  args.x_stride = rows.stride;
  args.weight = weight.const_data_ptr();
  args.y = y.data_ptr();
  args.rows = rows.rows;
  args.size = size;
  args.eps = static_cast<float>(eps);
  args.dtype = dtype_of(rows.tensor, "x");
  return args;
}

Tensor rms_norm(const Tensor& x, const Tensor& weight, double eps) {
  const Rows rows = as_rows(x, "x");
  Tensor y = at::empty(x.sizes(), x.options());
  const PartTimer timer(kOther);
  kernels().rms_norm(norm_args(rows, weight, eps, y));
  return y;
}

std::tuple<Tensor, Tensor> add_rms_norm(const Tensor& x, const Tensor& residual,
                                        const Tensor& weight, double eps) {
  const Rows rows = as_rows(x, "x");
  check_same(residual, x, "residual");
  TORCH_CHECK(residual.sizes() == x.sizes(), "residual is ", residual.sizes(), ", must be ",
              x.sizes());
  const Tensor before = residual.contiguous();
  Tensor y = at::empty(x.sizes(), x.options()), after = at::empty(x.sizes(), x.options());
  RmsNormArgs args = norm_args(rows, weight, eps, y);
  args.residual = before.const_data_ptr();
  args.residual_out = after.data_ptr();
  const PartTimer timer(kOther);
  kernels().rms_norm(args);
  return {y, after};
}

}  // namespace

void rotary_(const Tensor& positions, Tensor query, Tensor key, int64_t head_dim,
             const Tensor& cos_sin, bool neox) {
  TORCH_CHECK(query.dim() == 2 && query.stride(1) == 1 && key.dim() == 2 && key.stride(1) == 1,
              "query and key must be [rows, heads * head_dim] with contiguous rows");
  TORCH_CHECK(positions.scalar_type() == at::kLong && positions.is_contiguous(),
              "positions must be int64 and contiguous");
  const int64_t rows = query.size(0), rotary_dim = cos_sin.size(-1);
  TORCH_CHECK(positions.numel() == rows && key.size(0) == rows, "positions, query and key have ",
              positions.numel(), ", ", rows, " and ", key.size(0), " rows");
  TORCH_CHECK(rotary_dim <= head_dim && query.size(1) % head_dim == 0 &&
                  key.size(1) % head_dim == 0,
              "rotary_dim must be at most head_dim, and query and key whole heads");
  TORCH_CHECK(cos_sin.is_contiguous(), "cos_sin must be contiguous");
  check_same(key, query, "key");
  check_same(cos_sin, query, "cos_sin");
  const int64_t* position = positions.const_data_ptr<int64_t>();
  for (int64_t i = 0; i < rows; ++i) {
    TORCH_CHECK(0 <= position[i] && position[i] < cos_sin.size(0), "positions[", i, "] = ",
                position[i], ", cos_sin holds ", cos_sin.size(0));
  }
  const PartTimer timer(kOther);
  kernels().rotary({position, cos_sin.const_data_ptr(),
                    query.data_ptr(), query.stride(0), query.size(1) / head_dim, key.data_ptr(),
                    key.stride(0), key.size(1) / head_dim, rows, head_dim, rotary_dim, neox,
                    dtype_of(query, "query")});
}


Tensor silu_and_mul(const Tensor& x) {
  const Tensor source = x.contiguous();
  TORCH_CHECK(x.device().is_cpu() && x.dim() >= 1 && x.size(-1) % 2 == 0,
              "x must be [..., 2 * size] on the CPU, is ", x.sizes());
  auto shape = x.sizes().vec();
  shape.back() /= 2;
  Tensor y = at::empty(shape, x.options());
  const int64_t size = shape.back();
  const PartTimer timer(kOther);
  kernels().silu_and_mul({source.const_data_ptr(), y.data_ptr(), size == 0 ? 0 : y.numel() / size,
                          size, dtype_of(x, "x")});
  return y;
}


Tensor attention(const Tensor& query, const Tensor& key_cache, const Tensor& value_cache,
                 const Tensor& req_to_token, const Tensor& req_pool_indices,
                 const Tensor& seq_lens, const Tensor& query_starts, double scale,
                 int64_t window) {
  TORCH_CHECK(query.dim() == 3 && query.stride(2) == 1 && query.stride(1) == query.size(2),
              "query must be [rows, heads, head_dim], contiguous within a row");
  TORCH_CHECK(key_cache.dim() == 3 && key_cache.is_contiguous() && value_cache.dim() == 3 &&
                  value_cache.is_contiguous(),
              "the caches must be [slots, kv_heads, head_dim] and contiguous");
  check_same(key_cache, query, "key_cache");
  check_same(value_cache, query, "value_cache");
  TORCH_CHECK(req_to_token.scalar_type() == at::kInt && req_to_token.dim() == 2 &&
                  req_to_token.stride(1) == 1,
              "req_to_token must be int32 [requests, positions]");
  const int64_t rows = query.size(0), heads = query.size(1), head_dim = query.size(2);
  const int64_t kv_heads = key_cache.size(1), requests = seq_lens.numel();
  TORCH_CHECK(key_cache.size(2) == head_dim && value_cache.size(1) == kv_heads && kv_heads > 0 &&
                  heads % kv_heads == 0,
              "query ", query.sizes(), " does not fit keys ", key_cache.sizes(), " and values ",
              value_cache.sizes());
  const int64_t* starts = int64_data(query_starts, requests + 1, "query_starts");
  TORCH_CHECK(starts[0] == 0 && starts[requests] == rows, "query_starts end at ",
              starts[requests], ", query has ", rows, " rows");
  const int64_t* lens = int64_data(seq_lens, requests, "seq_lens");
  const int64_t* pool = int64_data(req_pool_indices, requests, "req_pool_indices");
  for (int64_t i = 0; i < requests; ++i) {
    const int64_t queries = starts[i + 1] - starts[i];
    TORCH_CHECK(0 <= queries && queries <= lens[i] && lens[i] <= req_to_token.size(1), "request ",
                i, " has ", queries, " rows and ", lens[i], " keys, req_to_token holds ",
                req_to_token.size(1));
    TORCH_CHECK(0 <= pool[i] && pool[i] < req_to_token.size(0), "req_pool_indices[", i, "] = ",
                pool[i], ", req_to_token has ", req_to_token.size(0), " rows");
  }
  Tensor out = at::empty({rows, heads, value_cache.size(2)}, query.options());
  const PartTimer timer(kAttention);
  kernels().attention({query.const_data_ptr(), query.stride(0), key_cache.const_data_ptr(),
                       value_cache.const_data_ptr(), req_to_token.const_data_ptr<int32_t>(),
                       req_to_token.stride(0), pool, lens, starts, requests, out.data_ptr(), heads,
                       kv_heads, head_dim, value_cache.size(2),
                       static_cast<float>(scale), window, dtype_of(query, "query")});
  return out;
}

namespace {

// cache[slots[i]] = rows[i]; rows [n, heads, dim] may be strided between rows.
void store_rows(const Tensor& rows, const Tensor& cache, const Tensor& slots, const char* name) {
  check_same(rows, cache, name);
  TORCH_CHECK(rows.dim() == 3 && rows.stride(2) == 1 && rows.stride(1) == rows.size(2) &&
                  cache.dim() == 3 && cache.is_contiguous() && rows.size(1) == cache.size(1) &&
                  rows.size(2) == cache.size(2),
              name, " is ", rows.sizes(), ", must be rows of the cache ", cache.sizes());
  const int64_t n = rows.size(0), bytes = rows.size(1) * rows.size(2) * rows.element_size();
  const int64_t* to = int64_data(slots, n, "slots");
  const char* from = static_cast<const char*>(rows.const_data_ptr());
  char* base = static_cast<char*>(cache.data_ptr());
  for (int64_t i = 0; i < n; ++i) {
    TORCH_CHECK(0 <= to[i] && to[i] < cache.size(0), "slots[", i, "] = ", to[i],
                ", the cache has ", cache.size(0));
    std::memcpy(base + to[i] * bytes, from + i * rows.stride(0) * rows.element_size(), bytes);
  }
}

}  // namespace

void store_kv(const Tensor& key, const Tensor& value, const Tensor& slots, Tensor key_cache,
              Tensor value_cache) {
  const PartTimer timer(kAttention);
  store_rows(key, key_cache, slots, "key");
  store_rows(value, value_cache, slots, "value");
}

namespace {

std::vector<double> take_seconds() {
  std::vector<double> taken(PartTimer::seconds, PartTimer::seconds + kParts);
  std::fill(PartTimer::seconds, PartTimer::seconds + kParts, 0.0);
  return taken;
}

void use_isa(std::string name) { use_level(name); }
std::string isa() { return kernels().name; }
bool has_matrix_unit() { return kernels().matrix_unit; }
int64_t threads() { return num_threads(); }

}  // namespace

TORCH_LIBRARY(sglang_dlite_kernel, m) {
  m.def("isa() -> str", &isa);
  m.def("runnable_isas() -> str", &runnable_levels);
  m.def("take_seconds() -> float[]", &take_seconds);
  m.def("use_isa(str name) -> ()", &use_isa);
  m.def("has_matrix_unit() -> bool", &has_matrix_unit);
  m.def("num_threads() -> int", &threads);
  m.def("packed_size(int out_features, int in_features) -> int", &packed_size);
  m.def("advise_huge_pages(Tensor(a!) memory) -> ()");
  m.def("pack_linear(Tensor weight, Tensor(a!) packed) -> ()");
  m.def("linear(Tensor x, Tensor packed, int out_features, Tensor? bias) -> Tensor");
  m.def("rms_norm(Tensor x, Tensor weight, float eps) -> Tensor");
  m.def("add_rms_norm(Tensor x, Tensor residual, Tensor weight, float eps) -> (Tensor, Tensor)");
  m.def("rotary_(Tensor positions, Tensor(a!) query, Tensor(b!) key, int head_dim, "
        "Tensor cos_sin, bool neox) -> ()");
  m.def("silu_and_mul(Tensor x) -> Tensor");
  m.def("store_kv(Tensor key, Tensor value, Tensor slots, Tensor(a!) key_cache, "
        "Tensor(b!) value_cache) -> ()");
  m.def("attention(Tensor query, Tensor key_cache, Tensor value_cache, Tensor req_to_token, "
        "Tensor req_pool_indices, Tensor seq_lens, Tensor query_starts, float scale, "
        "int window) -> Tensor");
}

TORCH_LIBRARY_IMPL(sglang_dlite_kernel, CPU, m) {
  m.impl("advise_huge_pages", &advise_huge_pages);
  m.impl("pack_linear", &pack);
  m.impl("linear", &linear);
  m.impl("rms_norm", &rms_norm);
  m.impl("add_rms_norm", &add_rms_norm);
  m.impl("rotary_", &rotary_);
  m.impl("silu_and_mul", &silu_and_mul);
  m.impl("store_kv", &store_kv);
  m.impl("attention", &attention);
}

}  // namespace dlite

// An empty module: importing it loads the library, which registers the operators above.
PyMODINIT_FUNC PyInit__C() {
  static PyModuleDef module = {PyModuleDef_HEAD_INIT, "_C", nullptr, -1, nullptr};
  return PyModule_Create(&module);
}
