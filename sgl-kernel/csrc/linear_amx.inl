// The same product on AMX tiles (TDPBF16PS: 16 x 32 inputs times 32 x 16 weights, fp32 sums).
//
// One accumulator tile sees its inputs in order, whatever the number of rows, so results do not
// depend on the batch here either.

constexpr int kTileRows = 16;
constexpr int64_t kRowsPerChunk = 256;  // x of a chunk stays in the second-level cache

struct alignas(64) TileConfig {
  uint8_t palette = 1;
  uint8_t start_row = 0;
  uint8_t reserved[14] = {};
  uint16_t row_bytes[16] = {};
  uint8_t rows[16] = {};
};

// Tiles 0..3 are sums and 4..5 inputs, of `rows` rows; 6..7 are weights.
inline void configure(int rows) {
  TileConfig config;
  for (int i = 0; i < 8; ++i) {
    config.row_bytes[i] = 64;
    config.rows[i] = static_cast<uint8_t>(i < 6 ? rows : kTileRows);
  }
  _tile_loadconfig(&config);
}

inline void zero_sums() {
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
}

// Up to 16 rows x the 4 tiles of a group, as sums [16, 64]: what decoding does.
inline void multiply_narrow(const bf16* x, int64_t x_stride, const bf16* w, int64_t steps,
                            float* sums) {
  const int64_t stride = x_stride * sizeof(bf16);
  zero_sums();
  for (int64_t s = 0; s < steps; ++s, x += kStepInputs, w += kGroupTiles * kTileElements) {
    prefetch_step(w);
    _tile_loadd(4, x, stride);
    _tile_loadd(6, w, 64);
    _tile_dpbf16ps(0, 4, 6);
    _tile_loadd(7, w + kTileElements, 64);
    _tile_dpbf16ps(1, 4, 7);
    _tile_loadd(6, w + 2 * kTileElements, 64);
    _tile_dpbf16ps(2, 4, 6);
    _tile_loadd(7, w + 3 * kTileElements, 64);
    _tile_dpbf16ps(3, 4, 7);
  }
  constexpr int64_t kBytes = kGroupColumns * sizeof(float);
  _tile_stored(0, sums, kBytes);
  _tile_stored(1, sums + kTileColumns, kBytes);
  _tile_stored(2, sums + 2 * kTileColumns, kBytes);
  _tile_stored(3, sums + 3 * kTileColumns, kBytes);
}

// 32 rows x 2 tiles, as sums [32, 32]: prompts.
inline void multiply_wide(const bf16* x, int64_t x_stride, const bf16* w, int64_t steps,
                          float* sums) {
  const int64_t stride = x_stride * sizeof(bf16);
  zero_sums();
  for (int64_t s = 0; s < steps; ++s, x += kStepInputs, w += kGroupTiles * kTileElements) {
    _tile_loadd(4, x, stride);
    _tile_loadd(5, x + kTileRows * x_stride, stride);
    _tile_loadd(6, w, 64);
    _tile_loadd(7, w + kTileElements, 64);
    _tile_dpbf16ps(0, 4, 6);
    _tile_dpbf16ps(1, 4, 7);
    _tile_dpbf16ps(2, 5, 6);
    _tile_dpbf16ps(3, 5, 7);
  }
  constexpr int64_t kBytes = 2 * kTileColumns * sizeof(float);
  float* bottom = sums + kTileRows * 2 * kTileColumns;
  _tile_stored(0, sums, kBytes);
  _tile_stored(1, sums + kTileColumns, kBytes);
  _tile_stored(2, bottom, kBytes);
  _tile_stored(3, bottom + kTileColumns, kBytes);
}

void linear(const LinearArgs& a) {
  int64_t x_stride;
  const bf16* x = padded_inputs(a, &x_stride);
  const int64_t inputs = round_up(a.in_features, kStepInputs), steps = inputs / kStepInputs;
  const int64_t row_chunks = (a.rows + kRowsPerChunk - 1) / kRowsPerChunk;
  for_groups(a, row_chunks, [&](int64_t row_chunk, int64_t first, int64_t end) {
    const int64_t begin_row = row_chunk * kRowsPerChunk;
    const int64_t end_row = begin_row + kRowsPerChunk < a.rows ? begin_row + kRowsPerChunk : a.rows;
    const int64_t end_wide = begin_row + (end_row - begin_row) / (2 * kTileRows) * 2 * kTileRows;
    alignas(64) float sums[kTileRows * kGroupColumns];
    if (begin_row < end_wide) configure(kTileRows);
    for (int64_t row = begin_row; row < end_wide; row += 2 * kTileRows) {
      for (int64_t place = first; place < end; ++place) {
        const int64_t group = group_at(a, place);
        for (int64_t tile = 0; tile < kGroupTiles; tile += 2) {
          const int64_t column = group * kGroupColumns + tile * kTileColumns;
          const bf16* w = a.packed + group * kGroupColumns * inputs + tile * kTileElements;
          multiply_wide(x + row * x_stride, x_stride, w, steps, sums);
          // Both tiles at once: 32 outputs are a whole cache line.
          for (int i = 0; i < 2 * kTileRows; ++i)
            write_sums(a, row + i, column, 2 * kTileColumns, sums + i * 2 * kTileColumns);
        }
      }
    }
    for (int64_t row = end_wide; row < end_row; row += kTileRows) {
      const int rows = static_cast<int>(end_row - row < kTileRows ? end_row - row : kTileRows);
      configure(rows);
      for (int64_t place = first; place < end; ++place) {
        const int64_t group = group_at(a, place);
        multiply_narrow(x + row * x_stride, x_stride, a.packed + group * kGroupColumns * inputs,
                        steps, sums);
        for (int i = 0; i < rows; ++i)
          write_sums(a, row + i, group * kGroupColumns, kGroupColumns, sums + i * kGroupColumns);
      }
    }
    _tile_release();
  });
}
