// y = x W^T + bias on packed bf16 weights (layout in kernels.h), fp32 sums, one rounding at the end.
//
// The weights are streamed once for up to kRowBlock rows. A sum runs over the inputs in order, so
// a row's result does not depend on the rows beside it.

#ifdef DLITE_DOT
// VDPBF16PS: two products and the sum in one instruction; a tile is one register wide.
constexpr int kRowBlock = 6;

template <int R>
void multiply_group(const bf16* x, int64_t x_stride, const bf16* w, int64_t steps, float* sums) {
  __m512 acc[R][kGroupTiles];
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
    for (int t = 0; t < kGroupTiles; ++t) acc[r][t] = _mm512_setzero_ps();
  for (int64_t s = 0; s < steps; ++s, x += kStepInputs, w += kGroupTiles * kTileElements) {
    prefetch_step(w);
    for (int64_t p = 0; p < kStepInputs / 2; ++p) {
      __m512bh weights[kGroupTiles];
#pragma GCC unroll 4
      for (int t = 0; t < kGroupTiles; ++t)
        weights[t] = (__m512bh)_mm512_loadu_si512(w + t * kTileElements + p * 2 * kTileColumns);
#pragma GCC unroll 8
      for (int r = 0; r < R; ++r) {
        int32_t pair;
        __builtin_memcpy(&pair, x + r * x_stride + 2 * p, 4);
        const __m512bh inputs = (__m512bh)_mm512_set1_epi32(pair);
#pragma GCC unroll 4
        for (int t = 0; t < kGroupTiles; ++t)
          acc[r][t] = _mm512_dpbf16_ps(acc[r][t], inputs, weights[t]);
      }
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
    for (int t = 0; t < kGroupTiles; ++t)
      _mm512_storeu_ps(sums + r * kGroupColumns + t * kTileColumns, acc[r][t]);
}
#else
// A pair of weights becomes two floats; acc += x0 * w0, then x1 * w1. Two tiles at a time.
constexpr int kRowBlock = W == 16 ? 4 : 1;
constexpr int kParts = 2 * kTileColumns / W;

template <int R>
void multiply_tiles(const bf16* x, int64_t x_stride, const bf16* w, int64_t steps, float* sums) {
  vfloat acc[R][kParts] = {};
  for (int64_t s = 0; s < steps; ++s, x += kStepInputs, w += kGroupTiles * kTileElements) {
    prefetch_step(w);
    for (int64_t p = 0; p < kStepInputs / 2; ++p) {
      vfloat even[kParts], odd[kParts];
#pragma GCC unroll 4
      for (int j = 0; j < kParts; ++j) {
        const int64_t column = j * W;
        vuint both;
        __builtin_memcpy(&both,
                         w + column / kTileColumns * kTileElements +
                             (p * kTileColumns + column % kTileColumns) * 2,
                         sizeof(both));
        even[j] = (vfloat)(both << 16);
        odd[j] = (vfloat)(both & 0xffff0000u);
      }
#pragma GCC unroll 8
      for (int r = 0; r < R; ++r) {
        const vfloat x0 = splat(bf16_to_float(x[r * x_stride + 2 * p]));
        const vfloat x1 = splat(bf16_to_float(x[r * x_stride + 2 * p + 1]));
#pragma GCC unroll 4
        for (int j = 0; j < kParts; ++j) {
          acc[r][j] = x0 * even[j] + acc[r][j];
          acc[r][j] = x1 * odd[j] + acc[r][j];
        }
      }
    }
  }
  for (int r = 0; r < R; ++r)
    for (int j = 0; j < kParts; ++j) store(sums + r * kGroupColumns + j * W, acc[r][j]);
}

template <int R>
void multiply_group(const bf16* x, int64_t x_stride, const bf16* w, int64_t steps, float* sums) {
  for (int64_t t = 0; t < kGroupTiles; t += 2)
    multiply_tiles<R>(x, x_stride, w + t * kTileElements, steps, sums + t * kTileColumns);
}
#endif

template <int R>
void linear_rows(const LinearArgs& a, const bf16* x, int64_t x_stride, int64_t row,
                 int64_t group) {
  const int64_t inputs = round_up(a.in_features, kStepInputs);
  float sums[R * kGroupColumns];
  multiply_group<R>(x + row * x_stride, x_stride, a.packed + group * kGroupColumns * inputs,
                    inputs / kStepInputs, sums);
  for (int r = 0; r < R; ++r)
    write_sums(a, row + r, group * kGroupColumns, kGroupColumns, sums + r * kGroupColumns);
}

void linear(const LinearArgs& a) {
  int64_t x_stride;
  const bf16* x = padded_inputs(a, &x_stride);
  for_groups(a, 1, [&](int64_t, int64_t first, int64_t end) {
    for (int64_t place = first; place < end; ++place) {
      const int64_t group = group_at(a, place);
      int64_t row = 0;
      for (; row + kRowBlock <= a.rows; row += kRowBlock)
        linear_rows<kRowBlock>(a, x, x_stride, row, group);
      for (; row + 2 <= a.rows; row += 2) linear_rows<2>(a, x, x_stride, row, group);
      for (; row < a.rows; ++row) linear_rows<1>(a, x, x_stride, row, group);
    }
  });
}
