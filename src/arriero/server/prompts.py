"""The ways to a prompt: a conversation, one after a `context` of tokens, a gap to fill, and text as it is."""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence

import msgspec

from arriero.chat.forced import call_format, strict_calls
from arriero.chat.grammar import Format
from arriero.chat.messages import Conversation, Think, Tool
from arriero.chat.parsers.events import Parser
from arriero.chat.parsers.passthrough import PassthroughParser
from arriero.chat.renderers.prompt import Encoded, Image, Text
from arriero.chat.renderers.prompt import Prompt as Rendered
from arriero.errors import InvalidRequest, PromptTooLong
from arriero.runner.messages import Trigger
from arriero.server.completion import Prompt
from arriero.server.models import OpenModel

log = logging.getLogger(__name__)

_TAG = re.compile(r"\[img-(\d{1,9})\]")


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
        self._cutter = model.text.cutter()

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

    def call_format(self, tools: Sequence[Tool], *, many: bool) -> Format:
        """The form of a reply that must call one of some tools; see `forced.call_format`."""
        text = self._model.text
        return call_format(text.calls, text.tokenizer.tag, tools, many=many)

    def strict_calls(self) -> list[Trigger]:
        """What makes calls fit that the reply may hold; see `forced.strict_calls`."""
        text = self._model.text
        return strict_calls(text.calls, text.tokenizer.tag, self._conversation.tools)

    def whole(self) -> Prompt:
        """The prompt of all messages."""
        if self._whole is None:
            text = self._model.text
            rendered = text.render(self._conversation, template=self._template, think=self._think)
            self._text = rendered.text
            self._whole = self._prompt(text.place(rendered, self._cutter))
        return self._whole

    def fitted(self, window: int, limit: int, num_predict: int) -> Prompt:
        """The prompt of the messages that fit."""
        whole = self.whole()
        if len(whole) < window:
            return whole
        if self._truncate and self._template is None:
            for size in (window - room_for_reply(window, num_predict), window - 1):
                try:
                    shorter = self._model.text.truncate(
                        self._conversation, size, think=self._think, cutter=self._cutter
                    )
                except PromptTooLong:
                    continue
                log.warning(
                    "%s: the conversation has %d tokens, the window %d: its oldest %d messages were left out",
                    self._model.asked,
                    len(whole),
                    window,
                    shorter.dropped,
                )
                kept = self._model.text.render(shorter.conversation, think=self._think)
                return self._prompt(self._model.text.place(kept, self._cutter), shorter.dropped)
        check_fits(len(whole), window, limit)
        raise AssertionError("a prompt that fits was returned above")

    def _prompt(self, encoded: Encoded, dropped: int = 0) -> Prompt:
        return Prompt(
            tokens=encoded.tokens,
            boundaries=self._model.text.boundaries(encoded.tokens),
            images=encoded.images,
            dropped_messages=dropped,
        )


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
    """Text taken as it is, control tokens included; it is never cut. `[img-0]` in it stands for the first image."""

    def __init__(self, model: OpenModel, text: str, images: Sequence[bytes] = ()) -> None:
        self._model = model
        self._text = text
        self._images = images
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
            text = self._model.text
            if self._images:
                encoded = text.place(self._segments(), text.cutter())
                self._whole = Prompt(tokens=encoded.tokens, images=encoded.images)
            else:
                self._whole = Prompt(tokens=text.tokenizer.encode(self._text))
        return self._whole

    def _segments(self) -> Rendered:
        """The text cut at its images' tags; InvalidRequest for a tag without an image, a warning for the reverse."""
        first, *others = _TAG.split(self._text)
        segments: list[Text | Image] = [Text(first)]
        used = {int(number) for number in others[::2]}
        for number, text in zip(others[::2], others[1::2], strict=True):
            if int(number) >= len(self._images):
                raise InvalidRequest(f"the prompt holds [img-{number}], but {len(self._images)} images were sent")
            segments += [Image(self._images[int(number)], bare=True), Text(text)]
        unused = [number for number in range(len(self._images)) if number not in used]
        if unused:
            log.warning("%s: nothing in the raw prompt stands for images %s", self._model.asked, unused)
        return Rendered([segment for segment in segments if isinstance(segment, Image) or segment.text])

    def fitted(self, window: int, limit: int, _num_predict: int) -> Prompt:
        """The same, or PromptTooLong."""
        check_fits(len(self.whole()), window, limit)
        return self.whole()


class ContinuedPrompt:
    """A new prompt after the `context` that an earlier reply handed out; too long a context loses its front."""

    def __init__(
        self, model: OpenModel, context: list[int], prompt: ConversationPrompt, *, truncate: bool = True
    ) -> None:
        """Raises InvalidRequest for ids that aren't tokens of the model, and for those of images."""
        size = model.text.tokenizer.vocab_size
        bad = next((index for index in context if not 0 <= index < size), None)
        if bad is not None:
            raise InvalidRequest(
                f"context holds {bad}, which is no token of {model.asked} (it has {size}); "
                "send back the context of a reply of the same model, or leave it out"
            )
        pad = model.text.placeholder_id
        if pad is not None and pad in context:
            raise InvalidRequest(
                "context holds an image, which tokens alone don't bring back; send the messages to /api/chat instead"
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
        return self._behind(self._context)

    def fitted(self, window: int, limit: int, num_predict: int) -> Prompt:
        """Context and new prompt, the context's front cut to leave `room_for_reply`."""
        new = len(self._behind([]))
        whole = len(self.whole())
        if whole < window:
            return self.whole()
        check_fits(new, window, limit)
        if not self._truncate:
            check_fits(whole, window, limit)
        keep = max(0, window - room_for_reply(window, num_predict) - new)
        log.warning(
            "%s: context and prompt have %d tokens, the window %d: the context's front was left out",
            self._model.asked,
            whole,
            window,
        )
        kept = self._context[len(self._context) - keep :]
        return msgspec.structs.replace(self._behind(kept), dropped_tokens=len(self._context) - keep)

    def _behind(self, context: list[int]) -> Prompt:
        """The new prompt behind some context, without a second beginning-of-sequence token."""
        new = self._prompt.whole()
        tokens, bos = new.tokens, self._model.text.tokenizer.bos_id
        cut = 1 if self._context and bos is not None and tokens[:1] == [bos] else 0
        images = [msgspec.structs.replace(image, offset=image.offset - cut + len(context)) for image in new.images]
        return Prompt(tokens=context + tokens[cut:], images=images)
