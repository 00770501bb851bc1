// Causal attention over a paged K/V cache with online softmax in fp32 (Milakov and Gimelshein,
// arXiv 1805.02867; blocks as in FlashAttention, arXiv 2205.14135).
//
// A row's result depends on nothing but its own query and keys: key blocks start at multiples of
// kKeyBlock, splits at multiples of kSplitKeys, and what a row may not see is an exact no-op. So a
// verify row and a decode step over the same context agree bit for bit.

constexpr int64_t kKeyBlock = 64;
constexpr int64_t kSplitKeys = 256;  // a split is done by one thread, splits are merged in order
constexpr int64_t kMaxRows = 32;      // rows of a block: queries x query heads of one K/V head

// The running softmax of `rows` rows (a multiple of 16: whole tiles): largest score, sum of weights,
// weighted sum of values.
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

// One (request, K/V head, block of queries).
struct Block {
  const int32_t* slots;  // [keys]: slot of each position
  int64_t first_row;     // of the queries in the batch
  int64_t queries;
  int64_t first_position;  // of the first query in the context
  int64_t kv_head;
};

// The arguments with what follows from them.
template <typename T>
struct Shape {
  const AttentionArgs& a;
  const int64_t group = a.num_heads / a.num_kv_heads;
  const int64_t value_width = round_up(a.value_dim, W);

  int64_t rows(const Block& block) const { return block.queries * group; }
  int64_t padded_rows(const Block& block) const { return round_up(rows(block), 16); }

  // Row r of a block is query r / group, head r % group of the K/V head's group.
  const T* query(const Block& block, int64_t r) const {
    return static_cast<const T*>(a.query) + (block.first_row + r / group) * a.query_stride +
           (block.kv_head * group + r % group) * a.head_dim;
  }

  // The rows of K and V at a position of the block's request.
  const T* key(const Block& block, int64_t position) const {
    return static_cast<const T*>(a.key_cache) +
           (block.slots[position] * a.num_kv_heads + block.kv_head) * a.head_dim;
  }
  const T* value(const Block& block, int64_t position) const {
    return static_cast<const T*>(a.value_cache) +
           (block.slots[position] * a.num_kv_heads + block.kv_head) * a.value_dim;
  }

  // Whether every row of the block sees every position of [begin, end).
  bool all_visible(const Block& block, int64_t begin, int64_t end) const {
    const int64_t last = block.first_position + block.queries - 1;
    return end - 1 <= block.first_position && (a.window < 0 || begin >= last - a.window);
  }
};

