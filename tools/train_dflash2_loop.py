"""Training of a draft on what its target said: the loss, the steps, and how many guesses would have stayed."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from tools.train_dflash2_network import Draft, embed
from tools.train_dflash2_talks import Talks
from tools.train_dflash2_target import Target


@dataclass(frozen=True, slots=True)
class Plan:
    """How long, with what, and how fast."""

    steps: int
    seconds: float
    """Whichever ends first; the rate of learning falls with the part that is over."""
    rows: int
    """Conversations of a step."""
    anchors: int
    """Blocks of each."""
    rate: float
    codebook_rate: float
    decay: float = 4.0
    """A guess counts e times less than one so many places before it: it is only looked at if those stay."""
    unary: float = 0.25
    """Part of the guesses whose scores without predecessor are trained too; candidates are chosen by these."""
    warm: float = 0.03


@dataclass(frozen=True, slots=True)
class Blocks:
    """Guesses of a step: states, what came before and at their places, their weights, flat in one order."""

    states: Tensor
    before: Tensor
    after: Tensor
    weights: Tensor


def cut(draft: Draft, target: Target, talks: Talks, anchors: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """States of blocks `[B, A, block, hidden]`, their tokens `[B, A, block]`, and whether each guess counts.

    It does when the model chose the token, in the anchor's own answer.
    """
    tokens = talks.tokens.long()
    _, taps = target.forward(tokens, taps=draft.shape.taps)
    states = draft(taps, anchors, embed(draft.shape, target.table, tokens, anchors))
    places = anchors[:, None] + torch.arange(draft.shape.block, device=anchors.device)
    return states, tokens[:, places], talks.own[:, places[:, 1:]].int().cummin(-1).values.bool()


def flat(draft: Draft, plan: Plan, states: Tensor, tokens: Tensor, counts: Tensor) -> Blocks:
    """The guesses that count."""
    weights = torch.exp(-torch.arange(draft.shape.block - 1, device=tokens.device) / plan.decay).expand(counts.shape)
    return Blocks(states[:, :, 1:][counts], tokens[:, :, :-1][counts], tokens[:, :, 1:][counts], weights[counts])


def loss_of(draft: Draft, plan: Plan, head: Tensor, blocks: Blocks) -> Tensor:
    """Cross-entropy of the tokens under the scores with their predecessors, and of some under those without.

    Over the whole vocabulary, so that every token's row of the codebooks learns also what it does not follow.
    """
    selector = draft.candidate_selector
    scores = functional.linear(blocks.states, head)
    gains = functional.linear(selector.keys(blocks.states, blocks.before), selector.successor_codebook)
    losses = functional.cross_entropy((scores + gains).float(), blocks.after, reduction="none")
    some = torch.rand(len(losses), device=losses.device) < plan.unary
    unary = functional.cross_entropy(scores[some].float(), blocks.after[some], reduction="none")
    total = (losses * blocks.weights).sum() + (unary * blocks.weights[some]).sum()
    return total / blocks.weights.sum().clamp(min=1e-6)


def train(draft: Draft, target: Target, talks: Talks, plan: Plan, seed: int, say_every: int = 100) -> list[float]:
    """Losses by step. Weights stay in float32; on a GPU products are in bfloat16."""
    device = target.table.device
    generator = torch.Generator().manual_seed(seed)
    optimizer = optimizer_for(draft, plan)
    rates = [group["lr"] for group in optimizer.param_groups]
    losses: list[Tensor] = []
    started = time.monotonic()
    for step, part in enumerate(rows_of(len(talks.tokens), plan.rows, generator)):
        done = max(step / max(plan.steps, 1), (time.monotonic() - started) / plan.seconds)
        if step >= plan.steps or done >= 1:
            break
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate * min(done / plan.warm, 1.0, 0.5 + 0.5 * math.cos(math.pi * done)) + 1e-7
        anchors = anchors_of(draft, talks, plan.anchors, generator)
        with autocast(device):
            states, tokens, counts = cut(draft, target, talks.rows(part.to(device)), anchors)
            loss = loss_of(draft, plan, target.head, flat(draft, plan, states, tokens, counts))
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(draft.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.detach())
        if step % say_every == say_every - 1:
            recent = torch.stack(losses[-say_every:]).mean().item()
            print(f"step {step + 1}, {done:.0%}: loss {recent:.3f}, {time.monotonic() - started:.1f} s", flush=True)
    return torch.stack(losses).tolist() if losses else []


def optimizer_for(draft: Draft, plan: Plan) -> torch.optim.Optimizer:
    """AdamW; matrices decay, codebooks have a rate of their own."""
    named = dict(draft.named_parameters())
    codebooks = [value for name, value in named.items() if "codebook" in name]
    matrices = [value for name, value in named.items() if value.ndim == 2 and "codebook" not in name]
    others = [value for value in named.values() if value.ndim != 2]
    groups = [
        {"params": matrices, "lr": plan.rate, "weight_decay": 0.05},
        {"params": codebooks, "lr": plan.codebook_rate, "weight_decay": 0.0},
        {"params": others, "lr": plan.rate, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, betas=(0.9, 0.95))


def rows_of(count: int, size: int, generator: torch.Generator) -> Iterator[Tensor]:
    """Numbers of `size` of `count` rows, all of them before any comes again, without end."""
    while True:
        order = torch.randperm(count, generator=generator)
        yield from order.split(size)


def anchors_of(draft: Draft, talks: Talks, most: int, generator: torch.Generator) -> Tensor:
    """Positions with something before them and a whole block behind, ascending."""
    last = talks.tokens.shape[1] - draft.shape.block
    chosen = torch.randperm(last, generator=generator)[:most] + 1
    return chosen.sort().values.to(talks.tokens.device)


def autocast(device: torch.device) -> torch.autocast:
    """bfloat16 for products on a GPU."""
    return torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda")


@torch.no_grad()
def tokens_a_round(draft: Draft, target: Target, talks: Talks, anchors: Tensor, rows: int = 32) -> list[float]:
    """How often the likeliest guess of each place would have stayed, and one more, over blocks at all anchors.

    The first number is the tokens of a round: one and the places that stay. Only what the model said counts.
    """
    stayed = torch.zeros(draft.shape.block - 1, device=anchors.device)
    total = 0
    for start in range(0, len(talks.tokens), rows):
        with autocast(anchors.device):
            states, tokens, counts = cut(draft, target, talks.rows(slice(start, start + rows)), anchors)
            asked = counts[:, :, 0]
            guesses = draft.walk(states[asked], tokens[asked][:, 0], target.head)
        right = ((guesses == tokens[asked][:, 1:]) & counts[asked]).int().cummin(-1).values
        stayed += right.sum(0)
        total += int(asked.sum())
    if not total:
        raise ValueError("no block starts before a token of an answer")
    places = (stayed / total).tolist()
    return [1 + sum(places), *places]
