#include "screen.h"

#include <sys/mman.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <new>

namespace dlite {
namespace {

// What fp32 sums may lose of a product of two vectors, of either order of summation.
constexpr float kSumError = 1e-5f;

}  // namespace

Screen::Screen(const bf16* weight, int64_t columns, int64_t inputs, const std::vector<float>& usual)
    : inputs_(inputs), mean_(inputs), factor_(inputs, 1.0f) {
  std::vector<double> sums(inputs), squares(inputs);
  for (int64_t c = 0; c < columns; ++c) {
    for (int64_t i = 0; i < inputs; ++i) {
      const double w = bf16_to_float(weight[c * inputs + i]);
      sums[i] += w;
      squares[i] += w * w;
    }
  }
  for (int64_t i = 0; i < inputs; ++i) {
    if (!std::isfinite(squares[i])) return;  // no bound holds for NaN
    mean_[i] = static_cast<float>(sums[i] / columns);
    const double variance = squares[i] / columns - sums[i] / columns * (sums[i] / columns);
    if (variance > 0 && usual[i] > 0) factor_[i] = std::sqrt(usual[i] / std::sqrt(variance));
  }
  groups_ = (columns + kGroupColumns - 1) / kGroupColumns;
  // Whole cache lines, on pages as large as the system has them.
  constexpr int64_t kPage = 1 << 21;
  const int64_t bytes = round_up(groups_ * screen_group_bytes(inputs), kPage);
  packed_.reset(static_cast<uint8_t*>(std::aligned_alloc(kPage, bytes)), std::free);
  if (!packed_) throw std::bad_alloc();
  madvise(packed_.get(), bytes, MADV_HUGEPAGE);
  for (int64_t group = 0; group < groups_; ++group) pack_group(weight, columns, group);
}

void Screen::pack_group(const bf16* weight, int64_t columns, int64_t group) {
  const int64_t padded = round_up(inputs_, kScreenInputs);
  uint8_t* bytes = packed_.get() + group * screen_group_bytes(inputs_);
  float* scales = reinterpret_cast<float*>(bytes + padded * kGroupColumns);
  float* errors = scales + kGroupColumns;
  std::vector<float> scaled(inputs_);
  for (int64_t j = 0; j < kGroupColumns; ++j) {
    const int64_t column = group * kGroupColumns + j;
    float largest = 0;
    double length = 0, error = 0;
    for (int64_t i = 0; i < inputs_; ++i) {
      const bool inside = column < columns;
      const float w = inside ? bf16_to_float(weight[column * inputs_ + i]) - mean_[i] : 0.0f;
      scaled[i] = w * factor_[i];
      largest = std::max(largest, std::abs(scaled[i]));
      length += static_cast<double>(scaled[i]) * scaled[i];
    }
    const float scale = largest / 127;
    for (int64_t i = 0; i < padded; ++i) {
      const float exact = i < inputs_ ? scaled[i] : 0.0f;
      const float digit = scale > 0 ? std::nearbyint(exact / scale) : 0.0f;
      error += static_cast<double>(exact - digit * scale) * (exact - digit * scale);
      bytes[(i / kScreenInputs * kGroupColumns + j) * kScreenInputs + i % kScreenInputs] =
          static_cast<uint8_t>(static_cast<int>(digit) + 128);
    }
    scales[j] = scale;
    // Columns past the matrix can be anything, so they raise no lower bound.
    errors[j] = column < columns ? static_cast<float>(std::sqrt(error)) : 1e30f;
    longest_ = std::max(longest_, static_cast<float>(std::sqrt(length)));
  }
}

const std::vector<int64_t>& Screen::groups(const bf16* x, int64_t x_stride, int64_t rows) const {
  static thread_local std::vector<int64_t> chosen;
  const int64_t padded = round_up(inputs_, kScreenInputs);
  static thread_local std::vector<int8_t> digits;
  static thread_local std::vector<uint8_t> wanted;
  digits.assign(rows * 2 * padded, 0);
  wanted.assign(groups_, 0);
  ScreenRow row[kScreenRows];
  for (int64_t r = 0; r < rows; ++r) {
    const bf16* input = x + r * x_stride;
    float largest = 0;
    for (int64_t i = 0; i < inputs_; ++i)
      largest = std::max(largest, std::abs(bf16_to_float(input[i]) / factor_[i]));
    constexpr int kLargestDigit = 127 * 256;
    const float step = largest / kLargestDigit;
    int8_t* high = digits.data() + r * 2 * padded;
    int8_t* low = high + padded;
    double length = 0, error = 0, shift = 0, plain = 0;
    for (int64_t i = 0; i < inputs_; ++i) {
      const float value = bf16_to_float(input[i]), scaled = value / factor_[i];
      const bool counts = step > 0 && std::isfinite(scaled);
      const int digit = counts ? static_cast<int>(std::nearbyint(scaled / step)) : 0;
      high[i] = static_cast<int8_t>((digit + 128) >> 8);
      low[i] = static_cast<int8_t>(digit - high[i] * 256);
      row[r].high_sum += high[i];
      row[r].low_sum += low[i];
      const double kept = static_cast<double>(digit) * step;
      length += kept * kept;
      error += (scaled - kept) * (scaled - kept);
      shift += static_cast<double>(value) * mean_[i];
      plain += std::abs(static_cast<double>(value) * mean_[i]);
    }
    row[r].step = step;
    row[r].length = static_cast<float>(std::sqrt(length)) * (1 + kSumError);
    row[r].error = longest_ * static_cast<float>(std::sqrt(error)) +
                   kSumError * (longest_ * row[r].length + static_cast<float>(plain));
    row[r].shift = static_cast<float>(shift);
  }
  kernels().screen({packed_.get(), padded, groups_, digits.data(), row, rows, wanted.data()});
  chosen.clear();
  for (int64_t group = 0; group < groups_; ++group)
    if (wanted[group]) chosen.push_back(group);
  return chosen;
}

}  // namespace dlite
