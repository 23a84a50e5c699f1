"""DFlash 2: DFlash with convolutions within a block, and tokens that are chosen by the one before them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Self

import mlx.core as mx

from arriero.errors import CheckpointError
from arriero.kernels.device import on_cpu
from arriero.kernels.topk import top_k_values
from arriero.model.checkpoint import Checkpoint
from arriero.model.contract import Pick
from arriero.model.drafts.dflash import BlockDraft
from arriero.model.drafts.dflash_config import SelectorConfig
from arriero.model.layers.embedding import Embedding
from arriero.model.layers.linear import Linear, expect_shape


class CandidateSelector:
    """Scores of the best tokens of each row, by the token chosen for the row before.

    For candidate k of row t after token p: `logit(k) + Σ_i A[p, i] · (W h_t)_i · C[k, i]`, in float32. Source: DFlash
    2, the released draft's implementation.
    """

    def __init__(self, config: SelectorConfig, predecessors: Embedding, successors: Embedding, project: Linear) -> None:
        self.config = config
        self.predecessors = predecessors
        self.successors = successors
        self.project = project

    @classmethod
    def load(
        cls, checkpoint: Checkpoint, prefix: str, dtype: mx.Dtype, config: SelectorConfig, *, vocab: int, hidden: int
    ) -> Self:
        """`predecessor_codebook` and `successor_codebook` `[vocab, rank]`, and `hidden_projection`, under `prefix`.

        Published codebooks have no `.weight` at the end of their names, converted ones may.
        """

        def codebook(name: str) -> Embedding:
            names = [f"{prefix}.{name}", f"{prefix}.{name}.weight"]
            found = next((n for n in names if n in checkpoint), None)
            if found is None:
                raise CheckpointError(f"the draft's checkpoint holds neither {' nor '.join(names)}")
            weight = checkpoint.weight(found).astype(dtype)
            expect_shape(found, weight.shape, (vocab, config.rank))
            return Embedding(weight, dtype)

        project = Linear.load(checkpoint, f"{prefix}.hidden_projection", dtype, bias=False, shape=(config.rank, hidden))
        return cls(config, codebook("predecessor_codebook"), codebook("successor_codebook"), project)

    def candidates(self, logits: mx.array) -> tuple[mx.array, mx.array]:
        """Of logits `[n, vocab]` the best, float32 `[n, k]` descending, and their tokens int32 `[n, k]`."""
        values, tokens = top_k_values(logits.astype(mx.float32), min(self.config.top_k, logits.shape[-1]))
        return values, tokens

    def prepared(self, states: mx.array, logits: mx.array, anchor: mx.array) -> list[mx.array]:
        """For rows `states` `[n, hidden]` behind the token `anchor` `[1]`: tokens of the candidates `[n, k]`, scores of
        the first row's `[1, k]`, and of each other row's `[n − 1, k, k]`, by the candidate chosen before.
        """
        unary, tokens = self.candidates(logits)
        rows, k = tokens.shape
        own = self.successors(tokens.reshape(-1)).reshape(rows, k, -1).astype(mx.float32)
        keys = own * self.project(states).astype(mx.float32)[:, None]
        before = mx.concatenate([anchor.astype(tokens.dtype), tokens[:-1].reshape(-1)])
        others = self.predecessors(before).astype(mx.float32)
        first = unary[:1] + (keys[:1] * others[:1]).sum(axis=-1)
        others = others[1:].reshape(rows - 1, k, 1, self.config.rank)
        return [tokens, first, unary[1:, None] + (keys[1:, None] * others).sum(axis=-1)]

    def walk(self, prepared: list[mx.array], pick: Pick) -> mx.array:
        """Tokens int32 `[n]` of what `prepared` gave, picked one after another.

        `pick` sees each row's candidates with the scores that its predecessor, as picked, gives them.
        """
        tokens, scores, lattice = prepared
        behind = _behind if on_cpu() else _compiled_behind
        candidates = mx.split(tokens, tokens.shape[0])
        later = list(mx.split(lattice, lattice.shape[0])) if lattice.shape[0] else []
        chosen = [pick(scores, candidates[0]).astype(mx.int32)]
        for before, of_row, rows in zip(candidates, candidates[1:], later, strict=False):
            chosen.append(pick(behind(before, chosen[-1], rows), of_row).astype(mx.int32))
        return mx.concatenate(chosen)


def _behind(candidates: mx.array, chosen: mx.array, scores: mx.array) -> mx.array:
    """The row of `scores` `[1, k, k]` behind the one of `candidates` `[1, k]` that is `chosen` `[1]`: `[1, k]`."""
    return mx.take(scores.squeeze(0), mx.argmax(candidates == chosen, axis=-1), axis=0)


_compiled_behind: Callable[[mx.array, mx.array, mx.array], mx.array] = mx.compile(_behind)


class SelectingBlockDraft(BlockDraft):
    """A block draft whose tokens are drawn one after another, each from a few candidates.

    What `pick` gets is the law of a token given those before it, so each proposal's distribution is its true one.
    """

    conditional = True
    whole = True
    selector: CandidateSelector

    def load_rest(self, checkpoint: Checkpoint, root: str, dtype: mx.Dtype) -> None:
        """The selector."""
        config = self.config
        if config.selector is None:
            raise CheckpointError(f"{config.architecture} has no selector")
        self.selector = CandidateSelector.load(
            checkpoint,
            f"{root}candidate_selector",
            dtype,
            config.selector,
            vocab=self.target.facts.vocab_size,
            hidden=config.hidden,
        )

    def prepared(self, states: mx.array, anchor: mx.array) -> list[mx.array]:
        return self.selector.prepared(states, self.logits(states), anchor)

    def guess(self, prepared: list[mx.array], pick: Pick) -> mx.array:
        return self.selector.walk(prepared, pick)

    def parts(self) -> list[Any]:
        return [*super().parts(), self.selector]
