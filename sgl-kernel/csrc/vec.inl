// Vectors of W floats and what the kernels need of them, for the level whose file includes this
// (inside an anonymous namespace, after `#pragma GCC target`). Operators are GCC's vector
// extension; a * b + c contracts to one FMA.

typedef float vfloat __attribute__((vector_size(4 * W)));
typedef int32_t vint __attribute__((vector_size(4 * W)));
typedef uint32_t vuint __attribute__((vector_size(4 * W)));
typedef uint16_t vhalf __attribute__((vector_size(2 * W)));

inline vfloat splat(float value) { return value - vfloat{}; }

inline float bf16_to_float(bf16 value) {
  const uint32_t bits = static_cast<uint32_t>(value) << 16;
  float result;
  __builtin_memcpy(&result, &bits, 4);
  return result;
}

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

inline vfloat load(const bf16* p) {
  vhalf h;
  __builtin_memcpy(&h, p, sizeof(h));
  return (vfloat)(__builtin_convertvector(h, vuint) << 16);
}

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

inline float sum(vfloat v) {
  float total = 0;
  for (int half = W / 2; half > 0; half /= 2)
    for (int i = 0; i < half; ++i) v[i] += v[i + half];
  total = v[0];
  return total;
}

inline vfloat max(vfloat a, vfloat b) { return a > b ? a : b; }

inline float max_of(vfloat v) {
  float largest = v[0];
  for (int i = 1; i < W; ++i) largest = v[i] > largest ? v[i] : largest;
  return largest;
}

// exp(x) for x <= 88, relative error below 2e-7; 0 below -87.3 (-inf included).
// x = n ln 2 + r, |r| <= ln 2 / 2; exp(r) by its Taylor polynomial of degree 7.
inline vfloat exp(vfloat x) {
  const vint vanishes = x < -87.3f;
  x = vanishes ? splat(0.0f) : x;
  const float magic = 12582912.0f;  // 1.5 * 2^23: adding it leaves round(x) in the low bits
  const vfloat shifted = x * 1.44269504088896341f + magic;
  const vfloat n = shifted - magic;
  vfloat r = x - n * 0.693145751953125f;  // ln 2 in two parts, n * the first is exact
  r = r - n * 1.42860682030941723e-6f;
  vfloat p = splat(1.0f / 5040) * r + 1.0f / 720;
  p = p * r + 1.0f / 120;
  p = p * r + 1.0f / 24;
  p = p * r + 1.0f / 6;
  p = p * r + 0.5f;
  p = p * r + 1.0f;
  p = p * r + 1.0f;
  const vint scale = (__builtin_convertvector(n, vint) + 127) << 23;
  const vfloat result = p * (vfloat)scale;
  return vanishes ? splat(0.0f) : result;
}
