// Which columns of a matrix can hold a product's largest element, from a copy of half its size.
//
// The copy has 8 bits an element. A column w of it is off by a vector of known length, so that
// every score lies in an interval of known width around what the copy gives; only columns whose
// interval reaches past the best lower end can be the largest, and those are computed exactly, by
// the same operator as ever. The result is that of the whole product, bit for bit.
//
// Two changes leave the order of the scores as it is and make the intervals narrow: the mean of all
// columns is taken off each, and every input is scaled so that it weighs in on both sides alike.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "kernels.h"

namespace dlite {

class Screen {
 public:
  Screen() = default;

  // weight [columns, inputs] contiguous; usual [inputs]: about how large each input gets (only the
  // speed depends on it).
  Screen(const bf16* weight, int64_t columns, int64_t inputs, const std::vector<float>& usual);

  // Whether it is worth its while: made, of finite weights, for a level that has the kernel, and for
  // few enough rows. More of them share one pass over the weights anyway.
  bool serves(int64_t rows) const { return groups_ > 0 && rows <= kScreenRows && kernels().screen; }

  // The groups of kGroupColumns columns, in order, that can hold the largest element of a row of
  // x W^T once it is rounded to bf16. x [rows, inputs], rows x_stride elements apart.
  const std::vector<int64_t>& groups(const bf16* x, int64_t x_stride, int64_t rows) const;

  int64_t num_groups() const { return groups_; }

 private:
  void pack_group(const bf16* weight, int64_t columns, int64_t group);

  int64_t inputs_ = 0;
  int64_t groups_ = 0;
  float longest_ = 0;            // of the scaled columns
  std::vector<float> mean_;      // [inputs]
  std::vector<float> factor_;    // [inputs]: weights are multiplied by it, x is divided
  std::shared_ptr<uint8_t> packed_;  // ScreenArgs describes it
};

}  // namespace dlite
