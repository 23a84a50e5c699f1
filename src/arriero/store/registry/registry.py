"""A registry as seen for one repository of it: its manifest, its blobs, and how one logs in."""

from __future__ import annotations

import re
from contextlib import AbstractContextManager

import httpx
import msgspec

from arriero.errors import RegistryError
from arriero.store.manifests import MANIFEST
from arriero.store.names import Name
from arriero.store.registry.address import Challenge, base_url
from arriero.store.registry.client import Client
from arriero.store.registry.key import Key
from arriero.store.registry.limits import Limits

_TOKEN = re.compile(r"[\x21-\x7e]+")
"""What may stand in a header."""


class Registry(Client):
    """The repository `namespace/model` on a name's host."""

    def __init__(self, name: Name, key: Key, limits: Limits, *, insecure: bool = False) -> None:
        """`insecure` reaches it by plain HTTP; raises InvalidRequest for a name that wants that without it."""
        super().__init__(base_url(name.host, name.scheme, insecure=insecure), limits)
        self.name = name
        self._key = key
        self.repository = self.root.join(f"v2/{name.namespace}/{name.model}/")

    def manifest(self) -> bytes:
        """The manifest's bytes; raises NotFound, RegistryError."""
        with self.open("GET", self._manifest_url, headers={"Accept": MANIFEST}) as response:
            return self.read(response, self.limits.manifest, "the manifest")

    def put_manifest(self, raw: bytes) -> None:
        """Name what was uploaded; raises RegistryError."""
        with self.open("PUT", self._manifest_url, headers={"Content-Type": MANIFEST}, content=raw):
            return

    def blob(self, digest: str) -> httpx.URL:
        """Where a blob is."""
        return self.repository.join(f"blobs/{digest}")

    def get(self, digest: str, headers: dict[str, str]) -> AbstractContextManager[httpx.Response]:
        """A blob, or the range of it that `headers` ask for."""
        return self.open("GET", self.blob(digest), headers=headers)

    def log_in(self, challenge: str) -> str:
        """A token for our key."""
        url, proof = self._key.token_request(Challenge.parse(challenge, self.root))
        with self._sent(self._http.build_request("GET", url, headers={"Authorization": proof})) as response:
            body = self.read(response, self.limits.reply, "the token")
            if response.status_code != 200:
                raise RegistryError(f"unauthorized: {self.root.host} gives no token (status {response.status_code})")
        try:
            token = msgspec.json.decode(body, type=_Token).token
            if not _TOKEN.fullmatch(token):
                raise ValueError
            return token
        except (msgspec.MsgspecError, ValueError):
            raise RegistryError(f"unauthorized: what {self.root.host} gives is no token") from None

    def denied(self) -> RegistryError:
        return RegistryError(
            f"unauthorized: access denied to {self.name} by {self.root.host}; its owner may have to allow this "
            "server's key (id_ed25519.pub in its home folder)"
        )

    @property
    def _manifest_url(self) -> httpx.URL:
        return self.repository.join(f"manifests/{self.name.tag}")


class _Token(msgspec.Struct):
    token: str
