"""Two layers of Qwen3.8 Flash Next at their real width, on this machine: memory and speed against the physical limit.

    python bench/flash_next.py [--prompt 16384] [--tokens 64] [--chunk 512] [--ngrams 2000000] [--folder KEEP]

One delta net with the table of n-grams and one indexed attention, each with 512 experts; random NVFP4 and MXFP8 weights
are written first (6 GB with 2 million rows a head; 20 million are published, 29 GB). Needs `src` and the repository on
the path and MLX; runs on the CPU, on Metal, and on an NVIDIA GPU with `pip install mlx[cuda13]`.
"""

from __future__ import annotations

import argparse
import math
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "src"), str(ROOT)]

import mlx.core as mx  # noqa: E402
import numpy as np  # noqa: E402

from arriero.kernels import device  # noqa: E402
from arriero.kernels.matmul import matmul  # noqa: E402
from arriero.model.architectures import load_model  # noqa: E402
from arriero.model.checkpoint import Checkpoint  # noqa: E402
from arriero.model.contract import Batch, Span  # noqa: E402
from arriero.source import FolderSource  # noqa: E402
from tools.flash_next_checkpoint import text_config, write_model  # noqa: E402

PIECE = 1 << 28


def resident() -> float:
    """Bytes of this process in memory, without pages of mapped files; 0 where the system does not say."""
    try:
        text = Path("/proc/self/status").read_text()
    except OSError:
        return 0.0
    return sum(float(line.split()[1]) * 1024 for line in text.splitlines() if line.startswith(("RssAnon", "RssShmem")))


def bandwidth(options: argparse.Namespace) -> float:
    """Bytes a second that copying moves, read and written."""
    if not device.on_cpu():
        big = mx.zeros(1 << 30, mx.uint8).view(mx.float32)
        seconds = []
        for _ in range(6):
            mx.eval(big)
            start = time.perf_counter()
            mx.eval(big + 1)
            seconds.append(time.perf_counter() - start)
        return 2 * big.nbytes / min(seconds)
    source = np.ones((options.threads, 1 << 28), np.uint8)
    target = np.empty_like(source)
    with ThreadPoolExecutor(options.threads) as threads:
        seconds = []
        for _ in range(4):
            start = time.perf_counter()
            list(threads.map(np.copyto, target, source))
            seconds.append(time.perf_counter() - start)
    return 2 * source.nbytes / min(seconds)


def product_rate() -> float:
    """Operations a second of one large product of matrices, bfloat16."""
    size = 2048 if device.on_cpu() else 8192
    a = mx.random.normal((size, size)).astype(mx.bfloat16)
    seconds = []
    for _ in range(4):
        mx.eval(a)
        start = time.perf_counter()
        mx.eval(matmul(a, a))
        seconds.append(time.perf_counter() - start)
    return 2 * size**3 / min(seconds)


def load(checkpoint: Checkpoint) -> Any:
    """The model, its weights evaluated piece by piece."""
    model: Any = load_model(checkpoint, mx.bfloat16)
    piece: list[mx.array] = []
    for array in model.parameters():
        piece.append(array)
        if sum(a.nbytes for a in piece) > PIECE:
            mx.eval(piece)
            piece = []
    mx.eval(piece)
    return model


def per_token(checkpoint: Checkpoint, model: Any) -> tuple[float, float, int]:
    """Bytes of weights that a decoded token reads, a prompt token's multiplications, and bytes from the host."""
    read, products = 0.0, 0.0
    sparse = model.config.sparse
    for info in map(checkpoint.info, checkpoint.names()):
        if "embed_tokens" in info.name or ".ple_embedding." in info.name:
            continue
        share = sparse.top_k / sparse.experts if ".experts." in info.name else 1
        read += info.nbytes * share
        # The head computes one token of a prompt.
        if len(info.shape) == 2 and not info.name.startswith("lm_head"):
            products += math.prod(info.shape) * share
    ngrams = next(layer.ngrams for layer in model.layers if layer.ngrams is not None)
    return read, products, ngrams.table.files.row_bytes * ngrams.config.rows_per_token


def forward(model: Any, caches: Any, batch: Batch) -> mx.array:
    """The next token of the last position, computed with the caches."""
    token = mx.argmax(model.logits(model.forward(batch).final[-1:]), axis=-1).astype(mx.int32)
    mx.async_eval(token, *(array for cache in caches for array in cache.state()))
    return token


def main() -> None:
    """Write, load, prefill, decode, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompt", type=int, default=16384)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--chunk", type=int, default=512)
    parser.add_argument("--ngrams", type=int, default=2_000_000, help="least rows of each of the table's 16 heads")
    parser.add_argument("--threads", type=int, default=2, help="of the measurement of the CPU's bandwidth")
    parser.add_argument("--folder", type=Path, help="where the weights are, or are to be kept")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = options.folder or Path(scratch)
        if not (folder / "model.safetensors.index.json").exists():
            text = text_config(["linear_attention", "full_attention"], ngram_vocab_size_base=options.ngrams)
            print({kind: f"{size / 1e9:.2f} GB" for kind, size in write_model(folder, text).items()}, flush=True)
        run(folder, options)


def run(folder: Path, options: argparse.Namespace) -> None:
    """Everything that is measured."""
    speed, rate = bandwidth(options), product_rate()
    mx.clear_cache()
    mx.reset_peak_memory()
    kernels = "with" if device.native() is not None else "without"
    print(f"{mx.default_device()} {kernels} the CPU extension", flush=True)
    print(f"measured: copies {speed / 1e9:.0f} GB/s, products {rate / 1e9:.0f} Gflop/s", flush=True)
    before, start = resident(), time.perf_counter()
    checkpoint = Checkpoint.open(FolderSource(str(folder)))
    model = load(checkpoint)
    weights = sum(array.nbytes for array in model.parameters())
    print(
        f"load: {time.perf_counter() - start:.1f} s, weights {weights / 1e9:.2f} GB, MLX holds "
        f"{mx.get_active_memory() / 1e9:.2f} GB (peak {mx.get_peak_memory() / 1e9:.2f}), resident memory grew by "
        f"{(resident() - before) / 1e9:.2f} GB",
        flush=True,
    )
    read, products, host = per_token(checkpoint, model)
    ids = np.random.default_rng(0).integers(0, 248000, options.prompt).astype(np.int32)
    for length in (min(2 * options.chunk, options.prompt), options.prompt):
        caches = model.new_caches()
        mx.clear_cache()
        mx.reset_peak_memory()
        start = time.perf_counter()
        for at in range(0, length, options.chunk):
            end = min(at + options.chunk, length)
            token = forward(model, caches, Batch.of(ids[at:end], [Span(0, end - at, at, caches)]))
            coming = ids[: min(end + options.chunk, length)]
            model.read_ahead([(coming, len(coming) - end)] if len(coming) > end else [])
            mx.eval(token)
        seconds = time.perf_counter() - start
        print(
            f"prefill: {length} tokens in {seconds:.1f} s, {length / seconds:.0f} a second "
            f"(products alone: {rate / 2 / products:.0f}); peak {(mx.get_peak_memory() - weights) / 1e9:.2f} GB beside "
            f"the weights; from the host {host * length / 1e6:.1f} MB",
            flush=True,
        )
    steps = []
    for step in range(options.tokens):
        start = time.perf_counter()
        token = forward(model, caches, Batch(token, [Span(0, 1, options.prompt + step, caches)]))
        mx.eval(token)
        steps.append(time.perf_counter() - start)
    middle = float(np.median(steps))
    print(
        f"decode: {1 / middle:.1f} tokens a second ({middle * 1e3:.2f} ms), reads {read / 1e6:.0f} MB of weights and "
        f"{host} bytes from the host a token; reading alone: {speed / read:.0f} a second"
    )


if __name__ == "__main__":
    main()
