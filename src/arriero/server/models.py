"""From the name in a request to a stored model and what it takes to talk to it, opened once per model."""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from dataclasses import dataclass

from arriero.chat.model_text import ModelText
from arriero.errors import NotFound, UnsupportedFeature
from arriero.model.architectures import loaded_bytes
from arriero.source import ModelSource
from arriero.store import manifests
from arriero.store.model import StoredModel
from arriero.store.store import Store

log = logging.getLogger(__name__)

_KEPT = 8
"""Models whose text side stays open: a large vocabulary takes some hundred MB and half a second to read."""

_LOCAL = ":local"


@dataclass(frozen=True, slots=True)
class OpenModel:
    """A stored model with its tokenizer, template and parser."""

    asked: str
    """The name as the request gave it, which replies and messages repeat."""
    stored: StoredModel
    source: ModelSource
    text: ModelText

    @property
    def context_length(self) -> int:
        """The model's own limit in tokens; 0 when its files don't say."""
        return self.text.context_length

    @property
    def weight_bytes(self) -> int:
        """Bytes that the weights take once they are loaded, as far as their layers' names and sizes tell."""
        return weight_bytes(self.stored)

    def can(self, capability: str) -> bool:
        """Whether the model has a capability and we can make use of it (`completion`, `tools`, `thinking`, …)."""
        return capability in self.text.capabilities

    def require(self, capability: str, what: str | None = None) -> None:
        """Raise UnsupportedFeature `"<model>" does not support <what>` unless the model has the capability."""
        if not self.can(capability):
            raise UnsupportedFeature(f'"{self.asked}" does not support {what or capability}')


def weight_bytes(stored: StoredModel) -> int:
    """Bytes that a model's weights take once they are loaded, as far as their layers' names and sizes tell.

    The experts of an FP8 model are in layers of many, and are decoded to twice their size as its other matrices are.
    """
    float8 = stored.config.file_type.lower() == "fp8"
    layers = stored.manifest.of(manifests.TENSOR, manifests.MODEL)
    return loaded_bytes({layer.name: layer.size << (float8 and layer.name.endswith(".experts")) for layer in layers})


class Models:
    """The opened models, the least recently used forgotten first."""

    def __init__(self) -> None:
        self._texts: OrderedDict[str, asyncio.Task[ModelText]] = OrderedDict()

    async def open(self, store: Store, name: str) -> OpenModel:
        """The model of a name; raises NotFound, InvalidRequest for a malformed name, StoreError, CheckpointError and
        UnsupportedFeature for a model that we don't run.
        """
        stored = await asyncio.to_thread(find, store, name)
        source = await asyncio.to_thread(stored.source)
        return OpenModel(name, stored, source, await self._text(stored, source))

    async def _text(self, stored: StoredModel, source: ModelSource) -> ModelText:
        key = stored.digest
        task = self._texts.get(key)
        if task is None:
            task = asyncio.create_task(asyncio.to_thread(_open_text, stored, source))
            task.add_done_callback(lambda done: self._forget_failed(key, done))
            self._texts[key] = task
            if len(self._texts) > _KEPT:
                self._texts.popitem(last=False)
        self._texts.move_to_end(key)
        # Shielded: the one who asked first may leave while others wait for the same model.
        return await asyncio.shield(task)

    def _forget_failed(self, key: str, task: asyncio.Task[ModelText]) -> None:
        if (task.cancelled() or task.exception() is not None) and self._texts.get(key) is task:
            del self._texts[key]


def _open_text(stored: StoredModel, source: ModelSource) -> ModelText:
    text = ModelText.open(source, stored.template, renderer=stored.renderer, parser=stored.parser)
    if text.templates.default is not None or text.templates.error is not None:
        return text
    log.warning(
        "%s has no chat template: messages reach it as plain text with blank lines between%s; "
        "TEMPLATE in a Modelfile gives it one",
        stored.name,
        f" (it was stored for the renderer '{stored.renderer}', which is not one of ours)" if stored.renderer else "",
    )
    return text


def find(store: Store, name: str) -> StoredModel:
    """A stored model by the name in a request; `:local` at its end says where to look, which is all there is here."""
    if not name:
        raise NotFound("model '' not found")
    try:
        return store.get(name)
    except NotFound:
        if name.lower().endswith(_LOCAL):
            return store.get(name[: -len(_LOCAL)])
        raise
