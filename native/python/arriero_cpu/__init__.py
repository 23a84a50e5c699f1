"""CPU kernels for arriero, as lazy MLX operations on the default CPU stream.

Every function takes and returns ``mlx.core.array`` and evaluates nothing. Import may fail where the installed MLX is
not the one this package was built for; :func:`probe` says so in plain words.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import mlx.core as mx

__version__ = "0.1.0"
built_for_mlx = "0.32.4"


class _Missing:
    def __init__(self, error: ImportError) -> None:
        self._error = error

    def __getattr__(self, name: str) -> Any:
        raise ImportError(f"arriero-cpu's native module does not load: {self._error}") from self._error


if TYPE_CHECKING:
    from . import _native
else:
    try:
        from . import _native
    except ImportError as error:  # an old wheel beside a new mlx: probe() must still be there to say so
        _native = _Missing(error)

# It takes _native from here, loaded or not.
from .packed import pack, packable, packed_gather, packed_matmul, packed_rows  # noqa: E402
from .parts import attention_part, gated_part, matrix, stack  # noqa: E402
from .sequence import depthwise_conv, gated_delta, indexed_attention, select_blocks, top_k  # noqa: E402

__all__ = [
    "add_rms_norm",
    "argmax",
    "attention",
    "attention_part",
    "built_for_mlx",
    "depthwise_conv",
    "gated_delta",
    "gated_part",
    "gather_mm",
    "gather_qmm",
    "geglu",
    "indexed_attention",
    "isa",
    "kv_append",
    "matmul",
    "matrix",
    "pack",
    "packable",
    "packed_gather",
    "packed_matmul",
    "packed_rows",
    "probe",
    "quantized_matmul",
    "read_bandwidth",
    "rms_norm",
    "rope",
    "rope_table",
    "select_blocks",
    "set_spin_us",
    "set_threads",
    "stack",
    "supports",
    "swiglu",
    "take_rows",
    "threads",
    "top_k",
]


def _scale(value: mx.array | float | None) -> mx.array | None:
    return mx.array(value, mx.float32) if isinstance(value, (int, float)) else value


def quantized_matmul(
    x: mx.array,
    w: mx.array,
    scales: mx.array,
    biases: mx.array | None = None,
    *,
    group_size: int,
    bits: int,
    mode: str = "affine",
    global_scale: mx.array | float | None = None,
    exact: bool = True,
) -> mx.array:
    """``x @ dequantised(w).T`` with mxfp8 weights in MLX's layout; the result has ``x``'s dtype.

    Weights of every other format go through :func:`pack` and :func:`packed_matmul`; a ValueError says so.
    ``global_scale``, one float or one per row of ``w``, multiplies the result. A row's result does not depend on the
    other rows. ``exact`` is for the likeness to :func:`packed_matmul`: these products are exact whatever it says.
    """
    return _native.quantized_matmul(x, w, scales, biases, group_size, bits, mode, _scale(global_scale))


def matmul(x: mx.array, w: mx.array) -> mx.array:
    """``x @ w.T`` for ``x`` [..., K] and ``w`` [N, K], of any float dtypes; the result has ``x``'s dtype."""
    return _native.matmul(x, w)


def gather_qmm(
    x: mx.array,
    w: mx.array,
    scales: mx.array,
    biases: mx.array | None = None,
    *,
    indices: mx.array,
    group_size: int,
    bits: int,
    mode: str = "affine",
    global_scale: mx.array | float | None = None,
    exact: bool = True,
) -> mx.array:
    """Each row of ``x`` [T, K] times the mxfp8 weights of its experts: ``w`` [E, N, K / 4], ``indices`` [T] or [T, k].

    Returns [T, N] or [T, k, N]. ``global_scale`` is a float, or holds one per expert. An index outside the experts
    gives zeros. ``exact`` as in :func:`quantized_matmul`.
    """
    return _native.gather_qmm(x, w, scales, biases, indices, group_size, bits, mode, _scale(global_scale))


def gather_mm(x: mx.array, w: mx.array, indices: mx.array) -> mx.array:
    """:func:`gather_qmm` for dense weights [E, N, K]."""
    return _native.gather_mm(x, w, indices)


def supports(mode: str, bits: int, group_size: int, x_dtype: mx.Dtype) -> bool:
    """Whether :func:`quantized_matmul` takes this format as it lies, with activations of this dtype."""
    return _native.supports(mode, bits, group_size, x_dtype)


def attention(
    q: mx.array,
    keys: Sequence[mx.array],
    values: Sequence[mx.array],
    *,
    scale: float,
    lengths: Sequence[int],
    positions: Sequence[int],
    counts: Sequence[int] | None = None,
    bases: Sequence[int] | None = None,
    window: int | None = None,
    softcap: float | None = None,
    sinks: mx.array | None = None,
    causal: bool = True,
) -> mx.array:
    """Attention of packed rows, each span over its own cache; returns [T, Hq, Dv] in ``q``'s dtype.

    ``q`` is [T, Hq, D]: ``lengths[i]`` rows belong to span ``i``, whose first query stands at absolute position
    ``positions[i]``. ``keys[i]`` and ``values[i]`` are [1, Hkv, cap, D]; their first ``counts[i]`` tokens (default:
    all) are in use and begin at absolute position ``bases[i]`` (default 0). A query sees the keys up to its own
    position, with ``window`` only the last ``window`` of them (itself included). ``softcap`` c turns a score s into
    c * tanh(s / c); ``sinks`` holds one extra logit per query head. A query that sees no key yields zeros.
    """
    return _native.attention(
        q,
        list(keys),
        list(values),
        scale,
        list(lengths),
        [k.shape[2] for k in keys] if counts is None else list(counts),
        list(positions),
        None if bases is None else list(bases),
        window,
        softcap,
        sinks,
        causal,
    )


def kv_append(buffer: mx.array, update: mx.array, start: int) -> mx.array:
    """Writes ``update`` ([1, H, T, D] or [T, H, D]) into ``buffer`` [1, H, cap, D] from token ``start`` on, in place.

    The result shares the buffer's memory. Use it instead of ``buffer`` from then on, and make sure that nobody still
    reads the overwritten tokens.
    """
    return _native.kv_append(buffer, update, start)


def rms_norm(x: mx.array, w: mx.array | None, eps: float) -> mx.array:
    """``x / sqrt(mean(x**2) + eps) * w`` over the last axis, computed in float32."""
    return _native.rms_norm(x, w, eps)


def add_rms_norm(x: mx.array, r: mx.array, w: mx.array | None, eps: float) -> tuple[mx.array, mx.array]:
    """``(x + r, rms_norm(x + r, w, eps))``."""
    total, normed = _native.add_rms_norm(x, r, w, eps)
    return total, normed


def rope_table(positions: mx.array, frequencies: mx.array, scale: float = 1.0) -> mx.array:
    """(cos, sin) of ``positions`` [T] times ``frequencies`` [R / 2], scaled: float32 [T, R / 2, 2] for :func:`rope`.

    Angles are computed in double precision.
    """
    return _native.rope_table(positions, frequencies, scale)


def rope(
    x: mx.array,
    table: mx.array,
    positions: mx.array | None = None,
    *,
    interleaved: bool = False,
) -> mx.array:
    """Rotates the first R elements of each head of ``x`` [T, H, D].

    ``table`` [P, R / 2, 2] comes from :func:`rope_table`; token t uses row ``positions[t]``, or row t without
    ``positions``. Pairs are (i, i + R / 2), or (2i, 2i + 1) when ``interleaved``.
    """
    return _native.rope(x, table, positions, interleaved)


def swiglu(gate: mx.array, up: mx.array) -> mx.array:
    """``silu(gate) * up``."""
    return _native.glu(gate, up, False)


def geglu(gate: mx.array, up: mx.array) -> mx.array:
    """``gelu(gate) * up`` with the tanh form of gelu."""
    return _native.glu(gate, up, True)


def argmax(x: mx.array) -> mx.array:
    """uint32 index of the largest value of the last axis, the first where several are equal; NaN never wins."""
    return _native.argmax(x)


def take_rows(
    w: mx.array,
    scales: mx.array,
    biases: mx.array | None,
    ids: mx.array,
    *,
    group_size: int,
    bits: int,
    mode: str = "affine",
    global_scale: mx.array | float | None = None,
    dtype: mx.Dtype,
) -> mx.array:
    """Rows ``ids`` [T] of an mxfp8 matrix [N, K], dequantised: [T, K] of ``dtype``; zeros for an id outside [0, N)."""
    return _native.take_rows(w, scales, biases, ids, group_size, bits, mode, _scale(global_scale), dtype)


def isa() -> str:
    """The instruction set in use with its integer extension, such as 'avx512-vnni', 'neon-i8mm' or 'portable'.

    ``ARRIERO_CPU_ISA`` names another: one of these, or the part before the hyphen for its best form. :func:`probe`
    says so where the machine does not have it.
    """
    return _native.isa()


def read_bandwidth(seconds: float = 1.0) -> float:
    """Bytes a second that the kernels' threads read from memory together, the best of several patterns tried now.

    It takes 512 MiB for so long; the calling thread waits.
    """
    return _native.read_bandwidth(seconds)


def threads() -> int:
    """Threads that share a kernel's work, the caller included (``ARRIERO_THREADS`` sets it at start)."""
    return _native.threads()


def set_threads(n: int) -> None:
    """Sets the number of threads."""
    _native.set_threads(n)


def set_spin_us(us: int) -> None:
    """How long an idle thread spins before it sleeps (200 microseconds by default; ``ARRIERO_SPIN_US``)."""
    _native.set_spin_us(us)


def probe() -> str:
    """Runs one small operation and returns the instruction set's name; raises ``RuntimeError`` where it cannot run."""
    installed = getattr(mx, "__version__", "of an unknown version")
    if installed != built_for_mlx:
        raise RuntimeError(
            f"arriero-cpu {__version__} was built for mlx {built_for_mlx}, but mlx {installed} is installed"
        )
    try:
        if problem := _native.isa_problem() or _native.pool_problem():
            raise RuntimeError(problem)
        x = mx.array([[1.0, 2.0, 3.0]])
        value = matmul(x, x).item()
    except ImportError as error:
        raise RuntimeError(str(error)) from error
    except TypeError as error:
        raise RuntimeError(
            "arriero-cpu and mlx do not share nanobind's type registry; rebuild arriero-cpu against this mlx wheel "
            f"({error})"
        ) from error
    except ValueError as error:
        raise RuntimeError(f"arriero-cpu cannot run here: {error}") from error
    if value != 14.0:
        raise RuntimeError(f"arriero-cpu computes wrongly on this machine ({isa()}: {value} instead of 14.0)")
    return isa()
