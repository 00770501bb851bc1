// The kernels compiled for amx.
#include "level.h"

// After the headers: their inline functions must stay those of the baseline.
#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq,avx512bf16,avx512vnni,amx-tile,amx-bf16,avx2,fma")

#define DLITE_LEVEL amx
#define DLITE_WIDTH 16  // floats in a vector
#define DLITE_DOT  // VDPBF16PS, VPDPBUSD
#define DLITE_MATRIX_UNIT  // AMX tiles
#include "level.inl"
