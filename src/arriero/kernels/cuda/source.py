"""Kernels made of `.cu` files.

MLX keeps compiled modules under a kernel's name and its text, which here names files: so a name carries a hash of
everything that decides the code.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import mlx.core as mx

from arriero.kernels.cuda.compiled import Text, in_use

FOLDER = Path(__file__).parent

ARGUMENT_BYTES = 32
"""The least size of an array that kernels read: MLX keeps smaller ones, of up to 8 bytes, in managed memory, where each
kernel that reads one waits 13 to 25 µs for it (H200)."""


@cache
def text(name: str) -> str:
    """The source file `name.cu`."""
    return (FOLDER / f"{name}.cu").read_text(encoding="utf-8")


@dataclass(frozen=True, slots=True)
class Kernel:
    """Everything of a kernel that does not change from call to call.

    `headers` and `body` name files. `defines` stand in front of them; they also say which optional arguments are
    missing. `threads` is a block's size, and `shared` the bytes of shared memory, which must follow from the template.
    """

    name: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    headers: tuple[str, ...]
    body: str
    threads: int
    shared: int = 0
    defines: tuple[tuple[str, str], ...] = ()
    resident: int = 1
    """Blocks that a multiprocessor must hold at once: what bounds a thread's registers."""
    contiguous: bool = True
    """Whether inputs that are not contiguous are copied first; what is written in place must not be."""
    phases: int = 1
    """Parts that a kernel has whose blocks wait for one another: tests execute them one after another."""

    @property
    def header(self) -> str:
        """What stands in front of the kernel, with the text of its files."""
        return "\n".join([*self._macros(), *(text(name) for name in self.headers)]) + "\n"

    @property
    def front(self) -> str:
        """The same with files by their paths: MLX hashes all of a source at each launch, 3 µs for 25 KB of text."""
        paths = [str(FOLDER / f"{name}.cu") for name in self.headers]
        if any(character in path for path in paths for character in '"\\\n'):
            return self.header
        return "\n".join([*self._macros(), *(f'#include "{path}"' for path in paths)]) + "\n"

    def _macros(self) -> list[str]:
        fixed = [("THREADS", str(self.threads)), ("RESIDENT", str(self.resident))]
        return [f"#define {name} {value}" for name, value in (*fixed, *self.defines)]

    @property
    def full_name(self) -> str:
        """The name with a hash of source, header, arguments and shared memory."""
        digest = hashlib.sha256()
        for part in (self.header, text(self.body), *self.inputs, "->", *self.outputs, str(self.shared)):
            digest.update(part.encode())
            digest.update(b"\0")
        return f"arriero_{self.name}_{digest.hexdigest()[:16]}"

    def __call__(
        self,
        inputs: Sequence[mx.array],
        template: Mapping[str, int | bool],
        *,
        blocks: tuple[int, int, int],
        shapes: Sequence[Sequence[int]],
        dtypes: Sequence[mx.Dtype],
    ) -> list[mx.array]:
        """Lazy outputs of `shapes` and `dtypes`."""
        across, down, deep = blocks
        values = tuple(template.items())
        made: list[mx.array] = _built(self, values, tuple(array.dtype for array in inputs), tuple(dtypes))(
            inputs=list(inputs),
            template=list(values),
            grid=(across * self.threads, down, deep),
            threadgroup=(self.threads, 1, 1),
            output_shapes=list(shapes),
            output_dtypes=list(dtypes),
        )
        return made

    def prepare(
        self, inputs: Sequence[mx.Dtype], template: Mapping[str, int | bool], outputs: Sequence[mx.Dtype]
    ) -> None:
        """Have the code for such a template and such types at hand before the first launch, where code is kept."""
        if in_use() is not None:
            _built(self, tuple(template.items()), tuple(inputs), tuple(outputs))

    def as_text(
        self, template: tuple[tuple[str, int | bool], ...], inputs: Sequence[mx.Dtype], outputs: Sequence[mx.Dtype]
    ) -> Text:
        """What MLX makes of it for such a template and such types."""
        return Text(
            self.full_name,
            self.front,
            self.header,
            text(self.body),
            tuple(zip(self.inputs, inputs, strict=True)),
            tuple(zip(self.outputs, outputs, strict=True)),
            template,
        )


@cache
def _built(
    kernel: Kernel,
    template: tuple[tuple[str, int | bool], ...],
    inputs: tuple[mx.Dtype, ...],
    outputs: tuple[mx.Dtype, ...],
) -> Any:
    """MLX's kernel, with its machine code at hand if a store is in use."""
    store = in_use()
    if store is not None:
        store.keep(kernel.as_text(template, inputs, outputs))
    return mx.fast.cuda_kernel(
        name=kernel.full_name,
        input_names=list(kernel.inputs),
        output_names=list(kernel.outputs),
        source=text(kernel.body),
        header=kernel.front,
        ensure_row_contiguous=kernel.contiguous,
        shared_memory=kernel.shared,
    )


def argument(array: mx.array) -> mx.array:
    """The same numbers, flat, in the device's own memory: at least `ARGUMENT_BYTES`, zeros behind.

    Arrays made by the host stay in managed memory until an operation of the device has written them.
    """
    flat = array.reshape(-1)
    missing = -(-ARGUMENT_BYTES // flat.dtype.size) - flat.size
    if missing > 0:
        return mx.concatenate([flat, mx.zeros((missing,), flat.dtype)])
    return flat + mx.zeros((1,), flat.dtype)
