// Causal attention over a paged K/V cache with online softmax in fp32 (Milakov and Gimelshein,
// arXiv 1805.02867; blocks as in FlashAttention, arXiv 2205.14135).
//
// A row's result depends on nothing but its own query and keys: key blocks start at multiples of
// kKeyBlock, splits at multiples of kSplitKeys, and what a row may not see is an exact no-op. So a
// verify row and a decode step over the same context agree bit for bit.

constexpr int64_t kKeyBlock = 64;
constexpr int64_t kSplitKeys = 1024;  // a split is done by one thread, splits are merged in order
constexpr int64_t kMaxRows = 32;      // rows of a block: queries x query heads of one K/V head

// The running softmax of `rows` rows: largest score, sum of weights, weighted sum of values.
struct Softmax {
  float* largest;  // [rows]
  float* weight;   // [rows]
  float* value;    // [rows, padded value_dim]

  static int64_t floats(int64_t rows, int64_t value_width) { return rows * (value_width + 2); }

  static Softmax at(float* memory, int64_t rows) {
    return {memory, memory + rows, memory + 2 * rows};
  }

  void reset(int64_t rows, int64_t value_width) const {
    for (int64_t r = 0; r < rows; ++r) largest[r] = -__builtin_inff();
    __builtin_memset(weight, 0, rows * sizeof(float));
    __builtin_memset(value, 0, rows * value_width * sizeof(float));
  }
};

// `total` becomes the softmax over the keys of both; a side without visible keys changes nothing.
inline void merge(const Softmax& total, const Softmax& part, int64_t rows, int64_t value_width) {
  for (int64_t r = 0; r < rows; ++r) {
    if (part.weight[r] == 0.0f) continue;
    const float a = total.largest[r], b = part.largest[r];
    const float top = a > b ? a : b;
    const float keep = total.weight[r] == 0.0f ? 0.0f : exp(splat(a - top))[0];
    const float add = exp(splat(b - top))[0];
    total.largest[r] = top;
    total.weight[r] = total.weight[r] * keep + part.weight[r] * add;
    for (int64_t i = 0; i < value_width; i += W) {
      float* t = total.value + r * value_width + i;
      store(t, load(t) * keep + load(part.value + r * value_width + i) * add);
    }
  }
}

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

// One (request, K/V head, block of queries).
struct Block {
  const int32_t* slots;  // [keys]: slot of each position
  int64_t first_row;     // of the queries in the batch
  int64_t queries;
  int64_t first_position;  // of the first query in the context
  int64_t kv_head;
};

template <typename T>
struct Attention {
  const AttentionArgs& a;
  const int64_t group = a.num_heads / a.num_kv_heads;
  const int64_t value_width = round_up(a.value_dim, W);
  const int64_t queries_per_block = kMaxRows / group > 0 ? kMaxRows / group : 1;

  explicit Attention(const AttentionArgs& args) : a(args) {}

  int64_t rows(const Block& block) const { return block.queries * group; }
  int64_t end_key(const Block& block) const { return block.first_position + block.queries; }
  int64_t begin_key(const Block& block) const {
    return a.window < 0 || block.first_position < a.window ? 0 : block.first_position - a.window;
  }

  // Row r of a block is query r / group, head r % group of the K/V head's group.
  const T* query(const Block& block, int64_t r) const {
    return static_cast<const T*>(a.query) + (block.first_row + r / group) * a.query_stride +
           (block.kv_head * group + r % group) * a.head_dim;
  }

  void write(const Block& block, const Softmax& s) const {
    for (int64_t r = 0; r < rows(block); ++r) {
      T* out = static_cast<T*>(a.out) +
               ((block.first_row + r / group) * a.num_heads + block.kv_head * group + r % group) *
                   a.value_dim;
      const float factor = 1.0f / s.weight[r];
      const float* value = s.value + r * value_width;
      int64_t i = 0;
      for (; i + W <= a.value_dim; i += W) store(out + i, load(value + i) * factor);
      for (; i < a.value_dim; ++i) store_one(out + i, value[i] * factor);
    }
  }

  // Keys of positions [begin, end) as keys_t [head_dim, kKeyBlock], zero-padded.
  void load_keys(const Block& block, int64_t begin, int64_t end, float* keys_t) const {
    const T* cache = static_cast<const T*>(a.key_cache) + block.kv_head * a.head_dim;
    const int64_t stride = a.num_kv_heads * a.head_dim, whole = a.head_dim / W * W;
    for (int64_t k = 0; k < kKeyBlock; k += W) {
      const T* rows[W];
      for (int64_t i = 0; i < W; ++i) {
        const int64_t position = begin + k + i;
        rows[i] = position < end ? cache + block.slots[position] * stride : nullptr;
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
    const T* cache = static_cast<const T*>(a.value_cache) + block.kv_head * a.value_dim;
    const int64_t stride = a.num_kv_heads * a.value_dim, whole = a.value_dim / W * W;
    for (int64_t position = begin; position < end; ++position, values += value_width) {
      const T* row = cache + block.slots[position] * stride;
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
    const int64_t position = block.first_position + r / group;
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
    const int64_t count = rows(block), head_dim = a.head_dim;
    const int64_t floats = count * head_dim + kKeyBlock * (head_dim + value_width + count) + count;
    float* queries = static_cast<float*>(thread_scratch(0, floats * sizeof(float)));
    float* keys_t = queries + round_up(count * head_dim, 16);
    float* values = keys_t + kKeyBlock * head_dim;
    float* scores = values + kKeyBlock * value_width;
    float* keep = scores + kKeyBlock * count;
    for (int64_t r = 0; r < count; ++r) {
      const T* row = query(block, r);
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

  Block block_of(int64_t request, int64_t kv_head, int64_t index) const {
    const int64_t start = a.query_starts[request], total = a.query_starts[request + 1] - start;
    const int64_t first = index * queries_per_block;
    return {a.req_to_token + a.req_pool_indices[request] * a.table_stride, start + first,
            total - first < queries_per_block ? total - first : queries_per_block,
            a.seq_lens[request] - total + first, kv_head};
  }

  int64_t blocks(int64_t request) const {
    const int64_t total = a.query_starts[request + 1] - a.query_starts[request];
    return (total + queries_per_block - 1) / queries_per_block;
  }

  int64_t first_split(const Block& block) const { return begin_key(block) / kSplitKeys; }
  int64_t end_split(const Block& block) const {
    return (end_key(block) + kSplitKeys - 1) / kSplitKeys;
  }

  void add_split(const Block& block, int64_t split, const Softmax& s) const {
    int64_t begin = split * kSplitKeys, end = begin + kSplitKeys;
    if (begin_key(block) > begin) begin = begin_key(block) / kKeyBlock * kKeyBlock;
    if (end_key(block) < end) end = end_key(block);
    s.reset(rows(block), value_width);
    add_keys(block, begin, end, s);
  }

  void run() const {
    // Work is a list of (request, block, K/V head, split); splits of one block are neighbours.
    // `starts` [requests + 1] counts the entries before each request.
    int64_t* starts = static_cast<int64_t*>(thread_scratch(2, (a.requests + 1) * sizeof(int64_t)));
    starts[0] = 0;
    for (int64_t i = 0; i < a.requests; ++i) {
      int64_t units = 0;
      for (int64_t b = 0; b < blocks(i); ++b) {
        const Block block = block_of(i, 0, b);
        units += end_split(block) - first_split(block);
      }
      starts[i + 1] = starts[i] + units * a.num_kv_heads;
    }
    const int64_t units = starts[a.requests];
    const int64_t part = Softmax::floats(rows_limit(), value_width);
    // Splits are handed out one by one only where blocks alone would not keep the team busy.
    const bool split_work = units < kUnitsPerThread * num_threads();
    if (!split_work) return run_blocks();
    float* parts = static_cast<float*>(thread_scratch(3, units * part * sizeof(float)));
    parallel_for(units, [&](int64_t unit) {
      const Place place = find(starts, unit);
      add_split(place.block, place.split, Softmax::at(parts + unit * part, rows(place.block)));
    });
    parallel_for(units, [&](int64_t unit) {
      const Place place = find(starts, unit);
      if (place.split != first_split(place.block)) return;
      const int64_t count = rows(place.block);
      const Softmax total = Softmax::at(parts + unit * part, count);
      for (int64_t i = 1; i < end_split(place.block) - place.split; ++i)
        merge(total, Softmax::at(parts + (unit + i) * part, count), count, value_width);
      write(place.block, total);
    });
  }

 private:
  static constexpr int64_t kUnitsPerThread = 64;

  struct Place {
    Block block;
    int64_t split;
  };

  int64_t rows_limit() const { return queries_per_block * group; }

  Place find(const int64_t* starts, int64_t unit) const {
    int64_t request = 0;
    while (starts[request + 1] <= unit) ++request;
    unit -= starts[request];
    for (int64_t b = 0;; ++b) {
      Block block = block_of(request, 0, b);
      const int64_t splits = end_split(block) - first_split(block);
      if (unit < splits * a.num_kv_heads) {
        block.kv_head = unit / splits;
        return {block, first_split(block) + unit % splits};
      }
      unit -= splits * a.num_kv_heads;
    }
  }

  // A prompt: one thread does all splits of a block, in the same order.
  void run_blocks() const {
    int64_t* starts = static_cast<int64_t*>(thread_scratch(2, (a.requests + 1) * sizeof(int64_t)));
    starts[0] = 0;
    for (int64_t i = 0; i < a.requests; ++i)
      starts[i + 1] = starts[i] + blocks(i) * a.num_kv_heads;
    const int64_t part = Softmax::floats(rows_limit(), value_width);
    parallel_for(starts[a.requests], [&](int64_t unit) {
      int64_t request = 0;
      while (starts[request + 1] <= unit) ++request;
      unit -= starts[request];
      // The longest blocks come first, so that no thread is left with one at the end.
      const int64_t index = blocks(request) - 1 - unit / a.num_kv_heads;
      const Block block = block_of(request, unit % a.num_kv_heads, index);
      float* memory = static_cast<float*>(thread_scratch(1, 2 * part * sizeof(float)));
      const Softmax total = Softmax::at(memory, rows(block));
      const Softmax next = Softmax::at(memory + part, rows(block));
      const int64_t first = first_split(block);
      add_split(block, first, total);
      for (int64_t split = first + 1; split < end_split(block); ++split) {
        add_split(block, split, next);
        merge(total, next, rows(block), value_width);
      }
      write(block, total);
    });
  }
};

void attention(const AttentionArgs& a) {
  if (a.dtype == Dtype::kBFloat16) Attention<bf16>(a).run();
  else Attention<float>(a).run();
}
