"""A prompt that is tokens already."""

from __future__ import annotations

from arriero.chat.parsers.events import Parser
from arriero.chat.parsers.passthrough import PassthroughParser
from arriero.errors import InvalidRequest
from arriero.server.completion import Prompt
from arriero.server.models import OpenModel
from arriero.server.prompts import check_fits


class TokenPrompt:
    """Token ids taken as they are, never cut."""

    def __init__(self, model: OpenModel, tokens: list[int]) -> None:
        """Raises InvalidRequest for ids that aren't tokens of the model, and for those that stand for images."""
        size, pad = model.text.tokenizer.vocab_size, model.text.placeholder_id
        bad = next((token for token in tokens if not 0 <= token < size or token == pad), None)
        if bad is not None:
            raise InvalidRequest(f"prompt holds {bad}, which is no token of text of {model.asked} (it has {size})")
        self._model = model
        self._prompt = Prompt(tokens=tokens)

    @property
    def stop_ids(self) -> frozenset[int]:
        """Tokens that end the reply."""
        return self._model.text.stop_ids

    def parser(self) -> Parser:
        """The reply is taken as it is, too."""
        return PassthroughParser()

    def whole(self) -> Prompt:
        """The tokens."""
        return self._prompt

    def fitted(self, window: int, limit: int, _num_predict: int) -> Prompt:
        """The same, or PromptTooLong."""
        check_fits(len(self._prompt), window, limit)
        return self._prompt
