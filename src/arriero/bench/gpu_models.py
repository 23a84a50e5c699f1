"""Models of published shapes with random weights, made on the device, and how fast the engine decodes with them."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import mlx.core as mx

from arriero.errors import CheckpointError
from arriero.model.architectures import load_model
from arriero.model.checkpoint import Checkpoint
from arriero.model.contract import Encoder, Model
from arriero.model.quantization import Quantization
from arriero.model.weight import Weight
from arriero.runner.engine import Engine, Limits
from arriero.runner.messages import SamplingOptions, Submit, Tokens
from arriero.runner.sampling import Sampler

CONFIGS: dict[str, dict[str, Any]] = {
    "Qwen3-8B": {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 151936,
        "max_position_embeddings": 40960,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e6,
        "tie_word_embeddings": False,
    },
    "Qwen3-30B-A3B": {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "moe_intermediate_size": 768,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "norm_topk_prob": True,
        "num_hidden_layers": 48,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "vocab_size": 151936,
        "max_position_embeddings": 40960,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e6,
        "tie_word_embeddings": False,
    },
}
"""Published configurations, as their `config.json` has them."""


class RandomCheckpoint(Checkpoint):
    """Stands for the files of a model: each tensor is made when it is asked for.

    Matrices are packed as `quantization` says, norms are ones, and the table of tokens is bfloat16.
    """

    def __init__(self, config: Mapping[str, Any], quantization: Quantization | None) -> None:
        super().__init__("random weights", {}, dict(config), {}, "hf")
        self.quantization = quantization
        self.shapes = dict(_shapes(config))
        self.names_taken: set[str] = set()

    @property
    def nbytes(self) -> int:
        return 0

    def names(self) -> list[str]:
        return list(self.shapes)

    def __contains__(self, name: str) -> bool:
        return name in self.shapes

    def unused(self) -> list[str]:
        return [name for name in self.shapes if name not in self.names_taken]

    def tensor(self, name: str) -> mx.array:
        return self.weight(name).data

    def weight(self, name: str) -> Weight:
        """CheckpointError for a name that the shape does not have."""
        if name not in self.shapes:
            raise CheckpointError(f"the shape has no tensor {name}")
        self.names_taken.add(name)
        shape = self.shapes[name]
        if len(shape) == 1:
            return Weight(mx.ones(shape, mx.bfloat16))
        how = self.quantization
        if how is None or "embed_tokens" in name or name.endswith("mlp.gate.weight"):
            made = Weight((mx.random.normal(shape) * shape[-1] ** -0.5).astype(mx.bfloat16))
        else:
            made = random_weight(shape, how)
        mx.eval([part for part in (made.data, made.scales, made.biases, made.global_scale) if part is not None])
        return made


def random_weight(shape: tuple[int, ...], how: Quantization) -> Weight:
    """Random codes with scales that make values of about `width ** -0.5`, on the device."""
    *outer, width = shape
    # MLX draws 31 bits at a time; an odd factor spreads them over 32.
    words = mx.random.randint(0, 1 << 30, (*outer, width * how.bits // 32)).astype(mx.uint32) * 2654435761
    groups = (*outer, width // how.group_size)
    size = width**-0.5
    if how.mode == "nvfp4":
        scales = mx.random.randint(44, 60, groups).astype(mx.uint8)
        count = outer[0] if len(outer) == 2 else 1
        factor = mx.full((count,) if len(outer) == 2 else (), size / 2.5, mx.float32)
        return Weight(words, how, scales, None, factor)
    if how.mode in ("mxfp4", "mxfp8"):
        # No code of E4M3 may be the one that is no number.
        words = words & 0xBFBFBFBF if how.mode == "mxfp8" else words
        exponent = 126 + round(math.log2(size))
        return Weight(words, how, mx.full(groups, exponent, mx.uint8))
    step = size / (2 ** (how.bits - 2))
    scales = (step * (0.9 + 0.2 * mx.random.uniform(shape=groups))).astype(mx.bfloat16)
    return Weight(words, how, scales, scales * -(2.0 ** (how.bits - 1)))


def _shapes(config: Mapping[str, Any]) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Names and shapes of Qwen 3's tensors."""
    c = config
    hidden, dim = c["hidden_size"], c["head_dim"]
    queries, keys = c["num_attention_heads"] * dim, c["num_key_value_heads"] * dim
    yield "model.embed_tokens.weight", (c["vocab_size"], hidden)
    yield "model.norm.weight", (hidden,)
    if not c["tie_word_embeddings"]:
        yield "lm_head.weight", (c["vocab_size"], hidden)
    for layer in range(c["num_hidden_layers"]):
        at = f"model.layers.{layer}"
        yield f"{at}.input_layernorm.weight", (hidden,)
        yield f"{at}.post_attention_layernorm.weight", (hidden,)
        for name, shape in (
            ("q_proj", (queries, hidden)),
            ("k_proj", (keys, hidden)),
            ("v_proj", (keys, hidden)),
            ("o_proj", (hidden, queries)),
        ):
            yield f"{at}.self_attn.{name}.weight", shape
        yield f"{at}.self_attn.q_norm.weight", (dim,)
        yield f"{at}.self_attn.k_norm.weight", (dim,)
        if "num_experts" in c:
            inner, count = c["moe_intermediate_size"], c["num_experts"]
            yield f"{at}.mlp.gate.weight", (count, hidden)
            yield f"{at}.mlp.switch_mlp.gate_proj.weight", (count, inner, hidden)
            yield f"{at}.mlp.switch_mlp.up_proj.weight", (count, inner, hidden)
            yield f"{at}.mlp.switch_mlp.down_proj.weight", (count, hidden, inner)
        else:
            inner = c["intermediate_size"]
            yield f"{at}.mlp.gate_proj.weight", (inner, hidden)
            yield f"{at}.mlp.up_proj.weight", (inner, hidden)
            yield f"{at}.mlp.down_proj.weight", (hidden, inner)


def random_model(config: Mapping[str, Any], quantization: Quantization | None) -> Model:
    """The model of a configuration with random weights, in memory."""
    model = load_model(RandomCheckpoint(config, quantization), mx.bfloat16)
    if isinstance(model, Encoder):
        raise TypeError(f"{model.facts.architecture} does not decode")
    mx.eval(list(model.parameters()))
    return model


@dataclass(frozen=True, slots=True)
class Decoding:
    """Medians of one setting."""

    rows: int
    context: int
    """Tokens of each row's prompt."""
    prefill: float
    """Prompt tokens a second of all rows together."""
    step: float
    """Seconds from one token of each row to the next."""

    @property
    def total(self) -> float:
        """New tokens a second of all rows together."""
        return self.rows / self.step


def decoding(model: Model, *, rows: int, context: int, tokens: int) -> Decoding:
    """Let the real engine read `rows` prompts of `context` tokens and write `tokens` greedily for each.

    Steps are timed while all rows decode, from one arrival of tokens to the next.
    """
    limits = Limits(model.facts.context_length, max_rows=rows)
    engine = Engine(model, Sampler(model.facts.vocab_size, model.facts.context_length), limits)
    greedy = SamplingOptions(temperature=0.0)
    started = time.perf_counter()
    for row in range(rows):
        prompt = [(row * 7919 + 31 * i + 11) % model.facts.vocab_size for i in range(context)]
        engine.submit(Submit(id=str(row), tokens=prompt, max_tokens=tokens, stop_tokens=[], sampling=greedy))
    first: float | None = None
    begun: set[str] = set()
    arrivals: list[float] = []
    while engine.busy:
        engine.step()
        came = {message.id for message in engine.drain() if isinstance(message, Tokens)}
        begun |= came
        now = time.perf_counter()
        if len(begun) == rows:
            first = now if first is None else first
            if len(came) == rows:
                arrivals.append(now)
    if first is None or len(arrivals) < 3:
        raise RuntimeError(f"{rows} rows of {tokens} tokens never decoded side by side")
    gaps = [b - a for a, b in pairwise(arrivals)]
    return Decoding(rows, context, rows * context / (first - started), statistics.median(gaps))
