"""Trains a small DFlash 2 draft for a Llama of a GGUF file, on what that model says to itself.

    PYTHONPATH=src python -m tools.train_dflash2 MODEL.gguf FOLDER [--conversations 20000] [--steps 2000]

Needs PyTorch (2.6 or later), beside the packages that arriero needs anyway; a GPU is used when there is one. The model
writes conversations: questions drawn at temperature 1, answers greedy in every other row, at `--temperature` in the
others. A draft of `--layers` layers with the model's own width is trained to guess what follows each of many places in
them, with the model's table and head as they are. FOLDER gets config.json and model.safetensors in bfloat16, which
DRAFT in a Modelfile puts beside a model, and questions.json, the first questions of the conversations that were held
out; `tools/train_dflash2_measure.py` measures it in the engine.

`--from FOLDER` goes on with a draft of the same sizes. With `--seconds` and `--write-seconds` the work ends in a known
time. `--talks FILE.npz` keeps the conversations: read when it is there, else written.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from arriero.chat.vocabulary import CONTROL, tokenizer_from_gguf
from tools.train_dflash2_files import read, write
from tools.train_dflash2_loop import Plan, tokens_a_round, train
from tools.train_dflash2_network import Draft, count
from tools.train_dflash2_shape import Shape, spread_taps
from tools.train_dflash2_talks import Manner, Marks, Talks, talks
from tools.train_dflash2_target import Metadata, Target, open_file


def arguments(values: Sequence[str] | None = None) -> argparse.Namespace:
    """The command's."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--seed", type=int, default=0)
    data = parser.add_argument_group("conversations")
    data.add_argument("--talks", type=Path)
    data.add_argument("--conversations", type=int, default=20000)
    data.add_argument("--length", type=int, default=512, help="tokens of each")
    data.add_argument("--batch", type=int, default=512, help="written at once")
    data.add_argument("--write-seconds", type=float, default=float("inf"))
    data.add_argument("--temperature", type=float, default=0.7)
    data.add_argument("--longest-question", type=int, default=Manner.longest_question)
    data.add_argument("--longest-answer", type=int, default=Manner.longest_answer)
    data.add_argument("--held-out", type=int, default=64, help="of them, to judge by")
    size = parser.add_argument_group("draft")
    size.add_argument("--from", type=Path, dest="earlier", help="a draft that was trained before")
    size.add_argument("--layers", type=int, default=2)
    size.add_argument("--inner", type=int, help="width of the feed-forward; the model's own by default")
    size.add_argument("--taps", type=int, default=5)
    size.add_argument("--block", type=int, default=8)
    size.add_argument("--window", type=int, default=512)
    size.add_argument("--rank", type=int, default=32, help="of the selector")
    size.add_argument("--top-k", type=int, default=16)
    size.add_argument("--conv-group", type=int, default=16)
    size.add_argument("--mask", type=int, help="the last control token that is no mark of a turn by default")
    plan = parser.add_argument_group("training")
    plan.add_argument("--steps", type=int, default=2000)
    plan.add_argument("--seconds", type=float, default=float("inf"))
    plan.add_argument("--rows", type=int, default=64, help="conversations of a step")
    plan.add_argument("--anchors", type=int, default=128, help="blocks of each")
    plan.add_argument("--rate", type=float, default=1.5e-3)
    plan.add_argument("--codebook-rate", type=float, default=3e-3)
    return parser.parse_args(values)


def main(values: Sequence[str] | None = None) -> dict[str, Any]:
    """Write conversations, train, judge and store; what was done is also in FOLDER/training.json."""
    options = arguments(values)
    torch.manual_seed(options.seed)
    reader = open_file(options.model)
    metadata = Metadata(reader)
    dtype = torch.bfloat16 if options.device.startswith("cuda") else torch.float32
    target = Target.load(reader, options.device, dtype, options.length)
    tokenizer = tokenizer_from_gguf(metadata.tokenizer())
    marks = Marks.of(
        metadata("tokenizer.chat_template"), lambda text: tokenizer.encode(text, add_special_tokens=False).ids
    )
    shape = shape_of(options, metadata, target, marks)
    started = time.monotonic()
    said = conversations(options, target, marks)
    wrote = time.monotonic() - started
    print(f"{said.tokens.numel():,} tokens, {int(said.own.sum()):,} of them the answers', {wrote:.0f} s", flush=True)
    if not 0 < options.held_out < len(said.tokens):
        raise SystemExit(f"--held-out {options.held_out} of {len(said.tokens)} conversations; some must be left")
    judged, learned = said.rows(slice(options.held_out)), said.rows(slice(options.held_out, None))
    draft = Draft(shape).to(options.device)
    if options.earlier is not None:
        read(draft, options.earlier)
    else:
        with torch.no_grad():
            draft.norm.weight.copy_(target.norm)
    print(f"{count(list(draft.parameters())):,} weights, {len(learned.tokens):,} conversations", flush=True)
    plan = Plan(options.steps, options.seconds, options.rows, options.anchors, options.rate, options.codebook_rate)
    started = time.monotonic()
    losses = train(draft, target, learned, plan, options.seed)
    trained = time.monotonic() - started
    # What is judged is what is stored.
    draft.to(torch.bfloat16).float()
    anchors = torch.arange(1, options.length - shape.block, 3, device=options.device)
    rounds = {
        name: tokens_a_round(draft, target, judged.rows(slice(first, None, 2)), anchors)
        for first, name in enumerate(("greedy", f"temperature {options.temperature}"))
    }
    for name, (tokens, *places) in rounds.items():
        print(f"{name}: {tokens:.2f} tokens a round; places {' '.join(f'{place:.2f}' for place in places)}")
    nbytes = write(draft, options.folder)
    asked = [tokenizer.decode(question) for question in judged.questions(marks, 32)]
    (options.folder / "questions.json").write_text(json.dumps(asked, indent=1, ensure_ascii=False) + "\n", "utf-8")
    print(f"{options.folder}: {nbytes / 1e6:.1f} MB")
    last = losses[-max(len(losses) // 20, 1) :]
    report = {
        "weights_bytes": nbytes,
        "conversations": len(learned.tokens),
        "tokens_of_answers": int(learned.own.sum()),
        "seconds_writing": wrote,
        "seconds_training": trained,
        "steps": len(losses),
        "loss": sum(last) / len(last) if last else None,
        "rounds": rounds,
        "options": {name: str(value) if isinstance(value, Path) else value for name, value in vars(options).items()},
    }
    (options.folder / "training.json").write_text(json.dumps(report, indent=1) + "\n", "utf-8")
    return report


def conversations(options: argparse.Namespace, target: Target, marks: Marks) -> Talks:
    """Those of a file, or new ones."""
    if options.talks is not None and options.talks.is_file():
        return Talks.read(options.talks, options.device)
    manner = Manner(options.longest_question, options.longest_answer, options.temperature)
    limits = {"rows": options.conversations, "batch": options.batch, "length": options.length}
    said = talks(target, marks, manner, seconds=options.write_seconds, **limits)
    if options.talks is not None:
        said.save(options.talks)
    return said


def shape_of(options: argparse.Namespace, metadata: Metadata, target: Target, marks: Marks) -> Shape:
    """The draft's sizes, most of them the target's."""
    heads = target.heads
    return Shape(
        hidden=target.table.shape[1],
        heads=heads.queries,
        kv_heads=heads.keys,
        head_dim=heads.width,
        inner=options.inner or metadata("llama.feed_forward_length"),
        vocab=len(target.head),
        target_layers=len(target.layers),
        taps=spread_taps(len(target.layers), options.taps),
        mask=mask_of(metadata, marks) if options.mask is None else options.mask,
        layers=options.layers,
        block=options.block,
        window=options.window,
        conv_group=options.conv_group,
        rank=options.rank,
        top_k=options.top_k,
        theta=heads.theta,
    )


def mask_of(metadata: Metadata, marks: Marks) -> int:
    """The last control token that stands in no mark; ValueError where there is none."""
    used = {*marks.before, *marks.to_answer, *marks.to_question}
    kinds = metadata("tokenizer.ggml.token_type")
    free = [token for token, kind in enumerate(kinds) if kind == CONTROL and token not in used]
    if not free:
        raise ValueError("no control token is left to stand for what is guessed; name one with --mask")
    return free[-1]


if __name__ == "__main__":
    main()
