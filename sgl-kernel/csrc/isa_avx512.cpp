// The kernels compiled for avx512.
#include "level.h"

// After the headers: their inline functions must stay those of the baseline.
#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq,avx2,fma")

#define DLITE_LEVEL avx512
#define DLITE_WIDTH 16  // floats in a vector
#include "level.inl"
