"""Rounds of drafts at real shapes: a DFlash 2 of random weights, some of whose tokens are made to be right.

What a round costs does not depend on what the weights say, only on how many drafts stay: so the draft's forward runs,
and what it guessed is replaced by what the target is known to say, up to a mistake.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import mlx.core as mx

from arriero.bench.gpu_models import CHUNK, RandomCheckpoint
from arriero.bench.gpu_shapes import Shape
from arriero.model.contract import Batch, Draft, Model, Pick, RowCaches
from arriero.model.drafts import load_draft
from arriero.model.quantization import Quantization
from arriero.runner.engine import Engine, Limits
from arriero.runner.messages import Failed, SamplingOptions, Submit, Tokens
from arriero.runner.sampling import Sampler
from arriero.runner.speculation.controller import EveryRound
from arriero.runner.speculation.speculator import Speculator

_DFLASH2 = {
    "architectures": ["DFlash2DraftModel"],
    "model_type": "qwen3",
    "num_hidden_layers": 5,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "layer_types": ["sliding_attention"] * 5,
    "sliding_window": 2048,
    "is_causal": False,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e7,
    "tie_word_embeddings": True,
}
_BLOCK = {
    "block_size": 8,
    "conv_kernel_size": 2,
    "conv_group_size": 16,
    "selector_rank": 256,
    "selector_top_k": 16,
}
DRAFTS: dict[str, dict[str, Any]] = {
    "Qwen3-8B": _DFLASH2
    | {
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "vocab_size": 151936,
        "num_target_layers": 36,
        "dflash_config": _BLOCK | {"mask_token_id": 151669, "target_layer_ids": [1, 9, 17, 25, 33]},
    },
    "Qwen3.8-27B": _DFLASH2
    | {
        "hidden_size": 5120,
        "intermediate_size": 17408,
        "vocab_size": 248320,
        "num_target_layers": 64,
        "dflash_config": _BLOCK | {"mask_token_id": 248070, "target_layer_ids": [5, 19, 33, 47, 61]},
    },
}
"""By their targets. That of Qwen3.8-27B is published; the other is the same at its target's width."""

TOKENS = 240
"""Tokens that a row writes in rounds."""
PASSES = 4
"""Times that rounds are run at most: what the target says in a round may differ from its plain steps by rounding."""


@dataclass(frozen=True, slots=True)
class Rounds:
    """Medians of rounds of a row, beside its plain steps."""

    drafted: int
    right: int
    """Drafts of a round that stay; one token of the target's own follows."""
    seconds: float
    """Of such a round."""
    step: float
    """Seconds of a plain step, without a draft."""
    share: float
    """Of the rounds that went as they were meant to."""

    @property
    def speed(self) -> float:
        """New tokens a second."""
        return (self.right + 1) / self.seconds

    @property
    def gain(self) -> float:
        """Over plain decoding."""
        return self.speed * self.step


class Forced(Draft):
    """A draft whose first tokens are right, whatever it guessed; everything that it computes is waited for."""

    def __init__(self, draft: Draft, right: int) -> None:
        self.facts = draft.facts
        self.draft = draft
        self.right = right
        self._known = mx.zeros((1,), mx.int32)

    def know(self, tokens: Sequence[int]) -> None:
        """What the row says from its first token on."""
        assert self.facts.limit is not None
        self._known = mx.array([*tokens, *[0] * self.facts.limit], mx.int32)
        mx.eval(self._known)

    def new_caches(self) -> RowCaches:
        return self.draft.new_caches()

    def commit(self, batch: Batch, states: mx.array) -> None:
        self.draft.commit(batch, states)

    def propose(self, batch: Batch, states: mx.array, anchor: mx.array, count: int, pick: Pick) -> mx.array:
        guessed = self.draft.propose(batch, states, anchor, count, pick)
        (span,) = batch.spans
        first = span.position + span.length + 1
        said = self._known[first : first + count]
        # A guess has no part in the sum, but it must be there before the sum is.
        wrong = mx.arange(count) >= self.right
        return mx.where(wrong, mx.where(said > 0, 0, 1), said + guessed * 0).astype(mx.int32)

    def parameters(self) -> Iterable[mx.array]:
        return self.draft.parameters()


def draft_tensors(config: Mapping[str, Any]) -> Iterator[tuple[str, Shape]]:
    """Names and shapes of a DFlash 2 draft's tensors."""
    c, own = config, config["dflash_config"]
    hidden, inner, dim = c["hidden_size"], c["intermediate_size"], c["head_dim"]
    queries, keys = c["num_attention_heads"] * dim, c["num_key_value_heads"] * dim
    taps, group = own["conv_kernel_size"], own["conv_group_size"]
    yield "fc.weight", (hidden, len(own["target_layer_ids"]) * hidden)
    yield "hidden_norm.weight", (hidden,)
    yield "norm.weight", (hidden,)
    for layer in range(c["num_hidden_layers"]):
        at = f"layers.{layer}"
        yield f"{at}.input_layernorm.weight", (hidden,)
        yield f"{at}.post_attention_layernorm.weight", (hidden,)
        for name, shape in (
            ("self_attn.q_proj", (queries, hidden)),
            ("self_attn.k_proj", (keys, hidden)),
            ("self_attn.v_proj", (keys, hidden)),
            ("self_attn.o_proj", (hidden, queries)),
            ("mlp.gate_proj", (inner, hidden)),
            ("mlp.up_proj", (inner, hidden)),
            ("mlp.down_proj", (hidden, inner)),
        ):
            yield f"{at}.{name}.weight", shape
        yield f"{at}.self_attn.q_norm.weight", (dim,)
        yield f"{at}.self_attn.k_norm.weight", (dim,)
        for conv in ("attention_conv", "mlp_conv"):
            yield f"{at}.{conv}.base_kernel", (2, taps, hidden)
            yield f"{at}.{conv}.kernel_projection.weight", (2 * taps * (hidden // group), hidden)
    yield "candidate_selector.predecessor_codebook", (c["vocab_size"], own["selector_rank"])
    yield "candidate_selector.successor_codebook", (c["vocab_size"], own["selector_rank"])
    yield "candidate_selector.hidden_projection.weight", (own["selector_rank"], hidden)


def random_draft(config: Mapping[str, Any], target: Model, quantization: Quantization | None) -> Draft:
    """The draft of a configuration with random weights, packed as its target is."""
    draft = load_draft(RandomCheckpoint(config, quantization, draft_tensors(config)), target, target.facts.dtype)
    mx.eval(list(draft.parameters()))
    return draft


def rounds(model: Model, draft: Draft, *, right: int, context: int, tokens: int) -> Rounds:
    """Let the real engine write `tokens` greedily behind `context` others, plainly and in rounds of drafts.

    RuntimeError when no round goes as it is meant to.
    """
    facts = model.facts
    prompt = [(31 * i + 11) % facts.vocab_size for i in range(context)]
    sampler = Sampler(facts.vocab_size, facts.context_length)
    limits = Limits(facts.context_length, max_rows=1, prefill_chunk=CHUNK)
    _written(Engine(model, sampler, limits), prompt, 24)
    known, arrivals = _written(Engine(model, sampler, limits), prompt, tokens)
    step = statistics.median(later - earlier for (earlier, _), (later, _) in pairwise(arrivals))
    forced = Forced(draft, right)
    meant: list[float] = []
    share = 0.0
    for _ in range(PASSES):
        forced.know([*prompt, *known])
        speculator = Speculator(model, sampler, forced, depths=EveryRound())
        known, arrivals = _written(Engine(model, sampler, limits, speculator=speculator), prompt, tokens)
        # The first and the last rounds are a prompt's end and what the budget leaves.
        gaps = [(later - earlier, count) for (earlier, _), (later, count) in pairwise(arrivals)][2:-1]
        meant = [gap for gap, count in gaps if count == right + 1]
        share = len(meant) / max(len(gaps), 1)
        if share > 0.9:
            break
    if not meant:
        raise RuntimeError(f"no round of {len(arrivals)} kept {right} drafts")
    assert draft.facts.limit is not None
    return Rounds(draft.facts.limit, right, statistics.median(meant), step, share)


def _written(engine: Engine, prompt: list[int], tokens: int) -> tuple[list[int], list[tuple[float, int]]]:
    """What a row says, and when how many tokens of it came."""
    greedy = SamplingOptions(temperature=0.0)
    engine.submit(Submit(id="row", tokens=prompt, max_tokens=tokens, stop_tokens=[], sampling=greedy))
    said: list[int] = []
    arrivals: list[tuple[float, int]] = []
    while engine.busy:
        engine.step()
        messages = engine.drain()
        now = time.perf_counter()
        failed = next((message for message in messages if isinstance(message, Failed)), None)
        if failed is not None:
            raise RuntimeError(f"the row failed: {failed.message}")
        new = [token for message in messages if isinstance(message, Tokens) for token in message.tokens]
        if new:
            said += new
            arrivals.append((now, len(new)))
    return said, arrivals


def with_draft(name: str, model: Model, quantization: Quantization, *, right: int = 5) -> Rounds | None:
    """Rounds of the model of this name in `DRAFTS`; None for another."""
    config = DRAFTS.get(name)
    if config is None:
        return None
    draft = random_draft(config, model, quantization)
    return rounds(model, draft, right=right, context=512, tokens=TOKENS)
