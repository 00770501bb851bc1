// Intervals of scores from 8-bit weights and inputs of two 8-bit digits (screen.h), by VPDPBUSD.

// One group of columns: its scores' highest upper ends, tile over tile, and lowest lower ends.
template <int R>
void screen_group(const ScreenArgs& a, const uint8_t* group, vfloat* lower, float* highest,
                  int64_t highest_stride) {
  // All tiles at once as long as their sums fit into the registers: one sum is late by 5 cycles.
  constexpr int kTiles = R <= 2 ? kGroupTiles : kGroupTiles / 2;
  constexpr int64_t kTileBytes = kTileColumns * kScreenInputs;
  const float* scales = reinterpret_cast<const float*>(group + a.inputs * kGroupColumns);
  const float* errors = scales + kGroupColumns;
  vfloat upper[R];
  for (int64_t first = 0; first < kGroupTiles; first += kTiles) {
    __m512i high[R][kTiles], low[R][kTiles];
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
      for (int t = 0; t < kTiles; ++t) high[r][t] = low[r][t] = _mm512_setzero_si512();
    const uint8_t* w = group + first * kTileBytes;
    for (int64_t i = 0; i < a.inputs; i += kScreenInputs, w += kGroupTiles * kTileBytes) {
      __m512i weights[kTiles];
#pragma GCC unroll 4
      for (int t = 0; t < kTiles; ++t) {
        weights[t] = _mm512_loadu_si512(w + t * kTileBytes);
        _mm_prefetch(reinterpret_cast<const char*>(w) + kPrefetchBytes + t * kTileBytes, _MM_HINT_T0);
      }
#pragma GCC unroll 4
      for (int r = 0; r < R; ++r) {
        const int8_t* digits = a.digits + r * 2 * a.inputs + i;
        int32_t four[2];
        __builtin_memcpy(&four[0], digits, 4);
        __builtin_memcpy(&four[1], digits + a.inputs, 4);
        const __m512i high_digits = _mm512_set1_epi32(four[0]);
        const __m512i low_digits = _mm512_set1_epi32(four[1]);
#pragma GCC unroll 4
        for (int t = 0; t < kTiles; ++t) {
          high[r][t] = _mm512_dpbusd_epi32(high[r][t], weights[t], high_digits);
          low[r][t] = _mm512_dpbusd_epi32(low[r][t], weights[t], low_digits);
        }
      }
    }
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) {
      const ScreenRow& row = a.row[r];
      // Weights are stored 128 too large, to be unsigned.
      const __m512i high_excess = _mm512_set1_epi32(128 * row.high_sum);
      const __m512i low_excess = _mm512_set1_epi32(128 * row.low_sum);
#pragma GCC unroll 4
      for (int t = 0; t < kTiles; ++t) {
        const int64_t column = (first + t) * kTileColumns;
        const vfloat digits =
            (vfloat)_mm512_cvtepi32_ps(_mm512_sub_epi32(high[r][t], high_excess)) * 256.0f +
            (vfloat)_mm512_cvtepi32_ps(_mm512_sub_epi32(low[r][t], low_excess));
        const vfloat score = digits * (load(scales + column) * row.step);
        const vfloat slack = load(errors + column) * row.length + row.error;
        lower[r] = max(lower[r], score - slack);
        upper[r] = first + t == 0 ? score + slack : max(upper[r], score + slack);
      }
    }
  }
#pragma GCC unroll 4
  for (int r = 0; r < R; ++r) store(highest + r * highest_stride, upper[r]);
}

template <int R>
void screen_rows(const ScreenArgs& a) {
  const int64_t bytes = screen_group_bytes(a.inputs);
  const int64_t step = std::max<int64_t>(1, kRangeBytes / bytes);
  const int64_t ranges = (a.groups + step - 1) / step;
  // [R, groups, kTileColumns] upper ends, then [ranges, R] lower ends.
  float* highest = static_cast<float*>(
      thread_scratch(2, (a.groups * kTileColumns + ranges) * R * sizeof(float)));
  float* floors = highest + R * a.groups * kTileColumns;
  weights_begin(a.packed, a.groups * bytes);
  parallel_for(ranges, [&](int64_t range) {
    vfloat lower[R];
    for (int r = 0; r < R; ++r) lower[r] = splat(-__builtin_inff());
    const int64_t end = std::min(a.groups, (range + 1) * step);
    for (int64_t group = range * step; group < end; ++group)
      screen_group<R>(a, a.packed + group * bytes, lower, highest + group * kTileColumns,
                      a.groups * kTileColumns);
    for (int r = 0; r < R; ++r) floors[range * R + r] = max_of(lower[r]);
  });
  for (int r = 0; r < R; ++r) {
    float floor = -__builtin_inff();
    for (int64_t range = 0; range < ranges; ++range) floor = std::max(floor, floors[range * R + r]);
    // Rounded to bf16, scores that are 2^-7 apart differ; the best one is at least floor + shift.
    const vfloat needed = splat(floor - __builtin_fabsf(floor + a.row[r].shift) / 128);
    const float* ends = highest + r * a.groups * kTileColumns;
    for (int64_t group = 0; group < a.groups; ++group) {
      const __mmask16 reach = _mm512_cmp_ps_mask((__m512)load(ends + group * kTileColumns),
                                                 (__m512)needed, _CMP_GE_OQ);
      a.wanted[group] |= reach != 0;
    }
  }
}

void screen(const ScreenArgs& a) {
  switch (a.rows) {
    case 1: return screen_rows<1>(a);
    case 2: return screen_rows<2>(a);
    case 3: return screen_rows<3>(a);
    case 4: return screen_rows<4>(a);
  }
}
