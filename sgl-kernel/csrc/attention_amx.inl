// Adding a range of keys to the running softmax of a block, on AMX tiles: bf16.
//
// Scores come out as [keys, rows] (K times Q^T), because K then needs no re-ordering. Weights are
// split into two bf16 parts before they meet the values: together they hold 16 bits of each, so
// that the result is that of fp32 weights up to its own rounding.

template <typename T>
struct MatrixBlocks {
  static constexpr int64_t kStep = kStepInputs;  // inputs of one tile product
  static constexpr int64_t kLanes = 16;          // rows of a tile, lanes of a vector
  static constexpr int64_t kKeySteps = kKeyBlock / kStep;

  const Shape<bf16>& shape;

  static bool serves(const AttentionArgs& a) {
    return a.head_dim % kStep == 0 && a.value_dim % kLanes == 0;
  }

  // 64-byte aligned memory of one call, in elements of 4 bytes.
  struct Memory {
    uint32_t* queries;  // [row tiles][head_dim / 32][16 pairs][16 rows], pairs of bf16
    bf16* keys;         // [64, head_dim], used where the slots are scattered
    uint32_t* values;   // [2][value_dim / 16][16 pairs of keys][16], pairs of bf16
    float* scores;      // [64 keys, 16 rows]
    bf16* weights;      // [2 parts][16 rows, 64 keys]
  };

  static Memory memory(const AttentionArgs& a, int64_t tiles) {
    const int64_t q = tiles * a.head_dim * kLanes / 2, k = kKeyBlock * a.head_dim / 2;
    const int64_t v = kKeyBlock * a.value_dim / 2, s = kKeyBlock * kLanes;
    const int64_t all = q + k + v + 2 * s;
    uint32_t* at = static_cast<uint32_t*>(thread_scratch(0, all * sizeof(uint32_t)));
    Memory m;
    m.queries = at;
    m.keys = reinterpret_cast<bf16*>(at += q);
    m.values = at += k;
    m.scores = reinterpret_cast<float*>(at += v);
    m.weights = reinterpret_cast<bf16*>(at += s);
    __builtin_memset(m.weights, 0, s * sizeof(float));  // never NaN in rows past the block
    return m;
  }

  // Q^T in tiles whose rows are pairs of inputs; rows past the block are zero.
  void load_queries(const Block& block, int64_t tiles, uint32_t* queries) const {
    const int64_t rows = shape.rows(block), pairs = shape.a.head_dim / 2;
    for (int64_t r = 0; r < tiles * kLanes; ++r) {
      uint32_t* to = queries + r / kLanes * pairs * kLanes + r % kLanes;
      if (r >= rows) {
        for (int64_t p = 0; p < pairs; ++p) to[p * kLanes] = 0;
        continue;
      }
      const bf16* from = shape.query(block, r);
      for (int64_t p = 0; p < pairs; ++p) __builtin_memcpy(to + p * kLanes, from + 2 * p, 4);
    }
  }

  // 16 keys from `position` on as tile rows, *stride bytes apart: in place where their slots are
  // neighbours, else a copy padded with zeros.
  const bf16* key_rows(const Block& block, int64_t position, int64_t end, bf16* copy,
                       int64_t* stride) const {
    const int64_t size = shape.a.head_dim;
    if (position + kLanes <= end && consecutive(block.slots + position)) {
      *stride = shape.a.num_kv_heads * size * sizeof(bf16);
      return shape.key(block, position);
    }
    for (int64_t i = 0; i < kLanes; ++i) {
      if (position + i < end)
        __builtin_memcpy(copy + i * size, shape.key(block, position + i), size * sizeof(bf16));
      else
        __builtin_memset(copy + i * size, 0, size * sizeof(bf16));
    }
    *stride = size * sizeof(bf16);
    return copy;
  }

  static bool consecutive(const int32_t* slots) {
    for (int64_t i = 1; i < kLanes; ++i)
      if (slots[i] != slots[0] + i) return false;
    return true;
  }

  // V in tiles whose rows are pairs of keys; keys past `end` are zero.
  void load_values(const Block& block, int64_t begin, int64_t end, uint32_t* values) const {
    const int64_t columns = shape.a.value_dim / kLanes;
    for (int64_t k = 0; k < kKeyBlock; k += 2) {
      const bf16* low = begin + k < end ? shape.value(block, begin + k) : nullptr;
      const bf16* high = begin + k + 1 < end ? shape.value(block, begin + k + 1) : nullptr;
      uint32_t* to = values + (k / kStep * columns * kLanes + k % kStep / 2) * kLanes;
      for (int64_t c = 0; c < columns; ++c) {
        const vuint a = low ? widen(low + c * kLanes) : vuint{};
        const vuint b = high ? widen(high + c * kLanes) : vuint{};
        const vuint both = a | b << 16;
        __builtin_memcpy(to + c * kLanes * kLanes, &both, sizeof(both));
      }
    }
  }

  // The next block's rows, of all heads: the first head's turn fetches them for the others too.
  void prefetch_keys(const Block& block, int64_t begin, int64_t end) const {
    if (block.kv_head != 0) return;
    const int64_t stop = begin + kKeyBlock < end ? begin + kKeyBlock : end;
    for (int64_t k = begin; k < stop; ++k) {
      prefetch_row(shape.key(block, k), shape.a.num_kv_heads * shape.a.head_dim);
      prefetch_row(shape.value(block, k), shape.a.num_kv_heads * shape.a.value_dim);
    }
  }

  static void prefetch_row(const bf16* row, int64_t size) {
    for (int64_t i = 0; i < size; i += 32) _mm_prefetch(row + i, _MM_HINT_T1);
  }

  // Four accumulators at a time, here and below: one alone waits 52 cycles for each product.
  struct Keys {
    const bf16* rows[kKeyBlock / kLanes];
    int64_t stride[kKeyBlock / kLanes];
  };

  Keys load_keys(const Block& block, int64_t begin, int64_t end, bf16* copy) const {
    Keys keys;
    for (int64_t i = 0; i < kKeyBlock / kLanes; ++i)
      keys.rows[i] = key_rows(block, begin + i * kLanes, end,
                              copy + i * kLanes * shape.a.head_dim, &keys.stride[i]);
    return keys;
  }

  // scores [64, 16] of one tile of rows.
  void score(const Keys& keys, const uint32_t* queries, float* scores) const {
    zero_sums();
    for (int64_t d = 0; d < shape.a.head_dim; d += kStep, queries += kLanes * kLanes) {
      _tile_loadd(6, queries, 64);
      _tile_loadd(4, keys.rows[0] + d, keys.stride[0]);
      _tile_dpbf16ps(0, 4, 6);
      _tile_loadd(5, keys.rows[1] + d, keys.stride[1]);
      _tile_dpbf16ps(1, 5, 6);
      _tile_loadd(4, keys.rows[2] + d, keys.stride[2]);
      _tile_dpbf16ps(2, 4, 6);
      _tile_loadd(5, keys.rows[3] + d, keys.stride[3]);
      _tile_dpbf16ps(3, 5, 6);
    }
    _tile_stored(0, scores, 64);
    _tile_stored(1, scores + kLanes * kLanes, 64);
    _tile_stored(2, scores + 2 * kLanes * kLanes, 64);
    _tile_stored(3, scores + 3 * kLanes * kLanes, 64);
  }

  // Scores [64 keys, 16 rows] of one tile become weights, as high and low bf16 parts
  // [2][16 rows, 64 keys]; the sums so far are scaled to the new largest score.
  //
  // One lane is one row where a step runs over the rows, one key where it runs over the keys.
  void soften(const Block& block, int64_t tile, int64_t begin, int64_t end, float* scores,
              bf16* parts, const Softmax& s, int64_t rows) const {
    constexpr int64_t kVectors = kKeyBlock / kLanes, kPart = kLanes * kKeyBlock;
    const vfloat old = load(s.largest + tile * kLanes);
    const vfloat top = max(old, scale_and_mask(block, tile, begin, end, scores));
    // A row that has seen nothing yet: its scores are all -inf, its weights become exp(-inf) = 0.
    const vfloat base = top == -__builtin_inff() ? splat(0) : top;
    alignas(64) float totals[kLanes * kLanes] = {}, bases[kLanes], keeps[kLanes];
    store(bases, base);
    for (int64_t k = 0; k < kVectors; ++k) transpose_tile(scores + k * kLanes * kLanes);
    for (int64_t i = 0; i < rows; ++i) {
      const float* row = scores + i * kLanes;
      bf16* part = parts + i * kKeyBlock;
      vfloat total = splat(0);
#pragma GCC unroll 4
      for (int64_t k = 0; k < kVectors; ++k) {
        const vfloat weight = exp(load(row + k * kLanes * kLanes) - bases[i]);
        total = total + weight;
        const vfloat high = round_to_bf16(weight);
        store(part + k * kLanes, high);
        store(part + kPart + k * kLanes, weight - high);
      }
      store(totals + i * kLanes, total);
    }
    transpose_tile(totals);
    vfloat sum = load(totals);
    for (int64_t i = 1; i < kLanes; ++i) sum = sum + load(totals + i * kLanes);
    const vfloat keep = exp(old - base);
    store(s.largest + tile * kLanes, top);
    store(s.weight + tile * kLanes, load(s.weight + tile * kLanes) * keep + sum);
    store(keeps, keep);
    for (int64_t i = 0; i < rows; ++i) {
      if (keeps[i] == 1.0f) continue;
      float* value = s.value + (tile * kLanes + i) * shape.value_width;
      for (int64_t d = 0; d < shape.value_width; d += W)
        store(value + d, load(value + d) * keeps[i]);
    }
  }

  // scores [64 keys, 16 rows] times the scale, -inf where hidden; returns each row's largest.
  vfloat scale_and_mask(const Block& block, int64_t tile, int64_t begin, int64_t end,
                        float* scores) const {
    const vfloat hidden = splat(-__builtin_inff());
    vfloat top = hidden;
    if (end - begin == kKeyBlock && shape.all_visible(block, begin, end)) {
      for (int64_t k = 0; k < kKeyBlock; ++k) {
        const vfloat score = load(scores + k * kLanes) * shape.a.scale;
        store(scores + k * kLanes, score);
        top = max(top, score);
      }
      return top;
    }
    vint first, last;  // the keys that each row sees, counted from begin
    for (int64_t i = 0; i < kLanes; ++i) {
      const int64_t position = block.first_position + (tile * kLanes + i) / shape.group;
      const int64_t low = shape.a.window < 0 ? begin : position - shape.a.window;
      last[i] = static_cast<int32_t>((position < end - 1 ? position : end - 1) - begin);
      first[i] = static_cast<int32_t>(low > begin ? low - begin : 0);
    }
    for (int32_t k = 0; k < kKeyBlock; ++k) {
      vfloat score = load(scores + k * kLanes) * shape.a.scale;
      score = (first <= k) & (last >= k) ? score : hidden;
      store(scores + k * kLanes, score);
      top = max(top, score);
    }
    return top;
  }

  static vfloat round_to_bf16(vfloat v) {
    const vuint wide = (vuint)_mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh((__m512)v));
    return (vfloat)(wide << 16);
  }

  static void transpose_tile(float* tile) {
    vfloat v[kLanes];
#pragma GCC unroll 16
    for (int i = 0; i < kLanes; ++i) v[i] = load(tile + i * kLanes);
    transpose(v);
#pragma GCC unroll 16
    for (int i = 0; i < kLanes; ++i) store(tile + i * kLanes, v[i]);
  }

  // value [16, value_dim] += weights values, for one tile of rows.
  void accumulate(const Memory& m, float* value) const {
    const int64_t columns = shape.a.value_dim / kLanes;
    int64_t c = 0;
    for (; c + 4 <= columns; c += 4) accumulate_columns<4>(m, c, columns, value);
    for (; c + 2 <= columns; c += 2) accumulate_columns<2>(m, c, columns, value);
    if (c < columns) accumulate_columns<1>(m, c, columns, value);
  }

  template <int kColumns>
  void accumulate_columns(const Memory& m, int64_t column, int64_t columns, float* value) const {
    constexpr int64_t kPart = kLanes * kKeyBlock, kTile = kLanes * kLanes;
    const int64_t stride = shape.a.value_dim * sizeof(float);
    float* sums = value + column * kLanes;
    _tile_loadd(0, sums, stride);
    if (kColumns > 1) _tile_loadd(1, sums + kLanes, stride);
    if (kColumns > 2) _tile_loadd(2, sums + 2 * kLanes, stride);
    if (kColumns > 2) _tile_loadd(3, sums + 3 * kLanes, stride);
    for (int64_t s = 0; s < kKeySteps; ++s) {
      const uint32_t* values = m.values + (s * columns + column) * kTile;
      // The high parts of the weights with every column, then the low parts.
      for (int64_t part = 0; part < 2; ++part) {
        _tile_loadd(4, m.weights + part * kPart + s * kStep, kKeyBlock * sizeof(bf16));
        _tile_loadd(6, values, 64);
        _tile_dpbf16ps(0, 4, 6);
        if (kColumns > 1) _tile_loadd(7, values + kTile, 64);
        if (kColumns > 1) _tile_dpbf16ps(1, 4, 7);
        if (kColumns > 2) _tile_loadd(6, values + 2 * kTile, 64);
        if (kColumns > 2) _tile_dpbf16ps(2, 4, 6);
        if (kColumns > 2) _tile_loadd(7, values + 3 * kTile, 64);
        if (kColumns > 2) _tile_dpbf16ps(3, 4, 7);
      }
    }
    _tile_stored(0, sums, stride);
    if (kColumns > 1) _tile_stored(1, sums + kLanes, stride);
    if (kColumns > 2) _tile_stored(2, sums + 2 * kLanes, stride);
    if (kColumns > 2) _tile_stored(3, sums + 3 * kLanes, stride);
  }

  // Adds positions [begin, end) to s; begin is a multiple of kKeyBlock, or the first key at all.
  void add_keys(const Block& block, int64_t begin, int64_t end, const Softmax& s) const {
    const int64_t count = shape.rows(block), tiles = (count + kLanes - 1) / kLanes;
    const Memory m = memory(shape.a, tiles);
    configure(kTileRows);
    prefetch_keys(block, begin, end);
    load_queries(block, tiles, m.queries);
    for (int64_t k = begin; k < end; k += kKeyBlock) {
      const int64_t stop = k + kKeyBlock < end ? k + kKeyBlock : end;
      prefetch_keys(block, stop, end);
      load_values(block, k, stop, m.values);
      const Keys keys = load_keys(block, k, stop, m.keys);
      for (int64_t tile = 0; tile < tiles; ++tile) {
        const int64_t rows = count - tile * kLanes < kLanes ? count - tile * kLanes : kLanes;
        score(keys, m.queries + tile * shape.a.head_dim / 2 * kLanes, m.scores);
        soften(block, tile, k, stop, m.scores, m.weights, s, rows);
        accumulate(m, s.value + tile * kLanes * shape.value_width);
      }
    }
    _tile_release();
  }
};
