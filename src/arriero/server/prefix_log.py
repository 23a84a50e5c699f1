"""How much of a prompt was still known, for the log: where it broke, and with which text."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from arriero.chat.tokenizer import Tokenizer
from arriero.runner.messages import PrefixUsed
from arriero.server.models import OpenModel

log = logging.getLogger(__name__)

AROUND = 6
"""Tokens shown on each side of the first that differs."""
IMAGE = 1 << 31
"""Stored keys from here on stand for an image."""


def log_prefix(model: OpenModel, tokens: Sequence[int], used: PrefixUsed) -> None:
    """One line a request; where something else is stored than what came, with both texts."""
    log.info(
        "%s: %d of %d prompt tokens were known, %d are restored", model.asked, used.matched, used.total, used.restored
    )
    if used.stored and used.matched < len(tokens):
        before, now, stored = difference(model.text.tokenizer, tokens, used)
        log.info(
            "%s: the prompt differs at token %d: %r is followed by %r, stored is %r",
            model.asked,
            used.matched,
            before,
            now,
            stored,
        )


def difference(tokenizer: Tokenizer, tokens: Sequence[int], used: PrefixUsed) -> tuple[str, str, str]:
    """The text before the first token that differs, the prompt's text from there, and the stored one."""
    at = used.matched
    stored = [token for token in used.stored if token < IMAGE]
    return (
        tokenizer.decode(list(tokens[max(at - AROUND, 0) : at])),
        tokenizer.decode(list(tokens[at : at + AROUND])),
        tokenizer.decode(stored[:AROUND]) if len(stored) == len(used.stored) else "an image",
    )
