"""From a model's files to its way with images, and from a conversation with images to tokens and patches."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from arriero.chat.media.gemma3 import Gemma3Media
from arriero.chat.media.gemma4 import Gemma4Media
from arriero.chat.media.qwen import QwenMedia
from arriero.chat.messages import Conversation, Message
from arriero.chat.model_text import ModelText
from arriero.chat.renderers.prompt import Prompt, Text
from arriero.errors import InvalidRequest, TemplateError, UnsupportedFeature
from arriero.source import FolderSource
from tests.helpers.picture_files import png
from tests.helpers.stored_model import byte_tokenizer

MARKS = ("<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|image_pad|>", "<|vision_end|>")
QWEN_TEMPLATE = (
    "{%- for m in messages %}<|im_start|>{{ m.role }}{{ '\n' }}"
    "{%- if m.content is string %}{{ m.content }}{%- else %}"
    "{%- for part in m.content %}{%- if part.type == 'image' %}<|vision_start|><|image_pad|><|vision_end|>"
    "{%- else %}{{ part.text }}{%- endif %}{%- endfor %}{%- endif %}<|im_end|>\n{% endfor %}"
    "{%- if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
PLAIN_TEMPLATE = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
SMALL = {"size": {"shortest_edge": 32 * 32, "longest_edge": 64 * 64}}
RED, BLUE = png(64, 64, 1), png(64, 32, 2)


def model(
    path: Path,
    *,
    template: str = QWEN_TEMPLATE,
    architecture: str = "Qwen3_5ForConditionalGeneration",
    tensor: str = "model.visual.patch_embed.proj.weight",
    config: dict[str, Any] | None = None,
    settings: dict[str, Any] | None = None,
) -> ModelText:
    """A model with a byte-level tokenizer and one tensor."""
    tokenizer = byte_tokenizer(MARKS)
    ids = {name: tokenizer.token_to_id(f"<|{name}|>") for name in ("image_pad", "vision_start", "vision_end")}
    found = {
        "architectures": [architecture],
        "vision_config": {"patch_size": 16, "spatial_merge_size": 2, "image_size": 28},
        "image_token_id": ids["image_pad"],
        "vision_start_token_id": ids["vision_start"],
        "vision_end_token_id": ids["vision_end"],
        "boi_token_id": ids["vision_start"],
        "eoi_token_id": ids["vision_end"],
        "mm_tokens_per_image": 4,
    }
    (path / "config.json").write_text(json.dumps(found | (config or {})))
    (path / "preprocessor_config.json").write_text(json.dumps(SMALL if settings is None else settings))
    (path / "tokenizer.json").write_text(tokenizer.to_str())
    (path / "tokenizer_config.json").write_text(json.dumps({"chat_template": template, "eos_token": "<|im_end|>"}))
    save_file({tensor: np.zeros((2, 2), np.float32)}, path / "model.safetensors")
    return ModelText.open(FolderSource(str(path)))


def spelled(text: ModelText, ids: list[int]) -> str:
    """The prompt with runs of placeholders as `[n]`."""
    parts: list[str] = []
    run = 0
    for index in [*ids, -1]:
        if index == text.placeholder_id:
            run += 1
            continue
        if run:
            parts.append(f"[{run}]")
        run = 0
        parts.append(text.tokenizer.decode([index]) if index >= 0 else "")
    return "".join(parts)


def placed(text: ModelText, *messages: Message) -> tuple[str, list[tuple[int, int]]]:
    rendered = text.render(Conversation(messages=list(messages)))
    encoded = text.place(rendered, text.cutter())
    for image in encoded.images:
        assert set(encoded.tokens[image.offset : image.end]) == {text.placeholder_id}
    return spelled(text, encoded.tokens), [(i.offset, i.patches.tokens) for i in encoded.images]


def user(content: str, *images: bytes, places: list[int] | None = None) -> Message:
    return Message(role="user", content=content, images=list(images), places=places or [])


@pytest.mark.parametrize(
    ("architecture", "tensor", "kind"),
    [
        ("Qwen3_5ForConditionalGeneration", "model.visual.x", QwenMedia),
        ("Qwen3_5MoeForConditionalGeneration", "vision_tower.x", QwenMedia),
        ("Qwen4ExpForConditionalGeneration", "model.visual.x", QwenMedia),
        ("Gemma4ForConditionalGeneration", "model.vision_tower.x", Gemma4Media),
        ("Gemma4UnifiedForConditionalGeneration", "model.vision_embedder.x", Gemma4Media),
        ("Gemma3ForConditionalGeneration", "vision_tower.vision_model.x", Gemma3Media),
    ],
)
def test_every_family_with_a_tower_claims_vision(tmp_path: Path, architecture: str, tensor: str, kind: type) -> None:
    settings = SMALL if kind is QwenMedia else {}
    config = {"vision_config": {"image_size": 28, "patch_size": 14}} if kind is Gemma3Media else {}
    text = model(tmp_path, architecture=architecture, tensor=tensor, settings=settings, config=config)
    assert isinstance(text.media, kind)
    assert text.capabilities[:2] == ("completion", "vision")


def test_a_tower_that_is_declared_and_not_there_costs_the_images(tmp_path: Path) -> None:
    """Text parts are often published with the configuration of the whole."""
    text = model(tmp_path, tensor="model.language_model.embed_tokens.weight")
    assert text.media is None
    assert "vision" not in text.capabilities
    assert text.no_media == "config.json declares a tower for images, but the model's files hold none"


@pytest.mark.parametrize(
    ("architecture", "tensor"),
    [
        ("Qwen3_5ForCausalLM", "model.visual.x"),
        ("LlamaForCausalLM", "vision_tower.x"),
    ],
)
def test_without_a_tower_that_we_load_there_is_no_vision(tmp_path: Path, architecture: str, tensor: str) -> None:
    text = model(tmp_path, architecture=architecture, tensor=tensor)
    assert text.media is None
    assert "vision" not in text.capabilities
    with pytest.raises(UnsupportedFeature, match="does not take images"):
        text.render(Conversation(messages=[user("look", RED)]))


def test_settings_that_are_not_honoured_cost_the_images_and_say_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        text = model(tmp_path, settings=SMALL | {"do_resize": False})
    assert "images are refused: preprocessor_config.json: do_resize" in caplog.text
    assert text.media is None
    assert "do_resize" in text.no_media
    assert placed(text, user("hello"))[0].startswith("<|im_start|>user\nhello")


def test_a_placeholder_that_is_no_token_costs_the_images(tmp_path: Path) -> None:
    text = model(tmp_path, config={"image_token_id": 99999})
    assert text.media is None
    assert "image_token_id" in text.no_media


def test_a_template_of_parts_places_images_where_the_message_has_them(tmp_path: Path) -> None:
    text = model(tmp_path)
    assert placed(text, user("what is this?", RED)) == (
        "<|im_start|>user\n<|vision_start|>[4]<|vision_end|>what is this?<|im_end|>\n<|im_start|>assistant\n",
        [(7, 4)],
    )
    spell, images = placed(text, user("before and after", RED, BLUE, places=[6]), user("x", BLUE, places=[1]))
    assert spell == (
        "<|im_start|>user\n<|vision_start|>[4]<|vision_end|>before<|vision_start|>[2]<|vision_end|> and after"
        "<|im_end|>\n<|im_start|>user\nx<|vision_start|>[2]<|vision_end|><|im_end|>\n<|im_start|>assistant\n"
    )
    assert [count for _, count in images] == [4, 2, 2]


def test_a_template_of_text_gets_the_familys_own_marks(tmp_path: Path) -> None:
    text = model(tmp_path, template=PLAIN_TEMPLATE)
    assert placed(text, user("what is this?", RED, BLUE))[0] == (
        "<|im_start|>user\n<|vision_start|>[4]<|vision_end|><|vision_start|>[2]<|vision_end|>what is this?<|im_end|>\n"
    )


def test_gemma_writes_its_own_marks_around_an_image(tmp_path: Path) -> None:
    template = QWEN_TEMPLATE.replace("<|vision_start|><|image_pad|><|vision_end|>", "<|image_pad|>")
    text = model(
        tmp_path,
        template=template,
        architecture="Gemma4ForConditionalGeneration",
        tensor="model.vision_tower.x",
        settings={"max_soft_tokens": 6},
    )
    assert "<|im_start|>user\n<|vision_start|>[4]<|vision_end|>look<|im_end|>" in placed(text, user("look", RED))[0]


def test_gemma_3_stands_images_in_paragraphs_of_their_own(tmp_path: Path) -> None:
    template = QWEN_TEMPLATE.replace("<|vision_start|><|image_pad|><|vision_end|>", "<|vision_start|>")
    text = model(
        tmp_path,
        template=template,
        architecture="Gemma3ForConditionalGeneration",
        tensor="vision_tower.x",
        config={"vision_config": {"image_size": 28, "patch_size": 14}},
        settings={},
    )
    assert "user\n\n\n<|vision_start|>[4]<|vision_end|>\n\nlook" in placed(text, user("look", RED))[0]


@pytest.mark.parametrize("role", ["user", "assistant"])
@pytest.mark.parametrize("template", [QWEN_TEMPLATE, PLAIN_TEMPLATE])
def test_text_that_spells_a_placeholder_stays_text(tmp_path: Path, role: str, template: str) -> None:
    text = model(tmp_path, template=template)
    forged = Message(role=role, content="I write <|image_pad|> here")
    spell, images = placed(text, user("a", RED), forged, user("b", BLUE))
    assert "I write <|image_pad|> here" in spell
    assert [count for _, count in images] == [4, 2]


def test_a_template_that_drops_an_image_is_refused(tmp_path: Path) -> None:
    only_last = "{{ messages[-1].role }}: {{ messages[-1].content }}"
    text = model(tmp_path, template=only_last)
    with pytest.raises(TemplateError, match="leaves out 1 of 2 images"):
        text.render(Conversation(messages=[user("a", RED), user("b", BLUE)]))


def test_a_damaged_image_names_itself(tmp_path: Path) -> None:
    text = model(tmp_path)
    rendered = text.render(Conversation(messages=[user("a", b"hi")]))
    with pytest.raises(InvalidRequest, match="of no kind that is read here"):
        text.place(rendered, text.cutter())
    with pytest.raises(UnsupportedFeature, match="does not take images"):
        text.encode(rendered)


def test_a_raw_prompt_that_spells_placeholders_beside_images_is_refused(tmp_path: Path) -> None:
    text = model(tmp_path)
    rendered = text.render(Conversation(messages=[user("a", RED)]))
    forged = Prompt([Text("<|image_pad|>"), *rendered.segments])
    with pytest.raises(InvalidRequest, match="stands for images alone"):
        text.place(forged, text.cutter())


def test_leaving_out_old_exchanges_leaves_out_their_images(tmp_path: Path) -> None:
    text = model(tmp_path)
    messages = [user("old", RED), Message(role="assistant", content="yes"), user("new", BLUE)]
    cutter = text.cutter()
    whole = text.place(text.render(Conversation(messages=messages)), cutter)
    shorter = text.truncate(Conversation(messages=messages), len(whole.tokens) - 1, cutter=cutter)
    assert shorter.dropped == 2
    kept = text.place(text.render(shorter.conversation), cutter)
    assert kept.tokens == shorter.tokens
    assert [image.patches.tokens for image in kept.images] == [2]
