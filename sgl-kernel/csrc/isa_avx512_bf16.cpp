// The kernels compiled for avx512_bf16.
#include "level.h"

// After the headers: their inline functions must stay those of the baseline.
#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq,avx512bf16,avx512vnni,avx2,fma")

#define DLITE_LEVEL avx512_bf16
#define DLITE_WIDTH 16  // floats in a vector
#define DLITE_DOT  // VDPBF16PS, VPDPBUSD
#include "level.inl"
