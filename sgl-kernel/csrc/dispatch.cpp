// Chooses the instruction-set level once per process.
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <cstdlib>
#include <stdexcept>
#include <string>

#include "kernels.h"

namespace dlite {
namespace {

bool can_run_avx2() { return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"); }

bool can_run_avx512() {
  return can_run_avx2() && __builtin_cpu_supports("avx512f") &&
         __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
         __builtin_cpu_supports("avx512dq");
}

// Every CPU that has the products of bf16 has those of bytes; a virtual machine may hide either.
bool can_run_avx512_bf16() {
  return can_run_avx512() && __builtin_cpu_supports("avx512bf16") &&
         __builtin_cpu_supports("avx512vnni");
}

// AMX also needs the kernel's permission for the tiles' state, asked for once per process.
bool can_run_amx() {
  constexpr long kRequestPermission = 0x1023, kTileData = 18;
  unsigned a, b, c, d;
  __asm__("cpuid" : "=a"(a), "=b"(b), "=c"(c), "=d"(d) : "a"(7), "c"(0));
  const bool has_tiles = (d >> 24 & 1) && (d >> 22 & 1);  // AMX-TILE, AMX-BF16
  return has_tiles && can_run_avx512_bf16() &&
         syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
}

struct Level {
  const char* name;
  bool (*can_run)();
  const KernelTable* (*table)();
};

constexpr Level kLevels[] = {  // best first
    {"amx", can_run_amx, amx_kernels},
    {"avx512_bf16", can_run_avx512_bf16, avx512_bf16_kernels},
    {"avx512", can_run_avx512, avx512_kernels},
    {"avx2", can_run_avx2, avx2_kernels},
};

const KernelTable* find(const std::string& wanted) {
  for (const Level& level : kLevels) {
    if (level.can_run() && (wanted.empty() || wanted == level.name)) return level.table();
  }
  if (wanted.empty()) throw std::runtime_error("sglang_dlite_kernel: this CPU has no AVX2 and FMA");
  throw std::runtime_error("DLITE_CPU_ISA = '" + wanted + "': this CPU can run " +
                           runnable_levels() + "; unset it to use the best one");
}

const KernelTable* configured() {
  const char* wanted = std::getenv("DLITE_CPU_ISA");
  return find(wanted == nullptr ? "" : wanted);
}

std::atomic<const KernelTable*>& current() {
  static std::atomic<const KernelTable*> table{configured()};
  return table;
}

}  // namespace

std::string runnable_levels() {
  std::string names;
  for (const Level& level : kLevels) {
    if (level.can_run()) names += names.empty() ? level.name : std::string(", ") + level.name;
  }
  return names;
}

const KernelTable& kernels() { return *current().load(std::memory_order_relaxed); }

void use_level(const std::string& name) { current().store(find(name)); }

void pack_linear(const bf16* weight, int64_t out_features, int64_t in_features, bf16* packed) {
  const int64_t inputs = round_up(in_features, kStepInputs);
  const int64_t outputs = round_up(out_features, kGroupColumns);
  for (int64_t out = 0; out < outputs; ++out) {
    bf16* column = packed + out / kGroupColumns * kGroupColumns * inputs +
                   out % kGroupColumns / kTileColumns * kTileElements + out % kTileColumns * 2;
    for (int64_t in = 0; in < inputs; ++in) {
      const bool inside = out < out_features && in < in_features;
      column[in / kStepInputs * kGroupTiles * kTileElements +
             in % kStepInputs / 2 * 2 * kTileColumns + in % 2] =
          inside ? weight[out * in_features + in] : 0;
    }
  }
}

}  // namespace dlite
