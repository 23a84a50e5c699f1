"""The chat templates that a model comes with, compiled."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from arriero.chat.files import TextFiles
from arriero.chat.go.template import GoTemplate
from arriero.chat.template import ChatTemplate, Template, is_go_template
from arriero.errors import TemplateError

log = logging.getLogger(__name__)

_GGUF_KEY = "tokenizer.chat_template"


def template_sources(files: TextFiles) -> dict[str, str]:
    """Name → text of every chat template; the main one is called `default`.

    `chat_template.jinja` wins over `chat_template.json`, which wins over `tokenizer_config.json`.
    """
    found: dict[str, str] = {}
    for key in files.metadata:
        if key == _GGUF_KEY or key.startswith(_GGUF_KEY + "."):
            value = files.metadata[key]
            if isinstance(value, str):
                found[key.removeprefix(_GGUF_KEY).removeprefix(".") or "default"] = value
    for name in ("tokenizer_config.json", "chat_template.json"):
        value = files.json(name).get("chat_template")
        if isinstance(value, str):
            found["default"] = value
        elif isinstance(value, list):
            for entry in value:
                if isinstance(entry, dict) and isinstance(entry.get("template"), str):
                    found[str(entry.get("name", "default"))] = entry["template"]
    text = files.text("chat_template.jinja")
    if text is not None:
        found["default"] = text
    return found


def compiled(source: str) -> ChatTemplate:
    """A template of either language, told by its text; raises TemplateError with the line."""
    return GoTemplate(source) if is_go_template(source) else Template(source)


class ChatTemplates:
    """The main template and the one for conversations with tools, if the model has another one for them."""

    def __init__(self, sources: dict[str, str], names: Mapping[str, Any] | None = None) -> None:
        """A template that can't be compiled is a warning here and an error when it is used.

        `names` are values that the templates read beside what every template is given.
        """
        self.names = dict(names or {})
        self.error: TemplateError | None = None
        self.default: ChatTemplate | None = None
        self.tool_use: ChatTemplate | None = None
        default = sources.get("default")
        if default is None and len(sources) == 1:
            default = next(iter(sources.values()))
        try:
            self.default = compiled(default) if default is not None else None
            self.tool_use = compiled(sources["tool_use"]) if "tool_use" in sources else None
        except TemplateError as error:
            log.warning("%s", error)
            self.error = error

    @classmethod
    def open(cls, files: TextFiles, override: str | None = None) -> ChatTemplates:
        """The templates of a model; `override` (a Modelfile's TEMPLATE) replaces them all."""
        return cls({"default": override} if override is not None else template_sources(files))

    def choose(self, tools: bool) -> ChatTemplate | None:
        """The template for a conversation; None when the model has none.

        Raises TemplateError when the model's template can't be used.
        """
        if self.error is not None:
            raise self.error
        return self.tool_use if tools and self.tool_use is not None else self.default

    @property
    def sources(self) -> str:
        """The text of all usable templates, to look for features."""
        return "\n".join(template.source for template in (self.default, self.tool_use) if template is not None)

    @property
    def variables(self) -> frozenset[str]:
        """The arguments that the usable templates read."""
        used = [template.variables for template in (self.default, self.tool_use) if template is not None]
        return frozenset().union(*used)
