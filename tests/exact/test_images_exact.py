"""Prompts with images through the engine in float32: the plain loop's tokens, whatever chunks and neighbours."""

from __future__ import annotations

import random
from collections.abc import Sequence

import mlx.core as mx
import msgspec
import numpy as np
import pytest

from arriero.image import PlacedImage
from arriero.model.architectures import load_model
from arriero.model.checkpoint import Checkpoint
from arriero.model.contract import Model
from arriero.runner.messages import SamplingOptions, Submit
from arriero.runner.sampling import Sampler
from arriero.source import FolderSource
from tests.helpers.engine_runs import collect, make_engine, plain_loop, run, submit
from tests.helpers.pictures import GOLDENS, PROMPTS, Golden, SeeingRows, seen
from tests.helpers.tiny_model import TinyModel

NAMES = sorted(folder.name for folder in GOLDENS.iterdir() if folder.is_dir())
COUNT = 30
DRAWN = SamplingOptions(temperature=2.0, top_k=60, top_p=1.0, seed=11)
"""Tiny models repeat themselves where only the best token counts."""


@pytest.fixture(params=NAMES, scope="module")
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def model(name: str) -> Model:
    return load_model(Checkpoint.open(FolderSource(str(GOLDENS / name))), mx.float32)


def asking(row: str, golden: Golden, count: int = COUNT) -> Submit:
    return msgspec.structs.replace(submit(row, golden.ids, count, sampling=DRAWN), images=golden.images)


def alone(model: Model, golden: Golden, count: int = COUNT) -> list[int]:
    """Tokens of the plainest loop."""
    rows = SeeingRows(model, [(golden.ids, golden.images)])
    sampler = Sampler(model.facts.vocab_size, model.facts.context_length)
    sampler.add("row", DRAWN, golden.ids)
    out: list[int] = []
    last = rows.logits([len(golden.ids)])[-1:]
    for _ in range(count):
        out += sampler.sample(["row"], mx.array(last)).read_tokens()
        last = rows.logits([1], out)
    return out


@pytest.mark.parametrize("chunk", [1, 5, 512])
@pytest.mark.parametrize("ahead", [False, True])
def test_chunks_and_neighbours_change_no_token(model: Model, name: str, chunk: int, ahead: bool) -> None:
    rng = random.Random(chunk)
    goldens = {prompt: Golden.load(name, prompt) for prompt in PROMPTS}
    texts = {f"text{n}": [rng.randrange(100) for _ in range(9 + 7 * n)] for n in range(3)}
    engine = make_engine(model, ahead, prefill_chunk=chunk, max_rows=5)
    waiting = [asking(prompt, golden) for prompt, golden in goldens.items()]
    waiting += [submit(row, ids, COUNT, sampling=DRAWN) for row, ids in texts.items()]
    rng.shuffle(waiting)
    replies: dict = {}
    while waiting:
        engine.submit(waiting.pop())
        for _ in range(3):
            engine.step()
            collect(engine, replies)
    run(engine, replies)
    for prompt, golden in goldens.items():
        assert replies[prompt].tokens == alone(model, golden)
    for row, ids in texts.items():
        assert replies[row].tokens == plain_loop(model, ids, COUNT, DRAWN)


def test_another_image_changes_what_follows_it(model: Model, name: str) -> None:
    """What the tests above compare does depend on the image."""
    golden = Golden.load(name, "between")
    image = golden.images[0]
    dark = bytes(len(image.patches.pixels))
    patches = msgspec.structs.replace(image.patches, pixels=dark, identity="dark")
    other = Golden(golden.ids, [PlacedImage(offset=image.offset, patches=patches)], golden.logits, golden.after)
    difference = np.abs(seen(model, golden) - seen(model, other))
    assert difference[: image.offset].max() == 0
    assert difference[image.end :].max() > 0.01


def test_what_was_stored_of_an_image_serves_the_same_image_only(model: Model, name: str) -> None:
    golden = Golden.load(name, "between")
    image = golden.images[0]
    patches = msgspec.structs.replace(
        image.patches, pixels=bytes(255 - value for value in image.patches.pixels), identity="another"
    )
    other = Golden(golden.ids, [PlacedImage(offset=image.offset, patches=patches)], golden.logits, golden.after)
    engine = make_engine(model, prefill_chunk=7, prefix_bytes=1 << 30)
    cached = []
    for turn, asked in enumerate([golden, other, golden, other]):
        engine.submit(asking(str(turn), asked))
        reply = run(engine)[str(turn)]
        assert reply.tokens == alone(model, asked)
        cached.append(reply.end.cached_tokens)
    assert max(cached[:2]) <= image.offset
    assert min(cached[2:]) > image.offset


def placed(golden: Golden, offsets: Sequence[int], tokens: int | None = None) -> list[PlacedImage]:
    patches = golden.images[0].patches
    if tokens is not None:
        patches = msgspec.structs.replace(patches, tokens=tokens)
    return [PlacedImage(offset=offset, patches=patches) for offset in offsets]


@pytest.mark.parametrize(
    ("offsets", "tokens", "message"),
    [
        ([25], None, "stands at tokens 25"),
        ([0, 3], None, "tokens from"),
        ([-1], None, "stands at tokens -1"),
        ([0], 3, "placeholders"),
    ],
)
def test_images_that_do_not_fit_fail_alone(
    model: Model, name: str, offsets: list[int], tokens: int | None, message: str
) -> None:
    golden = Golden.load(name, "between")
    engine = make_engine(model)
    engine.submit(msgspec.structs.replace(submit("bad", golden.ids), images=placed(golden, offsets, tokens)))
    engine.submit(asking("good", golden))
    replies = run(engine)
    assert message in replies["bad"].end.message
    assert replies["bad"].end.error == "InvalidRequest"
    assert replies["good"].tokens == alone(model, golden)


def test_pixels_of_another_size_are_refused(model: Model, name: str) -> None:
    golden = Golden.load(name, "between")
    image = golden.images[0]
    patches = msgspec.structs.replace(image.patches, pixels=image.patches.pixels[:-3])
    engine = make_engine(model)
    bad = msgspec.structs.replace(submit("bad", golden.ids), images=[PlacedImage(offset=image.offset, patches=patches)])
    engine.submit(bad)
    assert "values" in run(engine)["bad"].end.message


def test_a_model_of_text_refuses_images(name: str) -> None:
    golden = Golden.load(name, "first")
    engine = make_engine(TinyModel())
    engine.submit(msgspec.structs.replace(submit("a", [1] * len(golden.ids)), images=golden.images))
    end = run(engine)["a"].end
    assert end.error == "UnsupportedFeature"
    assert "does not take images" in end.message


@pytest.mark.parametrize("behind", [1, 2, 3])
def test_a_prompt_goes_on_from_within_an_image_that_was_stored(model: Model, name: str, behind: int) -> None:
    """States are kept four tokens before a prompt's end, which may be inside of an image; the image is the same."""
    golden = Golden.load(name, "between")
    image = golden.images[0]
    short = Golden(golden.ids[: image.end + behind], [image], golden.logits, golden.after)
    engine = make_engine(model, prefix_bytes=1 << 30)
    for turn, asked in enumerate([short, short, golden, short]):
        engine.submit(asking(str(turn), asked, 6))
        assert run(engine)[str(turn)].tokens == alone(model, asked, 6)
