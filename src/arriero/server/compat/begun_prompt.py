"""A conversation whose last reply has been begun for the model, which goes on from there."""

from __future__ import annotations

import msgspec

from arriero.chat.parsers.events import Parser
from arriero.chat.parsers.harmony import HarmonyParser
from arriero.chat.parsers.reply import ReplyParser
from arriero.errors import UnsupportedFeature
from arriero.server.completion import Prompt
from arriero.server.models import OpenModel
from arriero.server.prompts import ConversationPrompt, check_fits


class BegunPrompt:
    """The prompt of a conversation and the beginning of the reply to it, in which no control token counts."""

    def __init__(self, model: OpenModel, prompt: ConversationPrompt, beginning: str, *, truncate: bool = False) -> None:
        self._model = model
        self._prompt = prompt
        self._truncate = truncate
        self._begun = model.text.tokenizer.encode(beginning, add_bos=False, special=False)

    @property
    def stop_ids(self) -> frozenset[int]:
        """Tokens that end the reply."""
        return self._prompt.stop_ids

    def parser(self) -> Parser:
        """A parser for what follows; UnsupportedFeature when the answer can't begin at once."""
        parser = self._prompt.parser()
        thoughts = parser.thoughts if isinstance(parser, ReplyParser) else None
        if isinstance(parser, HarmonyParser) or (thoughts is not None and thoughts.opened):
            raise UnsupportedFeature(
                "this model thinks before it answers, so its answer can't be begun for it; "
                "switch thinking off where the model allows it, or end the conversation with a user message"
            )
        return parser

    def whole(self) -> Prompt:
        """The prompt of all messages, and the beginning."""
        self.parser()
        return self._with_beginning(self._prompt.whole())

    def fitted(self, window: int, limit: int, num_predict: int) -> Prompt:
        """The prompt of the messages that fit, and the beginning."""
        whole = self.whole()
        if len(whole) < window:
            return whole
        if not self._truncate or len(self._begun) + 1 >= window:
            check_fits(len(whole), window, limit)
        return self._with_beginning(self._prompt.fitted(window - len(self._begun), limit, num_predict))

    def _with_beginning(self, prompt: Prompt) -> Prompt:
        return msgspec.structs.replace(prompt, tokens=prompt.tokens + self._begun)
