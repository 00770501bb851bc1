// Causal attention over a paged K/V cache: who does which part when.

// Blocks<T>::add_keys does the arithmetic, this the order of the work.
template <typename T, template <typename> class Blocks>
struct Attention {
  const AttentionArgs& a;
  const Shape<T> shape{a};
  const Blocks<T> kernel{shape};
  const int64_t value_width = shape.value_width;
  const int64_t queries_per_block = kMaxRows / shape.group > 0 ? kMaxRows / shape.group : 1;

  int64_t rows(const Block& block) const { return shape.rows(block); }
  int64_t end_key(const Block& block) const { return block.first_position + block.queries; }
  int64_t begin_key(const Block& block) const {
    return a.window < 0 || block.first_position < a.window ? 0 : block.first_position - a.window;
  }

  void write(const Block& block, const Softmax& s) const {
    for (int64_t r = 0; r < rows(block); ++r) {
      T* out = static_cast<T*>(a.out) +
               ((block.first_row + r / shape.group) * a.num_heads + block.kv_head * shape.group + r % shape.group) *
                   a.value_dim;
      const float factor = 1.0f / s.weight[r];
      const float* value = s.value + r * value_width;
      int64_t i = 0;
      for (; i + W <= a.value_dim; i += W) store(out + i, load(value + i) * factor);
      for (; i < a.value_dim; ++i) store_one(out + i, value[i] * factor);
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
    s.reset(shape.padded_rows(block), value_width);
    kernel.add_keys(block, begin, end, s);
  }

  void run() const {
    // Work is a list of (request, block, split), all K/V heads of it; splits of one block are
    // neighbours. A row of the cache holds all heads: one thread then reads whole rows.
    // `starts` [requests + 1] counts the entries before each request.
    int64_t* starts = static_cast<int64_t*>(thread_scratch(2, (a.requests + 1) * sizeof(int64_t)));
    starts[0] = 0;
    for (int64_t i = 0; i < a.requests; ++i) {
      int64_t units = 0;
      for (int64_t b = 0; b < blocks(i); ++b) {
        const Block block = block_of(i, 0, b);
        units += end_split(block) - first_split(block);
      }
      starts[i + 1] = starts[i] + units;
    }
    // Splits are handed out one by one as long as their partial sums stay small: always when
    // decoding, not in a long prompt, whose blocks alone keep the team busy.
    const int64_t units = starts[a.requests], part = Softmax::floats(largest_rows(), value_width);
    const int64_t bytes = units * a.num_kv_heads * part * sizeof(float);
    if (bytes > kMaxPartialBytes) return run_blocks(part);
    float* parts = static_cast<float*>(thread_scratch(3, bytes));
    const int64_t heads = a.num_kv_heads;
    parallel_for(units, [&](int64_t unit) {
      Place place = find(starts, unit);
      for (int64_t h = 0; h < heads; ++h) {
        place.block.kv_head = h;
        add_split(place.block, place.split,
                  Softmax::at(parts + (unit * heads + h) * part, shape.padded_rows(place.block)));
      }
    });
    parallel_for(units * heads, [&](int64_t index) {
      const int64_t unit = index / heads;
      Place place = find(starts, unit);
      if (place.split != first_split(place.block)) return;
      place.block.kv_head = index % heads;
      const int64_t count = shape.padded_rows(place.block);
      const Softmax total = Softmax::at(parts + index * part, count);
      for (int64_t i = 1; i < end_split(place.block) - place.split; ++i)
        merge(total, Softmax::at(parts + (index + i * heads) * part, count), count, value_width);
      write(place.block, total);
    });
  }

 private:
  static constexpr int64_t kMaxPartialBytes = 16 << 20;

  struct Place {
    Block block;
    int64_t split;
  };

  // Padded rows of the largest block of the batch.
  int64_t largest_rows() const {
    int64_t queries = 1;
    for (int64_t i = 0; i < a.requests; ++i)
      queries = std::max(queries, a.query_starts[i + 1] - a.query_starts[i]);
    return round_up(std::min(queries, queries_per_block) * shape.group, 16);
  }

  Place find(const int64_t* starts, int64_t unit) const {
    int64_t request = 0;
    while (starts[request + 1] <= unit) ++request;
    unit -= starts[request];
    for (int64_t b = 0;; ++b) {
      const Block block = block_of(request, 0, b);
      const int64_t splits = end_split(block) - first_split(block);
      if (unit < splits) return {block, first_split(block) + unit};
      unit -= splits;
    }
  }

  // A prompt: one thread does all splits of a block, in the same order.
  void run_blocks(int64_t part) const {
    int64_t* starts = static_cast<int64_t*>(thread_scratch(2, (a.requests + 1) * sizeof(int64_t)));
    starts[0] = 0;
    for (int64_t i = 0; i < a.requests; ++i)
      starts[i + 1] = starts[i] + blocks(i) * a.num_kv_heads;
    parallel_for(starts[a.requests], [&](int64_t unit) {
      int64_t request = 0;
      while (starts[request + 1] <= unit) ++request;
      unit -= starts[request];
      // The longest blocks come first, so that no thread is left with one at the end.
      const int64_t index = blocks(request) - 1 - unit / a.num_kv_heads;
      const Block block = block_of(request, unit % a.num_kv_heads, index);
      float* memory = static_cast<float*>(thread_scratch(1, 2 * part * sizeof(float)));
      const Softmax total = Softmax::at(memory, shape.padded_rows(block));
      const Softmax next = Softmax::at(memory + part, shape.padded_rows(block));
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
#ifdef DLITE_MATRIX_UNIT
  if (a.dtype == Dtype::kBFloat16 && MatrixBlocks<bf16>::serves(a))
    return Attention<bf16, MatrixBlocks>{a}.run();
#endif
  if (a.dtype == Dtype::kBFloat16) Attention<bf16, VectorBlocks>{a}.run();
  else Attention<float, VectorBlocks>{a}.run();
}
