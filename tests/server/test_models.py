"""Opening models by name: once per model, never remembering a failure."""

import asyncio
import dataclasses
import threading

import pytest

from arriero.chat.messages import Conversation, Message
from arriero.errors import CheckpointError, NotFound, UnsupportedFeature
from arriero.server import models
from arriero.server.models import Models, find
from arriero.store import manifests
from arriero.store.manifests import Layer, Manifest
from arriero.store.store import Store
from tests.helpers.stored_model import put_model


@pytest.fixture
def store(tmp_path) -> Store:
    store = Store(tmp_path)
    put_model(store)
    return store


async def test_many_requests_at_once_open_a_model_once(store, monkeypatch):
    opened, real = [], models.ModelText.open

    def slow(source, template=None, **names):
        opened.append(source)
        threading.Event().wait(0.05)
        return real(source, template, **names)

    monkeypatch.setattr(models.ModelText, "open", slow)
    cache = Models()
    found = await asyncio.gather(*(cache.open(store, "tiny") for _ in range(8)))
    assert len(opened) == 1
    assert len({id(model.text) for model in found}) == 1


async def test_one_who_leaves_does_not_take_the_model_from_the_others(store, monkeypatch):
    real = models.ModelText.open

    def slow(source, template=None, **names):
        threading.Event().wait(0.1)
        return real(source, template, **names)

    monkeypatch.setattr(models.ModelText, "open", slow)
    cache = Models()
    first = asyncio.create_task(cache.open(store, "tiny"))
    second = asyncio.create_task(cache.open(store, "tiny"))
    await asyncio.sleep(0.05)
    first.cancel()
    assert (await second).text.capabilities == ("completion",)


async def test_a_failure_is_not_remembered(store, monkeypatch):
    real, broken = models.ModelText.open, [True]

    def sometimes(source, template=None, **names):
        if broken:
            raise CheckpointError("damaged")
        return real(source, template, **names)

    monkeypatch.setattr(models.ModelText, "open", sometimes)
    cache = Models()
    with pytest.raises(CheckpointError):
        await cache.open(store, "tiny")
    broken.clear()
    assert (await cache.open(store, "tiny")).asked == "tiny"


async def test_only_the_latest_models_stay_open(store):
    for number in range(models._KEPT + 2):
        put_model(store, f"m{number}", system=f"{number}")
    cache = Models()
    for number in range(models._KEPT + 2):
        await cache.open(store, f"m{number}")
    assert len(cache._texts) == models._KEPT


async def test_a_model_made_anew_under_its_name_is_opened_anew(store):
    cache = Models()
    before = await cache.open(store, "tiny")
    put_model(store, "tiny", context_length=99)
    after = await cache.open(store, "tiny")
    assert (before.context_length, after.context_length) == (4096, 99)


async def test_a_model_without_a_template_is_told_so_in_the_log(store, caplog):
    """Wart 6: the text that reaches such a model has no turns."""
    put_model(store, "bare", template="", renderer="glimmer")
    await Models().open(store, "tiny")
    assert "has no chat template" not in caplog.text
    await Models().open(store, "bare")
    assert "bare:latest has no chat template: messages reach it as plain text" in caplog.text
    assert "stored for the renderer 'glimmer', which is not one of ours" in caplog.text


async def test_a_model_without_a_template_uses_the_renderer_it_was_stored_for(store, caplog):
    """Wart 6: models of the library keep the name of a renderer, and no template."""
    put_model(store, "named", template="", renderer="gemma4")
    model = await Models().open(store, "named")
    assert "has no chat template" not in caplog.text
    question = Conversation(messages=[Message(role="user", content="Hi")])
    assert "<|turn>user\nHi<turn|>\n<|turn>model\n" in model.text.render(question).text


async def test_a_model_with_nothing_but_a_go_template_uses_it(store):
    put_model(store, "go", template="")
    with store.building() as build:
        model = store.get("go")
        added = build.add(b"[{{ .Prompt }}]")
        layer = Layer(media_type=manifests.TEMPLATE, digest=added.digest, size=added.size)
        build.put(model.name, Manifest.build(model.manifest.config, [*model.manifest.layers, layer]))
    opened = await Models().open(store, "go")
    assert opened.text.render(Conversation(messages=[Message(role="user", content="hi")])).text == "[hi]"


def test_names_are_looked_up_as_they_are_before_a_local_suffix_is_cut(store):
    assert str(find(store, "tiny:local").name) == "tiny:latest"
    store.copy("tiny", "tiny:local")
    assert str(find(store, "tiny:local").name) == "tiny:local"
    with pytest.raises(NotFound, match="model '' not found"):
        find(store, "")


async def test_a_missing_capability_is_said_with_the_name_as_asked(store):
    model = await Models().open(store, "Tiny")
    with pytest.raises(UnsupportedFeature, match=r'^"Tiny" does not support insert$'):
        model.require("insert")


async def test_tables_that_stay_in_their_files_are_no_weights_to_make_room_for(store, monkeypatch):
    model = await Models().open(store, "tiny")
    alone = model.weight_bytes
    table = "model.language_model.layers.1.ple.ple_embedding.ngram_embedding"
    names = [f"{table}.shard_0.weight", f"{table}.shard_0.weight_scale", f"{table}.weight_scale"]
    layers = [
        Layer(media_type=manifests.TENSOR, digest="sha256:" + "0" * 64, size=10 ** (12 + i), name=name)
        for i, name in enumerate(names)
    ]
    held = model.stored.manifest
    stored = dataclasses.replace(model.stored, manifest=Manifest.build(held.config, [*held.layers, *layers]))
    larger = dataclasses.replace(model, stored=stored)
    assert larger.weight_bytes == alone + 10**14
    monkeypatch.setenv("ARRIERO_RESIDENT_TABLES", "1")
    assert larger.weight_bytes == alone + 10**12 + 10**13 + 10**14
