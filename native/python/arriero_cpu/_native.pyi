from collections.abc import Sequence
from typing import overload

import mlx.core as mx

def quantized_matmul(
    x: mx.array,
    w: mx.array,
    scales: mx.array,
    biases: mx.array | None,
    group_size: int,
    bits: int,
    mode: str,
    global_scale: mx.array | None,
) -> mx.array: ...
def matmul(x: mx.array, w: mx.array) -> mx.array: ...
def gather_qmm(
    x: mx.array,
    w: mx.array,
    scales: mx.array,
    biases: mx.array | None,
    indices: mx.array,
    group_size: int,
    bits: int,
    mode: str,
    global_scale: mx.array | None,
) -> mx.array: ...
def gather_mm(x: mx.array, w: mx.array, indices: mx.array) -> mx.array: ...
def supports(mode: str, bits: int, group_size: int, x_dtype: mx.Dtype) -> bool: ...
def attention(
    q: mx.array,
    keys: Sequence[mx.array],
    values: Sequence[mx.array],
    scale: float,
    lengths: Sequence[int],
    counts: Sequence[int],
    positions: Sequence[int],
    bases: Sequence[int] | None,
    window: int | None,
    softcap: float | None,
    sinks: mx.array | None,
    causal: bool,
) -> mx.array: ...
def kv_append(buffer: mx.array, update: mx.array, start: int) -> mx.array: ...
def rms_norm(x: mx.array, w: mx.array | None, eps: float) -> mx.array: ...
def add_rms_norm(x: mx.array, r: mx.array, w: mx.array | None, eps: float) -> list[mx.array]: ...
def rope(x: mx.array, table: mx.array, positions: mx.array | None, interleaved: bool) -> mx.array: ...
def rope_table(positions: mx.array, frequencies: mx.array, scale: float) -> mx.array: ...
def glu(gate: mx.array, up: mx.array, gelu: bool) -> mx.array: ...
def argmax(x: mx.array) -> mx.array: ...
def gated_delta(
    q: mx.array,
    k: mx.array,
    v: mx.array,
    a: mx.array,
    b: mx.array,
    rate: mx.array,
    bias: mx.array,
    states: Sequence[mx.array],
    lengths: Sequence[int],
    stops: Sequence[Sequence[int]],
    eps: float,
) -> list[mx.array]: ...
def depthwise_conv(
    x: mx.array,
    w: mx.array,
    bias: mx.array | None,
    tails: Sequence[mx.array],
    lengths: Sequence[int],
    stops: Sequence[Sequence[int]],
    dilation: int,
    silu: bool,
) -> list[mx.array]: ...
def top_k(x: mx.array, k: int) -> mx.array: ...
def indexed_attention(
    q: mx.array,
    keys: Sequence[mx.array],
    values: Sequence[mx.array],
    blocks: mx.array,
    scale: float,
    lengths: Sequence[int],
    positions: Sequence[int],
    block: int,
) -> mx.array: ...
def select_blocks(
    q: mx.array,
    keys: Sequence[mx.array],
    scale: float,
    lengths: Sequence[int],
    positions: Sequence[int],
    block: int,
    width: int,
) -> mx.array: ...
def take_rows(
    w: mx.array,
    scales: mx.array,
    biases: mx.array | None,
    ids: mx.array,
    group_size: int,
    bits: int,
    mode: str,
    global_scale: mx.array | None,
    dtype: mx.Dtype,
) -> mx.array: ...

class Packed:
    @property
    def rows(self) -> int: ...
    @property
    def columns(self) -> int: ...
    @property
    def experts(self) -> int: ...
    @property
    def symmetric(self) -> bool: ...
    @property
    def nbytes(self) -> int: ...
    @property
    def arrays(self) -> list[mx.array]: ...

def pack(w: mx.array, scales: mx.array, biases: mx.array | None, group_size: int, bits: int, mode: str) -> Packed: ...
def packable(mode: str, bits: int, group_size: int) -> bool: ...
def packed_matmul(x: mx.array, packed: Packed, global_scale: mx.array | None, exact: bool) -> mx.array: ...
def packed_gather(
    x: mx.array, packed: Packed, indices: mx.array, global_scale: mx.array | None, exact: bool
) -> mx.array: ...
def packed_rows(packed: Packed, ids: mx.array, global_scale: mx.array | None, dtype: mx.Dtype) -> mx.array: ...

class Matrix:
    @overload
    def __init__(self, packed: Packed, global_scale: mx.array | None, bias: mx.array | None, exact: bool) -> None: ...
    @overload
    def __init__(
        self,
        w: mx.array,
        scales: mx.array | None,
        biases: mx.array | None,
        group_size: int,
        bits: int,
        mode: str,
        global_scale: mx.array | None,
        bias: mx.array | None,
    ) -> None: ...

class AttentionPart:
    def __init__(
        self,
        before: tuple[mx.array, float] | None,
        qkv: Sequence[Matrix],
        query_norm: tuple[mx.array, float] | None,
        key_norm: tuple[mx.array, float] | None,
        out: Matrix,
        after: tuple[mx.array, float] | None,
        heads: int,
        kv_heads: int,
        head_dim: int,
        scale: float,
        softcap: float,
        window: int,
        interleaved: bool,
        exact: bool,
    ) -> None: ...
    def __call__(
        self,
        x: mx.array,
        angles: mx.array | None,
        buffers: Sequence[mx.array],
        lengths: Sequence[int],
        positions: Sequence[int],
        bases: Sequence[int],
    ) -> list[mx.array]: ...

class GatedPart:
    def __init__(
        self,
        before: tuple[mx.array, float],
        gate_up: Sequence[Matrix],
        down: Matrix,
        after: tuple[mx.array, float] | None,
        gelu: bool,
        exact: bool,
    ) -> None: ...
    def __call__(self, x: mx.array, branch: mx.array) -> mx.array: ...

class Stack:
    def __init__(self, layers: Sequence[tuple[AttentionPart, GatedPart]]) -> None: ...
    @property
    def ready(self) -> bool: ...
    def __call__(
        self,
        x: mx.array,
        angles: Sequence[mx.array | None],
        buffers: Sequence[mx.array],
        lengths: Sequence[int],
        positions: Sequence[int],
        bases: Sequence[int],
        after: Sequence[mx.array],
    ) -> mx.array: ...

def isa() -> str: ...
def isa_problem() -> str: ...
def pool_problem() -> str: ...
def quota_cores(root: str) -> int: ...
def read_bandwidth(seconds: float) -> float: ...
def threads() -> int: ...
def set_threads(n: int) -> None: ...
def set_spin_us(us: int) -> None: ...
