"""Images over the API, with a real runner process around a tiny model with a tower."""

from __future__ import annotations

import base64
from typing import Any

import pytest
from PIL import Image

from arriero.chat.messages import Conversation, Message
from arriero.chat.model_text import ModelText
from arriero.chat.renderers.prompt import Encoded
from arriero.source import FolderSource
from tests.helpers.picture_files import file_of, pixels, png
from tests.helpers.seeing_server import OPTIONS, Seeing

FIRST, SECOND = png(40, 24, 1), png(16, 48, 2)


def asked(content: str, *images: bytes) -> dict[str, Any]:
    return {"role": "user", "content": content, "images": list(images)}


def test_a_chat_with_an_image_is_answered_as_by_hand(seeing: Seeing) -> None:
    reply = seeing.client.chat("seeing", [asked("what is this?", FIRST)], options=OPTIONS)
    assert reply.message.content == seeing.said(Message(role="user", content="what is this?", images=[FIRST]))
    assert reply.message.content != seeing.said(Message(role="user", content="what is this?", images=[SECOND]))


def test_a_streamed_chat_with_images_in_several_turns(seeing: Seeing) -> None:
    turns = [asked("a", FIRST), {"role": "assistant", "content": "yes"}, asked("b", SECOND, FIRST)]
    pieces = seeing.client.chat("seeing", turns, options=OPTIONS, stream=True)
    assert "".join(piece.message.content or "" for piece in pieces) == seeing.said(
        Message(role="user", content="a", images=[FIRST]),
        Message(role="assistant", content="yes"),
        Message(role="user", content="b", images=[SECOND, FIRST]),
    )


def test_generate_takes_images_too(seeing: Seeing) -> None:
    reply = seeing.client.generate("seeing", "what is this?", images=[FIRST], options=OPTIONS)
    assert reply.response == seeing.said(Message(role="user", content="what is this?", images=[FIRST]))


def test_a_raw_prompt_says_where_its_images_stand(seeing: Seeing) -> None:
    reply = seeing.client.generate(
        "seeing", "A [img-0] B [img-0] [img-1]", raw=True, images=[FIRST, SECOND], options=OPTIONS
    )
    # 3 × 5 and 6 × 2 blocks of patches, each image between its marks.
    assert reply.prompt_eval_count == len("A  B  ") + 3 * 2 + 15 + 15 + 12


def test_an_image_counts_its_tokens(seeing: Seeing) -> None:
    def count(*images: bytes) -> int:
        reply = seeing.client.chat("seeing", [asked("x", *images)], options={"num_predict": 1})
        return int(reply.prompt_eval_count or 0)

    assert count(FIRST) - count() == 15 + 2
    assert count(FIRST, SECOND) - count() == 15 + 12 + 4


def test_data_urls_are_taken(seeing: Seeing) -> None:
    url = "data:image/png;base64," + base64.b64encode(FIRST).decode()
    body = {"model": "seeing", "stream": False, "options": OPTIONS, "messages": [asked("x") | {"images": [url]}]}
    reply = seeing.http.post("/api/chat", json=body)
    assert reply.json()["message"]["content"] == seeing.said(Message(role="user", content="x", images=[FIRST]))


def test_vision_is_listed_where_there_is_a_tower(seeing: Seeing) -> None:
    assert "vision" in (seeing.client.show("seeing").capabilities or [])
    assert "vision" not in (seeing.client.show("blind").capabilities or [])
    listed = {model["name"]: model for model in seeing.http.get("/api/tags").json()["models"]}
    assert "vision" in listed["seeing:latest"]["capabilities"]


def test_a_rendered_prompt_counts_its_images(seeing: Seeing) -> None:
    body = asked("x") | {"images": [base64.b64encode(FIRST).decode()]}
    reply = seeing.http.post("/api/chat", json={"model": "seeing", "messages": [body], "_debug_render_only": True})
    assert reply.json()["_debug_info"]["image_count"] == 1


PICTURE = base64.b64encode(FIRST).decode()


@pytest.mark.parametrize(
    ("image", "message"),
    [
        ("no base64!", "messages[0].images[0]: illegal base64 data"),
        ("aGk=", "of no kind that is read here"),
        ("", "an image is empty"),
        ("https://example.org/a.png", "image URLs are not fetched"),
        ("data:image/png,abc", "a data URL without"),
        (base64.b64encode(FIRST[:90]).decode(), "damaged"),
        (base64.b64encode(b"RIFF\0\0\0\0WAVEfmt ").decode(), "sound is not in this version"),
        (base64.b64encode(file_of(Image.fromarray(pixels(900, 2)))).decode(), "too long and thin"),
    ],
)
def test_an_image_that_cannot_be_taken_is_a_400_in_words(seeing: Seeing, image: str, message: str) -> None:
    assert message in seeing.error("chat", messages=[{"role": "user", "content": "x", "images": [image]}])


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"prompt": "a", "suffix": "b", "images": [PICTURE]}, "insert"),
        ({"prompt": "[img-1]", "raw": True, "images": [PICTURE]}, "[img-1], but 1 images were sent"),
        ({"prompt": "[img-0]<|image_pad|>", "raw": True, "images": [PICTURE]}, "stands for images alone"),
        ({"prompt": "a", "images": [PICTURE] * 257}, "at most 256 are taken"),
        ({"prompt": "a", "model": "blind", "images": [PICTURE]}, '"blind" does not support images'),
    ],
)
def test_what_does_not_go_with_images_is_a_400(seeing: Seeing, body: dict[str, Any], message: str) -> None:
    assert message in seeing.error("generate", **body)


def test_a_context_with_an_image_is_not_taken_for_one(seeing: Seeing) -> None:
    reply = seeing.client.generate("seeing", "x", images=[FIRST], options=OPTIONS)
    assert "context holds an image" in seeing.error("generate", prompt="y", context=list(reply.context or []))


def test_an_image_behind_a_context_stands_where_it_should(seeing: Seeing) -> None:
    first = seeing.client.generate("seeing", "x", options=OPTIONS)
    context = list(first.context or [])
    body = {"model": "seeing", "prompt": "y", "images": [PICTURE], "context": context, "options": OPTIONS}
    reply = seeing.http.post("/api/generate", json=body | {"stream": False}).json()
    text = ModelText.open(FolderSource(str(seeing.folder)))
    new = text.place(
        text.render(Conversation(messages=[Message(role="user", content="y", images=[FIRST])])), text.cutter()
    )
    shifted = [type(i)(offset=i.offset + len(context), patches=i.patches) for i in new.images]
    by_hand = seeing.tokens(Encoded([*context, *new.tokens], shifted), text.stop_ids)
    assert reply["response"] == text.tokenizer.decode(by_hand)


def test_a_conversation_too_long_loses_its_oldest_images(seeing: Seeing) -> None:
    turns = []
    for _ in range(6):
        turns += [asked("look " * 20, FIRST), {"role": "assistant", "content": "yes " * 20}]
    reply = seeing.client.chat("seeing", [*turns, asked("now", SECOND)], options=OPTIONS | {"num_ctx": 256})
    assert (reply.prompt_eval_count or 0) < 256
    assert reply.eval_count
