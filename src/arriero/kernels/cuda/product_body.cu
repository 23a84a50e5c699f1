// The arguments that a kernel has not are defined as null in front of this.
extern __shared__ char shared_[];
arriero::Extras extra_ = {BRANCH, SUM, GAIN, FACTORS, BIAS, RESIDUAL, CHOSEN};
arriero::product<MODE, GROUP, N_, K_, ROWS, ACTIVATION, DEPTH, TILES, BUFFERS, NORM, WIDE_GAIN, EXPERTS, SHARED_BY>(
    (const arriero::bf16*)x, w, scales, BIASES, extra_, (arriero::bf16*)out, x_shape[0], __int_as_float(EPS_BITS),
    shared_, arriero::Written());
