"""LoRA adapters: what they add to which matrix, as PEFT and mlx-lm write them.

`W + scale · B · A` with A `[rank, inputs]` and B `[outputs, rank]` (Hu et al. 2021, "LoRA"); an embedding's rows are
its outputs. The sum is made in float32 while a model is created, and rounded once to what the tensor is stored as.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from arriero.create.inventory import open_weights
from arriero.create.kinds import sniff
from arriero.create.numbers import Numbers, finite
from arriero.errors import CheckpointError, InvalidRequest, UnsupportedFeature
from arriero.formats import json_text
from arriero.formats.safetensors import SafetensorsFile

CONFIG = "adapter_config.json"
WEIGHTS = ("adapter_model.safetensors", "adapters.safetensors")
"""PEFT's and mlx-lm's."""
_FLOATS = {"F32", "F16", "BF16"}
_ROOTS = re.compile(r"^(?:(?:base_model|model|language_model)\.)+")
_PEFT = re.compile(r"(.+)\.lora_(embedding_)?([AB])(?:\.default)?(?:\.weight)?")
_MLX = re.compile(r"(.+)\.lora_([ab])")


@dataclass(frozen=True)
class Delta:
    """What is added to one matrix, or to each of a stack: `scale · left [out, rank] · right [rank, in]`.

    Both are views of the mapped file, in its types.
    """

    left: np.ndarray
    right: np.ndarray
    scale: float

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the matrix that it fits."""
        return (*self.left.shape[:-1], self.right.shape[-1])

    def rows(self, start: int, stop: int) -> np.ndarray:
        """Float32 rows; those of a stack count through, and none of a call belong to two matrices."""
        if self.left.ndim == 2:
            left, right = self.left[start:stop], self.right
        else:
            matrix, at = divmod(start, self.left.shape[-2])
            left, right = self.left[matrix, at : at + stop - start], self.right[matrix]
        sums: np.ndarray = (left.astype(np.float32) * np.float32(self.scale)) @ right.astype(np.float32)
        return sums


@dataclass(frozen=True)
class Adapted:
    """Numbers with something added."""

    numbers: Numbers
    delta: Delta

    @property
    def name(self) -> str:
        """The tensor's."""
        return self.numbers.name

    @property
    def shape(self) -> tuple[int, ...]:
        """The tensor's."""
        return self.numbers.shape

    def read(self, start: int, stop: int) -> np.ndarray:
        """See `Numbers.read`."""
        return finite(self.numbers.read(start, stop) + self.delta.rows(start, stop), self.name)


@dataclass(frozen=True)
class Adapter:
    """An opened adapter."""

    deltas: dict[str, Delta]
    """By the name of the module as the adapter has it, without what stands before `layers.` or the like."""
    names: dict[str, str]
    """The same modules by their whole names, for messages."""
    taken: set[str] = field(default_factory=set)
    """Modules that a tensor of the model has asked for."""

    def delta_of(self, name: str, shape: tuple[int, ...]) -> Delta | None:
        """What a tensor of the model gets; raises CheckpointError for one of another shape than the adapter was made
        for.
        """
        module = _stem(name.removesuffix(".weight"))
        delta = self.deltas.get(module)
        if delta is None:
            return None
        self.taken.add(module)
        if delta.shape != shape:
            raise CheckpointError(
                f"the adapter does not belong to this model: it changes {self.names[module]} by a matrix of shape "
                f"{list(delta.shape)}, but tensor {name} has {list(shape)}"
            )
        return delta

    def check_taken(self) -> None:
        """Raise CheckpointError when the model has no tensor for something that the adapter changes."""
        left = sorted(self.deltas.keys() - self.taken)
        if left:
            more = f" and {len(left) - 1} more" if len(left) > 1 else ""
            raise CheckpointError(
                f"the adapter does not belong to this model: it changes {self.names[left[0]]}{more}, for which the "
                "model has no matrix that can be changed (those of GPTQ and AWQ models cannot)"
            )

    @property
    def rank(self) -> int:
        """The largest of all modules."""
        return max(int(delta.right.shape[-2]) for delta in self.deltas.values())


def open_adapter(files: Mapping[str, Path]) -> Adapter:
    """An adapter of its files by name; raises InvalidRequest, CheckpointError or UnsupportedFeature that say what is
    wrong with which.
    """
    gguf = next((name for name, path in files.items() if sniff(path) == "gguf"), None)
    if gguf is not None:
        raise UnsupportedFeature(f"{gguf} is an adapter as GGUF; use the safetensors that it was made of")
    weights = [name for name in files if name in WEIGHTS] or [n for n in files if n.endswith(".safetensors")]
    if CONFIG not in files or len(weights) != 1:
        raise InvalidRequest(
            f"an adapter is {CONFIG} and one of {' (PEFT), '.join(WEIGHTS)} (mlx-lm); "
            f"found {', '.join(sorted(files)) or 'nothing'}"
        )
    config = _config(files[CONFIG])
    file = open_weights(weights[0], files[weights[0]])
    deltas = _mlx(config, file) if "fine_tune_type" in config or "lora_parameters" in config else _peft(config, file)
    names = {_stem(module): module for module in deltas}
    if len(names) != len(deltas):
        raise CheckpointError("the adapter changes one module under two names")
    if not deltas:
        raise CheckpointError(f"{weights[0]} holds no matrices of an adapter")
    return Adapter({stem: deltas[module] for stem, module in names.items()}, names)


def _config(path: Path) -> dict[str, Any]:
    try:
        config: dict[str, Any] = json_text.decode(path.read_bytes(), dict[str, Any])
    except (msgspec.MsgspecError, RecursionError) as error:
        raise CheckpointError(f"{CONFIG} is not a JSON object: {error}") from None
    return config


def _peft(config: Mapping[str, Any], file: SafetensorsFile) -> dict[str, Delta]:
    if str(config.get("peft_type", "LORA")).upper() != "LORA":
        raise UnsupportedFeature(f"the adapter is {config['peft_type']!r:.40}, not LORA; merge it into the weights")
    for option in ("use_dora", "fan_in_fan_out", "lora_bias", "use_qalora", "alora_invocation_tokens"):
        if config.get(option):
            raise UnsupportedFeature(f"the adapter has {option}, which is not merged here; merge it into the weights")
    pairs: dict[str, dict[str, str]] = {}
    embeddings = set()
    for name in file.tensors:
        found = _PEFT.fullmatch(name)
        if found is None:
            raise _foreign(name)
        pairs.setdefault(found[1], {})[found[3]] = name
        if found[2]:
            embeddings.add(found[1])
    deltas = {}
    for module, names in pairs.items():
        a, b = (_matrix(file, module, names, part) for part in "AB")
        if a.ndim != 2 or b.ndim != 2:
            raise _foreign(names["A"])
        rank = _pattern(config.get("rank_pattern"), module, config.get("r"))
        _check_rank(module, rank, a.shape[-2], b.shape[-1])
        alpha = _number(_pattern(config.get("alpha_pattern"), module, config.get("lora_alpha")), "lora_alpha")
        scale = alpha / (math.sqrt(a.shape[0]) if config.get("use_rslora") else a.shape[0])
        deltas[module] = Delta(a.T, b.T, scale) if module in embeddings else Delta(b, a, scale)
    return deltas


def _mlx(config: Mapping[str, Any], file: SafetensorsFile) -> dict[str, Delta]:
    kind = config.get("fine_tune_type", "lora")
    if kind != "lora":
        raise UnsupportedFeature(f"the adapter's fine_tune_type is {kind!r:.40}, expected 'lora'; fuse it with mlx-lm")
    parameters = config.get("lora_parameters")
    facts: Mapping[str, Any] = parameters if isinstance(parameters, Mapping) else {}
    scale = _number(facts.get("scale"), "lora_parameters.scale")
    pairs: dict[str, dict[str, str]] = {}
    for name in file.tensors:
        found = _MLX.fullmatch(name)
        if found is None:
            raise _foreign(name)
        pairs.setdefault(found[1], {})[found[2]] = name
    deltas = {}
    for module, names in pairs.items():
        a, b = (_matrix(file, module, names, part) for part in "ab")
        if b.ndim != a.ndim or (b.ndim == 3 and len(a) != len(b)):
            raise CheckpointError(f"the adapter's {module} has matrices of shape {list(a.shape)} and {list(b.shape)}")
        if b.ndim == 3:  # a stack of experts has A and B the usual way round
            left, right = b, a
        elif "embed" in module.rpartition(".")[2]:
            left, right = a, b
        else:
            left, right = b.T, a.T
        _check_rank(module, facts.get("rank"), right.shape[-2], left.shape[-1])
        deltas[module] = Delta(left, right, scale)
    return deltas


def _matrix(file: SafetensorsFile, module: str, names: Mapping[str, str], part: str) -> np.ndarray:
    if part not in names:
        raise CheckpointError(f"the adapter has only one of the two matrices for {module}; {part} is missing")
    span = file.tensors[names[part]]
    if span.dtype not in _FLOATS or len(span.shape) not in (2, 3) or 0 in span.shape:
        raise CheckpointError(f"the adapter's {span.name} is {span.dtype} of shape {list(span.shape)}, no matrix")
    values = file.view(span.name)
    if not np.isfinite(values).all():
        raise CheckpointError(f"the adapter's {span.name} holds numbers that are not finite")
    return values


def _check_rank(module: str, declared: object, first: int, second: int) -> None:
    if first != second or (declared is not None and declared != first):
        said = "" if declared is None else f", and {CONFIG} says {declared}"
        raise CheckpointError(f"the adapter's matrices for {module} have the ranks {first} and {second}{said}")


def _pattern(patterns: object, module: str, default: object) -> object:
    """The value for the end of a module's name, the first that fits; PEFT's other regular expressions are refused."""
    for key, value in patterns.items() if isinstance(patterns, Mapping) else ():
        if re.fullmatch(r"[\w.]+", key) is None:
            raise UnsupportedFeature(f"{CONFIG} has the pattern {key!r:.60}; only names of modules are read here")
        if f".{module}".endswith(f".{key}"):
            return value
    return default


def _number(value: object, name: str) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        raise CheckpointError(f"{CONFIG} has {name} {value!r:.40}, expected a number")
    return float(value)


def _foreign(name: str) -> UnsupportedFeature:
    return UnsupportedFeature(
        f"the adapter's tensor {name} is not one of a plain LoRA adapter (lora_A and lora_B, or lora_a and lora_b); "
        "merge it into the weights"
    )


def _stem(module: str) -> str:
    return _ROOTS.sub("", module)
