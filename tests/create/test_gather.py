"""The client's half: what FROM means, what is sent, what is refused before it is hashed."""

import json
import os

import pytest

from arriero.create.gather import gather
from arriero.errors import CheckpointError, InvalidRequest, ModelfileError, UnsupportedArchitecture
from arriero.modelfile import parse
from tests.helpers.checkpoint_folder import blob_name, tensors, write_folder
from tests.helpers.gguf_files import write_tiny_llama_gguf

Bad = InvalidRequest


def gathered(text, folder):
    return gather(parse(text), folder)


def files(text, folder):
    return set(gathered(text, folder).body["files"])


def test_a_folder_brings_its_weights_and_what_lies_beside_them(tmp_path):
    folder = write_folder(tmp_path / "my model")
    (folder / "README.md").write_text("x")
    found = gathered("FROM ./my model", tmp_path)
    assert set(found.body["files"]) == {
        "config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja",
        "model.safetensors",
    }  # fmt: skip
    digest = found.body["files"]["model.safetensors"]
    assert digest == blob_name(folder / "model.safetensors")
    assert found.uploads[digest] == folder / "model.safetensors"


def test_instructions_become_typed_fields(tmp_path):
    text = (
        'FROM base\nSYSTEM s\nTEMPLATE t\nPARAMETER stop one\nPARAMETER stop "two "\nPARAMETER temperature 1\n'
        "PARAMETER seed 7\nPARAMETER use_mmap true\nPARAMETER mirostat 1\nMESSAGE user hi\nLICENSE a\nLICENSE b\n"
        "RENDERER r\nPARSER p\nREQUIRES 0.19.0\n"
    )
    found = gathered(text, tmp_path)
    assert found.uploads == {}
    assert found.body == {
        "from": "base",
        "system": "s",
        "template": "t",
        "parameters": {"stop": ["one", "two "], "temperature": 1.0, "seed": 7, "use_mmap": True},
        "messages": [{"role": "user", "content": "hi"}],
        "license": ["a", "b"],
        "renderer": "r",
        "parser": "p",
        "requires": "0.19.0",
    }


def test_a_single_gguf_file_is_sent_alone(tmp_path):
    write_tiny_llama_gguf(tmp_path / "tiny.gguf")
    write_folder(tmp_path)
    assert files("FROM tiny.gguf", tmp_path) == {"tiny.gguf"}
    os.rename(tmp_path / "tiny.gguf", tmp_path / "renamed")
    assert files("FROM ./renamed", tmp_path) == {"renamed"}


def test_a_single_safetensors_file_of_any_name_is_a_whole_model(tmp_path):
    write_folder(tmp_path / "m", {"llama.safetensors": tensors()})
    assert "model.safetensors" in files("FROM m/llama.safetensors", tmp_path)
    (tmp_path / "m" / "config.json").unlink()
    with pytest.raises(InvalidRequest, match=r"no config.json beside it; FROM needs the model's whole folder"):
        gathered("FROM m/llama.safetensors", tmp_path)


def test_one_shard_of_several_is_no_model_but_the_index_is(tmp_path):
    values = tensors()
    names = sorted(values)
    shards = {
        "model-1.safetensors": {n: values[n] for n in names[:5]},
        "model-2.safetensors": {n: values[n] for n in names[5:]},
    }
    write_folder(tmp_path / "m", shards, index=True)
    with pytest.raises(InvalidRequest, match=r"is one of several files of a model; use its folder"):
        gathered("FROM m/model-1.safetensors", tmp_path)
    assert {"model-1.safetensors", "model-2.safetensors"} < files("FROM m/model.safetensors.index.json", tmp_path)


def test_safetensors_win_over_gguf_in_one_folder(tmp_path):
    write_folder(tmp_path / "m")
    write_tiny_llama_gguf(tmp_path / "m" / "tiny.gguf")
    assert "tiny.gguf" not in files("FROM m", tmp_path)
    assert "model.safetensors" in files("FROM m", tmp_path)


def test_a_home_folder_and_a_link_are_followed(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    write_folder(tmp_path / "x")
    (tmp_path / "link").symlink_to(tmp_path / "x")
    assert files("FROM ~/x", tmp_path / "x") == files(f"FROM {tmp_path}/link", tmp_path)


def test_a_file_that_leaves_the_folder_is_insecure(tmp_path):
    folder = write_folder(tmp_path / "m")
    (tmp_path / "secret.json").write_text("{}")
    (folder / "extra.json").symlink_to(tmp_path / "secret.json")
    with pytest.raises(InvalidRequest, match=r"^insecure path: .*extra.json is a link to .*secret.json"):
        gathered("FROM m", tmp_path)


def test_hugging_faces_cache_links_into_its_own_blobs(tmp_path):
    real = write_folder(tmp_path / "models--a--b" / "blobs")
    snapshot = tmp_path / "models--a--b" / "snapshots" / "0123"
    snapshot.mkdir(parents=True)
    for path in real.iterdir():
        (snapshot / path.name).symlink_to(path)
    assert "model.safetensors" in files(f"FROM {snapshot}", tmp_path)


def test_parts_of_a_gguf_model_in_a_cache_of_hashes_are_found_by_their_links(tmp_path):
    blobs, snapshot = tmp_path / "models--a--b" / "blobs", tmp_path / "models--a--b" / "snapshots" / "0123"
    blobs.mkdir(parents=True)
    snapshot.mkdir(parents=True)
    parts = [f"x-0000{n}-of-00002.gguf" for n in (1, 2)]
    for number, name in enumerate(parts):
        metadata = {"split.count": 2, "split.no": number}
        write_tiny_llama_gguf(blobs / f"hash{number}", metadata=metadata)
        (snapshot / name).symlink_to(blobs / f"hash{number}")
    with pytest.raises(CheckpointError, match=r"x-00002-of-00002.gguf: tensor .* is in an earlier part"):
        gathered(f"FROM {snapshot}", tmp_path)
    with pytest.raises(CheckpointError, match=r"x-00002-of-00002.gguf: tensor .* is in an earlier part"):
        gathered(f"FROM {snapshot}/{parts[1]}", tmp_path)


@pytest.mark.parametrize(
    ("make", "text", "error", "match"),
    [
        (lambda p: None, "FROM .", Bad, r"found nothing, expected config.json with model\*.safetensors"),
        (lambda p: (p / "a.txt").write_text("x"), "FROM .", Bad, r"found a.txt, expected"),
        (lambda p: write_folder(p / "sub"), "FROM .", Bad, r"sub/ holds model.safetensors: FROM that folder"),
        (lambda p: None, "FROM ./nope", Bad, r"there is no file or folder at"),
        (lambda p: None, "FROM nope/", Bad, r"there is no file or folder at"),
        (lambda p: None, "FROM nope.gguf", Bad, r"there is no file or folder at"),
        (lambda p: (p / "l").symlink_to(p / "gone"), "FROM l", Bad, r"a link to .*gone, which does not"),
        (lambda p: (p / "a.gguf").write_text("x"), "FROM a.gguf", Bad, r"neither a GGUF file nor safetensors"),
        (lambda p: (p / "config.json").write_text("{}"), "FROM config.json", Bad, r"is a JSON file, not weights"),
        (lambda p: (p / "a.gguf").write_bytes(b"GGUF"), "FROM a.gguf", CheckpointError, r"^a.gguf: 4 bytes are"),
        (
            lambda p: (p / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1"),
            "FROM .", Bad, r"model.safetensors is a Git LFS pointer",
        ),
        (lambda p: (p / "pytorch_model.bin").write_bytes(b"\x80\x02x"), "FROM .", Bad, r"holds PyTorch weights"),
        (lambda p: (p / "consolidated.safetensors").write_bytes(b"x"), "FROM .", Bad, r"maker's own tensor names"),
        (
            lambda p: (p / "model.safetensors").write_bytes(b"\x02\0\0\0\0\0\0\0{}"),
            "FROM .", Bad, r"has model.safetensors but no config.json",
        ),
        (
            lambda p: write_folder(p, config={"architectures": ["Qwen3ForCausalLN"]}),
            "FROM .", UnsupportedArchitecture, r"Did you mean Qwen3ForCausalLM",
        ),
        (
            lambda p: write_tiny_llama_gguf(p / "x-00001-of-00002.gguf"),
            "FROM x-00001-of-00002.gguf", CheckpointError, r"x-00002-of-00002.gguf",
        ),
        (
            lambda p: [write_tiny_llama_gguf(p / f"{n}.gguf") for n in "ab"],
            "FROM .", Bad, r"several GGUF models \(a.gguf, b.gguf\); FROM one",
        ),
        (lambda p: write_folder(p), "FROM .\nADAPTER a", Bad, r"^ADAPTER a: there is no file or folder at"),
        (lambda p: write_folder(p), "FROM .\nADAPTER .\nADAPTER .", Bad, r"only one adapter is currently supported"),
        (lambda p: write_folder(p), "FROM .\nADAPTER .", Bad, r"^an adapter is adapter_config.json and one of"),
        (lambda p: write_folder(p), "FROM .\nDRAFT .", UnsupportedArchitecture, r"^draft model LlamaForCausalLM"),
        (lambda p: write_folder(p), "FROM .\nDRAFT d\nDRAFT e", Bad, r"^DRAFT d and DRAFT e: a model has one draft"),
        (lambda p: write_folder(p), "FROM .\nDRAFT ./d", Bad, r"^DRAFT ./d: there is no file or folder at"),
        (lambda p: write_folder(p), "FROM .\nFROM base", Bad, r"must be the only FROM"),
        (lambda p: None, "FROM a\nFROM b", Bad, r"must be the only FROM"),
        (lambda p: None, "FROM a\nPARAMETER top_kk 1", ModelfileError, r"^\(line 2, column 1\): unknown parameter"),
    ],
)  # fmt: skip
def test_what_is_no_model_is_explained(tmp_path, make, text, error, match):
    make(tmp_path)
    with pytest.raises(error, match=match):
        gathered(text, tmp_path)


def test_a_gguf_file_beside_pytorch_weights_is_taken(tmp_path):
    write_tiny_llama_gguf(tmp_path / "tiny.gguf")
    (tmp_path / "pytorch_model.bin").write_bytes(b"\x80\x02x")
    assert files("FROM .", tmp_path) == {"tiny.gguf"}


def test_hashing_is_reported(tmp_path):
    write_folder(tmp_path)
    seen = []
    gather(parse("FROM ."), tmp_path, lambda *step: seen.append(step))
    size = (tmp_path / "model.safetensors").stat().st_size
    assert ("model.safetensors", size, size) in seen


def test_the_body_is_plain_json(tmp_path):
    write_folder(tmp_path)
    assert json.loads(json.dumps(gathered("FROM .\nPARAMETER stop x", tmp_path).body))
