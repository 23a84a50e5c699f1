"""Models made of models, and what a request may and may not say."""

import json

import pytest

from arriero.create.create import create
from arriero.create.request import CreateRequest
from arriero.errors import (
    ArrieroError,
    InvalidRequest,
    NotFound,
    StoreError,
    TemplateError,
    UnsupportedFeature,
)
from arriero.store.store import Store
from tests.helpers.checkpoint_folder import upload, write_folder
from tests.helpers.gguf_files import write_tiny_llama_gguf
from tests.helpers.unchecked import unchecked


@pytest.fixture
def store(tmp_path):
    store = Store(tmp_path / "store")
    folder = tmp_path / "g"
    folder.mkdir()
    write_tiny_llama_gguf(folder / "tiny.gguf")
    request = CreateRequest(
        model="base",
        files=upload(store, folder),
        system="old",
        license="one",
        parameters={"temperature": 0.5, "stop": ["a"]},
        messages=[{"role": "user", "content": "hi"}],
        requires="v0.19.0",
    )
    create(store, request, lambda status: None, check=unchecked)
    return store


def make(store, **fields):
    seen = []
    fields = {"model": "m", "from_": "base"} | fields
    return create(store, CreateRequest(**fields), seen.append), [status["status"] for status in seen]


def test_a_base_gives_its_layers_and_everything_that_is_not_said(store):
    base = store.get("base")
    model, statuses = make(store)
    assert [layer.digest for layer in model.manifest.layers] == [layer.digest for layer in base.manifest.layers]
    assert {layer.from_ for layer in model.manifest.layers} == {"base:latest"}
    assert (model.system, model.params, model.config.requires) == ("old", {"temperature": 0.5, "stop": ["a"]}, "0.19.0")
    assert model.details.parent_model == "base:latest"
    assert statuses[-2:] == ["writing manifest", "success"]
    assert all(status.startswith("using existing layer sha256:") for status in statuses[:-2])


def test_what_a_message_says_besides_its_text_is_left_out_with_a_warning(store, caplog):
    model, _ = make(store, messages=[{"role": "user", "content": "hi", "images": ["aGk="], "thinking": ""}])
    assert model.messages == [{"role": "user", "content": "hi"}]
    assert "of messages only role and content are stored; left out: images" in caplog.text


def test_texts_replace_licences_append_and_parameters_merge(store):
    model, _ = make(
        store,
        system="new",
        license=["two", " ", "three"],
        parameters={"stop": "b", "top_k": 3.0},
        messages=[{"role": "assistant", "content": "yes"}],
        template="{{ messages[0].content }}",
        renderer="r",
        parser="qwen3.5",
    )
    assert (model.system, model.licenses) == ("new", ["one", "two", "three"])
    assert model.params == {"temperature": 0.5, "stop": ["b"], "top_k": 3}
    assert model.messages == [{"role": "assistant", "content": "yes"}]
    assert model.template == "{{ messages[0].content }}"
    assert (model.renderer, model.parser) == ("r", "qwen3.5")
    assert {"completion", "tools", "thinking"} <= set(model.capabilities)
    assert store.get("base").system == "old"


def test_a_model_can_be_made_from_itself(store):
    model, _ = make(store, model="base", system="newer")
    assert model.system == "newer"
    assert store.verify() == []


def test_info_overrides_the_configuration(store):
    model, _ = make(
        store,
        info={
            "capabilities": ["completion", "insert"],
            "parameter_size": "9B",
            "quantization_level": "Q1",
            "context_length": 7,
        }
        | {"model_family": "f", "base_name": "b"},
    )
    details = model.details
    assert (details.parameter_size, details.quantization_level, details.context_length) == ("9B", "Q1", 7)
    assert (details.family, details.families, model.config.base_name) == ("f", ["f"], "b")
    assert model.capabilities[:2] == ["completion", "insert"]


def test_a_safetensors_model_can_be_a_base_too(store, tmp_path):
    files = upload(store, write_folder(tmp_path / "m"))
    create(store, CreateRequest(model="st", files=files), lambda status: None)
    model, statuses = make(store, from_="st", system="s")
    assert model.source() == store.get("st").source()
    assert "using 11 existing tensor layers" in statuses
    assert len(statuses) < 15


def test_a_base_of_another_store_is_adopted(store, tmp_path):
    mine = Store(tmp_path / "mine", [store.root])
    make(mine, system="s")
    store.delete("base")
    assert mine.verify() == []


def test_a_damaged_base_is_refused(store):
    layer = store.get("base").manifest.layers[0]
    store.blobs.path(layer.digest).write_bytes(b"?")
    with pytest.raises(StoreError, match="is damaged"):
        make(store)


def test_the_old_modelfile_field_is_folded_in_under_the_others(store):
    text = 'FROM base\nSYSTEM from the text\nPARAMETER stop x\nPARAMETER stop "y z"\nPARAMETER top_k 3\nMESSAGE user q'
    model, _ = make(store, from_="", modelfile=text, system="own", parameters={"top_k": 5})
    assert model.system == "own"
    assert model.params == {"temperature": 0.5, "stop": ["x", "y z"], "top_k": 5}
    assert model.messages == [{"role": "user", "content": "q"}]


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("FROM ./model.gguf", "upload them"),
        ("FROM /etc/passwd", "upload them"),
        ("FROM a\nFROM b", "several FROM"),
        ("FROM base\nADAPTER x", "upload it and name it in 'adapters'"),
        ("FROM base\nPARAMETER nope 1", r"\(line 2, column 1\): unknown parameter 'nope'"),
        ("FROM base\nPARAMETER top_k many", r"\(line 2, column 1\): invalid int value \[many\]"),
    ],
)
def test_a_modelfile_field_cannot_name_files(store, text, match):
    with pytest.raises(InvalidRequest, match=match):
        make(store, from_="", modelfile=text)


def test_a_template_with_triple_quotes_goes_through(store):
    text = 'a """\n{{ messages[0].content }} """\nb'
    assert make(store, template=text)[0].template == text


def test_a_go_template_is_taken_and_a_broken_one_refused(store, tmp_path):
    go = "{{ if .System }}{{ .System }}{{ end }}{{ .Prompt }}"
    assert make(store, template=go)[0].template == go
    files = upload(store, write_folder(tmp_path / "m", template=False))
    create(store, CreateRequest(model="bare", files=files, template=go), lambda status: None)
    files = upload(store, tmp_path / "m")
    with pytest.raises(TemplateError, match="line 1: the function shout is unknown"):
        create(
            store, CreateRequest(model="broken", files=files, template=go + "{{ shout .Prompt }}"), lambda status: None
        )


DIGEST = "sha256:" + "0" * 64


@pytest.mark.parametrize(
    ("fields", "error", "match"),
    [
        ({"model": "a.b/c"}, InvalidRequest, "^invalid model name"),
        ({"model": ""}, InvalidRequest, "^invalid model name"),
        ({"from_": ""}, InvalidRequest, "^neither 'from' or 'files' was specified"),
        ({"from_": "nope"}, NotFound, "model 'nope' not found"),
        ({"files": {"a.gguf": DIGEST}}, InvalidRequest, "both 'from' and 'files'"),
        ({"from_": "", "files": {"a.gguf": DIGEST}}, InvalidRequest, "'a.gguf' is blob .* not been uploaded"),
        ({"from_": "", "files": {"../a.gguf": DIGEST}}, InvalidRequest, "^file path must be relative"),
        ({"from_": "", "files": {".": DIGEST}}, InvalidRequest, "^file path must be relative"),
        ({"from_": "", "files": {"/a.gguf": DIGEST}}, InvalidRequest, "^file path must be relative"),
        ({"from_": "", "files": {"C:\\a.gguf": DIGEST}}, InvalidRequest, "^file path must be relative"),
        ({"from_": "", "files": {"a.gguf": "sha256:0"}}, InvalidRequest, "^invalid digest format"),
        ({"adapters": {"a": DIGEST}}, InvalidRequest, "'a' is blob .* not been uploaded"),
        ({"draft_files": {"a": DIGEST}}, InvalidRequest, "'a' is blob .* not been uploaded"),
        ({"quantize": "int5"}, InvalidRequest, "quantisation 'int5' is not known; it can be nvfp4, .*"),
        ({"quantization": "q5_K_M"}, InvalidRequest, "'q5_K_M' is not known"),
        ({"draft_quantize": "int4"}, InvalidRequest, "--draft-quantize requires a DRAFT model"),
        ({"remote_host": "http://x"}, UnsupportedFeature, "'remote_host'"),
        ({"path": "/etc"}, InvalidRequest, "'path' is not accepted"),
        ({"parameters": {"nope": 1}}, InvalidRequest, "unknown option 'nope'"),
        ({"parameters": {"top_k": "x"}}, InvalidRequest, 'option "top_k" must be of type integer'),
        ({"messages": [{"role": "tool", "content": "x"}]}, InvalidRequest, "message role must be one of"),
        ({"messages": [{"role": "user", "content": 3}]}, InvalidRequest, "must be text"),
        ({"requires": "new"}, InvalidRequest, "requires must be a version"),
        ({"info": {"nope": 1}}, InvalidRequest, "unknown info field"),
        (
            {"info": {"context_length": -1}},
            InvalidRequest,
            'info field "context_length" must be a non-negative integer',
        ),
        (
            {"info": {"context_length": 1 << 63}},
            InvalidRequest,
            'info field "context_length" must be a non-negative integer of 64 bits',
        ),
        ({"info": {"base_name": 1}}, InvalidRequest, 'info field "base_name" must be a string'),
        ({"info": {"capabilities": "x"}}, InvalidRequest, 'info field "capabilities" must be a list'),
        ({"template": "{% if %}"}, TemplateError, "template"),
    ],
)
def test_what_cannot_be_honoured_is_refused_and_named(store, fields, error, match):
    before = {entry.name for entry in store.blobs.files()}
    with pytest.raises(error, match=match) as caught:
        make(store, **fields)
    assert isinstance(caught.value, ArrieroError)
    assert {entry.name for entry in store.blobs.files()} == before
    assert [str(model.name) for model in store.list()] == ["base:latest"]


def test_the_configuration_blob_is_what_other_programs_read(store):
    blob = json.loads(store.blobs.read(store.get("base").manifest.config.digest))
    assert {"model_format", "model_family", "model_families", "model_type", "file_type", "architecture", "os"} <= set(
        blob
    )
    assert (blob["architecture"], blob["os"]) == ("amd64", "linux")
