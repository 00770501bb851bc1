// The kernels compiled for avx2.
#include "level.h"

// After the headers: their inline functions must stay those of the baseline.
#pragma GCC target("avx2,fma")

#define DLITE_LEVEL avx2
#define DLITE_WIDTH 8  // floats in a vector
#include "level.inl"
