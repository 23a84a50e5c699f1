"""Filling in the middle: the tokens with which a code model is shown a gap."""

from __future__ import annotations

from dataclasses import dataclass

from arriero.chat.files import TextFiles
from arriero.chat.stops import valid_id
from arriero.chat.tokenizer import Tokenizer

_SPELLINGS = (
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),
    ("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),
    ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),
    ("<|fim_begin|>", "<|fim_hole|>", "<|fim_end|>"),
    ("<|code_prefix|>", "<|code_suffix|>", "<|code_middle|>"),
    ("▁<PRE>", "▁<SUF>", "▁<MID>"),
)
_ENDINGS = (
    "<|fim_pad|> <|repo_name|> <|file_sep|> <|cursor|> <fim_pad> <reponame> <filename> <file_sep> <fim-pad> ▁<EOT>"
).split()
_GGUF_ENDINGS = ("fim_pad", "fim_rep", "fim_sep", "eot")


@dataclass(frozen=True, slots=True)
class FimTokens:
    """Ids of the three markers, in the order prefix, suffix, middle; and what ends the filling."""

    prefix: int
    suffix: int
    middle: int
    endings: frozenset[int]

    @classmethod
    def find(cls, tokenizer: Tokenizer, files: TextFiles) -> FimTokens | None:
        """The markers that a GGUF file names, else those with a known spelling; None when the model has none."""
        metadata = files.metadata
        named = [metadata.get(f"tokenizer.ggml.fim_{name}_token_id") for name in ("pre", "suf", "mid")]
        ids = [valid_id(tokenizer, value) for value in named]
        candidates = [ids, *([tokenizer.token_id(text) for text in spelling] for spelling in _SPELLINGS)]
        for prefix, suffix, middle in candidates:
            if prefix is not None and suffix is not None and middle is not None:
                return cls(prefix, suffix, middle, _endings(tokenizer, files) - {prefix, suffix, middle})
        return None

    def encode(self, tokenizer: Tokenizer, prompt: str, suffix: str) -> list[int]:
        """The prompt that asks for the text between `prompt` and `suffix`."""
        start = [tokenizer.bos_id] if tokenizer.add_bos and tokenizer.bos_id is not None else []
        before = tokenizer.encode(prompt, add_bos=False, special=False)
        after = tokenizer.encode(suffix, add_bos=False, special=False)
        return [*start, self.prefix, *before, self.suffix, *after, self.middle]


def _endings(tokenizer: Tokenizer, files: TextFiles) -> frozenset[int]:
    found = [valid_id(tokenizer, files.metadata.get(f"tokenizer.ggml.{name}_token_id")) for name in _GGUF_ENDINGS]
    found += [tokenizer.token_id(text) for text in _ENDINGS]
    return frozenset(index for index in found if index is not None)
