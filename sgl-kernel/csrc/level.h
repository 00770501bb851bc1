// What the kernels of every level are written with; included before a level's target is set.
#pragma once

#include <immintrin.h>

#include <algorithm>

#include "kernels.h"
#include "thread_pool.h"
#include "weight_order.h"
