// Gates, in forms that neither overflow nor need infinity.
inline float sigmoid(float x) {
  const float e = metal::exp(-metal::abs(x));
  return (x < 0.0f ? e : 1.0f) / (1.0f + e);
}
inline float silu(float x) { return x * sigmoid(x); }
// gelu's tanh form, by 1 + tanh(t) = 2 sigmoid(2 t).
inline float gelu_tanh(float x) { return x * sigmoid(1.5957691216057308f * (x + 0.044715f * x * x * x)); }
