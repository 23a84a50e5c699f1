"""A process that builds a model of lazy zeros, so that a model which could not be loaded is never named.

Reads a source from its standard input, whose files have true headers, and writes one JSON object: `error`, the
sentence of what is missing or has another shape, or `unused`, tensors that the model does not take.
"""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from functools import partial

import msgspec

from arriero.source import ModelSource


class Verdict(msgspec.Struct):
    """What became of it."""

    error: str = ""
    unused: list[str] = []


REAL_BYTES = 1 << 16
"""Tensors up to this size are read, since a model may compare them with what they have to be."""


def judge(source: ModelSource) -> Verdict:
    """Build it; no tensor of any size is computed."""
    import mlx.core as mx

    from arriero.errors import ArrieroError
    from arriero.model.architectures import load_model
    from arriero.model.checkpoint import Checkpoint
    from arriero.model.contract import Encoder
    from arriero.model.drafts import load_draft, load_head
    from arriero.model.stored import HostWeight, Stored
    from arriero.model.weight import Quantization, Weight
    from arriero.source import GGUFSource

    def zeros_like(view: HostWeight, float8: bool) -> Weight:
        def zeros(array: object) -> mx.array | None:
            if array is None:
                return None
            dtype = str(array.dtype)  # type: ignore[attr-defined]
            return mx.zeros(array.shape, getattr(mx, dtype, mx.float32))  # type: ignore[attr-defined]

        data = mx.zeros(view.data.shape, mx.float32) if float8 else zeros(view.data)
        assert data is not None
        if view.quantization is None:
            return Weight(data)
        if data.dtype != mx.uint32:
            data = mx.zeros((*view.data.shape[:-1], view.data.shape[-1] // 4), mx.uint32)
        return Weight(data, view.quantization, zeros(view.scales), zeros(view.biases), zeros(view.global_scale))

    def zero_blocks(shape: tuple[int, ...], how: Quantization) -> Weight:
        """What blocks of GGUF files are repacked to."""
        words, groups = ((*shape[:-1], shape[-1] * bits // per) for bits, per in ((how.bits, 32), (1, how.group_size)))
        affine = how.mode == "affine"
        scales = mx.zeros(groups, mx.float16 if affine else mx.uint8)
        return Weight(mx.zeros(words, mx.uint32), how, scales, mx.zeros(groups, mx.float16) if affine else None)

    def hollow(stored: Stored) -> Stored:
        if stored.info.nbytes <= REAL_BYTES:
            return stored
        if isinstance(source, GGUFSource) and stored.info.quantization is not None:
            return replace(stored, load=partial(zero_blocks, stored.info.shape, stored.info.quantization))

        def load() -> Weight:
            view = stored.view()
            return zeros_like(view, view.quantization is None and view.scales is not None)

        return replace(stored, load=load)

    def emptied(opened: Checkpoint) -> Checkpoint:
        stored = {name: hollow(tensor) for name, tensor in opened._stored.items()}
        return Checkpoint(opened.label, stored, opened.config, opened.generation_config, opened.dialect)

    mx.set_default_device(mx.cpu)
    try:
        checkpoint = emptied(Checkpoint.open(source))
        model = load_model(checkpoint, mx.bfloat16)
        beside = Checkpoint.open_draft(source)
        if isinstance(model, Encoder):
            if beside is not None:
                return Verdict(error="a draft guesses next tokens, and an embedding model has none; leave DRAFT out")
        else:
            if beside is not None:
                load_draft(emptied(beside), model, mx.bfloat16)
            load_head(checkpoint, model, mx.bfloat16)
    except ArrieroError as error:
        return Verdict(error=str(error))
    return Verdict(unused=checkpoint.unused())


def main() -> None:
    """The process."""
    os.environ["ARRIERO_KERNELS"] = "graph"  # repacking for kernels would compute every weight
    verdict = judge(msgspec.json.decode(sys.stdin.buffer.read(), type=ModelSource))
    sys.stdout.buffer.write(msgspec.json.encode(verdict))


if __name__ == "__main__":
    main()
