"""The key pair by which registries know a user: ed25519 in OpenSSH form, made on first need."""

from __future__ import annotations

import base64
import hashlib
import os
import secrets
import time
from pathlib import Path
from typing import TYPE_CHECKING

import httpx

from arriero.errors import RegistryError, StoreError

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    from arriero.store.registry.address import Challenge

_NOTHING = base64.b64encode(hashlib.sha256(b"").hexdigest().encode()).decode()


class Key:
    """The pair `id_ed25519`, `id_ed25519.pub` in a folder."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / "id_ed25519"

    def token_request(self, challenge: Challenge) -> tuple[httpx.URL, str]:
        """Where to ask for a token, and the `Authorization` that proves who asks."""
        query = [("service", challenge.service), *(("scope", scope) for scope in challenge.scopes)]
        nonce = base64.urlsafe_b64encode(secrets.token_bytes(16)).decode().rstrip("=")
        url = challenge.realm.copy_with(params=[*query, ("ts", str(int(time.time()))), ("nonce", nonce)])
        return url, self.sign(f"GET,{url},{_NOTHING}".encode())

    def sign(self, message: bytes) -> str:
        """`<public key>:<signature>`, both in base64; raises RegistryError, StoreError when the key can't be used."""
        from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

        key = self._load()
        public = key.public_key().public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH).decode().split()[1]
        return f"{public}:{base64.b64encode(key.sign(message)).decode()}"

    def _load(self) -> Ed25519PrivateKey:
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
        from cryptography.hazmat.primitives.serialization import load_ssh_private_key

        if not self._path.exists():
            self._make()
        try:
            key = load_ssh_private_key(self._path.read_bytes(), password=None)
        except OSError as error:
            raise StoreError(f"the key {self._path} cannot be read: {error.strerror}") from None
        except ValueError as error:
            raise RegistryError(f"the key {self._path} cannot be used: {error}; remove it to get a new one") from None
        if not isinstance(key, Ed25519PrivateKey):
            raise RegistryError(f"the key {self._path} is not an ed25519 key; remove it to get a new one")
        return key

    def _make(self) -> None:
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
        from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, PublicFormat

        key = Ed25519PrivateKey.generate()
        temporary = self._path.with_name(f"{self._path.name}.{os.getpid()}.{secrets.token_hex(4)}")
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            with os.fdopen(descriptor, "wb") as file:
                file.write(key.private_bytes(Encoding.PEM, PrivateFormat.OpenSSH, NoEncryption()))
            try:
                # A link and not a rename: of two processes that make one at once, both use the first.
                os.link(temporary, self._path)
            except FileExistsError:
                return
            finally:
                temporary.unlink(missing_ok=True)
            public = key.public_key().public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH)
            self._path.with_suffix(".pub").write_bytes(public + b"\n")
        except OSError as error:
            raise StoreError(f"no key can be made at {self._path}: {error.strerror}") from error
