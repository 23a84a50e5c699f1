"""Qwen3.8 Flash Next at its published width with random weights: decoding, a long prompt, and what the kernels gain.

Routed experts are NVFP4, attention is bfloat16, the other matrices MXFP8, as conversions are published. The table of
n-grams lies in the host's memory, packed, and is read as from a mapped file.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import mlx.core as mx
import numpy as np

from arriero.bench.gpu_models import CHUNK, decoding, random_weight, verifying
from arriero.errors import UnsupportedFeature
from arriero.kernels import device
from arriero.kernels.cuda import indexed, indexed_choice
from arriero.model.architectures import load_model
from arriero.model.architectures.qwen4_exp_config import Config
from arriero.model.architectures.qwen4_exp_hash import NGramHash
from arriero.model.checkpoint import Checkpoint
from arriero.model.contract import Batch, Span
from arriero.model.quantization import Quantization
from arriero.model.stored import HostWeight, Stored, TensorInfo
from arriero.model.weight import Weight

NVFP4, MXFP8 = Quantization("nvfp4", 4, 16), Quantization("mxfp8", 8, 32)
TEXT: dict[str, Any] = {
    "vocab_size": 248320,
    "hidden_size": 2560,
    "full_attention_interval": 4,
    "num_attention_heads": 24,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "attention_bias": False,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "output_gate_type": "sigmoid",
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 48,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
    "mamba_ssm_dtype": "float32",
    "hc_count": 4,
    "hc_lowrank": 320,
    "indexer_n_heads": 4,
    "indexer_kv_heads": 1,
    "indexer_head_dim": 128,
    "indexer_budget": 2048,
    "indexer_compress_ratio": 4,
    "num_experts": 512,
    "num_experts_per_tok": 10,
    "moe_intermediate_size": 640,
    "shared_expert_intermediate_size": 640,
    "ple_layer_ids": [2],
    "ple_embed_dim": 2560,
    "ple_conv_kernel_size": 4,
    "ngram_size": 3,
    "heads_per_ngram": 8,
    "ngram_vocab_size_base": 20_000_000,
    "make_ngram_vocab_size_divisible_by": 128,
    "split_ngram_parts": 128,
    "eos_token_id": 248044,
    "max_position_embeddings": 262144,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 1e7,
        "partial_rotary_factor": 0.25,
        "mrope_interleaved": True,
        "mrope_section": [11, 11, 10],
    },
}
"""The published text model but for its number of layers (48)."""
LAYERS = 48
TILE = 1 << 26
"""Random bytes that a table is filled with, over and over."""

Shape = tuple[int, ...]


def config(layers: int = LAYERS, **changes: Any) -> dict[str, Any]:
    """A configuration of so many layers."""
    return {
        "architectures": ["Qwen4ExpForCausalLM"],
        "model_type": "qwen4_exp",
        "tie_word_embeddings": False,
        "num_hidden_layers": layers,
        **TEXT,
        **changes,
    }


def checkpoint(values: Mapping[str, Any]) -> Checkpoint:
    """Random weights of a configuration, each made when it is asked for."""
    stored: dict[str, Stored] = {}
    for name, shape in tensors(values):
        how = packing(name, shape)
        info = TensorInfo(name, "BF16" if how is None else "U32", shape, how, round(nbytes(shape, how)))
        stored[name] = Stored(info, lambda n=name, s=shape, h=how: _made(n, s, h), _no_view)  # type: ignore[misc]
    for tensor in _table(values):
        stored[tensor.info.name] = tensor
    return Checkpoint("random weights", stored, dict(values), {}, "hf")


def packing(name: str, shape: Shape) -> Quantization | None:
    """How a tensor of published conversions is packed."""
    if len(shape) < 2 or any(
        part in name for part in ("self_attn", "inject", "conv1d", "gate.weight", "ple", "_a.", "_b.")
    ):
        return None
    return NVFP4 if ".experts." in name else MXFP8


def nbytes(shape: Shape, how: Quantization | None) -> float:
    """Of a tensor, scales included."""
    return math.prod(shape) * (2.0 if how is None else how.bits / 8 + 1 / how.group_size)


def weight_bytes(layers: int) -> float:
    """Of the weights of so many layers, on the device."""
    return sum(nbytes(shape, packing(name, shape)) for name, shape in tensors(config(layers)))


def table_bytes(ngrams: int) -> float:
    """Of the table, on the host, with so many rows for each head."""
    rows = ngrams * TEXT["heads_per_ngram"] * (TEXT["ngram_size"] - 1)
    width = TEXT["ple_embed_dim"] // (TEXT["heads_per_ngram"] * (TEXT["ngram_size"] - 1))
    return nbytes((rows, width), NVFP4)


def tensors(values: Mapping[str, Any]) -> Iterator[tuple[str, Shape]]:
    """Names and shapes but for the table's."""
    c = values
    hidden, vocab, experts = c["hidden_size"], c["vocab_size"], c["num_experts"]
    width = c["hc_count"] * hidden
    yield "model.embed_tokens.weight", (vocab, hidden)
    yield "lm_head.weight", (vocab, hidden)
    yield from _reader("model.hyper_connection_mixer", c, writes=False)
    for layer in range(c["num_hidden_layers"]):
        at = f"model.layers.{layer}"
        for name in ("attn_hyper_connection", "mlp_hyper_connection"):
            yield from _reader(f"{at}.{name}", c, writes=True)
        attends = (layer + 1) % c["full_attention_interval"] == 0
        yield from _attention(f"{at}.self_attn", c) if attends else _delta_net(f"{at}.linear_attn", c)
        inner, shared = c["moe_intermediate_size"], c["shared_expert_intermediate_size"]
        yield f"{at}.mlp.gate.weight", (experts, hidden)
        yield f"{at}.mlp.experts.gate_proj.weight", (experts, inner, hidden)
        yield f"{at}.mlp.experts.up_proj.weight", (experts, inner, hidden)
        yield f"{at}.mlp.experts.down_proj.weight", (experts, hidden, inner)
        yield f"{at}.mlp.shared_expert_gate.weight", (1, hidden)
        yield f"{at}.mlp.shared_expert.gate_proj.weight", (shared, hidden)
        yield f"{at}.mlp.shared_expert.up_proj.weight", (shared, hidden)
        yield f"{at}.mlp.shared_expert.down_proj.weight", (hidden, shared)
        if layer + 1 in c["ple_layer_ids"]:
            yield f"{at}.ple.key_proj.weight", (width, c["ple_embed_dim"])
            yield f"{at}.ple.value_proj.weight", (hidden, c["ple_embed_dim"])
            yield f"{at}.ple.conv1d.weight", (width, 1, c["ple_conv_kernel_size"])
            for name in ("norm_key", "norm_query", "norm_conv"):
                yield f"{at}.ple.{name}.weight", (width,)


def _reader(at: str, c: Mapping[str, Any], *, writes: bool) -> Iterator[tuple[str, Shape]]:
    width, rank = c["hc_count"] * c["hidden_size"], c["hc_lowrank"]
    yield f"{at}.hc_norm.weight", (width,)
    yield f"{at}.input_mix_weight_down.weight", (rank, width)
    yield f"{at}.input_mix_weight_up.weight", (width, rank)
    if writes:
        yield f"{at}.block_inject_weight.weight", (c["hc_count"], width)


def _attention(at: str, c: Mapping[str, Any]) -> Iterator[tuple[str, Shape]]:
    hidden, dim, index = c["hidden_size"], c["head_dim"], c["indexer_head_dim"]
    heads, kv_heads = c["num_attention_heads"], c["num_key_value_heads"]
    yield f"{at}.q_proj.weight", (2 * heads * dim, hidden)
    yield f"{at}.k_proj.weight", (kv_heads * dim, hidden)
    yield f"{at}.v_proj.weight", (kv_heads * dim, hidden)
    yield f"{at}.o_proj.weight", (hidden, heads * dim)
    yield f"{at}.q_norm.weight", (dim,)
    yield f"{at}.k_norm.weight", (dim,)
    yield f"{at}.indexer.index_qk_proj.weight", ((c["indexer_n_heads"] + 1) * index, hidden)
    yield f"{at}.indexer.q_layernorm.weight", (index,)
    yield f"{at}.indexer.k_layernorm.weight", (index,)


def _delta_net(at: str, c: Mapping[str, Any]) -> Iterator[tuple[str, Shape]]:
    hidden, heads = c["hidden_size"], c["linear_num_value_heads"]
    keys, values = c["linear_num_key_heads"] * c["linear_key_head_dim"], heads * c["linear_value_head_dim"]
    yield f"{at}.in_proj_qkv.weight", (2 * keys + values, hidden)
    yield f"{at}.in_proj_z.weight", (values, hidden)
    yield f"{at}.out_proj.weight", (hidden, values)
    yield f"{at}.in_proj_a.weight", (heads, hidden)
    yield f"{at}.in_proj_b.weight", (heads, hidden)
    yield f"{at}.conv1d.weight", (2 * keys + values, 1, c["linear_conv_kernel_dim"])
    yield f"{at}.norm.weight", (c["linear_value_head_dim"],)
    yield f"{at}.A_log", (heads,)
    yield f"{at}.dt_bias", (heads,)


def _made(name: str, shape: Shape, how: Quantization | None) -> Weight:
    """Evaluated, so that no more than one is in the making. Norms are stored around 0."""
    if how is not None:
        weight = random_weight(shape, how)
    elif len(shape) == 1:
        weight = Weight(mx.ones(shape, mx.bfloat16) if ".linear_attn." in name else mx.zeros(shape, mx.bfloat16))
    else:
        weight = Weight((mx.random.normal(shape) * shape[-1] ** -0.5).astype(mx.bfloat16))
    mx.eval([part for part in (weight.data, weight.scales, weight.global_scale) if part is not None])
    return weight


def _table(values: Mapping[str, Any]) -> Iterator[Stored]:
    """The shards of the tables, and the numbers of their hashes."""
    ngrams = Config.read(values).ngrams
    for number, layer in enumerate(ngrams.layers if ngrams is not None else ()):
        assert ngrams is not None
        at, hash_ = f"model.layers.{layer}.ple.ple_embedding", NGramHash.of(ngrams, number)
        for name, numbers in (
            ("layer_multipliers", hash_.multipliers),
            ("ngram_heads_vocab_sizes", hash_.sizes),
            ("ngram_heads_offsets", hash_.offsets),
        ):
            yield _hosted(f"{at}.{name}", "I64", numbers.shape, HostWeight(numbers))
        width = ngrams.width // ngrams.rows_per_token
        rows = -(-hash_.rows // ngrams.divisor) * ngrams.divisor // ngrams.shards
        codes = _filled((ngrams.shards, rows, width // 2), 0, 256)
        scales = _filled((ngrams.shards, rows, width // 16), 44, 60)
        factor = np.array(width**-0.5, np.float32)
        for shard in range(ngrams.shards):
            view = HostWeight(codes[shard], NVFP4, scales[shard], None, factor)
            yield _hosted(f"{at}.ngram_embedding.shard_{shard}.weight", "U8", (rows, width), view)


def _filled(shape: Shape, low: int, high: int) -> np.ndarray:
    """Random bytes, the same `TILE` of them over and over."""
    tile = np.random.default_rng(0).integers(low, high, min(TILE, math.prod(shape)), np.uint8)
    made = np.empty(math.prod(shape), np.uint8)

    def fill(at: int) -> None:
        part = made[at : at + tile.size]
        part[:] = tile[: part.size]

    with ThreadPoolExecutor(16) as threads:
        list(threads.map(fill, range(0, made.size, tile.size)))
    return made.reshape(shape)


def _hosted(name: str, dtype: str, shape: Shape, view: HostWeight) -> Stored:
    size = sum(part.nbytes for part in (view.data, view.scales) if part is not None)
    return Stored(TensorInfo(name, dtype, shape, view.quantization, size), _no_load, lambda: view)


def _no_view() -> HostWeight:
    raise UnsupportedFeature("a random weight of the device has no copy on the host")


def _no_load() -> Weight:
    raise UnsupportedFeature("the table of n-grams stays on the host")


@dataclass(frozen=True, slots=True)
class Chunk:
    """One chunk of a prompt: seconds, and the most memory beside what was held before it."""

    seconds: float
    bytes: int


@dataclass(frozen=True, slots=True)
class FlashNext:
    """What one run measured."""

    layers: int
    weight_bytes: int
    table_bytes: int
    step_bytes: float
    """Of weights that a decoded token reads."""
    host_bytes: int
    """Of the table that a token brings from the host."""
    short: float
    """Seconds of a decoded token with a short history."""
    prompt: int
    read: int
    """Tokens of the prompt that were read in the time there was."""
    prefill: float
    """Seconds that they took."""
    prefill_bytes: int
    """The most that was held beside weights and what was there before."""
    long: float
    """Seconds of a decoded token behind the prompt."""
    ours: Chunk
    """The chunk behind it."""
    plain: Chunk | None
    """The last one, with plain MLX in place of the kernels for blocks of keys."""
    eight: float | None = None
    """Seconds of a step of eight rows with a short history."""
    verify: float | None = None
    """Seconds of a forward of eight tokens of one row, read before the next is built."""

    def to_json(self) -> dict[str, Any]:
        """As JSON has it."""
        return asdict(self)


def measure(
    layers: int = LAYERS,
    *,
    prompt: int = 65536,
    seconds: float = 60.0,
    ngrams: int = TEXT["ngram_vocab_size_base"],
    fallback: bool = True,
    tell: Callable[[str], object] = str,
) -> FlashNext:
    """Make the model, decode, read a prompt for at most so many `seconds`, decode behind it.

    `ngrams` is the least number of rows of each head of the table; `fallback` measures a chunk without the kernels
    for blocks of keys, which takes seconds for each layer of attention. UnsupportedFeature where there is no GPU.
    """
    if device.cuda() is None:
        raise UnsupportedFeature("there is no NVIDIA GPU here that arriero's kernels work on, so nothing was measured")
    values = config(layers, ngram_vocab_size_base=ngrams)
    tell(f"Flash Next, {layers} layers: the table")
    files = checkpoint(values)
    tell(f"Flash Next, {layers} layers: weights")
    model: Any = load_model(files, mx.bfloat16)
    mx.eval(list(model.parameters()))
    weights = sum(array.nbytes for array in model.parameters())
    table = next(layer.ngrams.table for layer in model.layers if layer.ngrams is not None)
    tell("decoding")
    decoding(model, rows=1, context=64, tokens=12)
    short = decoding(model, rows=1, context=512, tokens=48).step
    decoding(model, rows=8, context=64, tokens=12)
    eight = decoding(model, rows=8, context=512, tokens=32).step
    tell(f"one row {1000 * short:.2f} ms a step, eight {1000 * eight:.2f} ms; eight tokens of one row")
    verify = verifying(model, context=512, tokens=8)
    tell(f"{1000 * verify:.2f} ms; a long prompt")
    reader = Reading(model, prompt)
    reader.chunk()
    held = mx.get_active_memory()
    reader.peak = 0
    started = time.perf_counter()
    while reader.left > 3 * CHUNK and time.perf_counter() - started < seconds:
        reader.chunk()
    spent, read, peak = time.perf_counter() - started, reader.position - CHUNK, reader.peak - held
    ours = reader.chunk()
    tell(f"{read} tokens in {spent:.2f} s, the last chunk in {ours.seconds:.3f} s")
    plain = None
    if fallback:
        tell("plain MLX in place of the kernels")
        with without_blocks():
            # The first compiles.
            plain = [reader.chunk(), reader.chunk()][1]
    tell("decoding behind the prompt")
    steps = [reader.step() for _ in range(24)]
    return FlashNext(
        layers,
        weights,
        sum(files.info(name).nbytes for name in files.names() if ".ngram_embedding." in name),
        step_bytes(values),
        table.files.row_bytes * values["heads_per_ngram"] * (values["ngram_size"] - 1),
        short,
        prompt,
        read,
        spent,
        peak,
        statistics.median(steps[4:]),
        ours,
        plain,
        eight,
        verify,
    )


def step_bytes(values: Mapping[str, Any]) -> float:
    """Bytes of weights that a step of one token reads."""
    total = 0.0
    for name, shape in tensors(values):
        share = values["num_experts_per_tok"] / values["num_experts"] if ".experts." in name else 1.0
        total += 0.0 if "embed_tokens" in name else nbytes(shape, packing(name, shape)) * share
    return total


class Reading:
    """A row that reads a prompt chunk by chunk, as the engine does, and then writes."""

    def __init__(self, model: Any, length: int) -> None:
        self.model = model
        self.ids = np.random.default_rng(1).integers(0, model.facts.vocab_size, length).astype(np.int32)
        self.caches = model.new_caches()
        self.position = 0
        self.token = mx.zeros((1,), mx.int32)
        self.peak = 0
        """The most memory that a chunk has taken, with what was held before it."""

    @property
    def left(self) -> int:
        """Tokens of the prompt that nobody has read."""
        return len(self.ids) - self.position

    def chunk(self) -> Chunk:
        """Read the next chunk."""
        held = mx.get_active_memory()
        mx.reset_peak_memory()
        started = time.perf_counter()
        end = min(self.position + CHUNK, len(self.ids))
        part = self.ids[self.position : end]
        self._forward(Batch.of(part, [Span(0, len(part), self.position, self.caches)]))
        coming = self.ids[: end + CHUNK]
        self.model.read_ahead([(coming, len(coming) - end)] if len(coming) > end else [])
        mx.eval(self.token)
        self.position = end
        spent, peak = time.perf_counter() - started, mx.get_peak_memory()
        self.peak = max(self.peak, peak)
        return Chunk(spent, peak - held)

    def step(self) -> float:
        """Seconds of a decoded token."""
        started = time.perf_counter()
        self._forward(Batch(self.token, [Span(0, 1, self.position, self.caches)]))
        mx.eval(self.token)
        self.position += 1
        return time.perf_counter() - started

    def _forward(self, batch: Batch) -> None:
        final = self.model.forward(batch).final
        self.token = mx.argmax(self.model.logits(final[-1:]), axis=-1).astype(mx.int32)
        mx.async_eval(self.token, *(array for cache in self.caches for array in cache.state()))  # type: ignore[no-untyped-call]


@contextmanager
def without_blocks() -> Iterator[None]:
    """Plain MLX chooses and reads blocks of keys."""
    kept = indexed.takes, indexed_choice.takes
    try:
        indexed.takes = indexed_choice.takes = lambda *_: False  # type: ignore[assignment]
        yield
    finally:
        indexed.takes, indexed_choice.takes = kept
