"""Any architecture of mlx-lm through our contract: its network, its caches, our checkpoints, batches and sampling.

What it costs beside an architecture of our own: rows of a batch run one after another, plain MLX computes everything,
there are no taps for drafts, and last bits may depend on the chunks that a prompt came in (not on its company).
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Iterable, Mapping
from itertools import pairwise
from typing import Any, Self, cast

import mlx.core as mx
from mlx.utils import tree_flatten

from arriero.errors import CheckpointError, LoadError, UnsupportedFeature
from arriero.kernels.device import on_cpu
from arriero.model.adapters.known import mlx_lm_module, mlx_lm_version
from arriero.model.checkpoint import Checkpoint
from arriero.model.contract import Batch, Hidden, ModelFacts, RowCaches
from arriero.model.layers.decoder import HARMLESS
from arriero.runner.caches.foreign import ForeignCache

log = logging.getLogger(__name__)

STEP = 256
"""Positions by which mlx-lm's caches grow."""
CONTEXT_FIELDS = ("max_position_embeddings", "max_seq_len", "max_sequence_length", "n_positions", "n_ctx")
CONTEXT_LENGTH = 4096
"""Where the configuration has none of these fields."""
FLOAT = "__float__"
# What a scale of one byte can belong to: (bits, values a scale).
BYTE_SCALES = {(4, 16): "nvfp4", (4, 32): "mxfp4", (8, 32): "mxfp8"}


class Model:
    """A network of mlx-lm. Its forwards give logits, so hidden states here are logits `[T, vocab]`.

    They are lazy: those of prompt tokens are never computed when a forward has nothing else.
    """

    facts: ModelFacts

    def __init__(self, network: Any, facts: ModelFacts) -> None:
        self.network = network
        self.facts = facts

    @classmethod
    def load(cls, checkpoint: Checkpoint, dtype: mx.Dtype) -> Self:
        """Build from a checkpoint with activations of `dtype`; CheckpointError says what does not fit."""
        config = checkpoint.config
        module = mlx_lm_module(config)
        if config.get("model_file") is not None:
            raise CheckpointError("the checkpoint wants to run its own program (`model_file`), which is never done")
        if module is None or checkpoint.dialect == "gguf":
            raise CheckpointError(f"mlx-lm has no model for {config.get('model_type')!r}")
        try:
            architecture = importlib.import_module(f"mlx_lm.models.{module}")
        except ImportError as error:
            raise LoadError(f"mlx-lm is installed, but cannot be imported: {error}") from error
        if on_cpu():
            # Compiled CPU code needs a C++ compiler on the user's machine, and may round otherwise for other shapes.
            mx.disable_compile()
        named = config.get("architectures")
        name = named[0] if isinstance(named, list) and named else str(config["model_type"])
        try:
            network = architecture.Model(architecture.ModelArgs.from_dict(spelled_out(config)))
            fill(network, checkpoint, dtype)
            network.eval()
            facts = measure(network, config, f"{name} (through mlx-lm)", dtype)
        except (AttributeError, KeyError, TypeError, ValueError, IndexError) as error:
            raise CheckpointError(
                f"mlx-lm {mlx_lm_version()} cannot build its {module} from this checkpoint: {error}"
            ) from error
        log.info("%s runs through mlx-lm %s (%s)", name, mlx_lm_version(), module)
        return cls(network, facts)

    def new_caches(self) -> RowCaches:
        """One slot: the memory of the whole network."""
        return [ForeignCache(lambda: new_layers(self.network))]

    def forward(self, batch: Batch) -> Hidden:
        """Row after row, stopping where a snapshot is wanted. Images and taps raise UnsupportedFeature."""
        if batch.features:
            raise UnsupportedFeature(f"{self.facts.architecture} does not take images")
        if batch.taps:
            raise UnsupportedFeature(f"{self.facts.architecture} gives no hidden states to drafts")
        parts = []
        for span in batch.spans:
            cache = span.caches[0]
            if not isinstance(cache, ForeignCache):
                raise TypeError(f"a {type(cache).__name__} is not the memory of a network of mlx-lm")
            for first, last in pairwise([0, *cache.splits(span.length), span.length]):
                tokens = batch.tokens[span.start + first : span.start + last]
                parts.append(self.network(tokens[None], cache=cache.layers)[0])
                cache.advance(last - first)
        return Hidden((parts[0] if len(parts) == 1 else mx.concatenate(parts)).astype(self.facts.dtype))

    def logits(self, hidden: mx.array) -> mx.array:
        """What `forward` gave."""
        return hidden

    def embed(self, tokens: mx.array) -> mx.array:
        """UnsupportedFeature: there are no drafts for these models."""
        raise UnsupportedFeature(f"{self.facts.architecture} gives no token rows to drafts")

    def raw_logits(self, hidden: mx.array) -> mx.array:
        """UnsupportedFeature: there are no drafts for these models."""
        raise UnsupportedFeature(f"{self.facts.architecture} gives no bare logits to drafts")

    def parameters(self) -> Iterable[mx.array]:
        """Every array of the network, each once."""
        leaves = cast(list[tuple[str, Any]], tree_flatten(self.network.parameters()))
        return list({id(array): array for _, array in leaves if isinstance(array, mx.array)}.values())


def spelled_out(config: Mapping[str, Any]) -> dict[str, Any]:
    """A configuration as mlx-lm's architectures look for its fields.

    Newer files hold the base, the scaling and the share of a rotary embedding in `rope_parameters`, where most of
    mlx-lm doesn't look and takes its own defaults without a word; and numbers that JSON has no letters for as
    `{"__float__": "Infinity"}`.
    """
    values = {name: _number(value) for name, value in config.items()}
    text = values.get("text_config")
    if isinstance(text, dict):
        values["text_config"] = spelled_out(text)
    rope = values.get("rope_parameters")
    if isinstance(rope, dict) and not any(isinstance(value, dict) for value in rope.values()):
        kind = rope.get("rope_type", rope.get("type", "default"))
        found = {name: rope[name] for name in ("rope_theta", "partial_rotary_factor") if name in rope}
        if kind != "default":
            found["rope_scaling"] = {name: value for name, value in rope.items() if name not in found}
        values = {**found, **{name: value for name, value in values.items() if value is not None or name not in found}}
    return values


def _number(value: Any) -> Any:
    """A value with what stands for an infinity or no number put right, in lists and objects too."""
    if isinstance(value, list):
        return [_number(item) for item in value]
    if isinstance(value, dict):
        return float(value[FLOAT]) if set(value) == {FLOAT} else {name: _number(item) for name, item in value.items()}
    return value


def new_layers(network: Any) -> list[Any]:
    """Fresh caches of mlx-lm, one a layer."""
    layers: list[Any] = importlib.import_module("mlx_lm.models.cache").make_prompt_cache(network)
    return layers


def fill(network: Any, checkpoint: Checkpoint, dtype: mx.Dtype) -> None:
    """Give a network the checkpoint's tensors: by its own rules for names, packed ones as they are stored.

    Raises CheckpointError or ValueError naming a tensor that is missing, left over, of another shape, or packed in a
    way that mlx-lm has no place for.
    """
    weights: dict[str, mx.array] = {}
    for name in checkpoint.names():
        weights |= _arrays_of(checkpoint, name)
    held = {name: array.size for name, array in weights.items() if not HARMLESS.search(name)}
    if hasattr(network, "sanitize"):
        weights = network.sanitize(weights)
    report_left_out(held, weights)
    _pack(network, weights)
    keep = getattr(network, "cast_predicate", None)
    for name, array in weights.items():
        if mx.issubdtype(array.dtype, mx.floating) and (keep is None or keep(name)):
            weights[name] = array.astype(dtype)
    network.load_weights(list(weights.items()), strict=True)


def report_left_out(held: Mapping[str, int], taken: Mapping[str, mx.array]) -> None:
    """Warn of tensors that mlx-lm's own rules for names have dropped: towers, heads for drafts, stray output heads.

    Rules rename, stack and split, so only the count of numbers tells that something is gone.
    """
    missing = sum(held.values()) - sum(array.size for array in taken.values())
    if missing > 0:
        gone = sorted(name for name in held if name not in taken)
        more = f" and {len(gone) - 5} more" if len(gone) > 5 else ""
        log.warning(
            "mlx-lm leaves out %d of the checkpoint's %d numbers; these names are not used as they are: %s%s",
            missing,
            sum(held.values()),
            ", ".join(gone[:5]),
            more,
        )


def measure(network: Any, config: Mapping[str, Any], architecture: str, dtype: mx.Dtype) -> ModelFacts:
    """What the engine needs to know. Sizes come from the shapes of two lazy forwards that nothing computes."""
    layers = new_layers(network)
    tokens = mx.zeros((1, STEP), mx.int32)
    logits = network(tokens, cache=layers)
    first = sum(layer.nbytes for layer in layers)
    network(tokens, cache=layers)
    token = max(sum(layer.nbytes for layer in layers) - first, 0) // STEP
    text = config.get("text_config")
    fields = {**config, **(text if isinstance(text, dict) else {})}
    context = next((fields[n] for n in CONTEXT_FIELDS if type(fields.get(n)) is int and fields[n] > 0), None)
    if context is None:
        log.warning("the configuration says no context length; %d tokens are assumed", CONTEXT_LENGTH)
    hidden = fields.get("hidden_size")
    return ModelFacts(
        architecture=architecture,
        vocab_size=logits.shape[-1],
        hidden_size=hidden if isinstance(hidden, int) else logits.shape[-1],
        layers=len(layers),
        context_length=context or CONTEXT_LENGTH,
        dtype=dtype,
        cache_bytes_per_token=token,
        cache_bytes_fixed=first,
    )


def _arrays_of(checkpoint: Checkpoint, name: str) -> dict[str, mx.array]:
    """A tensor under the names that mlx-lm has for its parts."""
    info = checkpoint.info(name)
    if info.quantization is None:
        return {name: checkpoint.tensor(name)}
    weight = checkpoint.weight(name)
    owner = name.removesuffix(".weight")
    if owner == name or weight.global_scale is not None or weight.scales is None:
        how = "with a global scale" if weight.global_scale is not None else "and is not called .weight"
        raise CheckpointError(
            f"tensor {name} is packed as {info.quantization.name} {how}, which mlx-lm has no place for; use the "
            "original model or one quantised for MLX"
        )
    parts = {name: weight.data, f"{owner}.scales": weight.scales}
    return parts if weight.biases is None else {**parts, f"{owner}.biases": weight.biases}


def _pack(network: Any, weights: Mapping[str, mx.array]) -> None:
    """Turn the layers whose weights are packed into packed layers; the kind shows in the shapes."""

    def kind(path: str, layer: Any) -> bool | dict[str, Any]:
        if not hasattr(layer, "to_quantized") or f"{path}.scales" not in weights:
            return False
        width, codes, scales = layer.weight.shape[-1], weights[f"{path}.weight"], weights[f"{path}.scales"]
        bits, group = codes.shape[-1] * 32 // width, width // scales.shape[-1]
        mode = "affine" if scales.dtype != mx.uint8 else BYTE_SCALES.get((bits, group))
        if mode is None:
            raise CheckpointError(f"tensor {path}.weight has {bits} bits and a scale for {group} values: unknown")
        return {"bits": bits, "group_size": group, "mode": mode}

    importlib.import_module("mlx.nn").quantize(network, class_predicate=kind)
