arriero::heads<DIM, HEADS, KV_HEADS, ROTATED, WIDE_GAIN, GATED, KEYS_ARE_VALUES, NORM_V>(
    (const arriero::bf16*)rows, angles, q_gain, k_gain, __int_as_float(Q_EPS_BITS), __int_as_float(K_EPS_BITS),
    (arriero::bf16*)out);
