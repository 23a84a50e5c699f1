// What few tokens of indexed attention need before it: norms of heads and rotation of the first 2 · HALF numbers of each,
// keys, values and index keys appended in place. A warp takes one head of one token; the grid is (heads / warps, tokens).
//
// `qkv` rows: QUERIES heads of a query and a gate each, then KEYS of k, then KEYS of v; `index` rows: INDEX heads, then
// the raw key. A token that completes a block of BLOCK_ appends the block's key in place of its own: the mean of the
// block's raw keys, normed, and turned as the block's first token is, which `back` turns this token's angles to.
{
  using namespace arriero;
#if BUFFERED_ROWS == 1
  bf16* const keys_[] = {(bf16*)k0};
  bf16* const values_[] = {(bf16*)v0};
  bf16* const index_[] = {(bf16*)i0};
#else
  bf16* const keys_[] = {(bf16*)k0, (bf16*)k1, (bf16*)k2, (bf16*)k3, (bf16*)k4, (bf16*)k5, (bf16*)k6, (bf16*)k7};
  bf16* const values_[] = {(bf16*)v0, (bf16*)v1, (bf16*)v2, (bf16*)v3, (bf16*)v4, (bf16*)v5, (bf16*)v6, (bf16*)v7};
  bf16* const index_[] = {(bf16*)i0, (bf16*)i1, (bf16*)i2, (bf16*)i3, (bf16*)i4, (bf16*)i5, (bf16*)i6, (bf16*)i7};
#endif
  constexpr int QKV = (2 * QUERIES + 2 * KEYS) * D_, WIDE = (INDEX + 1) * W_, EACH = (D_ > W_ ? D_ : W_) / 32;
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, head = blockIdx.x * (THREADS / 32) + warp;
  if (head >= QUERIES + 2 * KEYS + INDEX + 1) return;
  const Query of = ((const Query*)queries)[blockIdx.y];
  const bf16 *row = qkv + (size_t)of.query * QKV, *wide = index + (size_t)of.query * WIDE;
  const float* turn = angles + (size_t)of.query * HALF * 2;
  const float eps = __int_as_float(EPS_BITS), index_eps = __int_as_float(INDEX_EPS_BITS);

  float x[EACH];
  // Norm, rounded, and rotation of N numbers that lane + 32 · e has.
  auto finish = [&](int n, const float* gain, float e, bool earlier, bf16* to) {
    float squares = 0.f;
#pragma unroll
    for (int i = 0; i < EACH; ++i) squares += i * 32 < n ? x[i] * x[i] : 0.f;
    const float r = rsqrtf(warp_sum(squares) / n + e);
#pragma unroll
    for (int i = 0; i < EACH; ++i)
      if (i * 32 < n) x[i] = __bfloat162float(__float2bfloat16(x[i] * r * gain[lane + 32 * i]));
#pragma unroll
    for (int i = 0; i < HALF / 32; ++i) {
      float2 a = ((const float2*)turn)[lane + 32 * i];
      if (earlier) {
        const float2 b = ((const float2*)back)[lane + 32 * i];
        a = make_float2(a.x * b.x + a.y * b.y, a.y * b.x - a.x * b.y);
      }
      const float first = x[i], second = x[i + HALF / 32];
      x[i] = first * a.x - second * a.y;
      x[i + HALF / 32] = second * a.x + first * a.y;
    }
#pragma unroll
    for (int i = 0; i < EACH; ++i)
      if (i * 32 < n) to[lane + 32 * i] = __float2bfloat16(x[i]);
  };
  auto take = [&](int n, const bf16* from) {
#pragma unroll
    for (int i = 0; i < EACH; ++i) x[i] = i * 32 < n ? __bfloat162float(from[lane + 32 * i]) : 0.f;
  };

  const int key = head - QUERIES, value = key - KEYS, index_head = value - KEYS;
  if (head < QUERIES) {
    take(D_, row + (size_t)2 * head * D_);
    finish(D_, q_gain, eps, false, q + ((size_t)of.query * QUERIES + head) * D_);
  } else if (key < KEYS) {
    take(D_, row + (size_t)(2 * QUERIES + key) * D_);
    finish(D_, k_gain, eps, false, keys_[of.row] + ((size_t)key * of.capacity + of.here) * D_);
  } else if (value < KEYS) {
    const bf16* from = row + (size_t)(2 * QUERIES + KEYS + value) * D_;
    bf16* to = values_[of.row] + ((size_t)value * of.capacity + of.here) * D_;
    for (int i = lane; i < D_; i += 32) to[i] = from[i];
  } else if (index_head < INDEX) {
    take(W_, wide + (size_t)index_head * W_);
    finish(W_, index_q_gain, index_eps, false, index_q + ((size_t)of.query * INDEX + index_head) * W_);
  } else {
    bf16* held = index_[of.row];
    bf16* to = held + (size_t)of.here * W_;
    const bf16* raw = wide + INDEX * W_;
    if ((of.here + 1) % BLOCK_) {
      for (int i = lane; i < W_; i += 32) to[i] = raw[i];
      return;
    }
#pragma unroll
    for (int i = 0; i < EACH; ++i) x[i] = 0.f;
    // In the order of the tokens; those of this forward are not in the cache yet.
    for (int ago = BLOCK_ - 1; ago >= 0; --ago) {
      const bf16* from = of.here - ago >= of.fresh_here ? raw - (size_t)ago * WIDE : to - (size_t)ago * W_;
#pragma unroll
      for (int i = 0; i < EACH; ++i)
        if (i * 32 < W_) x[i] += __bfloat162float(from[lane + 32 * i]);
    }
#pragma unroll
    for (int i = 0; i < EACH; ++i) x[i] = __bfloat162float(__float2bfloat16(x[i] / BLOCK_));
    finish(W_, index_k_gain, index_eps, BLOCK_ > 1, to);
  }
}
