"""A stored safetensors model as the source of another one: its tensors as those of files, and which layers can stay."""

from __future__ import annotations

from dataclasses import dataclass

from arriero.create.inventory import Inventory
from arriero.create.recode import Recoding
from arriero.errors import CheckpointError, InvalidRequest, StoreError
from arriero.formats.safetensors import SafetensorsFile
from arriero.model.companions import bundle
from arriero.model.packing import configured
from arriero.store import manifests
from arriero.store.manifests import DRAFT_FOLDER, Layer, is_draft
from arriero.store.model import StoredModel


@dataclass(frozen=True)
class StoredTensors:
    """What of a stored model is read again."""

    inventory: Inventory
    """All its tensors; `documents` and `texts` are where the blobs are."""
    layers: dict[str, Layer]
    """The layer of each tensor."""

    def changed(self, recoding: Recoding) -> tuple[Inventory, list[Layer]]:
        """The tensors of the layers that have to be written again, and the layers that stay.

        A layer with a tensor that changes is written again whole, and so is one with a companion of such a tensor.
        """
        tensors = self.inventory.tensors
        hints = configured(self.inventory.config)
        touched: set[str] = set()
        for found in bundle(tensors):
            recoded = recoding.of(found, tensors, hints)
            if recoded is not None:
                names = [part.span.name for part in found.parts] + [recoded.factor] * bool(recoded.factor)
                touched.update(self.layers[name].name for name in names)
        kept = {layer.name: layer for layer in self.layers.values() if layer.name not in touched}
        again = {name: file for name, file in tensors.items() if self.layers[name].name in touched}
        return (
            Inventory(again, self.inventory.config, self.inventory.documents, self.inventory.texts),
            list(kept.values()),
        )


def stored_draft(model: StoredModel) -> StoredTensors:
    """What DRAFT means of a stored model: the draft beside it, or the model itself when none is."""
    return stored_tensors(model, draft=any(is_draft(layer) for layer in model.manifest.layers))


def stored_tensors(model: StoredModel, *, draft: bool = False) -> StoredTensors:
    """Open the tensors of a stored model, or of the draft beside it, whose names keep their prefix.

    Raises StoreError for a damaged model and InvalidRequest for one of another kind.
    """
    folder = DRAFT_FOLDER if draft else ""
    files: dict[str, SafetensorsFile] = {}
    layers: dict[str, Layer] = {}
    for layer in model.manifest.of(manifests.TENSOR):
        if is_draft(layer) is not draft:
            continue
        try:
            file = SafetensorsFile(model.path(layer))
        except CheckpointError as error:
            raise StoreError(f"model '{model.name}' is damaged: layer {layer.name}: {error}") from None
        files |= dict.fromkeys(file.tensors, file)
        layers |= dict.fromkeys(file.tensors, layer)
    config = model.json_file(f"{folder}config.json")
    if not files or not config:
        what = "no draft beside it" if draft else "no safetensors tensors"
        raise InvalidRequest(f"model '{model.name}' has {what}")
    inside = {
        name.removeprefix(folder): layer
        for name, layer in model.files.items()
        if name.startswith(DRAFT_FOLDER) is draft
    }
    documents = {name: model.path(layer) for name, layer in inside.items() if layer.media_type == manifests.JSON}
    texts = {name: model.path(layer) for name, layer in inside.items() if layer.media_type == manifests.TEXT}
    return StoredTensors(Inventory(files, config, documents, texts), layers)
