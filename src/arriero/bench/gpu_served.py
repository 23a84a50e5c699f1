"""A model of random weights as a client of the whole product sees it: store, server, runner process and stream.

Nothing of the product knows: the weights are written as a stored model into a folder of its own, and a server of its
own loads it. Nothing is drafted, since random text repeats itself.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import product
from pathlib import Path
from string import ascii_lowercase
from typing import Any

import mlx.core as mx
import numpy as np
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from arriero.bench.gpu_models import RandomCheckpoint
from arriero.bench.speed import Speed, measure
from arriero.cli.client import Client
from arriero.create.made import Piece
from arriero.create.write import header_of_pieces
from arriero.errors import ArrieroError
from arriero.model.quantization import Quantization
from arriero.model.weight import Weight
from arriero.store import manifests
from arriero.store.blobs import BlobWriter
from arriero.store.manifests import ConfigBlob, Layer, Manifest
from arriero.store.store import Build, Store

NAME = "random"
PATIENCE = 60.0
"""Seconds for a server to answer at all; its load has a limit of its own."""

_DTYPES = {mx.uint32: "U32", mx.uint8: "U8", mx.float32: "F32", mx.bfloat16: "BF16"}


def served(
    config: Mapping[str, Any],
    quantization: Quantization,
    *,
    parallels: Sequence[int] = (1, 8),
    words: int = 80,
    tokens: int = 256,
    runs: int = 3,
    tell: Callable[[str], object] = str,
) -> list[Speed]:
    """Store, serve and ask over /api/generate, once for each number of requests at once.

    A prompt of `words` words is some six tokens a word: each byte is one. ArrieroError with the end of the server's
    log when it does not answer.
    """
    with tempfile.TemporaryDirectory(prefix="arriero-bench-") as folder:
        home = Path(folder)
        store_random(Store(home / "models"), config, quantization)
        mx.clear_cache()
        with _server(home) as client:
            found = []
            for parallel in parallels:
                speed = measure(client, NAME, words=words, tokens=tokens, parallel=parallel, runs=runs)
                tell(
                    f"{parallel} at once: {speed.decode:.1f} tok/s each, first token {1000 * speed.first_token:.0f} ms"
                )
                found.append(speed)
            return found


def store_random(store: Store, config: Mapping[str, Any], quantization: Quantization) -> None:
    """Put a model of random weights into a store as `NAME`, a layer a tensor, as `arriero create` lays them out."""
    checkpoint = RandomCheckpoint(config, quantization)
    files = {
        "config.json": dict(config),
        "tokenizer.json": json.loads(tokenizer(config["vocab_size"]).to_str()),
        "tokenizer_config.json": {"eos_token": END},
    }
    with store.building() as build:
        layers = [_tensor(build, name, checkpoint.weight(name)) for name in checkpoint.names()]
        for label, value in files.items():
            blob = build.add(json.dumps(value).encode())
            layers.append(Layer(media_type=manifests.JSON, digest=blob.digest, size=blob.size, name=label))
        about = build.add(ConfigBlob(model_format="safetensors", model_family=config["model_type"]).encode())
        config_layer = Layer(media_type=manifests.CONFIG, digest=about.digest, size=about.size)
        build.put(NAME, Manifest.build(config_layer, layers))


def _tensor(build: Build, name: str, weight: Weight) -> Layer:
    companions = {
        "": weight.data,
        ".scale": weight.scales,
        ".bias": weight.biases,
        ".global_scale": weight.global_scale,
    }
    parts = {name + suffix: part for suffix, part in companions.items() if part is not None}

    def fill(writer: BlobWriter) -> None:
        writer.write(header_of_pieces({key: Piece(_DTYPES[part.dtype], part.shape) for key, part in parts.items()}))
        for part in parts.values():
            writer.write(np.asarray(part.reshape(-1).view(mx.uint8)).data)

    blob = build.stream(fill)
    return Layer(media_type=manifests.TENSOR, digest=blob.digest, size=blob.size, name=name)


END = "<|end|>"


def tokenizer(vocab: int) -> Tokenizer:
    """One with `vocab` tokens: a byte each, then words that no text is cut into, and last the one that ends a reply."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    # GPT-2's stand-ins for what cannot be printed.
    table = {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}
    words = ("Ġ" + "".join(letters) for letters in product(ascii_lowercase, repeat=4))
    for token, word in zip(range(256, vocab - 1), words, strict=False):
        table[word] = token
    made = Tokenizer(models.BPE(vocab=table, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens([AddedToken(END, special=True, normalized=False)])
    return made


@contextmanager
def _server(home: Path) -> Iterator[Client]:
    """A server on a free port of loopback with its home in a folder; ends with the block.

    Compiled kernels are those of this process, whose environment says where they are.
    """
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    log = home / "server.log"
    environ = os.environ | {
        "ARRIERO_HOME": str(home),
        "OLLAMA_MODELS": str(home / "none"),
        "ARRIERO_HOST": f"127.0.0.1:{port}",
        "ARRIERO_SPECULATION": "off",
        "ARRIERO_CONTEXT_LENGTH": "4096",
        "ARRIERO_NUM_PARALLEL": "8",
    }
    with log.open("wb") as out:
        process = subprocess.Popen(
            [sys.executable, "-m", "arriero", "serve"], env=environ, stdin=subprocess.DEVNULL, stdout=out, stderr=out
        )
    client = Client("127.0.0.1", port)
    try:
        deadline = time.monotonic() + PATIENCE
        while not client.is_up(timeout=1.0):
            if process.poll() is not None or time.monotonic() > deadline:
                end = log.read_text("utf-8", "replace").strip()[-2000:]
                raise ArrieroError(f"the server of the measurement did not answer: {end}")
            time.sleep(0.05)
        yield client
    finally:
        process.terminate()
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
