"""Tokenizers from GGUF metadata: equal to tokenizer.json and to sentencepiece."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from arriero.chat.pretokenizers import FAMILIES
from arriero.chat.vocabulary import merges_from_scores
from arriero.errors import CheckpointError
from tests.helpers.text_models import byte_level_metadata, fixture, tokenizer_of


@pytest.mark.parametrize(("pre", "family"), [("qwen2", "qwen2"), ("llama-bpe", "llama3")])
def test_byte_level_ids_equal_those_of_the_folder(pre: str, family: str) -> None:
    tokenizer = tokenizer_of(byte_level_metadata(pre, family))
    for case in fixture(f"tokenizer_{family}.json")["cases"]:
        # GGUF doesn't record which tokens swallow the blanks beside them.
        if "<pad_me>" not in case["text"]:
            assert tokenizer.encode(case["text"], add_bos=False) == case["ids"], case["text"]


@pytest.mark.parametrize("named", [None, "default", "qwen2"])
def test_the_library_s_gpt_oss_goes_by_its_architecture(named: str | None, caplog: pytest.LogCaptureFixture) -> None:
    """Words of its rule take a capital of their own: another rule joins them."""
    text = "camelCaseWords don't 12345   x\n\n"
    expected = tokenizer_of(byte_level_metadata("gpt-4o")).encode(text, add_bos=False)
    found = tokenizer_of(byte_level_metadata(named) | {"general.architecture": "gptoss"}).encode(text, add_bos=False)
    assert found == expected
    assert not caplog.records


@pytest.mark.parametrize("name", ["sentencepiece.json", "sentencepiece_prefix.json"])
def test_sentencepiece_ids_equal_those_of_sentencepiece(name: str) -> None:
    described = fixture(name)
    tokenizer = tokenizer_of(described["metadata"])
    for case in described["cases"]:
        # After an added token the library puts the blank in front again, as llama.cpp does; sentencepiece doesn't.
        if name == "sentencepiece_prefix.json" and ("<tool>" in case["text"] or "\n" in case["text"]):
            continue
        assert tokenizer.encode(case["text"], add_bos=False, special=False) == case["ids"], case["text"]


@pytest.mark.parametrize("name", ["sentencepiece.json", "sentencepiece_prefix.json"])
def test_sentencepiece_text_survives(name: str) -> None:
    described = fixture(name)
    tokenizer = tokenizer_of(described["metadata"])
    for case in described["cases"]:
        assert tokenizer.decode(case["ids"]) == case["decoded"], case["text"]


def test_a_continuation_keeps_its_leading_blank() -> None:
    tokenizer = tokenizer_of(fixture("sentencepiece_prefix.json")["metadata"])
    ids = tokenizer.encode("the llamas", add_bos=False)
    assert tokenizer.decode(ids) == "the llamas"
    assert tokenizer.decode(ids, start=False) == " the llamas"


def test_sentencepiece_with_merges_equals_sentencepiece() -> None:
    described = fixture("sentencepiece.json")
    metadata = dict(described["metadata"])
    tokens, scores, types = (metadata[f"tokenizer.ggml.{name}"] for name in ("tokens", "scores", "token_type"))
    merges = merges_from_scores(tokens, scores, types, {token: index for index, token in enumerate(tokens)})
    del metadata["tokenizer.ggml.scores"]
    metadata |= {"tokenizer.ggml.model": "gemma4", "tokenizer.ggml.merges": [" ".join(pair) for pair in merges]}
    tokenizer = tokenizer_of(metadata)
    assert tokenizer.add_bos
    for case in described["cases"]:
        assert tokenizer.encode(case["text"], add_bos=False, special=False) == case["ids"], case["text"]


def test_byte_tokens_are_bytes() -> None:
    tokenizer = tokenizer_of(fixture("sentencepiece.json")["metadata"])
    ids = tokenizer.encode("\U0001f9e2", add_bos=False)
    assert [tokenizer.token_bytes(index) for index in ids] == [b"\xf0", b"\x9f", b"\xa7", b"\xa2"]


def test_sentencepiece_files_get_bos_by_default() -> None:
    metadata = fixture("sentencepiece.json")["metadata"]
    tokenizer = tokenizer_of(metadata)
    assert tokenizer.encode("a")[0] == metadata["tokenizer.ggml.bos_token_id"]
    assert not tokenizer_of(metadata | {"tokenizer.ggml.add_bos_token": False}).add_bos


def test_llama3_files_get_bos_by_default_and_qwen_files_do_not() -> None:
    assert tokenizer_of(byte_level_metadata("llama-bpe")).add_bos
    assert not tokenizer_of(byte_level_metadata("qwen2")).add_bos


def test_runs_of_digits_are_cut_as_the_family_does() -> None:
    def pieces(pre: str, text: str) -> list[str]:
        return [piece for piece, _ in FAMILIES[pre].pre_tokenizer().pre_tokenize_str(text)]

    assert pieces("llama-bpe", "0000000") == ["000", "000", "0"]
    assert pieces("qwen2", "000") == ["0", "0", "0"]
    assert pieces("smollm", "a12") == ["a", "1", "2"]
    assert pieces("gpt-2", "a12 34") == ["a", "12", "Ġ34"]
    assert pieces("deepseek-v3", "1234x") == ["123", "4", "x"]
    assert pieces("tekken", "12") == ["1", "2"]


@pytest.mark.parametrize("pre", sorted(FAMILIES))
def test_no_family_loses_text(pre: str) -> None:
    tokenizer = tokenizer_of(byte_level_metadata(pre))
    for case in fixture("tokenizer_qwen2.json")["cases"]:
        text = case["text"]
        # Composed forms come out of families that compose; everything else must be as it went in.
        if "\u0301" not in text and "<pad_me>" not in text:
            assert tokenizer.decode(tokenizer.encode(text, add_bos=False)) == text


def test_cased_families_cut_between_cases() -> None:
    pieces = [piece for piece, _ in FAMILIES["gpt-4o"].pre_tokenizer().pre_tokenize_str("camelCase HTTPServer don't")]
    assert pieces == ["camel", "Case", "ĠHTTPServer", "Ġdon't"]


def test_an_unknown_family_is_a_warning_that_names_it(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        tokenizer = tokenizer_of(byte_level_metadata("alpaca-7"))
    assert "alpaca-7" in caplog.text
    assert tokenizer.decode(tokenizer.encode("it works 123")) == "it works 123"


def test_a_missing_family_is_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        tokenizer_of(byte_level_metadata(None))
    assert "doesn't name its pre-tokenizer" in caplog.text


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tokenizer.ggml.model": "t5"}, "t5"),
        ({"tokenizer.ggml.model": None}, "None"),
        ({"tokenizer.ggml.tokens": []}, "tokens"),
        ({"tokenizer.ggml.tokens": [1, 2]}, "list of str"),
        ({"tokenizer.ggml.merges": ["ab"]}, "merges"),
        ({"tokenizer.ggml.token_type": [1]}, "token_type"),
    ],
)
def test_wrong_byte_level_metadata_is_an_error_that_names_the_key(change: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        tokenizer_of(byte_level_metadata("qwen2") | change)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tokenizer.ggml.scores": [0.0]}, "scores"),
        ({"tokenizer.ggml.unknown_token_id": 10**6}, "unknown_token_id"),
        (
            {f"tokenizer.ggml.{key}": [item] for key, item in (("tokens", "a" * 500_000), ("scores", 0.0))}
            | {"tokenizer.ggml.token_type": [1], "tokenizer.ggml.unknown_token_id": 0},
            "piece 0 has 500000 characters",
        ),
    ],
)
def test_wrong_sentencepiece_metadata_is_an_error_that_names_the_key(change: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        tokenizer_of(fixture("sentencepiece.json")["metadata"] | change)


def test_a_vocabulary_without_merges_is_an_error() -> None:
    metadata = byte_level_metadata("qwen2")
    del metadata["tokenizer.ggml.merges"]
    with pytest.raises(CheckpointError, match="merges"):
        tokenizer_of(metadata)
