"""Everything on the text side of one model: tokenizer, chat template, what it can do."""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence
from typing import Any

from arriero.chat.files import TextFiles
from arriero.chat.fim import FimTokens
from arriero.chat.messages import Conversation, Message, Think, Tool
from arriero.chat.parsers.events import Parser
from arriero.chat.parsers.passthrough import PassthroughParser
from arriero.chat.parsers.thinking import ThinkingParser
from arriero.chat.renderers.jinja import JinjaRenderer
from arriero.chat.renderers.prompt import Image, Prompt, Renderer, Text
from arriero.chat.renderers.raw import RawRenderer
from arriero.chat.stops import token_content
from arriero.chat.templates import ChatTemplates
from arriero.chat.tokenizer import Tokenizer
from arriero.chat.truncation import Truncated, truncate
from arriero.errors import TemplateError, UnsupportedFeature
from arriero.source import ModelSource

log = logging.getLogger(__name__)

_TAGS = (("<think>", "</think>"), ("[THINK]", "[/THINK]"), ("<seed:think>", "</seed:think>"))
_PROBE_FUNCTION = {"name": "probe", "description": "", "parameters": {"type": "object", "properties": {}}}
_EMBEDDERS = re.compile(r"Embedding|Bert|SentenceTransformer")


class ModelText:
    """Opened once for a loaded model; safe to use from several threads."""

    def __init__(self, files: TextFiles, templates: ChatTemplates) -> None:
        self.tokenizer = Tokenizer.from_files(files, templates)
        self.templates = templates
        self.stop_ids = self.tokenizer.stop_ids
        self.context_length = _context_length(files)
        """Tokens that the model was made for; 0 when its files don't say."""
        self.fim_tokens = FimTokens.find(self.tokenizer, files)
        self.capabilities = self._capabilities(files)
        """Of `completion`, `embedding`, `insert`, `tools`, `thinking`, in the order of Ollama's list."""
        self._names = _special_names(self.tokenizer, files)
        control = [self.tokenizer.token_text(index) for index in self.tokenizer.control_ids]
        self.renderer: Renderer = RawRenderer()
        if templates.default is not None or templates.error is not None:
            self.renderer = JinjaRenderer(templates, self._names, control)
        self._control = control
        self._prompt_ends: dict[tuple[Think, bool], str] = {}

    @classmethod
    def open(cls, source: ModelSource, template: str | None = None) -> ModelText:
        """Open a model's text side; `template` (a Modelfile's TEMPLATE) replaces the model's own.

        Raises CheckpointError for a vocabulary that can't be used. A template that can't be used is a warning now and
        an error when a conversation is rendered, so raw prompts still work.
        """
        files = TextFiles.open(source)
        return cls(files, ChatTemplates.open(files, template))

    def render(
        self,
        conversation: Conversation,
        *,
        template: str | None = None,
        add_generation_prompt: bool = True,
        think: Think = None,
    ) -> Prompt:
        """The prompt of a conversation; `template` is used for this one call in place of the model's.

        Raises TemplateError or UnsupportedFeature, saying what the template complains about.
        """
        renderer = self.renderer
        if template is not None:
            templates = ChatTemplates({"default": template})
            renderer = JinjaRenderer(templates, self._names, self._control)
        return renderer.render(conversation, add_generation_prompt=add_generation_prompt, think=think)

    def encode(self, prompt: Prompt | str) -> list[int]:
        """Token ids of a rendered prompt (a string counts as text with control tokens).

        Raises UnsupportedFeature for images: their places are filled by the family's own code.
        """
        segments: list[Text | Image] = [Text(prompt)] if isinstance(prompt, str) else prompt.segments
        ids: list[int] = []
        for segment in segments or [Text("")]:
            if isinstance(segment, Image):
                raise UnsupportedFeature("this model does not take images")
            ids += self.tokenizer.encode(segment.text, add_bos=not ids, special=segment.control)
        return ids

    def boundaries(self, ids: list[int]) -> list[int]:
        """Offsets in a prompt just after each end of a turn: where a later prompt is likely to differ."""
        return [offset + 1 for offset, index in enumerate(ids) if index in self.stop_ids]

    def fim(self, prompt: str, suffix: str) -> list[int]:
        """Token ids that ask for the text between `prompt` and `suffix`.

        Raises UnsupportedFeature when the model has no tokens for that.
        """
        if self.fim_tokens is None:
            raise UnsupportedFeature("this model does not support insert: it has no tokens for a prefix and a suffix")
        return self.fim_tokens.encode(self.tokenizer, prompt, suffix)

    def truncate(self, conversation: Conversation, limit: int, *, think: Think = None) -> Truncated:
        """Leave out the oldest exchanges until the prompt fits `limit` tokens; see `truncation.truncate`."""
        return truncate(conversation, limit, lambda shorter: self.encode(self.render(shorter, think=think)))

    def parser(self, prompt: str | None = None, *, think: Think = None, tools: Sequence[Tool] = ()) -> Parser:
        """A fresh parser for a reply.

        `prompt` is what was rendered, for templates that open the block of thinking themselves; without it, what the
        template writes with these `think` and `tools` for a short question counts.
        """
        tags = self._thinking_tags()
        if tags is None:
            return PassthroughParser()
        if prompt is None:
            prompt = self._prompt_end(think, bool(tools))
        return ThinkingParser(prompt, opening=tags[0], closing=tags[1])

    def _prompt_end(self, think: Think, tools: bool) -> str:
        if (think, tools) not in self._prompt_ends:
            offered = [Tool({"type": "function", "function": _PROBE_FUNCTION})] if tools else []
            question = Conversation(messages=[Message(role="user", content="Salve")], tools=offered)
            try:
                self._prompt_ends[think, tools] = self.render(question, think=think).text[-64:]
            except TemplateError as error:
                log.warning("the template can't render a short question: %s", error)
                self._prompt_ends[think, tools] = ""
        return self._prompt_ends[think, tools]

    def _thinking_tags(self) -> tuple[str, str] | None:
        source = self.templates.sources
        return next((tags for tags in _TAGS if tags[1] in source), None)

    def _capabilities(self, files: TextFiles) -> tuple[str, ...]:
        found = ["embedding" if _embeds(files) else "completion"]
        if self.fim_tokens is not None:
            found.append("insert")
        if "tools" in self.templates.variables:
            found.append("tools")
        if self._thinking_tags() is not None:
            found.append("thinking")
        return tuple(found)


def _embeds(files: TextFiles) -> bool:
    if any(key.endswith(".pooling_type") for key in files.metadata) or "modules.json" in files:
        return True
    architectures = files.json("config.json").get("architectures")
    return isinstance(architectures, list) and any(_EMBEDDERS.search(str(name)) for name in architectures)


def _context_length(files: TextFiles) -> int:
    architecture = files.metadata.get("general.architecture")
    config = files.json("config.json")
    text_config = config.get("text_config")
    candidates: list[Any] = [files.metadata.get(f"{architecture}.context_length")]
    for part in (text_config, config):
        if isinstance(part, dict):
            candidates += [part.get(name) for name in ("max_position_embeddings", "n_positions", "max_seq_len")]
    return next((value for value in candidates if isinstance(value, int) and value > 0), 0)


def _special_names(tokenizer: Tokenizer, files: TextFiles) -> dict[str, str]:
    """The special tokens that templates write: as `tokenizer_config.json` names them, BOS and EOS also by their ids."""
    names = {"bos_token": tokenizer.token_text(tokenizer.bos_id), "eos_token": tokenizer.token_text(tokenizer.eos_id)}
    for file in ("special_tokens_map.json", "tokenizer_config.json"):
        for name in ("bos_token", "eos_token", "pad_token", "unk_token", "sep_token", "cls_token", "mask_token"):
            text = token_content(files.json(file).get(name))
            if text is not None:
                names[name] = text
    return names
