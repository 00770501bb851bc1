// What a draft step needs beside the target's kernels (equations: drafter/backbone.py and
// drafter/sequential_head.py of sglang-dlite).

// A head RMS-normed and rotated, as floats. `cos` and `sin` are its position's rows of the table.
inline void norm_and_rotate(const bf16* head, const bf16* weight, const float* cos,
                            const float* sin, int64_t size, float eps, float* out) {
  float squares = 0;
  for (int64_t i = 0; i < size; ++i) {
    out[i] = bf16_to_float(head[i]);
    squares += out[i] * out[i];
  }
  const float factor = 1.0f / __builtin_sqrtf(squares / static_cast<float>(size) + eps);
  for (int64_t i = 0; i < size; ++i) out[i] *= factor * bf16_to_float(weight[i]);
  const int64_t half = size / 2;
  for (int64_t i = 0; i < half; ++i) {
    const float a = out[i], b = out[half + i];
    out[i] = a * cos[i] - b * sin[i];
    out[half + i] = b * cos[half + i] + a * sin[half + i];
  }
}

void draft_attention(const DraftAttentionArgs& a) {
  const int64_t keys = a.context + a.queries, group = a.num_heads / a.num_kv_heads;
  const int64_t width = (a.num_heads + 2 * a.num_kv_heads) * a.head_dim;
  const int64_t kv_width = a.num_kv_heads * a.head_dim;
  const float scale = 1.0f / __builtin_sqrtf(static_cast<float>(a.head_dim));
  parallel_for(a.requests * a.num_kv_heads, [&](int64_t unit) {
    const int64_t request = unit / a.num_kv_heads, head = unit % a.num_kv_heads, d = a.head_dim;
    const int64_t padded = round_up(d, W);
    float* memory = static_cast<float*>(
        thread_scratch(0, ((2 * keys + 2) * padded + round_up(keys, W)) * sizeof(float)));
    float* key = memory;                    // [keys, padded]
    float* value = key + keys * padded;     // [keys, padded]
    float* query = value + keys * padded;   // [padded]
    float* sum_v = query + padded;          // [padded]
    float* weight = sum_v + padded;         // [keys]
    __builtin_memset(memory, 0, (2 * keys + 2) * padded * sizeof(float));
    for (int64_t k = 0; k < keys; ++k) {
      const bf16* row =
          k < a.context
              ? a.context_kv + (request * a.context + k) * a.context_stride + head * d
              : a.qkv + (request * a.queries + k - a.context) * width + a.num_heads * d + head * d;
      norm_and_rotate(row, a.key_norm, a.cos + k * d, a.sin + k * d, d, a.eps, key + k * padded);
      for (int64_t i = 0; i < d; ++i) value[k * padded + i] = bf16_to_float(row[kv_width + i]);
    }
    for (int64_t t = 0; t < a.queries; ++t) {
      const int64_t row = request * a.queries + t, position = a.context + t;
      for (int64_t g = 0; g < group; ++g) {
        const int64_t offset = (head * group + g) * d;
        norm_and_rotate(a.qkv + row * width + offset, a.query_norm, a.cos + position * d,
                        a.sin + position * d, d, a.eps, query);
        float top = -__builtin_inff(), total = 0;
        for (int64_t k = 0; k < keys; ++k) {
          vfloat dot = splat(0);
          for (int64_t i = 0; i < padded; i += W)
            dot = load(query + i) * load(key + k * padded + i) + dot;
          weight[k] = sum(dot) * scale;
          top = weight[k] > top ? weight[k] : top;
        }
        __builtin_memset(sum_v, 0, padded * sizeof(float));
        for (int64_t k = 0; k < keys; ++k) {
          const float w = exp(splat(weight[k] - top))[0];
          total += w;
          for (int64_t i = 0; i < padded; i += W)
            store(sum_v + i, load(value + k * padded + i) * w + load(sum_v + i));
        }
        bf16* out = a.out + row * a.num_heads * d + offset;
        for (int64_t i = 0; i < d; ++i) out[i] = float_to_bf16(sum_v[i] / total);
      }
    }
  });
}

void gated_update(const GatedUpdateArgs& a) {
  const auto sigmoid = [](vfloat x) {
    x = max(splat(-80.0f), x < 80.0f ? x : splat(80.0f));
    return 1.0f / (exp(-x) + 1.0f);
  };
  for (int64_t r = 0; r < a.rows; ++r) {
    const bf16* gate = a.mixed + r * 2 * a.rank;
    const bf16* candidate = gate + a.rank;
    float* state = a.state + r * a.rank;
    bf16* rounded = a.state_rounded + r * a.rounded_stride;
    int64_t i = 0;
    for (; i + W <= a.rank; i += W) {
      const vfloat keep = sigmoid(load(gate + i));
      const vfloat tanh = 2.0f * sigmoid(2.0f * load(candidate + i)) - 1.0f;
      const vfloat next = keep * load(state + i) + (1.0f - keep) * tanh;
      store(state + i, next);
      store(rounded + i, next);
    }
    for (; i < a.rank; ++i) {
      const float keep = 1.0f / (1.0f + __builtin_expf(-load_one(gate + i)));
      state[i] = keep * state[i] + (1.0f - keep) * __builtin_tanhf(load_one(candidate + i));
      rounded[i] = float_to_bf16(state[i]);
    }
  }
}

void argmax(const ArgmaxArgs& a) {
  parallel_for(a.rows, [&](int64_t r) {
    const bf16* x = a.x + r * a.size;
    // First the value, then the first place where it stands: both passes are plain streams.
    vfloat high = splat(-__builtin_inff());
    int64_t i = 0;
    for (; i + W <= a.size; i += W) high = max(high, load(x + i));
    float top = max_of(high);
    for (; i < a.size; ++i) top = load_one(x + i) > top ? load_one(x + i) : top;
    int64_t index = 0;
    for (i = 0; i + W <= a.size; i += W) {
      const vint equal = load(x + i) == top;
      bool any = false;
      for (int j = 0; j < W; ++j) any |= equal[j] != 0;
      if (any) break;
    }
    for (; i < a.size; ++i) {
      if (load_one(x + i) == top) {
        index = i;
        break;
      }
    }
    a.index[r * a.index_stride] = index;
  });
}
