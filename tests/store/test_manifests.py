"""Manifests and configuration blobs: bytes kept, unknown fields carried along."""

import hashlib
import json

import pytest

from arriero.errors import StoreError
from arriero.store.manifests import ConfigBlob, Layer, Manifest

DIGEST = "sha256:" + "ab" * 32
RAW = json.dumps(
    {
        "schemaVersion": 2,
        "mediaType": "application/vnd.docker.distribution.manifest.v2+json",
        "config": {"mediaType": "application/vnd.docker.container.image.v1+json", "digest": DIGEST, "size": 5},
        "layers": [
            {
                "mediaType": "application/vnd.ollama.image.tensor",
                "digest": DIGEST,
                "size": 7,
                "name": "w",
                "urls": ["u"],
            }
        ],
        "annotations": {"a": "b"},
    },
    indent=3,
).encode()


def test_a_manifest_that_was_read_keeps_its_bytes_and_their_digest():
    manifest = Manifest.decode(RAW)
    assert manifest.raw == RAW
    assert manifest.digest == hashlib.sha256(RAW).hexdigest()
    assert manifest.size == 12


def test_unknown_fields_survive_a_rebuild():
    manifest = Manifest.decode(RAW)
    rebuilt = json.loads(Manifest.build(manifest.config, manifest.layers, like=manifest).raw)
    assert rebuilt == json.loads(RAW)


def test_a_built_manifest_is_compact_json_and_a_newline():
    raw = Manifest.build(Layer(media_type="c", digest=DIGEST, size=1), []).raw
    assert raw.endswith(b"}\n")
    assert b" " not in raw
    assert Manifest.decode(raw).layers == ()


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"\n",
        b"{",
        b"[]",
        b"null",
        b"{}",
        b'{"config":{}}',
        RAW.replace(b'"size": 7', b'"size": -7'),
        RAW.replace(b"7", b'"7"'),
        RAW.replace(b'"layers": [', b'"layers": [3, '),
    ],
)
def test_a_corrupt_manifest_is_an_error_that_says_so(raw):
    with pytest.raises(StoreError, match=r"^corrupt manifest: "):
        Manifest.decode(raw)


def test_a_layer_with_a_hostile_digest_is_refused():
    with pytest.raises(StoreError, match=r"corrupt manifest: .*digest"):
        Manifest.decode(RAW[::-1].replace(DIGEST[::-1].encode(), b"../x"[::-1], 1)[::-1])


def test_a_configuration_blob_keeps_unknown_fields_and_takes_null_for_unset():
    raw = b'{"model_format":"gguf","model_families":null,"renderer":null,"rootfs":{"type":"layers"},"new_field":1}'
    config = ConfigBlob.decode(raw)
    assert (config.renderer, config.model_families) == ("", None)
    assert json.loads(config.encode())["rootfs"] == {"type": "layers"}
    assert ConfigBlob.decode(config.encode()) == config


@pytest.mark.parametrize("raw", [b"", b"[]", b'{"model_format":3}', b'{"context_length":9223372036854775808}', b"\xff"])
def test_a_corrupt_configuration_is_an_error(raw):
    with pytest.raises(StoreError, match="corrupt configuration"):
        ConfigBlob.decode(raw)
