// Vectors of W floats and what the kernels need of them, for the level whose file includes this
// (inside an anonymous namespace, after `#pragma GCC target`). Operators are GCC's vector
// extension; a * b + c contracts to one FMA.

typedef float vfloat __attribute__((vector_size(4 * W)));
typedef int32_t vint __attribute__((vector_size(4 * W)));
typedef uint32_t vuint __attribute__((vector_size(4 * W)));
typedef uint16_t vhalf __attribute__((vector_size(2 * W)));

inline vfloat splat(float value) { return value - vfloat{}; }

// Round to nearest even; NaN stays NaN.
inline bf16 float_to_bf16(float value) {
  uint32_t bits;
  __builtin_memcpy(&bits, &value, 4);
  if (value != value) return static_cast<bf16>((bits >> 16) | 0x40);
  return static_cast<bf16>((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

inline vfloat load(const float* p) {
  vfloat v;
  __builtin_memcpy(&v, p, sizeof(v));
  return v;
}

// W numbers of 16 bits as W of 32. GCC makes two halves and a merge of __builtin_convertvector.
inline vuint widen(const uint16_t* p) {
#if DLITE_WIDTH == 16
  return (vuint)_mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
#else
  return (vuint)_mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
#endif
}

inline vfloat load(const bf16* p) { return (vfloat)(widen(p) << 16); }

inline void store(float* p, vfloat v) { __builtin_memcpy(p, &v, sizeof(v)); }

#ifdef DLITE_DOT
inline void store(bf16* p, vfloat v) {
  const __m256bh h = _mm512_cvtneps_pbh((__m512)v);
  __builtin_memcpy(p, &h, sizeof(h));
}
#else
inline void store(bf16* p, vfloat v) {
  const vuint bits = (vuint)v;
  const vuint rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  const vint is_nan = v != v;
  const vuint result = ((vuint)is_nan & ((bits >> 16) | 0x40)) | (~(vuint)is_nan & rounded);
  const vhalf h = __builtin_convertvector(result, vhalf);
  __builtin_memcpy(p, &h, sizeof(h));
}
#endif

inline float load_one(const float* p) { return *p; }
inline float load_one(const bf16* p) { return bf16_to_float(*p); }
inline void store_one(float* p, float v) { *p = v; }
inline void store_one(bf16* p, float v) { *p = float_to_bf16(v); }

#if DLITE_WIDTH == 16
inline float sum(vfloat v) { return _mm512_reduce_add_ps((__m512)v); }
inline float max_of(vfloat v) { return _mm512_reduce_max_ps((__m512)v); }
#else
inline float sum(vfloat v) {
  const __m128 half = _mm_add_ps(_mm256_castps256_ps128((__m256)v), _mm256_extractf128_ps((__m256)v, 1));
  const __m128 pair = _mm_add_ps(half, _mm_movehl_ps(half, half));
  return _mm_cvtss_f32(_mm_add_ss(pair, _mm_movehdup_ps(pair)));
}
inline float max_of(vfloat v) {
  const __m128 half = _mm_max_ps(_mm256_castps256_ps128((__m256)v), _mm256_extractf128_ps((__m256)v, 1));
  const __m128 pair = _mm_max_ps(half, _mm_movehl_ps(half, half));
  return _mm_cvtss_f32(_mm_max_ss(pair, _mm_movehdup_ps(pair)));
}
#endif

inline vfloat max(vfloat a, vfloat b) { return a > b ? a : b; }

// exp(x) for x <= 100 with a relative error below 3e-7; infinite above 88.7, 0 below -104 (-inf
// included), NaN for NaN.
// x = n ln 2 + r, |r| <= ln 2 / 2; exp(r) by its Taylor polynomial of degree 6.
inline vfloat exp(vfloat x) {
  const float floor = -110.0f;
#if DLITE_WIDTH == 16
  x = (vfloat)_mm512_max_ps(_mm512_set1_ps(floor), (__m512)x);  // the second operand where NaN
  const vfloat n = (vfloat)_mm512_roundscale_ps((__m512)(x * 1.44269504088896341f), 0);
#else
  x = (vfloat)_mm256_max_ps(_mm256_set1_ps(floor), (__m256)x);
  const vfloat n = (vfloat)_mm256_round_ps((__m256)(x * 1.44269504088896341f), 0);
#endif
  vfloat r = x - n * 0.693145751953125f;  // ln 2 in two parts, n times the first is exact
  r = r - n * 1.42860682030941723e-6f;
  vfloat p = r * (1.0f / 720) + 1.0f / 120;
  p = p * r + 1.0f / 24;
  p = p * r + 1.0f / 6;
  p = p * r + 0.5f;
  p = p * r + 1.0f;
  p = p * r + 1.0f;
#if DLITE_WIDTH == 16
  return (vfloat)_mm512_scalef_ps((__m512)p, (__m512)n);
#else
  // 2^n in two factors, so that a result below the normal range is reached without a wrong sign.
  const vint whole = (vint)_mm256_cvtps_epi32((__m256)n), half = whole >> 1;
  return p * (vfloat)((half + 127) << 23) * (vfloat)((whole - half + 127) << 23);
#endif
}
