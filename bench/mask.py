"""What a grammar costs a token: computing the mask, the engine's own work on it, and applying it to the scores.

    python bench/mask.py [--vocabulary 250000] [--tokens 400] [--model FOLDER | FILE.gguf]

Without a model the vocabulary is made up: bytes, and random words as a large vocabulary has them. A reply of each
schema is drawn and followed; figures are medians and the slowest of a hundred, in microseconds.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import time
from collections import defaultdict
from pathlib import Path

import mlx.core as mx
import numpy as np

sys.path.insert(0, str(Path(__file__).parent.parent))

from arriero.chat.tokenizer import Tokenizer
from arriero.runner.messages import Grammar, SamplingOptions, Vocabulary
from arriero.runner.sampling import Sampler
from arriero.runner.sampling.constraint import Constraint
from arriero.runner.sampling.grammar import Grammars
from arriero.source import FolderSource, GGUFSource

SCHEMAS = {
    "any object": {"type": "object"},
    "a record": {
        "type": "object",
        "properties": {
            "name": {"type": "string"},
            "age": {"type": "integer", "minimum": 0, "maximum": 150},
            "tags": {"type": "array", "items": {"type": "string"}, "minItems": 3},
            "kind": {"enum": ["small", "large"]},
        },
        "required": ["name", "age", "tags", "kind"],
        "additionalProperties": False,
    },
    "a pattern": {"type": "string", "pattern": "^[a-z]+( [a-z]+)*$"},
}


def vocabulary(size: int) -> Vocabulary:
    """Bytes, and words of letters with blanks, digits and brackets before them."""
    chance = random.Random(0)
    known = {bytes((byte,)) for byte in range(256)}
    heads = [b"", b" ", b" ", b"\n", b'"', b' "', b"{", b"(", b".", b"_", b"-"]
    letters = b"etaoinshrdlucmfwypvbgkjqxzETAOINSHR0123456789"
    while len(known) < size - 1:
        word = bytes(chance.choices(letters, k=chance.randint(1, 9)))
        known.add(chance.choice(heads) + word + chance.choice([b"", b"", b"", b'"', b",", b":"]))
    return Vocabulary(tokens=[*sorted(known), b"<|end|>"], special=[size - 1])


def micro(seconds: list[float]) -> str:
    worst = sorted(seconds)[int(len(seconds) * 0.99)]
    return f"{statistics.median(seconds) * 1e6:7.0f} ({worst * 1e6:7.0f})"


def follow(grammars: Grammars, schema: object, count: int) -> dict[str, list[float]]:
    """Seconds of each part, token by token."""
    size = grammars.size
    spent: dict[str, list[float]] = defaultdict(list)
    chance = random.Random(1)
    sampler = Sampler(size, 4096)
    sampler.add("row", SamplingOptions(temperature=1.0, seed=1), [0])
    scores = mx.random.normal((1, size)).astype(mx.bfloat16)
    mx.eval(scores)

    def applied(mask: np.ndarray | None) -> float:
        start = time.perf_counter()
        sampler.sample(["row"], scores, None if mask is None else {"row": mask}).read_tokens()
        return time.perf_counter() - start

    compiled = grammars.compile(Grammar(kind="json_schema", text=json.dumps(schema))).result().whole
    seen = 0
    while seen < count:
        matcher = compiled.deep_copy()
        row = Constraint(grammars, Grammar(kind="json_schema", text=json.dumps(schema)), [size - 1])
        row.start()
        while seen < count and not row.complete:
            start = time.perf_counter()
            matcher.compute_bitmask()
            spent["mask, on the thread beside the forward"].append(time.perf_counter() - start)
            assert row._mask is not None
            row._mask.exception()
            start = time.perf_counter()
            mask = row.allowed()
            spent["engine: allowed"].append(time.perf_counter() - start)
            if row.complete:
                break
            spent["drawn with it"].append(applied(mask))
            spent["drawn without"].append(applied(None))
            token = chance.choice(np.flatnonzero(mask[:-1]).tolist() or [size - 1])
            if token == size - 1:
                break
            start = time.perf_counter()
            row.advance(token)
            spent["engine: advance"].append(time.perf_counter() - start)
            matcher.consume_token(token)
            seen += 1
    return spent


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vocabulary", type=int, default=250_000)
    parser.add_argument("--tokens", type=int, default=400)
    parser.add_argument("--model", help="a folder or GGUF file whose tokenizer gives the vocabulary")
    asked = parser.parse_args()
    if asked.model:
        gguf = asked.model.endswith(".gguf")
        tokens, special = Tokenizer.open(GGUFSource((asked.model,)) if gguf else FolderSource(asked.model)).all_bytes()
        words = Vocabulary(tokens=tokens, special=special)
    else:
        words = vocabulary(asked.vocabulary)
    grammars = Grammars(words, len(words.tokens))
    start = time.perf_counter()
    grammars.compile(Grammar(kind="json_schema", text='{"type": "object"}')).result()
    print(f"vocabulary of {grammars.size}: read and one grammar compiled in {time.perf_counter() - start:.2f} s")
    print("microseconds a token, median (99 of 100)")
    for name, schema in SCHEMAS.items():
        print(f"\n{name}")
        for part, seconds in follow(grammars, schema, asked.tokens).items():
            print(f"  {part:36}{micro(seconds)}")
    grammars.close()


if __name__ == "__main__":
    main()
