"""What MLX's allocator holds, and how much of it may be pinned. Called on the array thread only."""

from __future__ import annotations

import logging
import re

import mlx.core as mx
import psutil

from arriero.kernels.device import cuda

log = logging.getLogger(__name__)

KEPT, KEPT_IDLE = 24, 96
"""Parts of an NVIDIA GPU's memory that free buffers may take there, and while a runner has nothing to do."""
KEPT_BYTES = 1 << 30
"""What they may take however small it is."""

_OUT_OF_MEMORY = re.compile(
    r"out of (?:device )?memory|unable to allocate|failed to allocate|allocation failed|malloc|not enough memory|"
    r"insufficient memory|bad_alloc|maximum allowed buffer size",
    re.IGNORECASE,
)


def memory_bytes() -> int:
    """Bytes that the allocator has taken from the system: in use, and free in its cache."""
    return mx.get_active_memory() + mx.get_cache_memory()


def release_buffers(*, idle: bool = False) -> None:
    """Give the allocator's free buffers back to the system; on NVIDIA GPUs only when they are more than stay there.

    There each one is a call of the driver, and another when it is needed again: a prompt of 4,096 tokens, which leaves
    5 GB of them, takes an 8B model 137 ms with those of the prompt before, and 142 where it gives back all beyond 2 GB
    after each chunk (H200). Other runners may need them while this one is idle.
    """
    if cuda() is None or mx.get_cache_memory() > max(
        KEPT_BYTES, mx.get_memory_limit() // (KEPT_IDLE if idle else KEPT)
    ):
        mx.clear_cache()


def wire_weights() -> int:
    """Keep what is allocated now (the weights) resident on a GPU; returns the limit set, 0 when there is none.

    Caches that grow later stay pageable: a wired limit that follows them can take a whole machine down. A device
    without the notion, or a refusal, leaves pageable operation and a log line.
    """
    if mx.default_device().type != mx.DeviceType.gpu:
        return 0
    recommended = int(mx.device_info().get("max_recommended_working_set_size", 0))
    if not recommended:
        return 0
    active = mx.get_active_memory()
    if active > recommended:
        log.warning(
            "the weights (%s) exceed what the device keeps resident (%s)", readable(active), readable(recommended)
        )
    limit = min(active, recommended)
    try:
        mx.set_wired_limit(limit)
    except (RuntimeError, ValueError) as error:
        log.warning("the weights cannot be wired (%s); they stay pageable", error)
        return 0
    return limit


def default_prefix_bytes() -> int:
    """An eighth of the machine's memory, at most 8 GiB: what stored prefixes may take when nobody says otherwise."""
    return min(int(psutil.virtual_memory().total) // 8, 8 << 30)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an exception of a forward means that memory ran out."""
    return isinstance(error, MemoryError) or bool(_OUT_OF_MEMORY.search(str(error)))


def readable(count: float) -> str:
    """Bytes as people read them: `1.5 GiB`."""
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} GiB"
