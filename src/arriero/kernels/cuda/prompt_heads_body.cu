// The buffers are written in place; MLX does not see that.
arriero::prompt_heads<DIM, HEADS, KV_HEADS, ROTATED, INTERLEAVED, NORM_Q, NORM_K, NORM_V, WIDE_GAIN, GATED, KEYS_ARE_VALUES>(
    (const arriero::bf16*)rows, ANGLES, Q_GAIN, K_GAIN, (const arriero::Run*)run, (arriero::bf16*)KEYS,
    (arriero::bf16*)VALUES, (arriero::bf16*)out, __int_as_float(Q_EPS_BITS), __int_as_float(K_EPS_BITS));
