namespace arriero {

// gpt-oss' activation of gate and up.
__device__ __forceinline__ float clamped(float gate, float up, float alpha, float limit) {
  const float g = fminf(gate, limit), u = fmaxf(fminf(up, limit), -limit);
  return g / (1.f + __expf(-alpha * g)) * (u + 1.f);
}

}  // namespace arriero
