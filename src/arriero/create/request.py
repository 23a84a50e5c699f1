"""What a client asks `create` for, checked before anything is read or written."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import PurePosixPath
from typing import Any

import msgspec

from arriero.create.precisions import parse_precision
from arriero.errors import InvalidRequest, UnsupportedFeature
from arriero.options import OPTIONS, check_options
from arriero.store.manifests import check_digest
from arriero.store.names import Name

ROLES = ("system", "user", "assistant")
_VERSION = re.compile(r"v?\d+\.\d+\.\d+(?:[-+][0-9A-Za-z.+-]+)?")
_INFO_TEXTS = ("model_family", "base_name", "quantization_level", "parameter_size")
_INFO_COUNTS = ("context_length", "embedding_length")


class CreateRequest(msgspec.Struct, kw_only=True):
    """The body of `POST /api/create`, by its wire names (`from` is `from_` here)."""

    model: str = ""
    name: str = ""
    from_: str = msgspec.field(default="", name="from")
    modelfile: str = ""
    """Modelfile text, as old clients send it: merged under the other fields; it can't name files."""
    files: dict[str, str] = {}
    adapters: dict[str, str] = {}
    draft_files: dict[str, str] = {}
    draft: str = ""
    """A stored model: the draft that is beside it, or the model itself when it is one (ours)."""
    draft_quantize: str = ""
    template: str = ""
    system: str = ""
    license: str | list[str] = ""
    parameters: dict[str, Any] = {}
    messages: list[dict[str, Any]] = []
    renderer: str = ""
    parser: str = ""
    requires: str = ""
    quantize: str = ""
    quantization: str = ""
    scale_search: bool = True
    """Whether scales are chosen by the error of their group (ours)."""
    info: dict[str, Any] = {}
    remote_host: str = ""
    insecure: bool = False
    """Whether a base that has to be pulled first may come by plain HTTP (ours)."""
    path: str = ""

    @property
    def target(self) -> Name:
        """The new model's name; raises InvalidRequest."""
        return Name.parse(self.model or self.name)

    @property
    def precision(self) -> str:
        """What `quantize`, or its older name, asks for."""
        return self.quantize or self.quantization

    @property
    def licenses(self) -> list[str]:
        """Licence texts, blank ones dropped."""
        texts = [self.license] if isinstance(self.license, str) else self.license
        return [text for text in texts if text.strip()]


def check_request(request: CreateRequest) -> None:
    """Raise for every field that can't be honoured, before any work; parameters are checked by `check_parameters`."""
    _ = request.target
    if request.remote_host:
        raise UnsupportedFeature("the field 'remote_host' is not supported: arriero runs local models only")
    for precision in (request.precision, request.draft_quantize):
        if precision:
            parse_precision(precision)
    if request.path:
        raise InvalidRequest(
            "the field 'path' is not accepted: upload the files (POST /api/blobs) and name them in 'files'"
        )
    if not request.from_ and not request.files:
        raise InvalidRequest("neither 'from' or 'files' was specified")
    if request.from_ and request.files:
        raise InvalidRequest("both 'from' and 'files' were given; a model is made of one of them")
    if request.draft and request.draft_files:
        raise InvalidRequest("both 'draft' and 'draft_files' were given; a model has one draft")
    if request.draft_quantize and not (request.draft or request.draft_files):
        raise InvalidRequest("--draft-quantize requires a DRAFT model")
    for files in (request.files, request.adapters, request.draft_files):
        for name, digest in files.items():
            check_file(name, digest)
    for message in request.messages:
        role = message.get("role")
        if role not in ROLES:
            raise InvalidRequest(f'message role must be one of "system", "user", or "assistant"; found {role!r}')
        if not isinstance(message.get("content", ""), str):
            raise InvalidRequest(f"the content of a message must be text; it is {message['content']!r:.60}")
    if request.requires and not _VERSION.fullmatch(request.requires):
        raise InvalidRequest(f"requires must be a version like 0.19.0; it is {request.requires!r}")
    check_info(request.info)


def check_file(name: str, digest: str) -> None:
    """Refuse a path that is absolute or climbs, and a malformed digest."""
    path = PurePosixPath(name.replace("\\", "/"))
    if not path.parts or path.is_absolute() or ".." in path.parts or ":" in path.parts[0] or "\0" in name:
        raise InvalidRequest(f"file path must be relative: {name!r}")
    try:
        check_digest(digest)
    except ValueError as error:
        raise InvalidRequest(f"{error}: {digest!r} for file {name!r}") from None


def check_parameters(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Typed parameters; a single text counts as a list where the option takes one; raises InvalidRequest."""
    listed = {
        name: [value] if isinstance(value, str) and name in OPTIONS and OPTIONS[name].kind == "string list" else value
        for name, value in parameters.items()
    }
    return check_options(listed)


def check_info(info: Mapping[str, Any]) -> None:
    """Refuse an unknown `info` field and one of the wrong type."""
    for key, value in info.items():
        if key in _INFO_TEXTS and not isinstance(value, str):
            raise InvalidRequest(f'info field "{key}" must be a string')
        if key in _INFO_COUNTS and (not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < 1 << 63):
            raise InvalidRequest(f'info field "{key}" must be a non-negative integer of 64 bits')
        if key == "capabilities" and not (isinstance(value, list) and all(isinstance(item, str) for item in value)):
            raise InvalidRequest('info field "capabilities" must be a list of strings')
        if key not in (*_INFO_TEXTS, *_INFO_COUNTS, "capabilities"):
            known = ", ".join(sorted((*_INFO_TEXTS, *_INFO_COUNTS, "capabilities")))
            raise InvalidRequest(f'unknown info field "{key}"; the fields are {known}')
