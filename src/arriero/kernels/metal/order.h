// Unsigned numbers in the order of floats: -0 is 0, every NaN is 0xFFFFFD, and nothing but a NaN is below -infinity.
inline uint order_of(float value) {
  uint bits = as_type<uint>(value);
  if (bits == 0x80000000u) bits = 0u;
  const uint flip = (bits & 0x80000000u) ? 0xffffffffu : 0x80000000u;
  // What separates infinity from the largest integer: NaNs above infinity wrap around to the bottom.
  return metal::max((bits ^ flip) + 0x7fffffu, 0xfffffdu);
}
inline uint order_of(float16_t value) { return order_of(float(value)); }
inline uint order_of(bfloat16_t value) { return order_of(float(value)); }
