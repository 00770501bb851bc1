// What the linear kernels of all levels share: padding of the inputs, chunks, writing of the sums.

// x with rows of whole kStepInputs inputs: x itself, or a copy padded with zeros.
inline const bf16* padded_inputs(const LinearArgs& a, int64_t* stride) {
  const int64_t width = round_up(a.in_features, kStepInputs);
  *stride = a.x_stride;
  if (width == a.in_features) return a.x;
  bf16* copy = static_cast<bf16*>(thread_scratch(1, a.rows * width * sizeof(bf16)));
  for (int64_t r = 0; r < a.rows; ++r) {
    __builtin_memcpy(copy + r * width, a.x + r * a.x_stride, a.in_features * sizeof(bf16));
    __builtin_memset(copy + r * width + a.in_features, 0,
                     (width - a.in_features) * sizeof(bf16));
  }
  *stride = width;
  return copy;
}

constexpr int64_t kRangeBytes = 131072;  // of weights in a chunk of work

// The group at a place of a range.
inline int64_t group_at(const LinearArgs& a, int64_t place) {
  return a.groups ? a.groups[place] : place;
}

// Calls body(row_chunk, first, end) for ranges of places of column groups, on the team. A range is
// about kRangeBytes, less where the matrix would not make 4 ranges a thread: a late thread then
// costs little.
template <typename Body>
void for_groups(const LinearArgs& a, int64_t row_chunks, const Body& body) {
  const int64_t bytes = kGroupColumns * round_up(a.in_features, kStepInputs) * sizeof(bf16);
  const int64_t groups =
      a.groups ? a.num_groups : (a.out_features + kGroupColumns - 1) / kGroupColumns;
  if (!a.groups) weights_begin(a.packed, groups * bytes);
  const int64_t by_size = kRangeBytes / bytes, by_threads = groups / (4 * num_threads());
  const int64_t smaller = by_size < by_threads ? by_size : by_threads;
  const int64_t step = smaller > 0 ? smaller : 1, ranges = (groups + step - 1) / step;
  parallel_for(ranges * row_chunks, [&](int64_t chunk) {
    const int64_t first = chunk % ranges * step;
    body(chunk / ranges, first, first + step < groups ? first + step : groups);
  });
}

// y[row, column : column + count] = sums + bias, rounded; columns past the matrix are dropped.
inline void write_sums(const LinearArgs& a, int64_t row, int64_t column, int64_t count,
                       const float* sums) {
  if (column + count > a.out_features) count = a.out_features - column;
  bf16* y = a.y + row * a.y_stride + column;
  const bf16* bias = a.bias ? a.bias + column : nullptr;
  int64_t i = 0;
  for (; i + W <= count; i += W) {
    const vfloat v = load(sums + i);
    store(y + i, bias ? v + load(bias + i) : v);
  }
  for (; i < count; ++i) store_one(y + i, bias ? sums[i] + load_one(bias + i) : sums[i]);
}

constexpr int64_t kPrefetchBytes = 8192;

// Asks for the weights that are two steps ahead while a step is worked on: the hardware's own
// prefetcher does not fill the bandwidth of a core. A non-temporal hint was far slower than this one.
inline void prefetch_step(const bf16* step) {
  const char* p = reinterpret_cast<const char*>(step) + kPrefetchBytes;
#pragma GCC unroll 64
  for (int64_t i = 0; i < kGroupTiles * kTileElements * 2; i += 64) _mm_prefetch(p + i, _MM_HINT_T0);
}
