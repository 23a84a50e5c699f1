"""The model itself, before its draft: which layers it takes over, which tensors it writes, what describes it.

One function for each kind of origin: uploaded files or another model, safetensors or GGUF.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import msgspec

from arriero.chat.files import GGUF_KEYS, TextFiles
from arriero.chat.model_text import ModelText
from arriero.chat.templates import ChatTemplates, compiled, template_sources
from arriero.create.adapter import Adapter
from arriero.create.draft import refuse_alone
from arriero.create.from_gguf import plan_gguf
from arriero.create.gguf import GGUFModel, read_gguf
from arriero.create.inventory import Inventory, take_inventory
from arriero.create.kinds import sniff
from arriero.create.plan import Plan, make_plan
from arriero.create.precisions import parse_precision
from arriero.create.recode import Recoding
from arriero.create.request import CreateRequest
from arriero.create.stored import stored_tensors
from arriero.create.work import Work
from arriero.create.write import add_layer
from arriero.errors import CheckpointError, InvalidRequest
from arriero.model.architectures import check_config
from arriero.model.gguf_config import generation_config_of
from arriero.source import GGUFSource
from arriero.store import manifests
from arriero.store.describe import human_count
from arriero.store.manifests import ConfigBlob, Layer, is_draft
from arriero.store.model import StoredModel, family_of

_GGUF = (manifests.MODEL, manifests.PROJECTOR)


@dataclass(frozen=True)
class Target:
    """The model itself, before its draft: layers that stay, tensors to write, files to keep beside them."""

    config: ConfigBlob
    text: ModelText | None
    kept: list[Layer] = field(default_factory=list)
    plan: Plan | None = None
    documents: dict[str, Path] = field(default_factory=dict)
    """Its JSON files, for the check."""
    files: list[tuple[str, Path, str]] = field(default_factory=list)
    """Name, place and media type of files that become layers."""
    gguf: tuple[Path, ...] = ()
    replaced: frozenset[str] = frozenset()
    """Uploads that nobody needs once the model is named."""


def labelled(base: StoredModel, layers: list[Layer]) -> list[Layer]:
    """Layers of a base, marked as taken from it."""
    return [msgspec.structs.replace(layer, from_=str(base.name)) for layer in layers]


def target_of_model(work: Work, base: StoredModel, adapter: Adapter | None) -> Target:
    """The base's layers; those that another precision or an adapter changes are written again.

    Refuses a base that would not load.
    """
    request, source = work.request, base.source()
    gguf: tuple[Path, ...] = ()
    if isinstance(source, GGUFSource):
        weights = base.manifest.of(manifests.MODEL)
        model = read_gguf({f"part {n} of {base.name}": base.path(w) for n, w in enumerate(weights, 1)})
        if request.precision or adapter is not None:
            others = [layer for layer in base.manifest.layers if layer.media_type not in _GGUF and not is_draft(layer)]
            return _recoded_gguf(work, model, adapter, labelled(base, others), base.config)
        files, gguf = model.text, tuple(map(Path, source.paths))
    else:
        check_config(base.json_file("config.json"))
        files = TextFiles.open(source)
    # Opening a tokenizer of 262,144 tokens takes seconds; a base has been through it.
    text = open_text(files, request.template) if request.template else None
    layers = labelled(base, [layer for layer in base.manifest.layers if not is_draft(layer)])
    documents = {
        name: base.path(layer)
        for name, layer in base.files.items()
        if layer.media_type == manifests.JSON and not is_draft(layer)
    }
    target = Target(base.config, text, layers, documents=documents, gguf=gguf)
    if request.precision or adapter is not None:
        target = _changed(work, base, adapter, target)
    tensors = sum(layer.media_type == manifests.TENSOR for layer in target.kept)
    for layer in target.kept:
        if layer.media_type != manifests.TENSOR:
            work.progress({"status": f"using existing layer {layer.digest}"})
    if tensors:
        work.progress({"status": f"using {tensors} existing tensor layers"})
    return target


def _changed(work: Work, base: StoredModel, adapter: Adapter | None, target: Target) -> Target:
    """A base's tensors where a precision or an adapter changes them."""
    found = stored_tensors(base)
    recoding = recoding_of(work.request, found.inventory.config, adapter)
    assert recoding is not None
    whole = make_plan(found.inventory, recoding)
    check_made(recoding, whole)
    again, kept = found.changed(recoding)
    stays = {layer.name for layer in kept}
    layers = [layer for layer in target.kept if layer.media_type != manifests.TENSOR or layer.name in stays]
    config = msgspec.structs.replace(base.config, file_type=whole.file_type, model_type=human_count(whole.parameters))
    return replace(target, config=config, kept=layers, plan=make_plan(again, recoding))


def target_of_files(work: Work, adapter: Adapter | None) -> Target:
    """Uploaded files, which have to be of one model; raises what `create` raises."""
    request = work.request
    paths = work.uploaded(request.files)
    gguf = [name for name, path in paths.items() if sniff(path) == "gguf"]
    if len(gguf) == len(paths):
        return _from_gguf(work, paths, adapter)
    if gguf:
        other = next(name for name in paths if name not in gguf)
        raise InvalidRequest(f"'files' mixes GGUF ({gguf[0]}) with other files ({other}); a model is one or the other")
    return _from_safetensors(work, paths, adapter)


def _from_gguf(work: Work, paths: dict[str, Path], adapter: Adapter | None) -> Target:
    request = work.request
    work.progress({"status": "parsing GGUF"})
    model = read_gguf(paths)
    if request.precision or adapter is not None:
        target = _recoded_gguf(work, model, adapter, [], _describe_gguf(model))
        return replace(target, replaced=frozenset(request.files.values()))
    text = open_text(model.text, request.template)
    layers = []
    for name in model.files:
        digest = manifests.check_digest(request.files[name])
        work.progress({"status": f"using existing layer {digest}"})
        layers.append(Layer(media_type=manifests.MODEL, digest=digest, size=paths[name].stat().st_size))
    return Target(_describe_gguf(model), text, layers, gguf=tuple(paths[name] for name in model.files))


def _recoded_gguf(
    work: Work, model: GGUFModel, adapter: Adapter | None, others: list[Layer], described: ConfigBlob
) -> Target:
    """A GGUF model as tensor layers; `others` are the layers that it keeps."""
    text = open_text(model.text, work.request.template)
    recoding = recoding_of(work.request, model.config, adapter)
    assert recoding is not None
    plan, changed = plan_gguf(model.parts, model.config, recoding)
    if recoding.asked and not changed:
        raise unchanged(recoding, plan)
    documents, layers = {}, list(others)
    written = {"config.json": model.config, "generation_config.json": generation_config_of(model.parts[0])}
    for name, document in written.items():
        layer = add_layer(work.build, msgspec.json.encode(document), manifests.JSON, work.progress, name)
        documents[name] = work.store.blobs.path(layer.digest)
        layers.append(layer)
    texts = {GGUF_KEYS: model.parts[0].without_tensors()}
    if template := template_sources(model.text).get("default"):
        texts["chat_template.jinja"] = template.encode()
    layers += [add_layer(work.build, data, manifests.TEXT, work.progress, name) for name, data in texts.items()]
    config = msgspec.structs.replace(
        described,
        model_format="safetensors",
        model_type=human_count(plan.parameters),
        file_type=plan.file_type,
        context_length=model.context_length,
        embedding_length=model.embedding_length,
    )
    return Target(config, text, layers, plan, documents)


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


def _from_safetensors(work: Work, paths: dict[str, Path], adapter: Adapter | None) -> Target:
    request = work.request
    inventory = take_inventory(paths)
    refuse_alone(inventory.config)
    check_config(inventory.config)
    text = open_text(TextFiles(inventory.documents | inventory.texts, {}), request.template)
    _check_vocabulary(inventory, text)
    recoding = recoding_of(request, inventory.config, adapter)
    plan = make_plan(inventory, recoding)
    if recoding is not None:
        check_made(recoding, plan)
    return Target(
        _describe_safetensors(inventory, plan),
        text,
        plan=plan,
        documents=inventory.documents,
        files=[(name, path, manifests.JSON) for name, path in inventory.documents.items()]
        + [(name, path, manifests.TEXT) for name, path in inventory.texts.items()],
        # The shards' bytes are in the tensor layers then.
        replaced=frozenset(request.files.values()),
    )


def recoding_of(request: CreateRequest, config: dict[str, Any], adapter: Adapter | None) -> Recoding | None:
    """What a request changes of a model's tensors; None where it is nothing."""
    if not request.precision and adapter is None:
        return None
    kind = parse_precision(request.precision) if request.precision else ""
    return Recoding.to(kind, config, search=request.scale_search, adapter=adapter)


def check_made(recoding: Recoding, plan: Plan) -> None:
    """Refuse a precision that changes nothing; what an adapter does not find is told by `Adapter.check_taken`."""
    if recoding.asked and not plan.made:
        raise unchanged(recoding, plan)


def unchanged(recoding: Recoding, plan: Plan) -> InvalidRequest:
    """What to say of a precision that changes nothing."""
    return InvalidRequest(
        f"no tensor of the model becomes {recoding.asked}: it is {plan.file_type} already, or too small for the "
        "groups; leave 'quantize' out"
    )


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
        context_length=_count(context),
        embedding_length=_count(hidden),
    )


def _count(value: object) -> int:
    return value if isinstance(value, int) and 0 <= value < 1 << 63 else 0


def open_text(files: TextFiles, template: str) -> ModelText:
    """The tokenizer and the templates as a load would open them, with the request's template in their place.

    Raises TemplateError for a template, Jinja's or Go's, that can't be used.
    """
    if template:
        compiled(template)
    return ModelText(files, ChatTemplates.open(files, template or None))
