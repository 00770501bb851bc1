// The whole draft step of a DLite drafter in one call: no Python between its operators.
// Equations and names: drafter/backbone.py, drafter/sequential_head.py of sglang-dlite.
#include <ATen/ATen.h>
#include <torch/custom_class.h>
#include <torch/library.h>

#include <algorithm>
#include <cstring>
#include <vector>

#include "kernels.h"
#include "screen.h"

namespace dlite {
namespace {

using at::Tensor;

bf16* data(const Tensor& tensor) { return static_cast<bf16*>(tensor.data_ptr()); }

// A packed weight and the bias that goes with it.
struct Linear {
  Tensor packed;
  Tensor bias;  // undefined where there is none
  int64_t in_features = 0;
  int64_t out_features = 0;

  Linear() = default;
  explicit Linear(const Tensor& weight, const Tensor& bias_ = {})
      : in_features(weight.size(1)), out_features(weight.size(0)) {
    const Tensor source = weight.to(at::kBFloat16).contiguous();
    packed = at::empty({packed_elements(out_features, in_features)}, source.options());
    pack_linear(data(source), out_features, in_features, data(packed));
    if (bias_.defined()) bias = bias_.to(at::kBFloat16).contiguous();
  }

  void operator()(const Tensor& x, const Tensor& y) const {
    (*this)(data(x), x.stride(0), x.size(0), data(y));
  }

  // With groups: only these columns of y are written.
  void operator()(const bf16* x, int64_t x_stride, int64_t rows, bf16* y,
                  const std::vector<int64_t>* groups = nullptr) const {
    LinearArgs args{x, x_stride, data(packed), bias.defined() ? data(bias) : nullptr, y,
                    out_features, rows, in_features, out_features};
    if (groups) {
      args.groups = groups->data();
      args.num_groups = static_cast<int64_t>(groups->size());
    }
    kernels().linear(args);
  }
};

struct Layer {
  Tensor input_norm, post_norm, query_norm, key_norm;
  Linear qkv, o, gate_up, down;
};

constexpr int64_t kTensorsPerLayer = 11;
constexpr int64_t kHeadTensors = 7;

struct DraftStep : torch::CustomClassHolder {
  // layers: kTensorsPerLayer tensors each, in the order of sglang_dlite_kernel.DraftStep; head:
  // final norm, recurrence and output; cos, sin [S + T, head_dim] fp32.
  DraftStep(const std::vector<Tensor>& layers, const std::vector<Tensor>& head, const Tensor& cos,
            const Tensor& sin, int64_t num_heads, int64_t num_kv_heads, int64_t num_drafts,
            double eps)
      : cos_(cos.contiguous()), sin_(sin.contiguous()), num_heads_(num_heads),
        num_kv_heads_(num_kv_heads), num_drafts_(num_drafts), eps_(static_cast<float>(eps)) {
    TORCH_CHECK(!layers.empty() && layers.size() % kTensorsPerLayer == 0 &&
                    head.size() == kHeadTensors,
                "DraftStep takes ", kTensorsPerLayer, " tensors per layer and ", kHeadTensors,
                " of the head, got ", layers.size(), " and ", head.size());
    std::vector<Tensor> context_weights;
    for (size_t i = 0; i < layers.size(); i += kTensorsPerLayer) {
      const Tensor* t = &layers[i];
      Layer layer;
      layer.input_norm = rounded(t[0]);
      layer.qkv = Linear(at::cat({t[1], t[2], t[3]}));
      layer.query_norm = rounded(t[4]);
      layer.key_norm = rounded(t[5]);
      layer.o = Linear(t[6]);
      layer.post_norm = rounded(t[7]);
      layer.gate_up = Linear(at::cat({t[8], t[9]}));
      layer.down = Linear(t[10]);
      layers_.push_back(layer);
      context_weights.push_back(t[2]);
      context_weights.push_back(t[3]);
    }
    // The context is the same for every layer, so its keys and values are one product for all.
    context_kv_ = Linear(at::cat(context_weights));
    norm_ = rounded(head[0]);
    token_embedding_ = rounded(head[1]);
    state_proj_ = Linear(head[2], head[3]);
    rank_ = token_embedding_.size(1);
    const Tensor& mlp = head[4];  // [R, R + h]: W_s, then W_h
    state_part_ = Linear(mlp.slice(1, 0, rank_));
    hidden_part_ = Linear(mlp.slice(1, rank_), head[5]);
    output_ = Linear(head[6]);
    const Tensor output = rounded(head[6]);
    screen_ = Screen(data(output), output.size(0), rank_, usual_inputs(head));
  }

  // context [n, S, h] (normed) and x [n, T, h] (embeddings), token_group [n, G] ->
  // token_ids [n, K] int64 and head_vectors [n, K, R].
  std::tuple<Tensor, Tensor> draft(const Tensor& context, const Tensor& x,
                                   const Tensor& token_group) const {
    const int64_t n = x.size(0), queries = x.size(1), h = x.size(2), group = token_group.size(1);
    TORCH_CHECK(x.scalar_type() == at::kBFloat16 && context.scalar_type() == at::kBFloat16 &&
                    token_group.scalar_type() == at::kLong,
                "DraftStep takes bfloat16 states and int64 tokens");
    TORCH_CHECK(context.dim() == 3 && context.size(0) == n && context.size(2) == h &&
                    context.size(1) + queries == cos_.size(0) && token_group.size(0) == n &&
                    queries == group + num_drafts_ && h == norm_.numel(),
                "DraftStep does not fit context ", context.sizes(), ", x ", x.sizes(),
                " and tokens ", token_group.sizes());
    Tensor tokens = at::empty({n, num_drafts_}, token_group.options());
    Tensor vectors = at::empty({n, num_drafts_, rank_}, x.options());
    if (n == 0) return {tokens, vectors};
    const Tensor group_ids = token_group.contiguous();
    const Tensor hidden = backbone(context.contiguous(), x.contiguous());
    decode(hidden, group_ids.const_data_ptr<int64_t>(), group, tokens, vectors);
    return {tokens, vectors};
  }

 private:
  static Tensor rounded(const Tensor& tensor) {
    return tensor.detach().to(at::kBFloat16).contiguous();
  }

  // About how large the elements of a head vector get: a state lies within (-1, 1), a hidden is
  // normed, and neither one's elements know of each other.
  static std::vector<float> usual_inputs(const std::vector<Tensor>& head) {
    constexpr double kStateSquare = 0.5;
    const Tensor norm = head[0].to(at::kFloat), mlp = head[4].to(at::kFloat);
    const Tensor bias = head[5].to(at::kFloat);
    const int64_t rank = mlp.size(0);
    const Tensor square = mlp.slice(1, 0, rank).square().sum(1) * kStateSquare +
                          (mlp.slice(1, rank) * norm).square().sum(1) + bias.square();
    const Tensor usual = square.sqrt().contiguous();
    return {usual.const_data_ptr<float>(), usual.const_data_ptr<float>() + rank};
  }

  // y = norm(x), or with a residual: residual += x, y = norm(residual).
  void norm(const Tensor& x, const Tensor& weight, const Tensor& y, const Tensor& residual) const {
    RmsNormArgs args{};
    args.x = x.const_data_ptr();
    args.x_stride = x.size(-1);
    args.weight = weight.const_data_ptr();
    args.y = y.data_ptr();
    args.rows = y.numel() / y.size(-1);
    args.size = y.size(-1);
    args.eps = eps_;
    args.dtype = Dtype::kBFloat16;
    if (residual.defined()) {
      args.residual = residual.const_data_ptr();
      args.residual_out = residual.data_ptr();
    }
    kernels().rms_norm(args);
  }

  // -> prediction hiddens [n, K, h], after the final norm.
  Tensor backbone(const Tensor& context, const Tensor& x) const {
    const int64_t n = x.size(0), queries = x.size(1), h = x.size(2), rows = n * queries;
    const int64_t slots = context.size(1);
    const int64_t kv_width = layers_[0].qkv.out_features - layers_[0].o.in_features;
    const auto buffer = [&](int64_t r, int64_t width) { return at::empty({r, width}, x.options()); };
    const Tensor context_kv = buffer(n * slots, context_kv_.out_features);
    context_kv_(context.view({n * slots, h}), context_kv);
    const Tensor residual = x.view({rows, h}).clone(), normed = buffer(rows, h);
    const Tensor qkv = buffer(rows, layers_[0].qkv.out_features), update = buffer(rows, h);
    const Tensor attended = buffer(rows, layers_[0].o.in_features);
    const Tensor wide = buffer(rows, layers_[0].gate_up.out_features);
    const Tensor active = buffer(rows, layers_[0].down.in_features);
    for (size_t l = 0; l < layers_.size(); ++l) {
      const Layer& layer = layers_[l];
      if (l == 0) norm(residual, layer.input_norm, normed, {});
      else norm(update, layer.input_norm, normed, residual);
      layer.qkv(normed, qkv);
      kernels().draft_attention(
          {data(qkv), data(context_kv) + static_cast<int64_t>(l) * kv_width,
           context_kv_.out_features, data(layer.query_norm), data(layer.key_norm),
           cos_.const_data_ptr<float>(), sin_.const_data_ptr<float>(), data(attended), n, queries,
           slots, num_heads_, num_kv_heads_, layer.o.in_features / num_heads_, eps_});
      layer.o(attended, update);
      norm(update, layer.post_norm, normed, residual);
      layer.gate_up(normed, wide);
      kernels().silu_and_mul({wide.const_data_ptr(), active.data_ptr(), rows, active.size(1),
                              Dtype::kBFloat16});
      layer.down(active, update);
    }
    norm(update, norm_, normed, residual);
    return normed.view({n, queries, h}).slice(1, queries - num_drafts_).contiguous();
  }

  void decode(const Tensor& hidden, const int64_t* group_ids, int64_t group, const Tensor& tokens,
              const Tensor& vectors) const {
    const int64_t n = hidden.size(0), vocab = output_.out_features;
    const auto buffer = [&](int64_t r, int64_t w) { return at::empty({r, w}, hidden.options()); };
    const Tensor projected = buffer(n * num_drafts_, rank_);
    hidden_part_(hidden.view({n * num_drafts_, hidden.size(2)}), projected);
    const Tensor state = at::zeros({n, rank_}, hidden.options().dtype(at::kFloat));
    const Tensor inputs = at::zeros({n, 2 * rank_}, hidden.options());  // state, previous token
    const Tensor mixed = buffer(n, 2 * rank_), combined = buffer(n, rank_);
    const Tensor logits = buffer(n, vocab);
    int64_t* out = tokens.data_ptr<int64_t>();
    const auto advance = [&](const int64_t* ids, int64_t stride) {
      for (int64_t i = 0; i < n; ++i) {
        const int64_t id = ids[i * stride];
        TORCH_CHECK(0 <= id && id < token_embedding_.size(0), "token ", id,
                    " is outside the drafter's vocabulary of ", token_embedding_.size(0));
        std::memcpy(data(inputs) + (2 * i + 1) * rank_, data(token_embedding_) + id * rank_,
                    rank_ * sizeof(bf16));
      }
      state_proj_(inputs, mixed);
      kernels().gated_update(
          {data(mixed), state.data_ptr<float>(), data(inputs), 2 * rank_, n, rank_});
    };
    if (group > 1) advance(group_ids + group - 2, group);
    for (int64_t k = 0; k < num_drafts_; ++k) {
      if (k == 0) advance(group_ids + group - 1, group);
      else advance(out + k - 1, num_drafts_);
      state_part_(data(inputs), 2 * rank_, n, data(combined));
      at::Tensor vector = vectors.select(1, k);
      at::add_out(vector, combined, projected.view({n, num_drafts_, rank_}).select(1, k));
      likeliest(data(vectors) + k * rank_, n, logits, out + k);
    }
  }

  // The likeliest token of each head vector x, the lowest id on ties; rows of x and of token_ids are
  // num_drafts_ of theirs apart.
  void likeliest(const bf16* x, int64_t rows, const Tensor& logits, int64_t* token_ids) const {
    const int64_t stride = num_drafts_ * rank_, vocab = output_.out_features;
    if (screen_.serves(rows)) {
      const std::vector<int64_t>& groups = screen_.groups(x, stride, rows);
      // None where x is not finite; many where the weights do not allow for narrow bounds.
      if (!groups.empty() && groups.size() < static_cast<size_t>(screen_.num_groups()) / 4) {
        output_(x, stride, rows, data(logits), &groups);
        for (int64_t r = 0; r < rows; ++r)
          token_ids[r * num_drafts_] = likeliest_of(data(logits) + r * vocab, vocab, groups);
        return;
      }
    }
    output_(x, stride, rows, data(logits));
    kernels().argmax({data(logits), token_ids, num_drafts_, rows, vocab});
  }

  static int64_t likeliest_of(const bf16* logits, int64_t vocab,
                              const std::vector<int64_t>& groups) {
    int64_t best = -1;
    for (const int64_t group : groups) {
      const int64_t end = std::min((group + 1) * kGroupColumns, vocab);
      for (int64_t id = group * kGroupColumns; id < end; ++id)
        if (best < 0 || bf16_to_float(logits[id]) > bf16_to_float(logits[best])) best = id;
    }
    return best;
  }

  std::vector<Layer> layers_;
  Linear context_kv_, state_proj_, state_part_, hidden_part_, output_;
  Screen screen_;  // of the output's columns
  Tensor norm_, token_embedding_, cos_, sin_;
  int64_t num_heads_, num_kv_heads_, num_drafts_, rank_ = 0;
  float eps_;
};

}  // namespace

TORCH_LIBRARY_FRAGMENT(sglang_dlite_kernel, m) {
  m.class_<DraftStep>("DraftStep")
      .def(torch::init<std::vector<Tensor>, std::vector<Tensor>, Tensor, Tensor, int64_t, int64_t,
                       int64_t, double>())
      .def("draft", &DraftStep::draft);
}

}  // namespace dlite
