"""A model from uploaded files or from another model: checked first, then written, then named.

Nothing is named before everything that it needs is on disk, and a failure leaves no new blob behind.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from arriero.chat.files import TextFiles
from arriero.chat.model_text import ModelText
from arriero.chat.templates import ChatTemplates, compiled
from arriero.create.check import check_plan
from arriero.create.fields import fields_of
from arriero.create.gguf import GGUFModel, read_gguf
from arriero.create.inventory import Inventory, take_inventory
from arriero.create.kinds import refuse, sniff
from arriero.create.plan import BlobPlan, Plan, make_plan
from arriero.create.precisions import parse_precision
from arriero.create.recode import Recoding
from arriero.create.request import CreateRequest, check_parameters, check_request
from arriero.create.write import write_tensor
from arriero.errors import CheckpointError, InvalidRequest, UnsupportedFeature
from arriero.model.architectures import check_config
from arriero.modelfile import parse
from arriero.options import OBSOLETE
from arriero.source import GGUFSource
from arriero.store import manifests
from arriero.store.capabilities import PARSER_CAPABILITIES
from arriero.store.describe import human_count
from arriero.store.manifests import ConfigBlob, Layer, Manifest
from arriero.store.model import StoredModel, family_of
from arriero.store.names import Name
from arriero.store.store import Build, Store

log = logging.getLogger(__name__)

Progress = Callable[[dict[str, Any]], None]
"""Takes each status object (`{"status": …}`, for bytes with `total` and `completed`); raising stops the import."""

Check = Callable[[Plan, Mapping[str, Path]], None]
"""Raises CheckpointError for a plan that makes no model, given the configuration files by name."""

_REPORT_EVERY = 0.1


def create(store: Store, request: CreateRequest, progress: Progress, *, check: Check = check_plan) -> StoredModel:
    """Make and name a model; blocking, for a thread.

    `check` is asked before the first weight is written. The last status is `success`. Raises InvalidRequest,
    UnsupportedFeature, NotFound (the base model), CheckpointError, UnsupportedArchitecture, TemplateError or
    StoreError; whatever `progress` raises ends the import too.
    """
    request = _with_modelfile(request)
    check_request(request)
    parameters = check_parameters(request.parameters)
    for name in sorted(OBSOLETE & request.parameters.keys()):
        log.warning("parameter %s has no effect any more and is left out", name)
    with store.building() as build:
        if request.from_ and request.precision:
            raise UnsupportedFeature(
                f"'quantize' was asked for the stored model {request.from_}; quantise while importing the original"
            )
        if request.from_:
            base = store.get(request.from_)
            origin = _from_model(base, request, progress)
        else:
            base = None
            origin = _from_files(store, build, request, progress, check)
        layers = _overlay(build, origin.layers, request, parameters, base, progress)
        config = origin.config
        if origin.text is not None:
            config = msgspec.structs.replace(config, capabilities=list(origin.text.capabilities))
        blob = _add(build, _configure(config, request).encode(), manifests.CONFIG, progress)
        progress({"status": "writing manifest"})
        model = build.put(
            request.target, Manifest.build(blob, layers, like=base.manifest if base is not None else None)
        )
    progress({"status": "success"})
    return model


def _with_modelfile(request: CreateRequest) -> CreateRequest:
    """Fold the text of the old `modelfile` field in, under the fields that are given on their own."""
    if not request.modelfile:
        return request
    modelfile = parse(request.modelfile)
    sources = modelfile.all("from")
    for name in ("adapter", "draft"):
        if modelfile.all(name):
            raise UnsupportedFeature(f"{name.upper()} in the field 'modelfile' is not supported yet")
    given: dict[str, Any] = {"modelfile": ""}
    if not request.files and not request.from_:
        if len(sources) > 1:
            raise InvalidRequest("the field 'modelfile' has several FROM lines; upload the files, name them in 'files'")
        try:
            Name.parse(sources[0])
        except InvalidRequest:
            raise InvalidRequest(
                f"FROM {sources[0]} in the field 'modelfile' is not the name of a model; to import files, upload them "
                "(POST /api/blobs/sha256:…) and name them in 'files'"
            ) from None
        given["from_"] = sources[0]
    for field, value in fields_of(modelfile).items():
        own = getattr(request, field)
        if field == "parameters":
            given[field] = value | own
        elif not own:
            given[field] = value
    return msgspec.structs.replace(request, **given)


@dataclass(frozen=True)
class _Origin:
    """Where the weights come from: layers that are in the store, their description, the text side."""

    layers: list[Layer]
    config: ConfigBlob
    text: ModelText | None
    """None for a base whose tokenizer and template are taken over as they are."""


def _from_model(base: StoredModel, request: CreateRequest, progress: Progress) -> _Origin:
    """The base's layers, marked as taken from it; refuses a base that would not load."""
    source = base.source()
    if isinstance(source, GGUFSource):
        weights = base.manifest.of(manifests.MODEL)
        files = read_gguf({f"part {n} of {base.name}": base.path(w) for n, w in enumerate(weights, 1)}).text
    else:
        check_config(base.json_file("config.json"))
        files = TextFiles.open(source)
    # Opening a tokenizer of 262,144 tokens takes seconds; a base has been through it.
    text = _open_text(files, request.template) if request.template else None
    layers = [msgspec.structs.replace(layer, from_=str(base.name)) for layer in base.manifest.layers]
    tensors = 0
    for layer in layers:
        if layer.media_type == manifests.TENSOR:
            tensors += 1
        else:
            progress({"status": f"using existing layer {layer.digest}"})
    if tensors:
        progress({"status": f"using {tensors} existing tensor layers"})
    return _Origin(layers, base.config, text)


def _from_files(store: Store, build: Build, request: CreateRequest, progress: Progress, check: Check) -> _Origin:
    paths = {name: _uploaded(store, name, digest) for name, digest in request.files.items()}
    kinds = {name: sniff(path) for name, path in paths.items()}
    for name, kind in kinds.items():
        if kind in ("lfs", "pytorch", "empty"):
            raise refuse(name, kind)
    gguf = [name for name, kind in kinds.items() if kind == "gguf"]
    if len(gguf) == len(paths):
        if request.precision:
            raise UnsupportedFeature(
                f"'quantize' was asked for {gguf[0]}, but GGUF files keep their precision; quantise the original "
                "safetensors model"
            )
        return _from_gguf(request, paths, progress)
    if gguf:
        other = next(name for name in paths if name not in gguf)
        raise InvalidRequest(f"'files' mixes GGUF ({gguf[0]}) with other files ({other}); a model is one or the other")
    imported = _from_safetensors(build, request, paths, progress, check)
    # The shards' bytes are in the tensor layers now; the uploads go once the model is named.
    build.replaced |= set(request.files.values())
    return imported


def _uploaded(store: Store, name: str, digest: str) -> Path:
    path = store.find_blob(digest)
    if path is None:
        raise InvalidRequest(f"file {name!r} is blob {digest}, which has not been uploaded (POST /api/blobs/{digest})")
    store.blobs.touch(digest)
    return path


def _from_gguf(request: CreateRequest, paths: dict[str, Path], progress: Progress) -> _Origin:
    progress({"status": "parsing GGUF"})
    model = read_gguf(paths)
    text = _open_text(model.text, request.template)
    layers = []
    for name in model.files:
        digest = manifests.check_digest(request.files[name])
        progress({"status": f"using existing layer {digest}"})
        layers.append(Layer(media_type=manifests.MODEL, digest=digest, size=paths[name].stat().st_size))
    return _Origin(layers, _describe_gguf(model), text)


def _describe_gguf(model: GGUFModel) -> ConfigBlob:
    return ConfigBlob(
        model_format="gguf",
        model_family=model.architecture,
        model_families=[model.architecture],
        model_type=human_count(model.parameters),
        file_type=model.file_type,
        context_length=model.context_length,
        embedding_length=model.embedding_length,
        architecture="amd64",
        os="linux",
    )


def _from_safetensors(
    build: Build, request: CreateRequest, paths: dict[str, Path], progress: Progress, check: Check
) -> _Origin:
    inventory = take_inventory(paths)
    check_config(inventory.config)
    text = _open_text(TextFiles(inventory.documents | inventory.texts, {}), request.template)
    _check_vocabulary(inventory, text)
    recoding = None
    if request.precision:
        kind = parse_precision(request.precision)
        recoding = Recoding.to(kind, inventory.config, search=request.scale_search)
    plan = make_plan(inventory, recoding)
    if recoding is not None and not plan.made:
        raise InvalidRequest(
            f"no tensor of the model becomes {recoding.asked}: it is {plan.file_type} already, or too small for the "
            "groups; leave 'quantize' out"
        )
    progress({"status": "checking that the model can be loaded"})
    check(plan, inventory.documents)
    how = f", {plan.made} of them quantised" if plan.made else " as they are"
    progress({"status": f"importing {len(plan.blobs)} tensors{how} ({plan.file_type})"})
    layers = _write_tensors(build, plan, progress)
    for kept, media_type in ((inventory.documents, manifests.JSON), (inventory.texts, manifests.TEXT)):
        for name, path in kept.items():
            layers.append(_add(build, path.read_bytes(), media_type, progress, name))
    return _Origin(layers, _describe_safetensors(inventory, plan), text)


def _check_vocabulary(inventory: Inventory, text: ModelText) -> None:
    """Refuse a tokenizer of another model: its own tokens must have rows (added ones may have none: Gemma's images)."""
    rows, tokens = _facts(inventory.config).get("vocab_size"), text.tokenizer.model_size
    if isinstance(rows, int) and tokens > rows:
        raise CheckpointError(
            f"tokenizer.json has {tokens} tokens, config.json a vocab_size of {rows}; they do not belong together"
        )


def _facts(config: dict[str, Any]) -> dict[str, Any]:
    """The configuration of the text model, which some models nest."""
    text = config.get("text_config")
    return config | (text if isinstance(text, dict) else {})


def _write_tensors(build: Build, plan: Plan, progress: Progress) -> list[Layer]:
    total, done, reported = plan.nbytes, 0, 0.0

    def copied(count: int) -> None:
        nonlocal done, reported
        done += count
        now = time.monotonic()
        if now - reported >= _REPORT_EVERY or done == total:
            reported = now
            progress({"status": "importing tensors", "total": total, "completed": done})

    errors: dict[tuple[str, str], list[float]] = {}

    def missed(blob: BlobPlan, error: float) -> None:
        errors.setdefault((blob.source, blob.stored_as), []).append(error)

    layers = []
    for blob in plan.blobs:
        stored = write_tensor(build, blob, copied, missed)
        layers.append(Layer(media_type=manifests.TENSOR, digest=stored.digest, size=stored.size, name=blob.name))
    for (source, kind), found in errors.items():
        lost = f"weight error {math.sqrt(sum(e * e for e in found) / len(found)):.2%}" if any(found) else "exact"
        progress({"status": f"{len(found)} tensors from {source} to {kind}: {lost}"})
    return layers


def _describe_safetensors(inventory: Inventory, plan: Plan) -> ConfigBlob:
    family = family_of(inventory.config)
    facts = _facts(inventory.config)
    context, hidden = facts.get("max_position_embeddings"), facts.get("hidden_size")
    return ConfigBlob(
        model_format="safetensors",
        model_family=family,
        model_families=[family],
        model_type=human_count(plan.parameters),
        file_type=plan.file_type,
        context_length=context if isinstance(context, int) else 0,
        embedding_length=hidden if isinstance(hidden, int) else 0,
    )


def _overlay(
    build: Build,
    layers: list[Layer],
    request: CreateRequest,
    parameters: dict[str, Any],
    base: StoredModel | None,
    progress: Progress,
) -> list[Layer]:
    """Put the request's texts in the place of the base's, its licences after them, its parameters over them."""
    merged = (base.params if base is not None else {}) | parameters
    texts: list[tuple[tuple[str, ...], str, bytes]] = []
    if request.template:
        texts.append(((manifests.TEMPLATE, manifests.PROMPT), manifests.TEMPLATE, request.template.encode()))
    if request.system:
        texts.append(((manifests.SYSTEM,), manifests.SYSTEM, request.system.encode()))
    texts.extend(((), manifests.LICENSE, text.encode()) for text in request.licenses)
    if parameters:
        texts.append(((manifests.PARAMS,), manifests.PARAMS, msgspec.json.encode(merged, order="sorted")))
    if request.messages:
        kept = [{"role": m["role"], "content": m.get("content", "")} for m in request.messages]
        texts.append(((manifests.MESSAGES,), manifests.MESSAGES, msgspec.json.encode(kept)))
    for replaced, media_type, data in texts:
        layers = [layer for layer in layers if layer.media_type not in replaced]
        layers.append(_add(build, data, media_type, progress))
    return layers


def _add(build: Build, data: bytes, media_type: str, progress: Progress, name: str = "") -> Layer:
    stored = build.add(data)
    progress({"status": f"{'creating new' if stored.created else 'using existing'} layer {stored.digest}"})
    return Layer(media_type=media_type, digest=stored.digest, size=stored.size, name=name)


def _open_text(files: TextFiles, template: str) -> ModelText:
    """The tokenizer and the templates as a load would open them, with the request's template in their place.

    Raises TemplateError for a template, Jinja's or Go's, that can't be used.
    """
    if template:
        compiled(template)
    return ModelText(files, ChatTemplates.open(files, template or None))


def _configure(config: ConfigBlob, request: CreateRequest) -> ConfigBlob:
    """The configuration with what the request says about it."""
    changes: dict[str, Any] = {
        field: getattr(request, field) for field in ("renderer", "parser") if getattr(request, field)
    }
    if request.requires:
        changes["requires"] = request.requires.removeprefix("v")
    capabilities = config.capabilities
    if request.parser:
        capabilities = list(dict.fromkeys([*(capabilities or []), *PARSER_CAPABILITIES.get(request.parser, ())]))
    info = dict(request.info)
    for key, field in (("quantization_level", "file_type"), ("parameter_size", "model_type")):
        if key in info:
            info[field] = info.pop(key)
    if "model_family" in info:
        info["model_families"] = [info["model_family"]]
    return msgspec.structs.replace(config, **({"capabilities": capabilities} | changes | info))
