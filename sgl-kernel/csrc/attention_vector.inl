// Adding a range of keys to the running softmax of a block, on vectors: any dtype and head size.

// In-register transpose of W vectors of W floats.
inline void transpose(vfloat* v) {
#pragma GCC unroll 5
  for (int width = 1; width < W; width *= 2) {
    vint low, high;
#pragma GCC unroll 16
    for (int i = 0; i < W; ++i) {
      const int base = i & ~width;
      low[i] = i & width ? base + W : base;
      high[i] = (i & width ? base + W : base) + width;
    }
#pragma GCC unroll 16
    for (int i = 0; i < W; ++i) {
      if (i & width) continue;
      const vfloat a = v[i], b = v[i + width];
      v[i] = __builtin_shuffle(a, b, low);
      v[i + width] = __builtin_shuffle(a, b, high);
    }
  }
}

template <typename T>
struct VectorBlocks {
  const Shape<T>& shape;
  const AttentionArgs& a = shape.a;
  const int64_t value_width = shape.value_width;

  // Keys of positions [begin, end) as keys_t [head_dim, kKeyBlock], zero-padded.
  void load_keys(const Block& block, int64_t begin, int64_t end, float* keys_t) const {
    const int64_t whole = a.head_dim / W * W;
    for (int64_t k = 0; k < kKeyBlock; k += W) {
      const T* rows[W];
      for (int64_t i = 0; i < W; ++i) {
        const int64_t position = begin + k + i;
        rows[i] = position < end ? shape.key(block, position) : nullptr;
      }
      for (int64_t d = 0; d < whole; d += W) {
        vfloat v[W];
#pragma GCC unroll 16
        for (int i = 0; i < W; ++i) v[i] = rows[i] ? load(rows[i] + d) : splat(0);
        transpose(v);
#pragma GCC unroll 16
        for (int i = 0; i < W; ++i) store(keys_t + (d + i) * kKeyBlock + k, v[i]);
      }
      for (int64_t d = whole; d < a.head_dim; ++d)
        for (int64_t i = 0; i < W; ++i)
          keys_t[d * kKeyBlock + k + i] = rows[i] ? load_one(rows[i] + d) : 0.0f;
    }
  }

  // Values of positions [begin, end) as values [end - begin, value_width].
  void load_values(const Block& block, int64_t begin, int64_t end, float* values) const {
    const int64_t whole = a.value_dim / W * W;
    for (int64_t position = begin; position < end; ++position, values += value_width) {
      const T* row = shape.value(block, position);
      for (int64_t d = 0; d < whole; d += W) store(values + d, load(row + d));
      for (int64_t d = whole; d < a.value_dim; ++d) values[d] = load_one(row + d);
      for (int64_t d = a.value_dim; d < value_width; ++d) values[d] = 0.0f;
    }
  }

  // scores [R, kKeyBlock] = scale * queries [R, head_dim] keys_t.
  template <int R>
  void score(const float* queries, const float* keys_t, float* scores) const {
    constexpr int kVectors = 64 / 16;  // registers per row and pass; R * kVectors + 5 <= 32 at W = 16
    for (int64_t k = 0; k < kKeyBlock; k += kVectors * W) {
      vfloat acc[R][kVectors] = {};
      for (int64_t d = 0; d < a.head_dim; ++d) {
        vfloat key[kVectors];
#pragma GCC unroll 4
        for (int j = 0; j < kVectors; ++j) key[j] = load(keys_t + d * kKeyBlock + k + j * W);
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r) {
          const vfloat q = splat(queries[r * a.head_dim + d]);
#pragma GCC unroll 4
          for (int j = 0; j < kVectors; ++j) acc[r][j] = q * key[j] + acc[r][j];
        }
      }
      for (int r = 0; r < R; ++r)
        for (int j = 0; j < kVectors; ++j)
          store(scores + r * kKeyBlock + k + j * W, acc[r][j] * a.scale);
    }
  }

  // value [R, value_width] = value * keep + weights [R, kKeyBlock] values, over `keys` keys.
  template <int R>
  void accumulate(const float* weights, const float* values, int64_t keys, const float* keep,
                  float* value) const {
    constexpr int kVectors = 2;
    int64_t d = 0;
    for (; d + kVectors * W <= value_width; d += kVectors * W)
      accumulate_columns<R, kVectors>(weights, values + d, keys, keep, value + d);
    for (; d < value_width; d += W)
      accumulate_columns<R, 1>(weights, values + d, keys, keep, value + d);
  }

  template <int R, int kVectors>
  void accumulate_columns(const float* weights, const float* values, int64_t keys,
                          const float* keep, float* value) const {
    vfloat acc[R][kVectors];
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
      for (int j = 0; j < kVectors; ++j)
        acc[r][j] = load(value + r * value_width + j * W) * keep[r];
    for (int64_t k = 0; k < keys; ++k) {
      vfloat v[kVectors];
#pragma GCC unroll 4
      for (int j = 0; j < kVectors; ++j) v[j] = load(values + k * value_width + j * W);
#pragma GCC unroll 8
      for (int r = 0; r < R; ++r) {
        const vfloat w = splat(weights[r * kKeyBlock + k]);
#pragma GCC unroll 4
        for (int j = 0; j < kVectors; ++j) acc[r][j] = w * v[j] + acc[r][j];
      }
    }
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
      for (int j = 0; j < kVectors; ++j)
        store(value + r * value_width + j * W, acc[r][j]);
  }

  // Scores of one row become weights; returns the factor for what was summed before.
  float soften(const Block& block, int64_t r, int64_t begin, int64_t end, float* scores,
               const Softmax& s) const {
    const int64_t position = block.first_position + r / shape.group;
    const int64_t last = position < end - 1 ? position : end - 1;
    const int64_t first = a.window < 0 ? 0 : position - a.window;
    for (int64_t k = 0; k < kKeyBlock; ++k) {
      const int64_t key = begin + k;
      if (key > last || key < first) scores[k] = -__builtin_inff();
    }
    vfloat high = load(scores);
    for (int64_t k = W; k < kKeyBlock; k += W) high = max(high, load(scores + k));
    const float block_high = max_of(high), old = s.largest[r];
    const float top = block_high > old ? block_high : old;
    if (top == -__builtin_inff()) {  // nothing visible yet
      __builtin_memset(scores, 0, kKeyBlock * sizeof(float));
      return 1.0f;
    }
    vfloat weights = splat(0);
    for (int64_t k = 0; k < kKeyBlock; k += W) {
      const vfloat w = exp(load(scores + k) - top);
      store(scores + k, w);
      weights = weights + w;
    }
    const float keep = old == -__builtin_inff() ? 0.0f : exp(splat(old - top))[0];
    s.largest[r] = top;
    s.weight[r] = s.weight[r] * keep + sum(weights);
    return keep;
  }

  // Adds positions [begin, end) to s; begin is a multiple of kKeyBlock, or the first key at all.
  void add_keys(const Block& block, int64_t begin, int64_t end, const Softmax& s) const {
    const int64_t count = shape.rows(block), head_dim = a.head_dim;
    const int64_t floats = round_up(count * head_dim, 16) + kKeyBlock * (head_dim + value_width + count) + count;
    float* queries = static_cast<float*>(thread_scratch(0, floats * sizeof(float)));
    float* keys_t = queries + round_up(count * head_dim, 16);
    float* values = keys_t + kKeyBlock * head_dim;
    float* scores = values + kKeyBlock * value_width;
    float* keep = scores + kKeyBlock * count;
    for (int64_t r = 0; r < count; ++r) {
      const T* row = shape.query(block, r);
      for (int64_t d = 0; d < head_dim; ++d) queries[r * head_dim + d] = load_one(row + d);
    }
    for (int64_t k = begin; k < end; k += kKeyBlock) {
      const int64_t stop = k + kKeyBlock < end ? k + kKeyBlock : end;
      load_keys(block, k, stop, keys_t);
      load_values(block, k, stop, values);
      int64_t r = 0;
      for (; r + 6 <= count; r += 6)
        score<6>(queries + r * head_dim, keys_t, scores + r * kKeyBlock);
      for (; r + 3 <= count; r += 3)
        score<3>(queries + r * head_dim, keys_t, scores + r * kKeyBlock);
      for (; r < count; ++r) score<1>(queries + r * head_dim, keys_t, scores + r * kKeyBlock);
      for (r = 0; r < count; ++r) keep[r] = soften(block, r, k, stop, scores + r * kKeyBlock, s);
      for (r = 0; r + 8 <= count; r += 8)
        accumulate<8>(scores + r * kKeyBlock, values, stop - k, keep + r,
                      s.value + r * value_width);
      for (; r + 3 <= count; r += 3)
        accumulate<3>(scores + r * kKeyBlock, values, stop - k, keep + r,
                      s.value + r * value_width);
      for (; r < count; ++r)
        accumulate<1>(scores + r * kKeyBlock, values, stop - k, keep + r,
                      s.value + r * value_width);
    }
  }
};
