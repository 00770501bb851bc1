// RMSNorm, rotary embedding, SiLU. Rows are independent; a row's arithmetic does not depend on
// how many rows there are.

// Rows per chunk so that a chunk is worth handing to another thread (about 16k elements).
inline int64_t rows_per_chunk(int64_t row_elements) {
  const int64_t rows = 16384 / (row_elements > 0 ? row_elements : 1);
  return rows > 0 ? rows : 1;
}

template <typename Row>
void for_rows(int64_t rows, int64_t row_elements, const Row& row) {
  const int64_t step = rows_per_chunk(row_elements);
  parallel_for((rows + step - 1) / step, [&](int64_t chunk) {
    const int64_t end = (chunk + 1) * step < rows ? (chunk + 1) * step : rows;
    for (int64_t r = chunk * step; r < end; ++r) row(r);
  });
}

template <typename T>
void rms_norm_typed(const RmsNormArgs& a) {
  const T* weight = static_cast<const T*>(a.weight);
  const int64_t size = a.size, whole = size / W * W;
  for_rows(a.rows, size, [&](int64_t r) {
    const T* x = static_cast<const T*>(a.x) + r * a.x_stride;
    const T* residual = a.residual ? static_cast<const T*>(a.residual) + r * size : nullptr;
    T* residual_out = a.residual ? static_cast<T*>(a.residual_out) + r * size : nullptr;
    T* y = static_cast<T*>(a.y) + r * size;
    float* row = static_cast<float*>(thread_scratch(0, size * sizeof(float)));
    vfloat squares = splat(0);
    for (int64_t i = 0; i < whole; i += W) {
      vfloat v = load(x + i);
      if (residual) {
        v = v + load(residual + i);
        store(residual_out + i, v);
      }
      store(row + i, v);
      squares = v * v + squares;
    }
    float total = sum(squares);
    for (int64_t i = whole; i < size; ++i) {
      float v = load_one(x + i);
      if (residual) {
        v += load_one(residual + i);
        store_one(residual_out + i, v);
      }
      row[i] = v;
      total += v * v;
    }
    const float factor = 1.0f / __builtin_sqrtf(total / static_cast<float>(size) + a.eps);
    for (int64_t i = 0; i < whole; i += W) {
      store(y + i, load(row + i) * factor * load(weight + i));
    }
    for (int64_t i = whole; i < size; ++i) {
      store_one(y + i, row[i] * factor * load_one(weight + i));
    }
  });
}

template <typename T>
void rotate_head(T* head, const T* cos, const T* sin, int64_t half, bool neox) {
  if (neox) {
    int64_t i = 0;
    for (; i + W <= half; i += W) {
      const vfloat a = load(head + i), b = load(head + half + i);
      const vfloat c = load(cos + i), s = load(sin + i);
      store(head + i, a * c - b * s);
      store(head + half + i, b * c + a * s);
    }
    for (; i < half; ++i) {
      const float a = load_one(head + i), b = load_one(head + half + i);
      const float c = load_one(cos + i), s = load_one(sin + i);
      store_one(head + i, a * c - b * s);
      store_one(head + half + i, b * c + a * s);
    }
    return;
  }
  for (int64_t i = 0; i < half; ++i) {
    const float a = load_one(head + 2 * i), b = load_one(head + 2 * i + 1);
    const float c = load_one(cos + i), s = load_one(sin + i);
    store_one(head + 2 * i, a * c - b * s);
    store_one(head + 2 * i + 1, b * c + a * s);
  }
}

template <typename T>
void rotary_typed(const RotaryArgs& a) {
  const int64_t half = a.rotary_dim / 2;
  for_rows(a.rows, (a.num_heads + a.num_kv_heads) * a.head_dim, [&](int64_t r) {
    const T* cos = static_cast<const T*>(a.cos_sin) + a.positions[r] * a.rotary_dim;
    T* query = static_cast<T*>(a.query) + r * a.query_stride;
    T* key = static_cast<T*>(a.key) + r * a.key_stride;
    for (int64_t h = 0; h < a.num_heads; ++h)
      rotate_head(query + h * a.head_dim, cos, cos + half, half, a.neox);
    for (int64_t h = 0; h < a.num_kv_heads; ++h)
      rotate_head(key + h * a.head_dim, cos, cos + half, half, a.neox);
  });
}

template <typename T>
void silu_and_mul_typed(const SiluAndMulArgs& a) {
  for_rows(a.rows, 2 * a.size, [&](int64_t r) {
    const T* gate = static_cast<const T*>(a.x) + r * 2 * a.size;
    const T* up = gate + a.size;
    T* y = static_cast<T*>(a.y) + r * a.size;
    int64_t i = 0;
    for (; i + W <= a.size; i += W) {
      const vfloat g = load(gate + i);
      const vfloat e = exp(g > -100.0f ? -g : splat(100.0f));  // exp(100) is infinite: 0 comes out
      store(y + i, g / (e + 1.0f) * load(up + i));
    }
    for (; i < a.size; ++i) {
      const float g = load_one(gate + i);
      store_one(y + i, g / (1.0f + __builtin_expf(-g)) * load_one(up + i));
    }
  });
}

void rms_norm(const RmsNormArgs& a) {
  a.dtype == Dtype::kBFloat16 ? rms_norm_typed<bf16>(a) : rms_norm_typed<float>(a);
}

void rotary(const RotaryArgs& a) {
  a.dtype == Dtype::kBFloat16 ? rotary_typed<bf16>(a) : rotary_typed<float>(a);
}

void silu_and_mul(const SiluAndMulArgs& a) {
  a.dtype == Dtype::kBFloat16 ? silu_and_mul_typed<bf16>(a) : silu_and_mul_typed<float>(a);
}
