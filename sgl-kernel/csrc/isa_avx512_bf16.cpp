// The kernels compiled for avx512_bf16.
#include <immintrin.h>

#include <algorithm>

#include "kernels.h"
#include "thread_pool.h"
#include "weight_order.h"

// After the headers: their inline functions must stay those of the baseline.
#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq,avx512bf16,avx2,fma")
#define DLITE_DOT

#define DLITE_WIDTH 16

namespace dlite {
namespace {

constexpr int W = DLITE_WIDTH;  // floats in a vector

#include "vec.inl"
#include "elementwise.inl"
#include "linear_common.inl"
#include "linear.inl"
#include "attention_shared.inl"
#include "attention_vector.inl"
#include "attention.inl"
#include "draft.inl"

}  // namespace

const KernelTable* avx512_bf16_kernels() {
  static const KernelTable table{"avx512_bf16", false, linear, rms_norm, rotary, silu_and_mul, attention,
                                 draft_attention, gated_update, argmax};
  return &table;
}

}  // namespace dlite
