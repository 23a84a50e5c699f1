"""Conversations that a model has with itself: it asks what it was trained to be asked, and answers."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jinja2.sandbox
import numpy as np
import torch
from torch import Tensor

from tools.train_dflash2_target import Memory, Target

QUESTION, ANSWER = "⟦question⟧", "⟦answer⟧"


@dataclass(frozen=True, slots=True)
class Marks:
    """Tokens around what is said. The first of both others is what ends a turn when the model says it."""

    before: list[int]
    """In front of the first question."""
    to_answer: list[int]
    to_question: list[int]

    @classmethod
    def of(cls, template: str, encode: Callable[[str], list[int]]) -> Marks:
        """From a chat template; ValueError when questions and answers do not stand in it as they are, or their ends
        differ.
        """
        spoken = [(("user", "assistant")[i % 2], (QUESTION, ANSWER)[i % 2]) for i in range(3)]
        messages = [{"role": role, "content": content} for role, content in spoken]
        environment = jinja2.sandbox.ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
        text = environment.from_string(template).render(messages=messages, add_generation_prompt=True)
        pieces = text.replace(ANSWER, QUESTION).split(QUESTION)
        if len(pieces) != 4 or not pieces[1].startswith(pieces[3]):
            raise ValueError(f"the chat template makes {len(pieces) - 1} turns of 3, or changes them later")
        before, to_question, to_answer = (encode(piece) for piece in (pieces[0], *pieces[2:]))
        if not to_answer or to_answer[:1] != to_question[:1]:
            raise ValueError(f"turns end with tokens {to_answer[:1]} and {to_question[:1]}; they must end alike")
        return cls(before, to_answer, to_question)


@dataclass(frozen=True)
class Manner:
    """How the model talks: the longest turns, and the temperature of the answers of those rows that are not greedy.

    Questions are drawn at temperature 1 among tokens at least `least` times as likely as the best.
    """

    longest_question: int = 96
    longest_answer: int = 256
    temperature: float = 0.7
    least: float = 0.03


@dataclass(frozen=True, slots=True)
class Talks:
    """Tokens `[n, T]`, and which of them the model chose in an answer; the even rows are greedy."""

    tokens: Tensor
    own: Tensor

    def save(self, path: Path) -> None:
        np.savez(path, tokens=self.tokens.cpu().numpy(), own=self.own.cpu().numpy())

    @classmethod
    def read(cls, path: Path, device: str) -> Talks:
        with np.load(path) as file:
            return cls(*(torch.from_numpy(file[name]).to(device) for name in ("tokens", "own")))

    def rows(self, part: Any) -> Talks:
        return Talks(self.tokens[part], self.own[part])

    def questions(self, marks: Marks, most: int) -> list[list[int]]:
        """Tokens of the first questions, of at most `most` conversations whose first question ended."""
        start, stop = len(marks.before), marks.to_answer[0]
        asked = [row[start : row.index(stop, start)] for row in self.tokens.tolist() if stop in row[start:]]
        return asked[:most]


@torch.no_grad()
def talk(target: Target, marks: Marks, rows: int, length: int, manner: Manner) -> Talks:
    """`rows` conversations of `length` tokens, question after question, nothing of which the host waits for.

    Rows take turns at different times, but all are equally long, so nothing is masked.
    """
    device = target.table.device
    tokens = torch.tensor(marks.before, device=device).repeat(rows, 1)
    if not 0 < tokens.shape[1] < length:
        raise ValueError(f"conversations of {length} tokens, behind {tokens.shape[1]} that all start with")
    stop = marks.to_answer[0]
    longest = max(len(marks.to_answer), len(marks.to_question))
    # What is put in after an end, by who speaks next: 0 the asker, 1 the answerer. 0 fills up, and is never used.
    put_in = torch.zeros((2, longest), dtype=torch.long, device=device)
    counts = torch.tensor([len(marks.to_question) - 1, len(marks.to_answer) - 1], device=device)
    for speaker, mark in enumerate((marks.to_question, marks.to_answer)):
        put_in[speaker, : len(mark) - 1] = torch.tensor(mark[1:], dtype=torch.long)
    most = torch.tensor([manner.longest_question, manner.longest_answer], device=device)
    speaker = torch.zeros(rows, dtype=torch.long, device=device)
    place = counts[speaker]
    said = torch.zeros(rows, dtype=torch.long, device=device)
    answers = torch.zeros(rows, device=device)
    answers[1::2] = manner.temperature
    memory = Memory(target, rows, length)
    chosen, own = list(tokens.T), [torch.zeros(rows, dtype=torch.bool, device=device)] * tokens.shape[1]
    new = tokens
    while len(chosen) < length:
        states, _ = target.forward(new, memory)
        scores = target.logits(states[:, -1]).float()
        answering = speaker == 1
        floor = torch.where(answering, 0.0, manner.least)
        token = pick(scores, torch.where(answering, answers, 1.0), floor)
        forced = place < counts[speaker]
        cut = ~forced & (said >= most[speaker])
        token = torch.where(forced, put_in[speaker, place.clamp(max=longest - 1)], torch.where(cut, stop, token))
        ends = ~forced & (token == stop)
        own.append(~forced & ~cut & answering)
        said = torch.where(ends, 0, said + ~forced)
        speaker = torch.where(ends, 1 - speaker, speaker)
        place = torch.where(ends, 0, place + forced)
        chosen.append(token)
        new = token[:, None]
    return Talks(torch.stack(chosen, 1).int(), torch.stack(own, 1))


def pick(scores: Tensor, temperature: Tensor, least: Tensor) -> Tensor:
    """A token for each row of `scores` `[n, vocab]`: the best where the temperature is 0, else a draw.

    Only among those at least `least` times as likely as the best, at temperature 1.
    """
    best = scores.max(-1, keepdim=True).values
    # A draw from a softmax is the largest of the scores with noise of Gumbel's law.
    noise = -torch.empty_like(scores).exponential_().log()
    heated = scores / temperature.clamp(min=1e-6)[:, None] + noise
    heated = heated.masked_fill(scores < best + least.log()[:, None], -torch.inf)
    return torch.where(temperature > 0, heated.argmax(-1), scores.argmax(-1))


def talks(
    target: Target, marks: Marks, manner: Manner, *, rows: int, batch: int, length: int, seconds: float = float("inf")
) -> Talks:
    """`rows` of them, `batch` (an even number) at once, or as many batches as start within `seconds`."""
    if batch < 2 or batch % 2:
        raise ValueError(f"{batch} conversations at once; an even number, half of them are greedy")
    parts: list[Talks] = []
    started = time.monotonic()
    while (had := sum(len(part.tokens) for part in parts)) < rows and time.monotonic() - started < seconds:
        parts.append(talk(target, marks, min(batch, rows - had), length, manner))
        share = parts[-1].own.float().mean().item()
        print(f"{had + len(parts[-1].tokens)} conversations, {share:.0%} answers, {time.monotonic() - started:.1f} s")
    if not parts:
        raise ValueError(f"no conversations: {rows} rows in {seconds} s")
    return Talks(torch.cat([part.tokens for part in parts]), torch.cat([part.own for part in parts]))
