"""Tokenizers from tokenizer.json: equal to transformers, special tokens, safety."""

from __future__ import annotations

import json
import threading
import unicodedata
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from arriero.chat.tokenizer import Tokenizer
from arriero.errors import CheckpointError
from arriero.source import FolderSource, LayersSource
from tests.helpers.text_models import fixture, fixture_id, folder

FAMILIES = ["qwen2", "llama3"]


@pytest.fixture(scope="module", params=FAMILIES)
def family(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def tokenizer(family: str, tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer.open(folder(tmp_path_factory.mktemp(family) / "m", family=family))


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    config = {"bos_token": None, "eos_token": "<|im_end|>", "add_bos_token": False}
    return Tokenizer.open(folder(tmp_path_factory.mktemp("qwen") / "m", tokenizer_config=config))


def test_ids_equal_those_of_transformers(tokenizer: Tokenizer, family: str) -> None:
    for case in fixture(f"tokenizer_{family}.json")["cases"]:
        assert tokenizer.encode(case["text"], add_bos=False) == case["ids"], case["text"]


def test_decoded_text_equals_that_of_transformers(tokenizer: Tokenizer, family: str) -> None:
    for case in fixture(f"tokenizer_{family}.json")["cases"]:
        assert tokenizer.decode(case["ids"]) == case["decoded"], case["text"]


def test_bytes_of_the_tokens_joined_are_the_text(qwen: Tokenizer) -> None:
    text = "ďábelské 漢字 👩‍👩‍👧 🇨🇿 \t{}\r\n<tool>"
    assert b"".join(qwen.token_bytes(index) for index in qwen.encode(text)) == text.encode()


def test_bos_comes_from_the_post_processor_when_no_file_says(tmp_path: Path) -> None:
    source = folder(tmp_path / "m", family="llama3", config={"bos_token_id": fixture_id("<|endoftext|>", "llama3")})
    described = fixture("tokenizer_llama3.json")
    tokenizer = Tokenizer.open(source)
    for case in described["cases"]:
        assert tokenizer.encode(case["text"]) == case["with_bos"]


def test_a_prompt_that_begins_with_bos_gets_no_second_one(tmp_path: Path) -> None:
    tokenizer = Tokenizer.open(
        folder(tmp_path / "m", family="llama3", config={"bos_token_id": fixture_id("<|endoftext|>", "llama3")})
    )
    assert tokenizer.encode("<|endoftext|>hello") == tokenizer.encode("hello")


def test_add_bos_false_of_the_configuration_wins_over_the_post_processor(tmp_path: Path) -> None:
    config = {"bos_token": "<|endoftext|>", "add_bos_token": False}
    tokenizer = Tokenizer.open(folder(tmp_path / "m", family="llama3", tokenizer_config=config))
    assert tokenizer.encode("hello") == tokenizer.encode("hello", add_bos=False)


def test_control_tokens_in_user_text_stay_text(qwen: Tokenizer) -> None:
    forged = qwen.encode("<|im_end|>", special=False)
    assert qwen.eos_id not in forged
    assert qwen.decode(forged) == "<|im_end|>"


def test_control_tokens_in_a_prompt_are_one_token(qwen: Tokenizer) -> None:
    assert qwen.encode("<|im_end|>") == [qwen.eos_id]


def test_threads_with_and_without_special_tokens_do_not_disturb_each_other(qwen: Tokenizer) -> None:
    text = "<|im_start|>user\nhi<|im_end|>"
    expected = {special: qwen.encode(text, special=special) for special in (True, False)}
    wrong: list[bool] = []

    def work(special: bool) -> None:
        wrong.extend(special for _ in range(200) if qwen.encode(text, special=special) != expected[special])

    threads = [threading.Thread(target=work, args=(special,)) for special in (True, False) * 2]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_the_longest_added_token_wins(qwen: Tokenizer) -> None:
    ids = qwen.encode("a<tag>xb")
    assert [qwen.token_text(index) for index in ids] == ["a", "<tag>x", "b"]


def test_ids_outside_the_vocabulary_decode_to_nothing(qwen: Tokenizer) -> None:
    assert qwen.decode([qwen.vocab_size, -1, 2**40]) == ""
    assert qwen.token_bytes(qwen.vocab_size + 5) == b""


def test_half_a_surrogate_pair_is_a_replacement_character(qwen: Tokenizer) -> None:
    assert qwen.decode(qwen.encode("a\ud800b 👧")) == "a\ufffdb 👧"


def test_nul_decodes_to_nothing(qwen: Tokenizer) -> None:
    assert qwen.decode(qwen.encode("a\0b")) == "ab"


def test_white_space_goes_to_the_next_piece_as_the_pattern_says(qwen: Tokenizer) -> None:
    def pieces(text: str) -> list[str]:
        found = [str(piece) for piece, _ in qwen._core.pre_tokenizer.pre_tokenize_str(text)]
        return [piece.replace("Ġ", " ").replace("ĉ", "\t").replace("Ċ", "\n") for piece in found]

    assert pieces("  word") == [" ", " word"]
    assert pieces("  }") == [" ", " }"]
    assert pieces("\tword") == ["\tword"]
    assert pieces("\t}") == ["\t", "}"]
    assert pieces("  1") == [" ", " ", "1"]
    assert pieces(" \nword") == [" \n", "word"]


@given(text=st.text(max_size=60).filter(lambda text: "<pad_me>" not in text))
@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_text_survives_encoding_and_decoding(qwen: Tokenizer, text: str) -> None:
    composed = unicodedata.normalize("NFC", text)
    assert qwen.decode(qwen.encode(text, special=False)) == composed.replace("\0", "")


def test_a_long_text_equals_its_parts_around_added_tokens(qwen: Tokenizer) -> None:
    text = "the llamas follow\n" * 800
    whole = qwen.encode(f"{text}<tool>{text}")
    assert whole == [*qwen.encode(text), *qwen.encode("<tool>"), *qwen.encode(text)]


def test_truncation_and_padding_saved_in_the_file_are_ignored(tmp_path: Path) -> None:
    described = fixture("tokenizer_qwen2.json")["tokenizer"]
    described["truncation"] = {"direction": "Right", "max_length": 3, "strategy": "LongestFirst", "stride": 0}
    described["padding"] = {
        "strategy": {"Fixed": 64},
        "direction": "Right",
        "pad_to_multiple_of": None,
        "pad_id": 0,
        "pad_type_id": 0,
        "pad_token": "!",
    }
    source = folder(tmp_path / "m")
    plain = Tokenizer.open(source).encode("the arriero leads the llamas")
    Path(source.path, "tokenizer.json").write_text(json.dumps(described), "utf-8")
    assert Tokenizer.open(source).encode("the arriero leads the llamas") == plain


def test_tokens_that_only_the_configuration_knows_are_added(tmp_path: Path) -> None:
    size = Tokenizer.open(folder(tmp_path / "m")).vocab_size
    config = {"added_tokens_decoder": {str(size): {"content": "<extra>", "special": True}}}
    tokenizer = Tokenizer.open(folder(tmp_path / "m", tokenizer_config=config))
    assert tokenizer.encode("<extra>") == [size]


def test_a_token_with_another_id_than_its_configuration_says_is_an_error(tmp_path: Path) -> None:
    config = {"added_tokens_decoder": {"9999": {"content": "<extra>", "special": True}}}
    with pytest.raises(CheckpointError, match="don't belong together"):
        Tokenizer.open(folder(tmp_path / "m", tokenizer_config=config))


@pytest.mark.parametrize("entry", ["²", "9999"])
def test_added_tokens_that_make_no_sense_are_passed_over(tmp_path: Path, entry: str) -> None:
    config = {"added_tokens_decoder": {entry: {"content": 5}}}
    assert Tokenizer.open(folder(tmp_path / "m", tokenizer_config=config)).encode("a")


def test_a_stored_model_of_layers_reads_the_same_files(tmp_path: Path) -> None:
    source = folder(tmp_path / "m", generation_config={"eos_token_id": fixture_id("<|im_end|>")})
    files = {name: str(Path(source.path, name)) for name in ("tokenizer.json", "generation_config.json")}
    tokenizer = Tokenizer.open(LayersSource(tensors={}, files=files))
    assert tokenizer.stop_ids == {fixture_id("<|im_end|>")}


def test_a_vocabulary_of_words_alone_is_refused_by_name(tmp_path: Path) -> None:
    kind = "WordLevel"
    source = folder(tmp_path / "m")
    content = {"model": {"type": kind, "vocab": {"a": 0}, "unk_token": "a"}}
    Path(source.path, "tokenizer.json").write_text(json.dumps(content), "utf-8")
    with pytest.raises(CheckpointError, match=kind):
        Tokenizer.open(source)


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"model": {"type": "BPE"}}', "\x00", '{"model": 3}'])
def test_a_damaged_file_is_a_checkpoint_error(tmp_path: Path, content: str) -> None:
    source = folder(tmp_path / "m")
    Path(source.path, "tokenizer.json").write_text(content, "utf-8")
    with pytest.raises(CheckpointError):
        Tokenizer.open(source)


def test_a_folder_without_tokenizer_says_so(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"no tokenizer\.json"):
        Tokenizer.open(FolderSource(str(tmp_path)))


def test_a_folder_that_is_not_there_is_a_checkpoint_error(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="not a folder"):
        Tokenizer.open(FolderSource(str(tmp_path / "nowhere")))
