"""Repositories of Hugging Face's hub: which files make the model, and those files as blobs.

`hf.co/<owner>/<repository>[:<quantisation>]`. The listing comes through huggingface-hub; the bytes come as a registry's
do: in parallel ranges, resumed, verified against the hub's own hashes.
"""

from __future__ import annotations

import hashlib
import logging
import os
import re
import threading
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from fnmatch import fnmatch
from functools import partial
from typing import Any, NamedTuple
from urllib.parse import quote

import httpx

from arriero.errors import NotFound, RegistryError
from arriero.store.manifests import DIGEST, MODEL, Layer, Manifest
from arriero.store.names import DEFAULT_TAG, Name
from arriero.store.registry.client import Client, retried
from arriero.store.registry.limits import Limits
from arriero.store.registry.progress import Report
from arriero.store.registry.pull import check_path, fetch
from arriero.store.store import Store

log = logging.getLogger(__name__)

_HOSTS = ("hf.co", "huggingface.co")
_PREFERRED = ("Q4_K_M", "Q4_0", "Q8_0", "Q4_K_S", "Q5_K_M", "Q6_K", "F16", "BF16")
_BESIDE = ("*.json", "chat_template.jinja", "tokenizer.model", "[0-9]*_*/config.json", "[0-9]*_Dense/model.safetensors")
_SHARD = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.gguf", re.IGNORECASE)
_SMALL = 64 << 20
"""Bytes of the largest file that is read at once; the hub has no SHA-256 of files that it keeps in git."""


class HubFile(NamedTuple):
    """A file of a repository by what the hub says of it."""

    path: str
    size: int
    sha256: str
    """'' for a file in git."""
    git_hash: str


def is_hub(name: Name) -> bool:
    """Whether a name means a repository of the hub."""
    return name.host.lower() in _HOSTS


@contextmanager
def pull_from_hub(
    store: Store, name: Name, report: Report, stop: threading.Event, *, limits: Limits, endpoint: str = ""
) -> Iterator[dict[str, str]]:
    """The files that make the model, as blobs: path → digest; what no model uses when the block ends is deleted.

    The tag names the quantisation of a repository of GGUF files, else a branch or revision. `endpoint` is where the hub
    is (default: `HF_ENDPOINT`, then huggingface.co). Raises RegistryError, StoreError, Cancelled.
    """
    report({"status": "pulling manifest"})
    endpoint = (endpoint or os.environ.get("HF_ENDPOINT") or "https://huggingface.co").rstrip("/")
    repository = f"{name.namespace}/{name.model}"
    token = _token()
    revision, listed = _list(endpoint, repository, name.tag, token)
    chosen = choose(listed, name)
    addresses = {
        file.path: httpx.URL(f"{endpoint}/{repository}/resolve/{quote(revision, safe='')}/{quote(file.path)}")
        for file in chosen
    }
    large = {f"sha256:{file.sha256}": file for file in chosen if file.sha256}
    with _Hub(httpx.URL(endpoint), limits, token=token or "") as client, store.keeping():

        def source(digest: str, headers: dict[str, str]) -> AbstractContextManager[httpx.Response]:
            return client.open("GET", addresses[large[digest].path], headers=headers)

        digests = {file.path: f"sha256:{file.sha256}" for file in chosen if file.sha256}
        sizes = [(digest, file.size) for digest, file in large.items()]
        with _awaited(store, sizes):
            for file in chosen:
                if not file.sha256:
                    data = retried(partial(_small, client, addresses[file.path], file), limits, stop)
                    digests[file.path] = store.blobs.put(_proven(data, file)).digest
            fetch(store, sizes, source, client, report, stop, together=len(large) > 1)
        yield digests
    store.discard(digests.values())


def _awaited(store: Store, sizes: Sequence[tuple[str, int]]) -> AbstractContextManager[None]:
    """Spares what has arrived when the rest does not; the hub has no manifest, so that one is made up."""
    layers = [Layer(media_type=MODEL, digest=digest, size=size) for digest, size in sorted(sizes)]
    return store.awaited(Manifest.build(layers[0], layers)) if layers else nullcontext()


def _small(client: Client, url: httpx.URL, file: HubFile) -> bytes:
    """A file of git as a whole."""
    try:
        with client.open("GET", url) as response:
            return client.read(response, _SMALL, file.path)
    except NotFound:
        raise RegistryError(f"{file.path} is listed by the hub and not there") from None


class _Hub(Client):
    def denied(self) -> RegistryError:
        return RegistryError(
            f"{self.root.host} does not give this model to us: it is gated or private; accept its terms there, and set "
            "HF_TOKEN for the server"
        )


def choose(files: Sequence[HubFile], name: Name) -> list[HubFile]:
    """The files that make the model; raises RegistryError with what there is when none do."""
    weights = [file for file in files if file.path.lower().endswith(".gguf") and "mmproj" not in file.path.lower()]
    if weights:
        if len(weights) < sum(file.path.lower().endswith(".gguf") for file in files):
            log.warning("%s: its projector (mmproj) is left out; the model takes text only", name)
        return _gguf(weights, name)
    safetensors = [file for file in files if fnmatch(file.path, "model*.safetensors")]
    if not safetensors or not any(file.path == "config.json" for file in files):
        shown = ", ".join(sorted(file.path for file in files)[:8]) or "nothing"
        raise RegistryError(f"{name} has neither GGUF files nor model*.safetensors with config.json; it has {shown}")
    return [file for file in files if file in safetensors or _is_beside(file.path)]


def _is_beside(path: str) -> bool:
    """Whether a model's folder is read with this file; `*` of a pattern does not span folders."""
    return any(fnmatch(path, pattern) and path.count("/") == pattern.count("/") for pattern in _BESIDE)


def _gguf(weights: Sequence[HubFile], name: Name) -> list[HubFile]:
    """The files of one quantisation."""
    groups: dict[str, list[HubFile]] = {}
    for file in weights:
        shard = _SHARD.fullmatch(file.path)
        groups.setdefault(shard[1] if shard else file.path[: -len(".gguf")], []).append(file)
    labels = [name.tag] if name.tag != DEFAULT_TAG else list(_PREFERRED)
    for label in labels:
        ending = re.compile(rf"(?:.*[-._/])?{re.escape(label)}", re.IGNORECASE | re.DOTALL)
        found = [stem for stem in groups if ending.fullmatch(stem)]
        if found:
            return sorted(groups[min(found, key=len)])
    shown = ", ".join(stem.rpartition("/")[2] for stem in sorted(groups)[:12])
    if name.tag == DEFAULT_TAG and len(groups) == 1:
        return sorted(next(iter(groups.values())))
    raise RegistryError(f"{name} has no GGUF file of that quantisation; there are {shown}")


def _list(endpoint: str, repository: str, tag: str, token: str | None) -> tuple[str, list[HubFile]]:
    """The revision (a commit) and its files."""
    # Imported here: only a pull from the hub needs it, and it takes half a second.
    from huggingface_hub import HfApi
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError, RevisionNotFoundError

    api = HfApi(endpoint=endpoint, token=token or False, library_name="arriero")
    try:
        info = api.model_info(repository, files_metadata=True, timeout=30)
        gguf = any(sibling.rfilename.lower().endswith(".gguf") for sibling in info.siblings or [])
        if tag != DEFAULT_TAG and not gguf:
            info = api.model_info(repository, revision=tag, files_metadata=True, timeout=30)
    except GatedRepoError:
        raise RegistryError(
            f"pull model manifest: {repository} is gated; accept its terms on the hub, and set HF_TOKEN for the server"
        ) from None
    except RevisionNotFoundError:
        raise RegistryError(f"pull model manifest: {repository} has no branch or revision {tag!r}") from None
    except RepositoryNotFoundError:
        raise RegistryError("pull model manifest: file does not exist") from None
    except Exception as error:  # noqa: BLE001  (its HTTP library, and so what that raises, changes with its version)
        raise RegistryError(f"pull model manifest: the hub failed: {' '.join(str(error).split())[:300]}") from None
    return info.sha or "main", [_file(sibling) for sibling in info.siblings or []]


def _file(sibling: Any) -> HubFile:
    """What the hub says of a file, checked."""
    lfs = sibling.lfs
    sha256, size = (lfs.sha256, lfs.size) if lfs is not None else ("", sibling.size or 0)
    check_path(sibling.rfilename)
    if not isinstance(size, int) or not 0 <= size <= 1 << 50 or (sha256 and not DIGEST.fullmatch(f"sha256:{sha256}")):
        raise RegistryError(f"the hub's entry of {sibling.rfilename} is not understood")
    return HubFile(sibling.rfilename, size, sha256.lower(), sibling.blob_id or "")


def _proven(data: bytes, file: HubFile) -> bytes:
    """A file of git whose bytes are those that git knows."""
    digest = hashlib.sha1(b"blob %d\0" % len(data) + data, usedforsecurity=False).hexdigest()
    if file.git_hash and digest != file.git_hash:
        raise RegistryError(f"{file.path} arrived with other bytes than the hub says; pull again")
    return data


def _token() -> str | None:
    """The user's token for the hub, where there is one."""
    from huggingface_hub import get_token

    return get_token()
