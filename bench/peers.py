"""The programs that are compared, each run in a process of its own with as many threads as the others."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from arriero.formats.gguf import open_shards

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent


@dataclass(frozen=True, slots=True)
class Figures:
    """Tokens per second of one program at one context, and the bytes that it reads for a new token."""

    prefill: float
    decode: float
    read_bytes: int = 0


def run(command: list[str], threads: int) -> Any:
    """The JSON that a program prints."""
    environ = {**os.environ, "ARRIERO_THREADS": str(threads), "OMP_NUM_THREADS": str(threads)}
    result = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=environ, cwd=ROOT)
    return json.loads(result.stdout)


def arriero(model: str, setting: str, context: int, tokens: int, runs: int, threads: int) -> Figures:
    """Our engine with a setting such as `bfloat16` or `bfloat16:int8`."""
    command = [*_arriero(model, setting), "--prompts", str(context), "--tokens", str(tokens), "--runs", str(runs)]
    found = run(command, threads)
    speed = found["speeds"][0]
    return Figures(speed["prefill"], speed["decode"], found["read_bytes"])


def arriero_rows(model: str, setting: str, rows: list[int], tokens: int, runs: int, threads: int) -> dict[int, float]:
    """What so many rows of 64 prompt tokens generate together."""
    command = [*_arriero(model, setting), "--prompts", "64", "--tokens", str(tokens), "--runs", str(runs)]
    found = run([*command, "--rows", *map(str, rows)], threads)
    return {speed["rows"]: speed["total"] for speed in found["speeds"]}


def _arriero(model: str, setting: str) -> list[str]:
    dtype, _, prefill = setting.partition(":")
    return [sys.executable, str(HERE / "speed_arriero.py"), model, "--dtype", dtype, "--prefill", prefill]


def llama_cpp(program: str, model: str, context: int, tokens: int, runs: int, threads: int) -> Figures:
    """llama-bench: a prompt of `context` tokens, and `tokens` new ones behind so many."""
    command = [program, "-m", model, "-t", str(threads), "-r", str(runs), "-o", "json"]
    prefill = run([*command, "-p", str(context), "-n", "0"], threads)[0]
    decode = run([*command, "-p", "0", "-n", str(tokens), "-d", str(context)], threads)[0]
    return Figures(prefill["avg_ts"], decode["avg_ts"], file_read_bytes(model))


def file_read_bytes(model: str) -> int:
    """Bytes of a GGUF file's weights but for a token table that is not the head, too."""
    tensors = {name: tensor for file in open_shards((model,)) for name, tensor in file.tensors.items()}
    skipped = "token_embd.weight" if "output.weight" in tensors else None
    return sum(tensor.nbytes for name, tensor in tensors.items() if name != skipped)


def mlx_lm(python: str, folder: str, threads: int) -> Figures:
    """mlx-lm with few tokens, behind a short prompt whatever the context."""
    found = run([python, str(HERE / "speed_mlx_lm.py"), folder], threads)
    return Figures(found["prefill"], found["decode"])
