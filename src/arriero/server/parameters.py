"""What a request asks of a generation, after defaults, the model's own parameters and the request's are laid over.

Order: built-in default < server setting < the model's PARAMETERs < the request's `options`.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from arriero.errors import InvalidRequest
from arriero.options import OBSOLETE, OPTIONS, check_options
from arriero.runner.messages import SamplingOptions
from arriero.settings import Settings

log = logging.getLogger(__name__)

MAX_TOP_LOGPROBS = 20

_SAMPLING = tuple(name for name in SamplingOptions.__struct_fields__ if name in OPTIONS)
_WITHOUT_EFFECT = ("num_gpu", "main_gpu", "use_mmap", "num_thread", "num_batch", "num_keep", "draft_num_predict")


@dataclass(frozen=True, slots=True)
class Parameters:
    """The settled parameters of one generation."""

    sampling: SamplingOptions
    num_predict: int
    """Most new tokens; 0 and below = the rest of the context."""
    num_ctx: int
    """The window that was asked for; 0 = nobody asked."""
    stop: tuple[str, ...]


def settle(
    settings: Settings,
    model: Mapping[str, Any],
    request: Mapping[str, Any],
    *,
    logprobs: bool = False,
    top_logprobs: int = 0,
) -> Parameters:
    """Lay the layers over each other; raises InvalidRequest naming the option that can't be honoured.

    A request's `stop` replaces the model's, as every option does; empty texts in it are left out.
    """
    for name in request:
        _warn_if_without_effect(name)
    asked = check_options(request)
    if not 0 <= top_logprobs <= MAX_TOP_LOGPROBS:
        raise InvalidRequest(f"top_logprobs must be between 0 and {MAX_TOP_LOGPROBS}")
    values = {name: option.default for name, option in OPTIONS.items() if option.default is not None}
    if settings.context_length > 0:
        values["num_ctx"] = settings.context_length
    values |= check_options(_known(model)) | asked
    num_ctx = values.get("num_ctx", 0)
    if "num_ctx" in asked and num_ctx < 1:
        raise InvalidRequest(f'option "num_ctx" must be at least 1; it is {num_ctx}')
    sampling = SamplingOptions(
        **{name: values[name] for name in _SAMPLING},
        logprobs=logprobs,
        top_logprobs=top_logprobs if logprobs else 0,
    )
    return Parameters(
        sampling=sampling,
        num_predict=values["num_predict"],
        num_ctx=max(num_ctx, 0),
        stop=tuple(dict.fromkeys(text for text in values["stop"] if text)),
    )


def _known(model: Mapping[str, Any]) -> dict[str, Any]:
    """A stored model's parameters without those that we don't know: another, maybe newer program may have made it."""
    for name in model:
        if name not in OPTIONS and name not in OBSOLETE:
            _warn(f"the model's parameter '{name}' is not known and has no effect")
    return {name: value for name, value in model.items() if name in OPTIONS}


def _warn_if_without_effect(name: str) -> None:
    if name in OBSOLETE:
        _warn(f"option '{name}' no longer exists and has no effect")
    elif name in _WITHOUT_EFFECT:
        _warn(f"option '{name}' has no effect here")


@cache
def _warn(text: str) -> None:
    """Once a process: clients send the same options with every request."""
    log.warning(text)
