"""What models can do: from the configuration, templates, parsers and GGUF headers."""

import json
import logging

import pytest

from arriero.store import manifests
from arriero.store.capabilities import template_capabilities
from arriero.store.manifests import ConfigBlob, Layer, Manifest
from arriero.store.store import Store
from tests.helpers.gguf_files import tokenizer_metadata, write_tiny_llama_gguf
from tests.helpers.stored import put_model

GO = "{{ if .Tools }}tools{{ end }}{{ .Prompt }}{{ if .Suffix }}{{ .Suffix }}{{ end }}{{ .Thinking }}"
ST = {"model_format": "safetensors"}
UNSAID = {"capabilities": None}
JINJA = "{% if tools %}{{ tools }}{% endif %}{{ '<think>' }}{{ '</think>' }}"


@pytest.fixture
def store(tmp_path):
    return Store(tmp_path / "store")


@pytest.mark.parametrize(
    ("layers", "config", "found"),
    [
        ({"model": b"m"}, {"capabilities": ["completion"]}, ["completion"]),
        ({"model": b"m", "template": GO.encode()}, UNSAID, ["completion", "tools", "insert", "thinking"]),
        ({"model": b"m", "template": b"{{ .Prompt }}"}, UNSAID, ["completion"]),
        ({"model": b"m", "template": JINJA.encode()}, UNSAID, ["completion", "tools", "thinking"]),
        ({"model": b"m"}, {"capabilities": ["completion"], "parser": "qwen3"}, ["completion", "tools"]),
        ({"model": b"m", "template": b"x"}, UNSAID | {"model_family": "gptoss"}, ["completion", "thinking"]),
        ({"tensor": b"t"}, ST | {"capabilities": ["completion", "vision"]}, ["completion"]),
        ({"tensor": b"t"}, ST | UNSAID, ["completion"]),
    ],
)  # fmt: skip
def test_capabilities_follow_the_configuration_and_the_template(store, layers, config, found):
    assert put_model(store, "m", layers, config=config).capabilities == found


@pytest.mark.parametrize(
    ("metadata", "found"),
    [
        ({}, ["completion"]),
        ({"llama.pooling_type": 1}, ["embedding"]),
        ({"tokenizer.chat_template": JINJA}, ["completion", "tools", "thinking"]),
    ],
)
def test_a_gguf_header_is_asked_when_nothing_else_says(store, tmp_path, metadata, found):
    write_tiny_llama_gguf(tmp_path / "a.gguf", metadata=tokenizer_metadata() | metadata)
    data = (tmp_path / "a.gguf").read_bytes()
    assert put_model(store, "m", {"model": data}, config={"capabilities": None}).capabilities == found


def test_a_damaged_model_does_not_break_a_listing(store, caplog):
    model = put_model(store, "m", {"model": b"not a gguf file at all, just bytes"}, config={"capabilities": None})
    store.blobs.remove(
        put_model(store, "n", {"model": b"n", "template": b"t"}, config={"capabilities": None})
        .manifest.layers[1]
        .digest
    )
    with caplog.at_level(logging.WARNING):
        assert [m.capabilities for m in Store(store.root).list()] == [["completion"], ["completion"]]
    assert "is damaged" in caplog.text
    assert "is incomplete" in caplog.text
    assert model.details.family == "llama"


@pytest.mark.parametrize(
    ("architecture", "tensor", "sees"),
    [
        ("Qwen3_5ForConditionalGeneration", "model.visual.patch_embed.proj.weight", True),
        ("Qwen3_5ForConditionalGeneration", "model.language_model.norm.weight", False),
        ("LlavaForConditionalGeneration", "vision_tower.patch_embed.weight", False),
    ],
)
def test_vision_is_said_of_models_whose_tower_we_load_whatever_the_list_says(store, architecture, tensor, sees):
    for listed in (["completion", "tools"], ["completion", "vision", "tools"]):
        with store.building() as build:
            config = json.dumps({"architectures": [architecture], "vision_config": {"depth": 1}}).encode()
            layers = []
            for media, data, name in ((manifests.TENSOR, b"t", tensor), (manifests.JSON, config, "config.json")):
                blob = build.add(data)
                layers.append(Layer(media_type=media, digest=blob.digest, size=blob.size, name=name))
            blob = build.add(ConfigBlob(model_format="safetensors", capabilities=listed).encode())
            top = Layer(media_type=manifests.CONFIG, digest=blob.digest, size=blob.size)
            build.put("m", Manifest.build(top, layers))
        expected = ["completion", "vision", "tools"] if sees else ["completion", "tools"]
        assert store.get("m").capabilities == expected


@pytest.mark.parametrize("mark", ["[/THINK]", "<channel|>", "<|channel|>analysis", "</seed:think>", "<think></think>"])
def test_thinking_is_seen_in_templates_of_every_kind(mark):
    assert template_capabilities("{{ '" + mark + "' }}") == ["thinking"]
    assert template_capabilities("{{ 'thinking' }}") == []
