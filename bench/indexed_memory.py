"""Memory of indexed attention at Flash Next's width: grows with the queries and their budget, not with queries × keys.

    [ARRIERO_KERNELS=graph] python bench/indexed_memory.py [--queries 128 256 512] [--keys 8192 16384 32768]

Prints, for a chunk of queries behind a history of keys, the most that MLX held beyond queries, keys, values and the
result, next to what a mask and the scores of all heads for `[queries, keys]` would take. With `ARRIERO_KERNELS=graph`
plain MLX computes, as on a GPU without kernels of its own; the CPU extension's buffers (some KB a thread) are its own.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "src"))

import mlx.core as mx

from arriero.kernels.block_select import block_select
from arriero.kernels.indexed_attention import indexed_attention

HEADS, KV_HEADS, WIDTH = 24, 2, 256
INDEX_HEADS, INDEX_WIDTH, BLOCK, BUDGET = 4, 128, 4, 512


def peak(queries: int, keys: int) -> tuple[int, int, float]:
    """Bytes beyond what goes in and comes out while blocks are chosen, while they are read, and the seconds of both."""
    position = keys - queries
    where = {"lengths": [queries], "positions": [position], "block": BLOCK}
    shapes = [(queries, INDEX_HEADS, INDEX_WIDTH), (keys // BLOCK, INDEX_WIDTH), (queries, HEADS, WIDTH)]
    index_q, index_k, q = (mx.random.normal(shape).astype(mx.bfloat16) for shape in shapes)
    k, v = (mx.random.normal((1, KV_HEADS, keys, WIDTH)).astype(mx.bfloat16) for _ in range(2))
    mx.eval(index_q, index_k, q, k, v)
    found = []
    start = time.perf_counter()
    for step in ("choose", "read"):
        before = mx.get_active_memory()
        mx.reset_peak_memory()
        if step == "choose":
            blocks = block_select(index_q, [index_k], scale=INDEX_WIDTH**-0.5, budget=BUDGET, **where)
            mx.eval(blocks)
            found.append(mx.get_peak_memory() - before - blocks.nbytes)
        else:
            y = indexed_attention(q, [k], [v], blocks, scale=WIDTH**-0.5, **where)
            mx.eval(y)
            found.append(mx.get_peak_memory() - before - y.nbytes)
    return found[0], found[1], time.perf_counter() - start


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--queries", type=int, nargs="+", default=[128, 256, 512])
    parser.add_argument("--keys", type=int, nargs="+", default=[8192, 16384, 32768])
    options = parser.parse_args()
    print("| queries | keys | choosing, MB | reading, MB | mask, MB | scores, MB | seconds |")
    print("|---:|---:|---:|---:|---:|---:|---:|")
    for queries in options.queries:
        for keys in options.keys:
            choosing, reading, seconds = peak(queries, keys)
            mask = queries * keys
            sizes = [choosing, reading, mask, 4 * HEADS * mask]
            print(
                f"| {queries} | {keys} | {' | '.join(f'{size / 1e6:.1f}' for size in sizes)} | {seconds:.2f} |",
                flush=True,
            )
            mx.clear_cache()


if __name__ == "__main__":
    main()
