"""Products of rows with the matrices of their experts, dense or quantised.

Both take x `[R, in]` and `indices`: `[R]` for one expert a row, or `[R, k]` for several, and give `[R, out]` or
`[R, k, out]` in x's dtype. `sorted_indices` promises that the flat indices ascend, which some devices use.
"""

from __future__ import annotations

import mlx.core as mx

from arriero.kernels import device
from arriero.kernels.cuda import experts
from arriero.kernels.cuda.product import Activation, operand
from arriero.kernels.metal import experts as metal
from arriero.kernels.metal.product import Operand as MetalOperand
from arriero.kernels.packed import Packed, pack


def gather_matmul(x: mx.array, w: mx.array, indices: mx.array, *, sorted_indices: bool = False) -> mx.array:
    """Dense experts, w `[experts, out, in]`."""
    native = device.native()
    if native is not None:
        return native.gather_mm(x, w, indices)
    return graph(x, w, indices, sorted_indices=sorted_indices)


def gather_quantized_matmul(
    x: mx.array,
    w: mx.array,
    scales: mx.array,
    biases: mx.array | None = None,
    *,
    indices: mx.array,
    group_size: int,
    bits: int,
    mode: str,
    global_scale: mx.array | None = None,
    sorted_indices: bool = False,
    exact: bool = True,
) -> mx.array:
    """Quantised experts, w `[experts, out, in · bits / 32]`; `global_scale` is float32, a scalar or one per expert.

    `exact` as in `quantized_matmul`; so is what it says about packing.
    """
    gpu = device.cuda()
    if gpu is not None:
        bank = operand(w, scales, biases, group_size=group_size, bits=bits, mode=mode, global_scale=global_scale)
        if bank is not None and experts.fits(gpu, x, bank, indices):
            return experts.multiply(gpu, x, bank, indices)
    if device.metal():
        on_metal = MetalOperand(w, scales, biases, mode, bits, group_size, global_scale)
        if metal.takes(x, on_metal, indices):
            return metal.multiply(x, on_metal, indices)
    packed = pack(w, scales, biases, group_size=group_size, bits=bits, mode=mode)
    if packed is not None:
        return gather_packed_matmul(x, packed, indices, global_scale=global_scale, exact=exact)
    native = device.native()
    if native is not None and native.supports(mode, bits, group_size, x.dtype):
        return native.gather_qmm(
            x,
            w,
            scales,
            biases,
            indices=indices,
            group_size=group_size,
            bits=bits,
            mode=mode,
            global_scale=_of_each(global_scale, w.shape[0]),
            exact=exact,
        )
    return quantized_graph(
        x,
        w,
        scales,
        biases,
        indices=indices,
        group_size=group_size,
        bits=bits,
        mode=mode,
        global_scale=global_scale,
        sorted_indices=sorted_indices,
    )


def gather_gated(
    x: mx.array,
    w: mx.array,
    scales: mx.array,
    biases: mx.array | None = None,
    *,
    indices: mx.array,
    group_size: int,
    bits: int,
    mode: str,
    global_scale: mx.array | None = None,
    activation: Activation,
) -> mx.array | None:
    """`activation(gate) · up` in one launch, where each expert's rows are those of gate before those of up.

    None where no kernel does that.
    """
    if device.metal() and activation != "gelu":
        on_metal = MetalOperand(w, scales, biases, mode, bits, group_size, global_scale)
        if metal.takes(x, on_metal, indices, activation=activation):
            return metal.multiply(x, on_metal, indices, activation=activation)
    gpu = device.cuda()
    if gpu is None:
        return None
    bank = operand(w, scales, biases, group_size=group_size, bits=bits, mode=mode, global_scale=global_scale)
    if bank is None or not experts.fits(gpu, x, bank, indices, gated=True):
        return None
    return experts.multiply(gpu, x, bank, indices, activation=activation)


def gather_packed_matmul(
    x: mx.array, packed: Packed, indices: mx.array, *, global_scale: mx.array | None = None, exact: bool = True
) -> mx.array:
    """The same of experts that are packed."""
    scales = _of_each(global_scale, packed.experts)
    return device.required().packed_gather(x, packed.native, indices, global_scale=scales, exact=exact)


def _of_each(global_scale: mx.array | None, experts: int) -> mx.array | None:
    """A global scale as one number an expert."""
    return None if global_scale is None else mx.broadcast_to(global_scale.reshape(-1), (experts,))


def graph(x: mx.array, w: mx.array, indices: mx.array, *, sorted_indices: bool = False) -> mx.array:
    """Plain MLX, whose CPU product of this kind knows float32 only."""
    if device.on_cpu() and (x.dtype != mx.float32 or w.dtype != mx.float32):
        w, indices = _used(w, indices)
        y = _gather(x.astype(mx.float32), w.astype(mx.float32), indices, sorted_indices and indices.ndim == 1)
        return y.astype(x.dtype)
    return _gather(x, w, indices, sorted_indices).astype(x.dtype)


def quantized_graph(
    x: mx.array,
    w: mx.array,
    scales: mx.array,
    biases: mx.array | None = None,
    *,
    indices: mx.array,
    group_size: int,
    bits: int,
    mode: str,
    global_scale: mx.array | None = None,
    sorted_indices: bool = False,
) -> mx.array:
    """Plain MLX; the global scale multiplies the output in float32, since only GPUs take it inside."""
    # See quantized_matmul: float16 would overflow before the global scale.
    rows = x.astype(mx.float32) if global_scale is not None and x.dtype == mx.float16 else x
    y = mx.gather_qmm(
        _rows(rows, indices),
        w,
        scales,
        biases,
        rhs_indices=indices,
        transpose=True,
        group_size=group_size,
        bits=bits,
        mode=mode,
        sorted_indices=sorted_indices,
    ).squeeze(-2)
    if global_scale is not None:
        scale = global_scale if global_scale.size == 1 else mx.take(global_scale.reshape(-1), indices)[..., None]
        y = y.astype(mx.float32) * scale
    return y.astype(x.dtype)


def _rows(x: mx.array, indices: mx.array) -> mx.array:
    """x with the unit axes that the gather products broadcast over."""
    return x[:, None, :] if indices.ndim == 1 else x[:, None, None, :]


def _gather(x: mx.array, w: mx.array, indices: mx.array, ascending: bool) -> mx.array:
    # MLX 0.32.4 on an NVIDIA H200: with the promise of ascending indices all rows but the first came out wrong, by as
    # much as the values themselves (float32 and bfloat16; gather_qmm is right). Without it they are right.
    ascending = ascending and not mx.cuda.is_available()
    y = mx.gather_mm(_rows(x, indices), w.swapaxes(-1, -2), rhs_indices=indices, sorted_indices=ascending)
    return y.squeeze(-2)


def _used(w: mx.array, indices: mx.array) -> tuple[mx.array, mx.array]:
    """Only the matrices that a few rows name, so that the conversion to float32 does not touch the whole bank."""
    if indices.size >= w.shape[0]:
        return w, indices
    return mx.take(w, indices.reshape(-1), axis=0), mx.arange(indices.size, dtype=mx.uint32).reshape(indices.shape)
