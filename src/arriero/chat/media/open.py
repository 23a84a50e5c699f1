"""Which way a model has with images, from its files."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from arriero.chat.files import TextFiles
from arriero.chat.media.media import Marks, Media
from arriero.chat.media.qwen import QwenMedia
from arriero.errors import CheckpointError
from arriero.model.vision import tower_of


def open_media(files: TextFiles, token_text: Callable[[int | None], str]) -> Media | None:
    """The model's way with images; None for a model whose images we don't take.

    `token_text` gives the text of a token's id. CheckpointError for settings that we don't honour.
    """
    config = files.json("config.json")
    family = tower_of(config, files.tensor_names())
    if family is None:
        return None

    def text(name: str, default: int) -> str:
        index = config.get(name, default)
        found = token_text(index) if isinstance(index, int) else ""
        if not found:
            raise CheckpointError(f"config.json: `{name}` is {index!r}, which is no token of the vocabulary")
        return found

    vision: Mapping[str, Any] = config["vision_config"]
    pad = text("image_token_id", 248056)
    around = text("vision_start_token_id", 248053), text("vision_end_token_id", 248054)
    return QwenMedia(Marks(pad, "", pad, "", around), vision, image_settings(files))


def image_settings(files: TextFiles) -> Mapping[str, Any]:
    """The settings of preprocessing, wherever they are; empty where the model has none."""
    found = files.json("preprocessor_config.json")
    if found:
        return found
    nested = files.json("processor_config.json").get("image_processor")
    return nested if isinstance(nested, dict) else {}
