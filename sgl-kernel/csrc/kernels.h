// The kernels' interface: plain pointers and strides, no torch. One table of functions exists per
// instruction-set level; `kernels()` is the best one that this CPU can run.
#pragma once

#include <bit>
#include <cstdint>
#include <string>

namespace dlite {

// Bit pattern of a bfloat16. Arithmetic is always done in fp32.
using bf16 = uint16_t;

inline float bf16_to_float(bf16 value) {
  return std::bit_cast<float>(static_cast<uint32_t>(value) << 16);
}

enum class Dtype { kFloat32, kBFloat16 };

// y = x W^T + bias, W packed by pack_linear (linear.inl describes the layout).
struct LinearArgs {
  const bf16* x;        // [rows, in_features], rows x_stride elements apart
  int64_t x_stride;
  const bf16* packed;   // packed_elements(out_features, in_features)
  const bf16* bias;     // [out_features], or null
  bf16* y;              // [rows, out_features], rows y_stride elements apart
  int64_t y_stride;
  int64_t rows;
  int64_t in_features;
  int64_t out_features;
  const int64_t* groups = nullptr;  // only these groups of kGroupColumns columns; null: all
  int64_t num_groups = 0;
};

// y = x / sqrt(mean(x^2) + eps) * weight over the last dimension. With a residual, x + residual
// takes the place of x, and its rounded value is written to residual_out.
struct RmsNormArgs {
  const void* x;          // [rows, size], rows x_stride elements apart
  int64_t x_stride;
  const void* residual;   // [rows, size] contiguous, or null
  void* residual_out;     // [rows, size] contiguous, or null
  const void* weight;     // [size]
  void* y;                // [rows, size] contiguous
  int64_t rows;
  int64_t size;
  float eps;
  Dtype dtype;
};

// Rotates the first rotary_dim elements of every head, in place.
struct RotaryArgs {
  const int64_t* positions;  // [rows]
  const void* cos_sin;       // [positions, rotary_dim]: cos in the first half, sin in the second
  void* query;               // [rows, num_heads * head_dim], rows query_stride elements apart
  int64_t query_stride;
  int64_t num_heads;
  void* key;                 // [rows, num_kv_heads * head_dim], rows key_stride elements apart
  int64_t key_stride;
  int64_t num_kv_heads;
  int64_t rows;
  int64_t head_dim;
  int64_t rotary_dim;
  bool neox;                 // pairs are (i, i + rotary_dim / 2), otherwise (2 i, 2 i + 1)
  Dtype dtype;
};

// y = silu(x[:size]) * x[size:].
struct SiluAndMulArgs {
  const void* x;  // [rows, 2 * size] contiguous
  void* y;        // [rows, size] contiguous
  int64_t rows;
  int64_t size;
  Dtype dtype;
};

// Causal attention of the last rows of each request over its paged context.
struct AttentionArgs {
  const void* query;            // [rows, num_heads, head_dim], rows query_stride elements apart
  int64_t query_stride;
  const void* key_cache;        // [slots, num_kv_heads, head_dim]
  const void* value_cache;      // [slots, num_kv_heads, value_dim]
  const int32_t* req_to_token;  // [*, table_stride]: the slot of each position of a request
  int64_t table_stride;
  const int64_t* req_pool_indices;  // [requests]: the requests' rows of req_to_token
  const int64_t* seq_lens;          // [requests]: keys of each request, its new rows included
  const int64_t* query_starts;      // [requests + 1]: each request's first row
  int64_t requests;
  void* out;                    // [rows, num_heads, value_dim] contiguous
  int64_t num_heads;
  int64_t num_kv_heads;
  int64_t head_dim;
  int64_t value_dim;
  float scale;
  int64_t window;               // keys seen before the row itself; negative: all
  Dtype dtype;
};

// One drafter layer's attention: T queries over S context slots and themselves, not causal. Heads
// of queries and keys are RMS-normed and rotated first; keys stand at positions 0..S+T-1 of the
// table, queries at the last T of them.
struct DraftAttentionArgs {
  const bf16* qkv;           // [requests * T, (num_heads + 2 num_kv_heads) * head_dim]
  const bf16* context_kv;    // [requests * S, 2 num_kv_heads * head_dim], rows context_stride apart
  int64_t context_stride;
  const bf16* query_norm;    // [head_dim]
  const bf16* key_norm;      // [head_dim]
  const float* cos;          // [S + T, head_dim], both halves equal
  const float* sin;          // [S + T, head_dim]
  bf16* out;                 // [requests * T, num_heads * head_dim]
  int64_t requests;
  int64_t queries;           // T
  int64_t context;           // S
  int64_t num_heads;
  int64_t num_kv_heads;
  int64_t head_dim;
  float eps;
};

// The gated recurrence: state = keep * state + (1 - keep) * tanh(candidate), keep = sigmoid(gate).
struct GatedUpdateArgs {
  const bf16* mixed;    // [rows, 2 rank]: gates, then candidates
  float* state;         // [rows, rank]
  bf16* state_rounded;  // [rows, rank], rows rounded_stride elements apart
  int64_t rounded_stride;
  int64_t rows;
  int64_t rank;
};

// The index of each row's largest element, the lowest one on ties.
struct ArgmaxArgs {
  const bf16* x;   // [rows, size] contiguous
  int64_t* index;  // rows index_stride elements apart
  int64_t index_stride;
  int64_t rows;
  int64_t size;
};

// A row of inputs in two digits: x is about step * (256 high + low).
struct ScreenRow {
  float step = 0;
  float length = 0;    // of the input: times a column's error, what the weights' digits leave open
  float error = 0;     // what the input's digits and the sums leave open
  float shift = 0;     // the scores plus this are those of the matrix itself
  int32_t high_sum = 0;
  int32_t low_sum = 0;
};

constexpr int64_t kScreenRows = 4;

// Which groups of columns can hold the largest product of a row (screen.h).
struct ScreenArgs {
  // Groups of kGroupColumns columns: [inputs / 4][columns][4] digits plus 128, then fp32 [columns]
  // the size of a digit and [columns] the length of the column's error.
  const uint8_t* packed;
  int64_t inputs;        // a multiple of kScreenInputs
  int64_t groups;
  const int8_t* digits;  // [rows, 2, inputs]: high, then low
  const ScreenRow* row;  // [rows]
  int64_t rows;          // at most kScreenRows
  uint8_t* wanted;       // [groups]: set to 1 where one of the rows needs the group
};

struct KernelTable {
  const char* name;
  bool matrix_unit;  // linear is at full speed for any number of rows
  void (*linear)(const LinearArgs&);
  void (*rms_norm)(const RmsNormArgs&);
  void (*rotary)(const RotaryArgs&);
  void (*silu_and_mul)(const SiluAndMulArgs&);
  void (*attention)(const AttentionArgs&);
  void (*draft_attention)(const DraftAttentionArgs&);
  void (*gated_update)(const GatedUpdateArgs&);
  void (*argmax)(const ArgmaxArgs&);
  void (*screen)(const ScreenArgs&);  // null where the level has no product of bytes
};

const KernelTable* avx2_kernels();
const KernelTable* avx512_kernels();
const KernelTable* avx512_bf16_kernels();
const KernelTable* amx_kernels();

// The table in use: the best that the CPU can run, or the one named by DLITE_CPU_ISA. Throws
// std::runtime_error where the CPU can run none, or not the named one.
const KernelTable& kernels();

// Changes the table in use (tests and comparisons); throws as above. "" is the best one.
void use_level(const std::string& name);

// The names of the levels that this CPU can run, best first, separated by ", ".
std::string runnable_levels();

// Packed weight: groups of kGroupColumns output columns; in a group, steps of kStepInputs inputs; in
// a step, kGroupTiles tiles of 16 pairs of inputs x 16 columns: [out / 64][in / 32][4][16][16][2].
// A group is one sequential stream for the prefetchers, and a tile's rows of 64 bytes are what
// AMX's TDPBF16PS, AVX512_BF16's VDPBF16PS and an fp32 FMA loop can all read, so that one packed
// copy serves every level.
constexpr int64_t kTileColumns = 16;
constexpr int64_t kGroupTiles = 4;
constexpr int64_t kGroupColumns = kGroupTiles * kTileColumns;
constexpr int64_t kStepInputs = 32;
constexpr int64_t kTileElements = kStepInputs * kTileColumns;

constexpr int64_t round_up(int64_t value, int64_t multiple) {
  return (value + multiple - 1) / multiple * multiple;
}

constexpr int64_t packed_elements(int64_t out_features, int64_t in_features) {
  return round_up(out_features, kGroupColumns) * round_up(in_features, kStepInputs);
}

constexpr int64_t kScreenInputs = 4;  // bytes that VPDPBUSD takes at once

constexpr int64_t screen_group_bytes(int64_t inputs) {
  return kGroupColumns * (round_up(inputs, kScreenInputs) + 2 * static_cast<int64_t>(sizeof(float)));
}

// weight [out_features, in_features] contiguous -> packed, padded with zeros.
void pack_linear(const bf16* weight, int64_t out_features, int64_t in_features, bf16* packed);

}  // namespace dlite
