"""WordPiece out of GGUF metadata as out of tokenizer.json; whole texts with their marks, cut at the end; pooling."""

from __future__ import annotations

from typing import Any

import pytest
from tokenizers import Tokenizer as Core
from tokenizers import models, normalizers, pre_tokenizers, processors

from arriero.chat.embedding import EmbeddingRules
from arriero.chat.files import TextFiles
from arriero.chat.tokenizer import Tokenizer
from arriero.errors import CheckpointError
from tests.helpers.text_models import byte_level_metadata, tokenizer_of

PIECES = [
    "[PAD]",
    "[UNK]",
    "[CLS]",
    "[SEP]",
    "[MASK]",
    "hello",
    "wor",
    "##ld",
    "##s",
    "un",
    "##i",
    "##code",
    "!",
    "漢",
    "7",
]
TEXTS = [
    "hello world",
    "Hello, WORLDS!",
    "unicode ünicode",
    "漢字7",
    "",
    "  hello\t\nworld ",
    "[SEP] hello",
    "zzz hello",
]


def reference() -> Core:
    """The same vocabulary as Hugging Face's files hold it."""
    made = Core(models.WordPiece({piece: index for index, piece in enumerate(PIECES)}, unk_token="[UNK]"))
    made.normalizer = normalizers.BertNormalizer(lowercase=True)
    made.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    made.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    return made


def metadata(**changes: Any) -> dict[str, Any]:
    def spelled(piece: str) -> str:
        if piece.startswith("["):
            return piece
        return piece[2:] if piece.startswith("##") else f"▁{piece}"

    return {
        "general.architecture": "bert",
        "tokenizer.ggml.model": "bert",
        "tokenizer.ggml.tokens": [spelled(piece) for piece in PIECES],
        "tokenizer.ggml.unknown_token_id": 1,
        "tokenizer.ggml.bos_token_id": 2,
        "tokenizer.ggml.seperator_token_id": 3,
        "tokenizer.ggml.add_bos_token": True,
    } | changes


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return tokenizer_of(metadata())


@pytest.mark.parametrize("text", TEXTS)
def test_a_gguf_file_gives_the_tokens_of_the_original(tokenizer: Tokenizer, text: str) -> None:
    assert tokenizer.encode_whole(text, 100) == (reference().encode(text).ids, False)


def test_a_text_that_is_too_long_loses_its_end_and_keeps_its_marks(tokenizer: Tokenizer) -> None:
    whole, cut = tokenizer.encode_whole("hello " * 10, 12)
    assert (len(whole), cut) == (12, False)
    assert tokenizer.encode_whole("hello " * 11, 12) == (whole, True)
    assert tokenizer.encode_whole("hello", 2) == ([2, 3], True)


def test_a_byte_level_vocabulary_puts_nothing_around_a_text_unless_it_wants_a_beginning() -> None:
    plain = tokenizer_of(byte_level_metadata("qwen2"))
    ids = plain.encode("hello there", add_bos=False)
    assert plain.encode_whole("hello there", 100) == (ids, False)
    assert plain.encode_whole("hello there", 2) == (ids[:2], True)
    begun = tokenizer_of(byte_level_metadata("qwen2") | {"tokenizer.ggml.add_bos_token": True})
    assert begun.encode_whole("hello there", 2) == ([begun.bos_id, ids[0]], True)


def test_a_gguf_file_may_want_an_end_behind_a_text() -> None:
    ended = tokenizer_of(byte_level_metadata("qwen2") | {"tokenizer.ggml.add_eos_token": True})
    ids = ended.encode("hello there", add_bos=False)
    assert ended.encode_whole("hello there", 100) == ([*ids, ended.eos_id], False)
    assert ended.encode_whole("hello there", 2) == ([ids[0], ended.eos_id], True)


@pytest.mark.parametrize("key", ["unknown_token_id", "bos_token_id", "seperator_token_id"])
def test_a_mark_that_is_not_there_is_named(key: str) -> None:
    with pytest.raises(CheckpointError, match=r"_id is (99|None)"):
        tokenizer_of(metadata(**{f"tokenizer.ggml.{key}": 99}))


@pytest.mark.parametrize(
    ("held", "pooling", "refused"),
    [
        ({"general.architecture": "bert"}, "mean", ""),
        ({"general.architecture": "bert", "bert.pooling_type": 2}, "cls", ""),
        ({"general.architecture": "qwen3", "qwen3.pooling_type": 3}, "last", ""),
        ({"general.architecture": "llama"}, "last", ""),
        ({"general.architecture": "gemma3", "gemma3.pooling_type": 1}, "mean", ""),
        ({"general.architecture": "gemma-embedding"}, "mean", ""),
        ({"general.architecture": "bert", "bert.pooling_type": 4}, "mean", "pooling type is 4"),
    ],
)
def test_pooling_is_what_a_gguf_file_says(held: dict[str, Any], pooling: str, refused: str) -> None:
    rules = EmbeddingRules.read(TextFiles({}, held))
    assert rules.pooling == pooling
    assert refused in rules.refused
    assert bool(refused) == bool(rules.refused)
