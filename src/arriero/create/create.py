"""A model from uploaded files or from another model: checked first, then written, then named.

Nothing is named before everything that it needs is on disk, and a failure leaves no new blob behind.
"""

from __future__ import annotations

import logging
from typing import Any

import msgspec

from arriero.create.check import check_plan
from arriero.create.fields import fields_of
from arriero.create.origin import origin_of
from arriero.create.request import CreateRequest, check_parameters, check_request
from arriero.create.work import Check, Work
from arriero.create.write import Progress, add_layer
from arriero.errors import InvalidRequest
from arriero.modelfile import parse
from arriero.options import OBSOLETE
from arriero.store import manifests
from arriero.store.capabilities import PARSER_CAPABILITIES
from arriero.store.manifests import ConfigBlob, Layer, Manifest
from arriero.store.model import StoredModel
from arriero.store.names import Name
from arriero.store.store import Build, Store

log = logging.getLogger(__name__)
MESSAGE_FIELDS = ("role", "content")


def create(store: Store, request: CreateRequest, progress: Progress, *, check: Check = check_plan) -> StoredModel:
    """Make and name a model; blocking, for a thread.

    `check` is asked before the first weight is written. The last status is `success`. Raises InvalidRequest,
    UnsupportedFeature, NotFound (the base model), CheckpointError, UnsupportedArchitecture, TemplateError or
    StoreError; whatever `progress` raises ends the import too.
    """
    request = prepared(request)
    parameters = check_parameters(request.parameters)
    for name in sorted(OBSOLETE & request.parameters.keys()):
        log.warning("parameter %s has no effect any more and is left out", name)
    left_out = sorted({key for said in request.messages for key in said if said[key] and key not in MESSAGE_FIELDS})
    if left_out:
        log.warning("of messages only %s are stored; left out: %s", " and ".join(MESSAGE_FIELDS), ", ".join(left_out))
    with store.building() as build:
        base = store.get(request.from_) if request.from_ else None
        origin = origin_of(Work(store, build, request, progress, check), base)
        layers = _overlay(build, origin.layers, request, parameters, base, progress)
        config = origin.config
        if origin.text is not None:
            config = msgspec.structs.replace(config, capabilities=list(origin.text.capabilities))
        blob = add_layer(build, _configure(config, request).encode(), manifests.CONFIG, progress)
        progress({"status": "writing manifest"})
        model = build.put(
            request.target, Manifest.build(blob, layers, like=base.manifest if base is not None else None)
        )
    progress({"status": "success"})
    return model


def prepared(request: CreateRequest) -> CreateRequest:
    """The request with the text of its `modelfile` in its fields, checked as far as it can be without the store.

    Raises InvalidRequest, UnsupportedFeature or ModelfileError.
    """
    request = _with_modelfile(request)
    check_request(request)
    return request


def _with_modelfile(request: CreateRequest) -> CreateRequest:
    """Fold the text of the old `modelfile` field in, under the fields that are given on their own."""
    if not request.modelfile:
        return request
    modelfile = parse(request.modelfile)
    sources = modelfile.all("from")
    if modelfile.all("adapter"):
        raise InvalidRequest("ADAPTER in the field 'modelfile' is a file; upload it and name it in 'adapters'")
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
    if modelfile.all("draft") and not request.draft and not request.draft_files:
        given["draft"] = modelfile.last("draft")
    for field, value in fields_of(modelfile).items():
        own = getattr(request, field)
        if field == "parameters":
            given[field] = value | own
        elif not own:
            given[field] = value
    return msgspec.structs.replace(request, **given)


def _overlay(
    build: Build,
    layers: list[Layer],
    request: CreateRequest,
    parameters: dict[str, Any],
    base: StoredModel | None,
    progress: Progress,
) -> list[Layer]:
    """Put the request's texts in the place of the base's, its new licences after them, its parameters over them."""
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
        made = add_layer(build, data, media_type, progress)
        # A model that is made by its own Modelfile says its base's licences once more.
        if not any((layer.media_type, layer.digest) == (media_type, made.digest) for layer in layers):
            layers.append(made)
    return layers


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
