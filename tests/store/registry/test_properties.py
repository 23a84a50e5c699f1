"""Whatever a registry or a disk holds: a clear error or a sound result."""

import json

from hypothesis import given, settings
from hypothesis import strategies as st

from arriero.errors import RegistryError
from arriero.store.blobs import Blobs
from arriero.store.registry.partial import Part, Partial
from arriero.store.registry.pull import checked

DIGEST = "sha256:" + "0" * 64
SCALARS = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=20)
ANYTHING = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=9), inner)
)
LAYERS = st.fixed_dictionaries(
    {
        "mediaType": st.just("application/vnd.ollama.image.tensor") | SCALARS,
        "digest": st.just(DIGEST) | SCALARS,
        "size": st.integers(0, 1 << 62) | SCALARS,
    },
    optional={"name": st.text("ab./\\\0", max_size=12) | SCALARS, "from": SCALARS},
)


@settings(deadline=None, max_examples=200)
@given(st.binary(max_size=300) | ANYTHING.map(lambda value: json.dumps(value).encode()))
def test_no_bytes_crash_the_reading_of_a_manifest(raw):
    try:
        checked(raw)
    except RegistryError:
        return


@settings(deadline=None, max_examples=60)
@given(LAYERS, st.lists(LAYERS, max_size=4))
def test_what_is_accepted_of_a_manifest_names_nothing_outside(config, layers):
    raw = json.dumps({"config": config, "layers": layers}).encode()
    try:
        manifest = checked(raw)
    except RegistryError:
        return
    assert manifest.raw == raw
    for layer in (*manifest.layers, manifest.config):
        assert ".." not in layer.name.split("/")
        assert not layer.name.startswith("/")
        assert layer.size <= 1 << 50


@settings(deadline=None, max_examples=150)
@given(
    st.one_of(
        st.binary(max_size=80),
        ANYTHING.map(lambda value: json.dumps(value).encode()),
        st.lists(st.tuples(st.integers(-5, 1100), st.integers(-5, 1100), st.integers(-5, 1100)), max_size=4).map(
            lambda parts: json.dumps(
                {"size": 1000, "parts": [{"start": a, "end": b, "done": c} for a, b, c in parts]}
            ).encode()
        ),
    )
)
def test_whatever_the_record_says_the_parts_are_the_blob(tmp_path_factory, raw):
    partial = Partial(Blobs(tmp_path_factory.mktemp("blobs")), DIGEST, 1000)
    assert partial.claim()
    partial.path.with_name(partial.path.name + ".json").write_bytes(raw)
    parts = partial.parts(300)
    partial.close()
    assert [part.start for part in parts] == [0, *(part.end for part in parts[:-1])]
    assert parts[-1].end == 1000
    assert all(0 <= part.done <= part.end - part.start for part in parts)


def test_a_record_is_taken_up_and_one_of_another_size_is_not(tmp_path):
    blobs = Blobs(tmp_path)
    one = Partial(blobs, DIGEST, 1000)
    assert one.claim()
    parts = one.parts(600)
    assert [(part.start, part.end) for part in parts] == [(0, 600), (600, 1000)]
    parts[1].done = 7
    one.save(parts)
    assert not Partial(blobs, DIGEST, 1000).claim()
    assert Partial(blobs, DIGEST, 1000).done() == 7
    one.close()
    two = Partial(blobs, DIGEST, 1000)
    assert two.claim()
    assert two.parts(600) == [Part(0, 600), Part(600, 1000, 7)]
    two.close()
    three = Partial(blobs, DIGEST, 999)
    assert three.claim()
    assert sum(part.done for part in three.parts(600)) == 0
    three.close()


def test_a_record_whose_file_is_gone_counts_nothing(tmp_path):
    blobs = Blobs(tmp_path)
    one = Partial(blobs, DIGEST, 1000)
    assert one.claim()
    parts = one.parts(600)
    parts[0].done = 600
    one.save(parts)
    one.close()
    one.path.unlink()
    two = Partial(blobs, DIGEST, 1000)
    assert two.claim()
    assert sum(part.done for part in two.parts(600)) == 0
    two.close()
