"""Text ⇄ token ids of one model, from `tokenizer.json` or from GGUF metadata. Refuses to know templates' arguments."""

from __future__ import annotations

import logging
import re
import threading
from collections.abc import Iterable
from typing import Any, Literal

import msgspec
import tokenizers

from arriero.chat.files import TextFiles
from arriero.chat.pretokenizers import FAMILIES
from arriero.chat.stops import stop_token_ids, token_content, valid_id
from arriero.chat.tags import Tags
from arriero.chat.templates import ChatTemplates
from arriero.chat.vocabulary import tokenizer_from_gguf
from arriero.errors import CheckpointError
from arriero.source import ModelSource

log = logging.getLogger(__name__)

Alphabet = Literal["byte-level", "sentencepiece"]

_TAG = re.compile(r"[<\[].*[>\]]", re.DOTALL)


class Tokenizer:
    """Encodes, decodes and knows the special tokens; safe to use from several threads."""

    def __init__(self, core: tokenizers.Tokenizer, files: TextFiles, templates: ChatTemplates) -> None:
        self._core = core
        self._lock = threading.Lock()
        self._alphabet, self._strips_prefix = _alphabet(core)
        added: dict[int, tokenizers.AddedToken] = core.get_added_tokens_decoder()
        self._added = {index: token.content for index, token in added.items()}
        self._bytes: dict[int, bytes] = {}
        self.vocab_size: int = core.get_vocab_size(with_added_tokens=True)
        self.model_size: int = core.get_vocab_size(with_added_tokens=False)
        """Tokens of the model's own vocabulary, without those added beside it."""
        self.control_ids = frozenset(index for index, token in added.items() if token.special)
        """Tokens whose text means something to the model; `special=False` never makes them from text."""
        self.bos_id = _special_id(self, files, "bos")
        self.eos_id = _special_id(self, files, "eos")
        self.pad_id = _special_id(self, files, "padding" if files.metadata else "pad")
        self.add_bos = self.bos_id is not None and _adds_bos(core, files, self.bos_id)
        self.add_eos = bool(files.metadata.get("tokenizer.ggml.add_eos_token", False))
        """Whether a text for itself ends with the end-of-sequence token though the tokenizer does not put it there."""
        self.stop_ids = stop_token_ids(self, files, templates)
        """Every token that ends a reply; none of them is ever printed."""
        # Some models name an ordinary token as their padding; that one keeps its text.
        self.hidden_ids = self.stop_ids | (self.control_ids & {self.bos_id, self.eos_id, self.pad_id})
        """Tokens that have no text in a reply."""
        tags = {index for index, text in self._added.items() if _TAG.fullmatch(text)}
        self.tag_ids = self.control_ids | self.stop_ids | tags
        """Tokens that stand for no text of their own: what spells them in other tokens is text and no tag."""
        self.tags = Tags(self._added.get(index, "") for index in self.tag_ids)

    @classmethod
    def open(cls, source: ModelSource, template: str | None = None) -> Tokenizer:
        """Open a model's tokenizer; `template` is a chat template that replaces the model's own.

        Raises CheckpointError when the vocabulary is missing, damaged or of a kind that we don't run.
        """
        files = TextFiles.open(source)
        return cls.from_files(files, ChatTemplates.open(files, template))

    @classmethod
    def from_files(cls, files: TextFiles, templates: ChatTemplates) -> Tokenizer:
        """As `open`, for files and templates that are already open."""
        core = tokenizer_from_gguf(files.metadata) if files.metadata else _tokenizer_from_json(files)
        return cls(core, files, templates)

    def encode(self, text: str, add_bos: bool = True, special: bool = True) -> list[int]:
        """Token ids of a text.

        `add_bos` puts the beginning-of-sequence token in front where the model wants one and the text doesn't already
        start with it. With `special=False` the text of a control token is plain text: user text can't forge one.
        """
        # Half of a surrogate pair, as JSON can spell it, is no character.
        text = text if text.isascii() else text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
        with self._lock:
            self._core.encode_special_tokens = not special
            ids: list[int] = self._core.encode(text, add_special_tokens=False).ids
        if add_bos and self.add_bos and self.bos_id is not None and ids[:1] != [self.bos_id]:
            ids.insert(0, self.bos_id)
        return ids

    def encode_whole(self, text: str, limit: int) -> tuple[list[int], bool]:
        """Token ids of a text for itself, with what the vocabulary puts around it, and whether its end was cut off.

        At most `limit` ids; control tokens spelled in the text are plain text.
        """
        text = text if text.isascii() else text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
        with self._lock:
            self._core.encode_special_tokens = True
            body = self._core.encode(text, add_special_tokens=False)
            around = self._core.num_special_tokens_to_add(False)
            bare: list[int] = self._core.post_process(self._core.encode("", add_special_tokens=False)).ids
            bos = [self.bos_id] if self.add_bos and self.bos_id is not None and bare[:1] != [self.bos_id] else []
            eos = [self.eos_id] if self.add_eos and self.eos_id is not None and bare[-1:] != [self.eos_id] else []
            room = max(limit - around - len(bos) - len(eos), 0)
            cut = len(body.ids) > room
            if cut:
                body.truncate(room)
            ids: list[int] = self._core.post_process(body).ids
        return [*bos, *ids, *eos], cut

    def decode(self, ids: Iterable[int], *, start: bool = True) -> str:
        """Text of token ids: special tokens as their text, invalid bytes as U+FFFD, NUL as nothing.

        `start` says that the ids begin a text, so the blank that SentencePiece puts before a text is taken off.
        """
        data = b"".join(map(self.token_bytes, ids)).replace(b"\0", b"")
        if start and self._strips_prefix:
            data = data.removeprefix(b" ")
        return data.decode("utf-8", "replace")

    def token_bytes(self, index: int) -> bytes:
        """The exact bytes of one token; empty for an id outside the vocabulary."""
        data = self._bytes.get(index)
        if data is None:
            data = self._bytes[index] = self._spell(index)
        return data

    def all_bytes(self) -> tuple[list[bytes], list[int]]:
        """The exact bytes of every token by id, and the ids that stand for no text of their own: tags and controls.

        Half a second for a large vocabulary; nothing is kept.
        """
        size = 1 + max(self._core.get_vocab(with_added_tokens=True).values(), default=-1)
        return [self._spell(index) for index in range(size)], sorted(index for index in self.tag_ids if index < size)

    def token_id(self, text: str) -> int | None:
        """The id of a vocabulary entry as it is spelled in the vocabulary; None when there is none."""
        index: int | None = self._core.token_to_id(text)
        return index

    def token_text(self, index: int | None) -> str:
        """A token as it is spelled in the vocabulary; '' for None and for ids outside it."""
        if index is None or not 0 <= index < 2**32:
            return ""
        return self._core.id_to_token(index) or ""

    def tag(self, text: str) -> int | None:
        """The token that a tag is; None where it is text to this vocabulary."""
        index = self.token_id(text)
        return index if index in self.tag_ids else None

    def is_added(self, index: int) -> bool:
        """Whether the token is matched as a whole before merging (control and user-defined tokens)."""
        return index in self._added

    def _spell(self, index: int) -> bytes:
        text = self.token_text(index)
        if self._alphabet == "byte-level":
            if index in self._added:
                return text.encode()
            return b"".join(_BYTE_OF.get(char) or char.encode() for char in text)
        if len(text) == 6 and text.startswith("<0x") and text.endswith(">"):
            try:
                return bytes((int(text[3:5], 16),))
            except ValueError:
                log.debug("%r looks like a byte token and isn't", text)
        return text.replace("▁", " ").encode()


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's printable spelling of bytes: printable Latin-1 as itself, the others from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + rank): byte for rank, byte in enumerate(others)}


_BYTE_OF = {char: bytes((byte,)) for char, byte in _byte_alphabet().items()}


class _ModelHead(msgspec.Struct):
    type: str = "BPE"


class _FileHead(msgspec.Struct):
    model: _ModelHead


def _tokenizer_from_json(files: TextFiles) -> tokenizers.Tokenizer:
    data = files.bytes("tokenizer.json")
    if data is None:
        raise CheckpointError(
            "the model has no tokenizer.json; convert its tokenizer with transformers and import again"
        )
    try:
        head = msgspec.json.decode(data, type=_FileHead)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise CheckpointError(f"tokenizer.json is not valid: {error}") from error
    if head.model.type not in ("BPE", "Unigram", "WordPiece"):
        raise CheckpointError(
            f"tokenizer.json holds a {head.model.type} vocabulary; only BPE, Unigram and WordPiece can be run"
        )
    try:
        core = tokenizers.Tokenizer.from_buffer(data)
    except Exception as error:
        raise CheckpointError(f"tokenizer.json cannot be read: {error}") from error
    # A file saved by a training script may cut or fill every text.
    core.no_truncation()
    core.no_padding()
    _add_missing(core, files.json("tokenizer_config.json").get("added_tokens_decoder"))
    return core


def _add_missing(core: tokenizers.Tokenizer, declared: Any) -> None:
    """Add tokens that only `tokenizer_config.json` knows, in the order of their ids."""
    if not isinstance(declared, dict):
        return
    for key in sorted((key for key in declared if key.isdecimal()), key=int):
        entry = declared[key]
        content = token_content(entry) if isinstance(entry, dict) else None
        if not content or core.token_to_id(content) is not None:
            continue
        flags = {name: bool(entry.get(name)) for name in ("single_word", "lstrip", "rstrip", "normalized", "special")}
        core.add_tokens([tokenizers.AddedToken(content, **flags)])
        if core.token_to_id(content) != int(key):
            raise CheckpointError(
                f"tokenizer_config.json gives {content!r} the id {key}, tokenizer.json's next free id is "
                f"{core.token_to_id(content)}: the two files don't belong together"
            )


def _alphabet(core: tokenizers.Tokenizer) -> tuple[Alphabet, bool]:
    """How the vocabulary spells bytes, and whether decoding takes off a blank at the start of a text."""
    state = msgspec.json.decode(core.decoder.__getstate__()) if core.decoder is not None else {}
    steps: list[dict[str, Any]] = state.get("decoders", [state])
    kinds = {step.get("type") for step in steps}
    if "ByteLevel" in kinds:
        return "byte-level", False
    strips = any(step.get("type") == "Strip" and step.get("start", 0) > 0 for step in steps) or any(
        step.get("type") == "Metaspace"
        and step.get("prepend_scheme", "always") != "never"
        and step.get("add_prefix_space", True)
        for step in steps
    )
    return "sentencepiece", strips


def _special_id(tokenizer: Tokenizer, files: TextFiles, name: str) -> int | None:
    """A special token's id: the first file that gives one decides."""
    if files.metadata:
        return valid_id(tokenizer, files.metadata.get(f"tokenizer.ggml.{name}_token_id"))
    for file in ("generation_config.json", "config.json"):
        value = files.json(file).get(f"{name}_token_id")
        if isinstance(value, list):
            value = value[0] if value else None
        if valid_id(tokenizer, value) is not None:
            return valid_id(tokenizer, value)
    for file in ("tokenizer_config.json", "special_tokens_map.json"):
        text = token_content(files.json(file).get(f"{name}_token"))
        if text is not None and tokenizer.token_id(text) is not None:
            return tokenizer.token_id(text)
    return None


def _adds_bos(core: tokenizers.Tokenizer, files: TextFiles, bos_id: int) -> bool:
    metadata = files.metadata
    if metadata:
        default = metadata.get("tokenizer.ggml.model") in ("llama", "gemma4")
        rule = FAMILIES.get(metadata.get("tokenizer.ggml.pre", ""))
        if rule is not None:
            default = default or rule.add_bos
        return bool(metadata.get("tokenizer.ggml.add_bos_token", default))
    declared = files.json("tokenizer_config.json").get("add_bos_token")
    if isinstance(declared, bool):
        return declared
    return bool(core.encode("a", add_special_tokens=True).ids[:1] == [bos_id])
