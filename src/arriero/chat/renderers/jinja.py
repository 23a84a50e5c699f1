"""The renderer that runs the model's own Jinja chat template."""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Mapping
from itertools import pairwise
from typing import Any

import msgspec

from arriero.chat.messages import Conversation, Message, Think, Tool, ToolCall
from arriero.chat.renderers.control import ControlText
from arriero.chat.renderers.objects import CallStyle, Form, message_objects
from arriero.chat.renderers.probes import Probes
from arriero.chat.renderers.prompt import Image, Prompt, Text
from arriero.chat.renderers.rewrites import one_call_a_turn, readings, system_first
from arriero.chat.template import ChatTemplate, TemplateStopped
from arriero.chat.templates import ChatTemplates
from arriero.errors import TemplateError, UnsupportedFeature

_MARK_DIGITS = 7


class JinjaRenderer:
    """Renders with the model's templates, and again in other words when a template refuses a conversation."""

    def __init__(
        self,
        templates: ChatTemplates,
        names: Mapping[str, str],
        control: Iterable[str] = (),
        image_token: str | None = None,
        own: Iterable[str] = (),
    ) -> None:
        """`names` are the special tokens that templates may write (`bos_token`, …); `control` the text of all control
        tokens, which in a user's text stay text; `image_token` what the template writes for an image; `own` what the
        model writes around its thoughts.
        """
        self._templates = templates
        self._names = {**names, **templates.names}
        self._control = ControlText(control)
        self._image_token = image_token
        self._own = frozenset(own)
        self._probes: dict[int, Probes] = {}
        self._turns: dict[int, ControlText] = {}

    def render(self, conversation: Conversation, *, add_generation_prompt: bool = True, think: Think = None) -> Prompt:
        """The prompt; an assistant message at the end is left open for the model to continue.

        Raises TemplateError (the template's first complaint) when no reading of the conversation is accepted, and
        UnsupportedFeature for images that the model can't take.
        """
        template = self._templates.choose(bool(conversation.tools))
        if template is None:
            raise TemplateError("the model has no chat template; give it one with TEMPLATE in a Modelfile")
        images = [image for message in conversation.messages for image in message.images]
        if images and self._image_token is None:
            raise UnsupportedFeature("this model does not take images")
        marks = _Marks()
        mark = marks.image if images and self._probe(template).takes_parts else None
        turns = self._between(template) if any(one.role == "assistant" for one in conversation.messages) else None
        messages = [self._guarded(message, marks, turns) for message in conversation.messages]
        last = messages[-1] if messages else None
        prefill = add_generation_prompt and last is not None and last.role == "assistant" and not last.tool_calls
        if prefill and last is not None:
            messages[-1] = Message(role="assistant", content=last.content + marks.end, thinking=last.thinking)
        tools = [Tool(_guard(tool.definition, marks, self._control)) for tool in conversation.tools]
        arguments = self._arguments(tools, add_generation_prompt and not prefill, think)
        if isinstance(think, str):
            arguments["medium_effort"] = think == "medium"
            arguments["reasoning_effort"] = self._probe(template).effort(think)
        text = self._accepted(template, messages, arguments, mark)
        if prefill:
            text, found, _ = text.rpartition(marks.end)
            if not found:
                raise TemplateError(
                    "the chat template drops the assistant message at the end, so it can't be continued"
                )
            text = text.replace(marks.end, "")
        return Prompt(self._segments(text, marks, images))

    def _guarded(self, message: Message, marks: _Marks, turns: ControlText | None) -> Message:
        """The message with marks in its content: for its images, and for the texts of control tokens.

        What the model itself wrote keeps its control tokens, but for those of `turns`: it may have repeated a text that
        spells them, and the next prompt must not read that as turns.
        """
        control = turns if message.role == "assistant" and turns is not None else self._control
        places = [0] * (len(message.images) - len(message.places)) + message.places
        edges = [0, *places, len(message.content)]
        pieces = [marks.hide_all(control, message.content[start:end]) for start, end in pairwise(edges)]
        content = marks.image.join(pieces)
        thinking = marks.hide_all(control, message.thinking)
        calls = [self._guarded_call(call, marks) for call in message.tool_calls]
        name, answers = (marks.hide_all(self._control, one) for one in (message.tool_name, message.tool_call_id))
        return msgspec.structs.replace(
            message, content=content, thinking=thinking, tool_calls=calls, tool_name=name, tool_call_id=answers
        )

    def _guarded_call(self, call: ToolCall, marks: _Marks) -> ToolCall:
        mapping = call.mapping()
        found = _guard(call.arguments if mapping is None else mapping, marks, self._control)
        name, number = (marks.hide_all(self._control, one) for one in (call.name, call.id))
        # A client's own text of arguments stays as it is where nothing had to be hidden.
        arguments = call.arguments if found in (mapping, call.arguments) else found
        return msgspec.structs.replace(call, name=name, arguments=arguments, id=number)

    def _arguments(self, tools: list[Tool], add_generation_prompt: bool, think: Think) -> dict[str, Any]:
        arguments: dict[str, Any] = {
            **self._names,
            "tools": [tool.definition for tool in tools] or None,
            "documents": None,
            "add_generation_prompt": add_generation_prompt,
        }
        if think is not None:
            # The names that model makers gave to the same switch.
            arguments["enable_thinking"] = arguments["thinking"] = bool(think)
        return arguments

    def _probe(self, template: ChatTemplate) -> Probes:
        if id(template) not in self._probes:
            arguments = self._arguments([], True, None)
            self._probes[id(template)] = Probes(template, arguments, self._image_token)
        return self._probes[id(template)]

    def _between(self, template: ChatTemplate) -> ControlText:
        """The control tokens by which the template makes turns, and the one that stands for an image."""
        if id(template) not in self._turns:
            image = {self._image_token} if self._image_token else set()
            self._turns[id(template)] = ControlText((self._probe(template).turns(self._control) - self._own) | image)
        return self._turns[id(template)]

    def _shown(self, template: ChatTemplate, messages: list[Message]) -> list[Message]:
        """The messages without what the template would leave out in silence."""
        probe = self._probe(template)
        if any(message.role == "developer" for message in messages) and probe.drops_developer:
            messages = [
                msgspec.structs.replace(message, role="system") if message.role == "developer" else message
                for message in messages
            ]
        if any(message.role == "system" for message in messages[1:]) and probe.drops_late_system:
            messages = system_first(messages)
        if any(len(message.tool_calls) > 1 for message in messages) and probe.drops_parallel_calls:
            messages = one_call_a_turn(messages)
        return messages

    def _accepted(
        self, template: ChatTemplate, messages: list[Message], arguments: dict[str, Any], mark: str | None
    ) -> str:
        styles = [CallStyle()]
        if any(message.tool_calls for message in messages):
            style = self._probe(template).calls
            others: tuple[Form, ...] = ("text" if style.form == "mapping" else "mapping", "wrapped")
            styles = [style, *(CallStyle(form, style.null_content) for form in others)]
        complaint: TemplateError | None = None
        for reading in readings(self._shown(template, messages)):
            for style in styles:
                try:
                    return template.render(arguments | {"messages": message_objects(reading, style, mark)})
                except TemplateStopped:
                    raise
                except TemplateError as error:
                    complaint = complaint or error
        assert complaint is not None
        raise complaint

    def _segments(self, text: str, marks: _Marks, images: list[bytes]) -> list[Text | Image]:
        segments: list[Text | Image] = []
        waiting = iter(images)

        def put(bare: bool) -> None:
            image = next(waiting, None)
            if image is None:
                raise TemplateError(f"the chat template writes more than {len(images)} images")
            segments.append(Image(image, bare))

        for piece, control in marks.split(text):
            if piece is None:
                put(bare=True)
                continue
            places = piece.split(self._image_token) if control and images and self._image_token else [piece]
            for index, part in enumerate(places):
                if index:
                    put(bare=False)
                if part:
                    segments.append(Text(part, control))
        left = sum(1 for _ in waiting)
        if left:
            raise TemplateError(f"the chat template leaves out {left} of {len(images)} images")
        return segments


def _guard(value: Any, marks: _Marks, control: ControlText) -> Any:
    """A JSON value with stand-ins for the control tokens that its strings spell."""
    if isinstance(value, str):
        return marks.hide_all(control, value)
    if isinstance(value, list):
        return [_guard(item, marks, control) for item in value]
    if isinstance(value, dict):
        return {_guard(key, marks, control): _guard(item, marks, control) for key, item in value.items()}
    return value


class _Marks:
    """Stand-ins that whoever wrote the conversation can't guess, of digits only: no filter changes those."""

    def __init__(self) -> None:
        self._secret = "".join(secrets.choice("0123456789") for _ in range(24))
        self._hidden: list[str] = []
        self._numbers: dict[str, int] = {}
        self.end = self._secret + "x" * _MARK_DIGITS
        self.image = self._secret + "9" * _MARK_DIGITS

    def hide(self, text: str) -> str:
        """A stand-in for a text, the same one each time: templates look for results by the ids of their calls."""
        if text not in self._numbers:
            self._numbers[text] = len(self._hidden)
            self._hidden.append(text)
        return f"{self._secret}{self._numbers[text]:0{_MARK_DIGITS}}"

    def hide_all(self, control: ControlText, text: str) -> str:
        """A text with stand-ins for what `control` finds in it."""
        parts, position = [], 0
        for start, end in control.spans(text):
            parts += [text[position:start], self.hide(text[start:end])]
            position = end
        return "".join([*parts, text[position:]])

    def split(self, text: str) -> list[tuple[str | None, bool]]:
        """The rendered text as (piece, may hold control tokens), with hidden texts back in place; None is an image."""
        first, *others = text.split(self._secret)
        pieces: list[tuple[str | None, bool]] = [(first, True)]
        for other in others:
            number, rest = other[:_MARK_DIGITS], other[_MARK_DIGITS:]
            if number == self.image[-_MARK_DIGITS:]:
                pieces += [(None, True), (rest, True)]
                continue
            if not number.isdecimal() or int(number) >= len(self._hidden):
                raise TemplateError("the chat template cuts a message's text, which holds control tokens, in two")
            pieces += [(self._hidden[int(number)], False), (rest, True)]
        return pieces
