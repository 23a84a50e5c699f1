"""A registry that means harm: each of its tricks is a clear error, and nothing is written outside the store."""

import json

import httpx
import pytest

from arriero.errors import InvalidRequest, RegistryError
from arriero.store.names import Name
from arriero.store.registry.address import Challenge, base_url, follow
from tests.helpers.registry import digest_of

BIG = bytes(range(256)) * 2000


def test_an_endless_body_is_cut(registry, store, puller):
    registry.add("a/b:latest", {"model": BIG})
    registry.endless = True
    with pytest.raises(RegistryError, match="more bytes came"):
        puller()
    assert store.verify() == []


def test_a_body_of_another_length_is_refused(registry, puller):
    raw = registry.add("a/b:latest", {"model": BIG[:1000]}).raw
    registry.manifests["a/b/latest"] = raw.replace(b'"size":1000}', b'"size":900}')
    with pytest.raises(RegistryError, match=r"size mismatch: 127\.0\.0\.1 sends 1000 bytes"):
        puller()


@pytest.mark.parametrize("said", ["bytes 7-{last}/{size}", "bytes {start}-7/{size}", "bytes */{size}", "lines 1-2/3"])
def test_a_range_that_was_not_asked_for_is_refused(registry, puller, said):
    registry.add("a/b:latest", {"model": BIG})
    registry.range_head = said
    with pytest.raises(RegistryError, match=r"127\.0\.0\.1 was asked for bytes \d+-\d+ of blob .* and sends"):
        puller()


def test_a_huge_manifest_is_not_read_to_its_end(registry, puller):
    registry.manifest_reply = b" " * (33 << 20)
    with pytest.raises(RegistryError, match=r"the manifest from 127\.0\.0\.1 is larger than"):
        puller()


@pytest.mark.parametrize(
    "text", [b"<html>", b"{}", b"", b"[" * 100_000, b'{"config":{"mediaType":"x","digest":"sha256:../../x","size":1}}']
)
def test_what_is_no_manifest_is_refused(registry, store, puller, text):
    registry.manifest_reply = text
    with pytest.raises(RegistryError, match="pull model manifest: what the registry sends is no manifest"):
        puller()
    assert store.list() == []


@pytest.mark.parametrize("name", ["../../etc/passwd", "/etc/passwd", "a/../b", "a\\b", "a\x00b", "a//b", "x" * 2000])
def test_a_layer_that_names_a_path_outside_is_refused(registry, puller, name):
    registry.add("a/b:latest", {}, tensors={name: b"12345678"})
    with pytest.raises(RegistryError, match=r"the name .* of a layer is refused"):
        puller()


def test_one_blob_of_two_sizes_is_refused(registry, puller):
    document = json.loads(registry.add("a/b:latest", {"model": b"one"}).raw)
    document["layers"].append({**document["layers"][0], "size": 4})
    registry.manifest_reply = json.dumps(document).encode()
    with pytest.raises(RegistryError, match="two sizes"):
        puller()


def test_an_empty_layer_that_is_none_is_refused(registry, puller):
    raw = registry.add("a/b:latest", {"model": b"", "system": b"one"}).raw
    assert puller().system == "one"
    registry.manifest_reply = raw.replace(b'"size":3', b'"size":0')
    with pytest.raises(RegistryError, match="is not the digest of nothing"):
        puller("a/c")


def test_a_configuration_that_cannot_be_read_names_no_model(registry, store, puller):
    document = json.loads(registry.add("a/b:latest", {"model": b"one"}).raw)
    registry.blobs[digest_of(b"no json")] = b"no json"
    document["config"] |= {"digest": digest_of(b"no json"), "size": 7}
    registry.manifest_reply = json.dumps(document).encode()
    with pytest.raises(RegistryError, match="the model's configuration is not one"):
        puller()
    assert store.list() == []


@pytest.mark.parametrize("location", ["file:///etc/passwd", "ftp://example.com/x", "javascript:1", "http://"])
def test_a_redirect_out_of_http_is_refused(registry, puller, location):
    registry.add("a/b:latest", {"model": BIG})
    registry.redirect = lambda _: location
    with pytest.raises(RegistryError, match=r"redirects|For absolute URLs"):
        puller()


def test_redirects_in_a_circle_end(registry, puller):
    registry.add("a/b:latest", {"model": BIG})
    registry.redirect = lambda digest: f"http://{registry.host}/v2/a/b/blobs/{digest}"
    with pytest.raises(RegistryError, match="redirects more than 10 times"):
        puller()


@pytest.mark.parametrize(
    "target", ["http://127.0.0.1:80/x", "https://[::1]/x", "https://10.0.0.8/", "https://169.254.169.254/"]
)
def test_a_redirect_from_the_open_network_into_ours_is_refused(target):
    origin = httpx.URL("https://8.8.8.8/v2/")
    with pytest.raises(RegistryError, match=r"without encryption|this machine or its network"):
        follow(origin, origin, target)


def test_a_redirect_that_drops_encryption_is_refused():
    origin = httpx.URL("https://8.8.8.8/v2/")
    with pytest.raises(RegistryError, match="without encryption"):
        follow(origin, origin, "http://1.1.1.1/x")
    assert follow(origin, origin, "https://1.1.1.1/x").host == "1.1.1.1"


def test_a_login_server_elsewhere_gets_no_signature(registry, puller):
    registry.add("a/b:latest", {"model": BIG})
    registry.login = True
    registry.realm = "http://127.0.0.1:1/token"
    with pytest.raises(RegistryError, match=r'realm host "127\.0\.0\.1:1" does not match original host'):
        puller()
    assert not (puller.home / "id_ed25519").exists()


@pytest.mark.parametrize("header", ["", "Basic realm=x", "Bearer", 'Bearer service="x"'])
def test_a_login_of_an_unknown_kind_is_an_error(header):
    with pytest.raises(RegistryError, match="asks for a login of an unknown kind"):
        Challenge.parse(header, httpx.URL("https://example.com/"))


def test_plain_http_must_be_asked_for():
    with pytest.raises(InvalidRequest, match="insecure protocol http"):
        base_url("example.com", Name.parse("http://example.com/a/b").scheme, insecure=False)
    assert str(base_url("example.com:5000", "https", insecure=True)) == "http://example.com:5000/"


def test_an_error_page_is_shown_in_one_short_line(registry, puller):
    registry.add("a/b:latest", {"model": BIG})
    registry.failures = [403] * 100
    with pytest.raises(RegistryError, match="answers 403: it failed"):
        puller()
