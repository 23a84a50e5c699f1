"""The set of tokens that end a reply: built here and nowhere else."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from arriero.chat.files import TextFiles
from arriero.chat.messages import Conversation, Message
from arriero.chat.renderers.jinja import JinjaRenderer
from arriero.chat.templates import ChatTemplates
from arriero.errors import TemplateError, UnsupportedFeature

if TYPE_CHECKING:
    from arriero.chat.tokenizer import Tokenizer

log = logging.getLogger(__name__)

_REPLY = "Ansérine"
"""A reply that no template writes by itself."""


def stop_token_ids(tokenizer: Tokenizer, files: TextFiles, templates: ChatTemplates) -> frozenset[int]:
    """The union of what every file calls an end, and the token with which the chat template ends a reply.

    A model's files often disagree: `generation_config.json` may list the end-of-text token only, while the template
    ends turns with another one.
    """
    found: set[int] = set()
    for value in _declared(tokenizer, files):
        for item in value if isinstance(value, list) else [value]:
            index = valid_id(tokenizer, item)
            if index is not None:
                found.add(index)
            elif item is not None:
                log.warning("%r is declared as a token that ends a reply and is not in the vocabulary", item)
    turn_end = _template_turn_end(tokenizer, templates)
    if turn_end is not None:
        found.add(turn_end)
    return frozenset(found)


def valid_id(tokenizer: Tokenizer, value: Any) -> int | None:
    """`value` when it is the id of a token, else None."""
    if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < tokenizer.vocab_size:
        return value
    return None


def token_content(value: Any) -> str | None:
    """The text of a special token as the JSON files give it: a string, or an object with `content`."""
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else None


def _declared(tokenizer: Tokenizer, files: TextFiles) -> Iterator[Any]:
    for name in ("eos", "eot", "eom"):
        yield files.metadata.get(f"tokenizer.ggml.{name}_token_id")
    yield files.metadata.get("tokenizer.ggml.eos_token_ids")
    for file in ("generation_config.json", "config.json"):
        yield files.json(file).get("eos_token_id")
    text_config = files.json("config.json").get("text_config")
    if isinstance(text_config, dict):
        yield text_config.get("eos_token_id")
    for file in ("tokenizer_config.json", "special_tokens_map.json"):
        for name in ("eos_token", "eot_token", "eom_token"):
            text = token_content(files.json(file).get(name))
            if text:
                yield tokenizer.token_id(text)


def _template_turn_end(tokenizer: Tokenizer, templates: ChatTemplates) -> int | None:
    """The token that the template writes after a finished reply, or else after one that the user has answered."""
    renderer = JinjaRenderer(templates, {"bos_token": "", "eos_token": tokenizer.token_text(tokenizer.eos_id)})
    turns = [Message(role="user", content="Salve"), Message(role="assistant", content=_REPLY)]
    for messages in (turns, [*turns, Message(role="user", content="Vale")]):
        try:
            prompt = renderer.render(Conversation(messages=messages), add_generation_prompt=False)
        except (TemplateError, UnsupportedFeature) as error:
            log.debug("no end of turn from the template: %s", error)
            continue
        ids = tokenizer.encode(prompt.text.rpartition(_REPLY)[2].lstrip(), add_bos=False)
        if ids and tokenizer.is_added(ids[0]):
            return ids[0]
    return None
