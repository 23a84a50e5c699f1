"""Everything on the text side of one model: tokenizer, chat template, what it can do."""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence
from typing import Any

from arriero.chat.calls.forms import form_of
from arriero.chat.embedding import EmbeddingRules
from arriero.chat.files import TextFiles
from arriero.chat.fim import FimTokens
from arriero.chat.media.media import Cutter, Media
from arriero.chat.media.open import open_media
from arriero.chat.messages import Conversation, Message, Think, Tool
from arriero.chat.parsers.events import Parser
from arriero.chat.parsers.families import FAMILIES, PARSER_NAMES, Family, family_of
from arriero.chat.renderers.builtin.catalogue import RENDERERS, renderer_of, variables_of
from arriero.chat.renderers.jinja import JinjaRenderer
from arriero.chat.renderers.prompt import Encoded, Prompt, Renderer, Text
from arriero.chat.renderers.raw import RawRenderer
from arriero.chat.stops import token_content
from arriero.chat.template import is_go_template
from arriero.chat.templates import ChatTemplates
from arriero.chat.tokenizer import Tokenizer
from arriero.chat.truncation import Truncated, truncate
from arriero.errors import CheckpointError, InvalidRequest, TemplateError, UnsupportedFeature
from arriero.image import ImagePatches, PlacedImage
from arriero.source import ModelSource

log = logging.getLogger(__name__)

_PROBE_FUNCTION = {"name": "probe", "description": "", "parameters": {"type": "object", "properties": {}}}
_EMBEDDERS = re.compile(r"Embedding|Bert|SentenceTransformer")


class ModelText:
    """Opened once for a loaded model; safe to use from several threads."""

    def __init__(self, files: TextFiles, templates: ChatTemplates, *, parser: str = "") -> None:
        self.tokenizer = Tokenizer.from_files(files, templates)
        self.templates = templates
        self.stop_ids = self.tokenizer.stop_ids
        self.context_length = _context_length(files)
        """Tokens that the model was made for; 0 when its files don't say."""
        self.embedding = EmbeddingRules.read(files)
        """How it makes vectors of texts."""
        self.fim_tokens = FimTokens.find(self.tokenizer, files)
        self.media, self.no_media = _open_media(files, self.tokenizer)
        """The way with images; without one, why there is none ('' for a model of text)."""
        self._family = self._find_family(parser)
        self.calls = form_of(
            self._family.name, templates.sources, lambda text: self.tokenizer.token_id(text) is not None
        )
        """How its calls are written, where a grammar can make them; None for a family without one."""
        self.capabilities = self._capabilities(files)
        """Of `completion`, `embedding`, `vision`, `insert`, `tools`, `thinking`."""
        self._names = _special_names(self.tokenizer, files)
        control = [self.tokenizer.token_text(index) for index in self.tokenizer.control_ids]
        self.renderer: Renderer = RawRenderer()
        if templates.default is not None or templates.error is not None:
            self.renderer = self._jinja(templates, control)
        self._control = control
        self._prompt_ends: dict[tuple[Think, bool], str] = {}

    @classmethod
    def open(
        cls, source: ModelSource, template: str | None = None, *, renderer: str = "", parser: str = ""
    ) -> ModelText:
        """Open a model's text side; `template` (a Modelfile's TEMPLATE) replaces the model's own.

        `renderer` (its RENDERER) names a built-in template that goes before both; `parser` (its PARSER) names what
        reads replies, which the template and the vocabulary tell otherwise.

        Raises CheckpointError for a vocabulary that can't be used. A template that can't be used is a warning now and
        an error when a conversation is rendered, so raw prompts still work.
        """
        files = TextFiles.open(source)
        return cls(files, _templates(files, template, renderer), parser=parser)

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
            renderer = self._jinja(ChatTemplates({"default": template}), self._control)
        return renderer.render(conversation, add_generation_prompt=add_generation_prompt, think=think)

    def encode(self, prompt: Prompt | str) -> list[int]:
        """Token ids of a rendered prompt of text (a string counts as text with control tokens).

        Raises UnsupportedFeature for images, which `place` takes.
        """
        return self.place(Prompt([Text(prompt)]) if isinstance(prompt, str) else prompt).tokens

    @property
    def placeholder_id(self) -> int | None:
        """The token that stands for an image, as often as that has tokens; None for a model that takes none."""
        return None if self.media is None else self.tokenizer.token_id(self.media.marks.placeholder)

    def cutter(self) -> Cutter | None:
        """What reads and cuts the images of one request; None for a model that takes none."""
        return None if self.media is None else Cutter(self.media)

    def place(self, prompt: Prompt, cutter: Cutter | None = None) -> Encoded:
        """Token ids of a rendered prompt, with the images over placeholders of their own.

        Raises UnsupportedFeature for images without a `cutter`, and InvalidRequest for those that can't be taken.
        """
        encoded = Encoded([])
        for text, control, images in self._pieces(prompt):
            ids = self.tokenizer.encode(text, add_bos=not encoded.tokens, special=control)
            if not images:
                encoded.tokens.extend(ids)
                continue
            if cutter is None or self.media is None:
                raise UnsupportedFeature("this model does not take images")
            self._put(ids, [cutter(image) for image in images], encoded)
        return encoded

    def _pieces(self, prompt: Prompt) -> list[tuple[str, bool, list[bytes]]]:
        """Text to be encoded in one go, whether control tokens in it count, and its images, one placeholder each.

        Text around an image is encoded with it, since tokens may reach over its edge.
        """
        pieces: list[tuple[str, bool, list[bytes]]] = []
        for segment in prompt.segments or [Text("")]:
            text, control, images = "", True, []
            if isinstance(segment, Text):
                text, control = segment.text, segment.control
            else:
                images = [segment.data]
                if self.media is not None:
                    marks = self.media.marks
                    text = f"{marks.before}{marks.placeholder}{marks.after}"
                    text = text.join(marks.bare) if segment.bare else text
            if control and pieces and pieces[-1][1]:
                before, _, others = pieces.pop()
                text, images = before + text, others + images
            pieces.append((text, control, images))
        return pieces

    def _put(self, ids: list[int], images: list[ImagePatches], encoded: Encoded) -> None:
        """Append the ids, each placeholder as often as its image has tokens."""
        pad = self.placeholder_id
        if sum(index == pad for index in ids) != len(images):
            raise InvalidRequest(
                f"the prompt's own text holds {self.tokenizer.token_text(pad)}, which stands for images alone"
            )
        waiting = iter(images)
        for index in ids:
            if index == pad:
                patches = next(waiting)
                encoded.images.append(PlacedImage(offset=len(encoded.tokens), patches=patches))
                encoded.tokens.extend([index] * patches.tokens)
            else:
                encoded.tokens.append(index)

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

    def truncate(
        self, conversation: Conversation, limit: int, *, think: Think = None, cutter: Cutter | None = None
    ) -> Truncated:
        """Leave out the oldest exchanges until the prompt fits `limit` tokens; see `truncation.truncate`."""
        return truncate(
            conversation, limit, lambda shorter: self.place(self.render(shorter, think=think), cutter).tokens
        )

    def parser(self, prompt: str | None = None, *, think: Think = None, tools: Sequence[Tool] = ()) -> Parser:
        """A fresh parser for a reply.

        `prompt` is what was rendered, for templates that open the block of thinking themselves; without it, what the
        template writes with these `think` and `tools` for a short question counts.
        """
        if prompt is None:
            prompt = self._prompt_end(think, bool(tools))
        return self._family.parser(prompt, tools)

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

    def _find_family(self, parser: str) -> Family:
        if parser in PARSER_NAMES:
            return FAMILIES[PARSER_NAMES[parser]]
        for problem in unknown_names("", parser):
            log.warning("%s", problem)
        takes_tools = "tools" in self.templates.variables
        return family_of(
            self.templates.sources, lambda text: self.tokenizer.token_id(text) is not None, takes_tools=takes_tools
        )

    def _jinja(self, templates: ChatTemplates, control: list[str]) -> JinjaRenderer:
        tags = self._family.tags
        own = () if tags is None else (tags.opening, tags.closing)
        return JinjaRenderer(templates, self._names, control, self.media.marks.written if self.media else None, own)

    def _capabilities(self, files: TextFiles) -> tuple[str, ...]:
        found = ["embedding" if _embeds(files) else "completion"]
        if self.media is not None:
            found.append("vision")
        if self.fim_tokens is not None:
            found.append("insert")
        if "tools" in self.templates.variables:
            found.append("tools")
        if self._family.thinks(self.templates.sources):
            found.append("thinking")
        return tuple(found)


def unknown_names(renderer: str, parser: str) -> list[str]:
    """What a model will do without, where RENDERER and PARSER name none of ours; '' names nothing."""
    problems = []
    if renderer and renderer not in RENDERERS:
        problems.append(f"there is no renderer '{renderer}': the model's own chat template is used, if it has one")
    if parser and parser not in PARSER_NAMES:
        problems.append(f"there is no parser '{parser}': the model's template tells how its replies are read")
    return problems


def _templates(files: TextFiles, template: str | None, renderer: str) -> ChatTemplates:
    """A built-in template by its name; else the model's own; else the built-in one that its architecture needs."""
    for problem in unknown_names(renderer, ""):
        log.warning("%s", problem)
    templates = ChatTemplates.open(files, template)
    if template is not None and is_go_template(template):
        own = ChatTemplates.open(files)
        missing = _shows(own) - _shows(templates)
        if own.default is not None and (missing or templates.error is not None):
            why = f"it does not show {' and '.join(sorted(missing))}" if missing else str(templates.error)
            log.warning("the model's own Jinja template is used instead of its Go template: %s", why)
            templates = own
    if renderer not in RENDERERS and templates.default is None and templates.error is None:
        tokenizer = Tokenizer.from_files(files, templates)
        renderer = renderer_of(files, lambda text: tokenizer.token_id(text) in tokenizer.stop_ids)
    if renderer not in RENDERERS:
        return templates
    built_in = RENDERERS[renderer]
    return ChatTemplates({"default": built_in.source}, variables_of(built_in, files))


def _shows(templates: ChatTemplates) -> set[str]:
    """What templates make use of."""
    thinks = family_of(templates.sources, lambda _: False, takes_tools=False).thinks(templates.sources)
    return ({"tools"} & templates.variables) | ({"thinking"} if thinks else set())


def _open_media(files: TextFiles, tokenizer: Tokenizer) -> tuple[Media | None, str]:
    """The way with images, or why there is none; text goes on without."""
    try:
        return open_media(files, tokenizer.token_text), ""
    except CheckpointError as error:
        log.warning("images are refused: %s", error)
        return None, str(error)


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
