"""The ways to a prompt: a conversation, one after a `context` of tokens, a gap to fill, and text as it is."""

from __future__ import annotations

import logging

from arriero.chat.messages import Conversation, Think
from arriero.chat.parsers.events import Parser
from arriero.chat.parsers.passthrough import PassthroughParser
from arriero.errors import InvalidRequest, PromptTooLong
from arriero.server.completion import Prompt
from arriero.server.models import OpenModel

log = logging.getLogger(__name__)


def check_fits(tokens: int, window: int, limit: int) -> None:
    """Raise PromptTooLong unless a prompt leaves room for one token of reply; `limit` is the widest window there is."""
    if tokens < window:
        return
    wider = f"raise num_ctx (this model goes up to {limit})" if window < limit else "use a model with a longer context"
    raise PromptTooLong(
        f"the prompt has {tokens} tokens and the context window holds {window}, the reply included; "
        f"shorten the prompt or {wider}"
    )


def room_for_reply(window: int, num_predict: int) -> int:
    """Tokens that a shortened prompt leaves free: a quarter of the window, or `num_predict` if that is less."""
    return max(1, min(num_predict, window // 4) if num_predict > 0 else window // 4)


class ConversationPrompt:
    """A conversation, rendered. One that doesn't fit loses its oldest exchanges, with a warning.

    The rule, for every model and API: system and developer messages, tools and the last exchange always stay; whole
    exchanges go, the oldest first, until there is `room_for_reply`. If the last exchange leaves less, it need only fit.
    """

    def __init__(
        self,
        model: OpenModel,
        conversation: Conversation,
        think: Think,
        *,
        truncate: bool = True,
        template: str | None = None,
    ) -> None:
        """`template` takes the place of the model's; `truncate` False refuses instead of leaving something out."""
        self._model = model
        self._conversation = conversation
        self._think = think
        self._truncate = truncate
        self._template = template
        self._text: str | None = None
        self._whole: Prompt | None = None

    @property
    def stop_ids(self) -> frozenset[int]:
        """Tokens that end the reply."""
        return self._model.text.stop_ids

    def rendered(self) -> str:
        """The prompt's text."""
        self.whole()
        assert self._text is not None
        return self._text

    def parser(self) -> Parser:
        """A parser for the reply."""
        return self._model.text.parser(self.rendered(), think=self._think, tools=self._conversation.tools)

    def whole(self) -> Prompt:
        """The prompt of all messages."""
        if self._whole is None:
            text = self._model.text
            rendered = text.render(self._conversation, template=self._template, think=self._think)
            self._text = rendered.text
            self._whole = self._prompt(text.encode(rendered))
        return self._whole

    def fitted(self, window: int, limit: int, num_predict: int) -> Prompt:
        """The prompt of the messages that fit."""
        whole = self.whole()
        if len(whole) < window:
            return whole
        if self._truncate and self._template is None:
            for size in (window - room_for_reply(window, num_predict), window - 1):
                try:
                    shorter = self._model.text.truncate(self._conversation, size, think=self._think)
                except PromptTooLong:
                    continue
                log.warning(
                    "%s: the conversation has %d tokens, the window %d: its oldest %d messages were left out",
                    self._model.asked,
                    len(whole),
                    window,
                    shorter.dropped,
                )
                return self._prompt(shorter.tokens, shorter.dropped)
        check_fits(len(whole), window, limit)
        raise AssertionError("a prompt that fits was returned above")

    def _prompt(self, tokens: list[int], dropped: int = 0) -> Prompt:
        return Prompt(tokens=tokens, boundaries=self._model.text.boundaries(tokens), dropped_messages=dropped)


class FilledPrompt:
    """A gap between two texts, as the model's own tokens show it."""

    def __init__(self, model: OpenModel, before: str, after: str) -> None:
        self._model = model
        self._before = before
        self._after = after
        self._whole: Prompt | None = None

    @property
    def stop_ids(self) -> frozenset[int]:
        """Tokens that end the reply: also those with which a model ends a file."""
        text = self._model.text
        return text.stop_ids | (text.fim_tokens.endings if text.fim_tokens else frozenset())

    def rendered(self) -> str:
        """The prompt's text, markers included."""
        return self._model.text.tokenizer.decode(self.whole().tokens)

    def parser(self) -> Parser:
        """What fills the gap has no structure."""
        return PassthroughParser()

    def whole(self) -> Prompt:
        """The prompt's tokens."""
        if self._whole is None:
            self._whole = Prompt(tokens=self._model.text.fim(self._before, self._after))
        return self._whole

    def fitted(self, window: int, limit: int, _num_predict: int) -> Prompt:
        """The same, or PromptTooLong."""
        check_fits(len(self.whole()), window, limit)
        return self.whole()


class TextPrompt:
    """Text taken as it is, control tokens included; it is never cut."""

    def __init__(self, model: OpenModel, text: str) -> None:
        self._model = model
        self._text = text
        self._whole: Prompt | None = None

    @property
    def stop_ids(self) -> frozenset[int]:
        """Tokens that end the reply."""
        return self._model.text.stop_ids

    def rendered(self) -> str:
        """The text."""
        return self._text

    def parser(self) -> Parser:
        """The reply is taken as it is, too."""
        return PassthroughParser()

    def whole(self) -> Prompt:
        """The text's tokens."""
        if self._whole is None:
            self._whole = Prompt(tokens=self._model.text.tokenizer.encode(self._text))
        return self._whole

    def fitted(self, window: int, limit: int, _num_predict: int) -> Prompt:
        """The same, or PromptTooLong."""
        check_fits(len(self.whole()), window, limit)
        return self.whole()


class ContinuedPrompt:
    """A new prompt after the `context` that an earlier reply handed out; too long a context loses its front."""

    def __init__(
        self, model: OpenModel, context: list[int], prompt: ConversationPrompt, *, truncate: bool = True
    ) -> None:
        """Raises InvalidRequest for ids that aren't tokens of the model."""
        size = model.text.tokenizer.vocab_size
        bad = next((index for index in context if not 0 <= index < size), None)
        if bad is not None:
            raise InvalidRequest(
                f"context holds {bad}, which is no token of {model.asked} (it has {size}); "
                "send back the context of a reply of the same model, or leave it out"
            )
        self._model = model
        self._context = context
        self._prompt = prompt
        self._truncate = truncate

    @property
    def stop_ids(self) -> frozenset[int]:
        """Tokens that end the reply."""
        return self._model.text.stop_ids

    def rendered(self) -> str:
        """The context's text and the new prompt's."""
        return self._model.text.tokenizer.decode(self._context) + self._prompt.rendered()

    def parser(self) -> Parser:
        """A parser for the reply to the new prompt."""
        return self._prompt.parser()

    def whole(self) -> Prompt:
        """Context and new prompt."""
        return Prompt(tokens=self._context + self._new())

    def fitted(self, window: int, limit: int, num_predict: int) -> Prompt:
        """Context and new prompt, the context's front cut to leave `room_for_reply`."""
        new = self._new()
        whole = len(self._context) + len(new)
        if whole < window:
            return self.whole()
        check_fits(len(new), window, limit)
        if not self._truncate:
            check_fits(whole, window, limit)
        keep = max(0, window - room_for_reply(window, num_predict) - len(new))
        log.warning(
            "%s: context and prompt have %d tokens, the window %d: the context's front was left out",
            self._model.asked,
            whole,
            window,
        )
        kept = self._context[len(self._context) - keep :]
        return Prompt(tokens=kept + new, dropped_tokens=len(self._context) - keep)

    def _new(self) -> list[int]:
        """The new prompt without a second beginning-of-sequence token."""
        tokens = self._prompt.whole().tokens
        bos = self._model.text.tokenizer.bos_id
        return tokens[1:] if self._context and bos is not None and tokens[:1] == [bos] else tokens
