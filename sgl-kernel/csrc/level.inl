// All kernels and their table, for the level that the including file has set up: DLITE_LEVEL is its
// name, DLITE_WIDTH its vectors' floats, DLITE_DOT and DLITE_MATRIX_UNIT what it has beside them.

#ifdef DLITE_MATRIX_UNIT
#define DLITE_HAS_MATRIX_UNIT true
#else
#define DLITE_HAS_MATRIX_UNIT false
#endif

#define DLITE_JOIN_(a, b) a##b
#define DLITE_JOIN(a, b) DLITE_JOIN_(a, b)
#define DLITE_TEXT_(a) #a
#define DLITE_TEXT(a) DLITE_TEXT_(a)

namespace dlite {
namespace {

constexpr int W = DLITE_WIDTH;

#include "vec.inl"
#include "elementwise.inl"
#include "linear_common.inl"
#ifdef DLITE_MATRIX_UNIT
#include "linear_amx.inl"
#else
#include "linear.inl"
#endif
#include "attention_shared.inl"
#include "attention_vector.inl"
#ifdef DLITE_MATRIX_UNIT
#include "attention_amx.inl"
#endif
#include "attention.inl"
#include "draft.inl"
#ifdef DLITE_DOT
#include "screen.inl"
#else
constexpr void (*screen)(const ScreenArgs&) = nullptr;
#endif

}  // namespace

const KernelTable* DLITE_JOIN(DLITE_LEVEL, _kernels)() {
  static const KernelTable table{DLITE_TEXT(DLITE_LEVEL), DLITE_HAS_MATRIX_UNIT, linear, rms_norm,
                                 rotary, silu_and_mul, attention, draft_attention, gated_update,
                                 argmax, screen};
  return &table;
}

}  // namespace dlite
