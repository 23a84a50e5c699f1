"""Wire types of `/api/embed` and `/api/embeddings`."""

from __future__ import annotations

from typing import Any

import msgspec


class EmbedRequest(msgspec.Struct, kw_only=True):
    """POST /api/embed."""

    model: str = ""
    input: Any = None
    truncate: bool = True
    dimensions: int = 0
    keep_alive: Any = None
    options: dict[str, Any] = {}


class EmbedReply(msgspec.Struct, kw_only=True, omit_defaults=True):
    """Vectors of length 1, in the order of the input. Durations are nanoseconds."""

    model: str
    embeddings: list[list[float]]
    total_duration: int = 0
    load_duration: int = 0
    prompt_eval_count: int = 0


class EmbeddingRequest(msgspec.Struct, kw_only=True):
    """POST /api/embeddings, the older one."""

    model: str = ""
    prompt: str = ""
    keep_alive: Any = None
    options: dict[str, Any] = {}


class EmbeddingReply(msgspec.Struct, kw_only=True):
    """One vector, as the model gives it."""

    embedding: list[float]
