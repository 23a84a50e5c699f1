"""Which way a model has with images, from its files."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from arriero.chat.files import TextFiles
from arriero.chat.media.gemma3 import Gemma3Media
from arriero.chat.media.gemma4 import Gemma4Media
from arriero.chat.media.media import Marks, Media
from arriero.chat.media.qwen import QwenMedia
from arriero.errors import CheckpointError
from arriero.model.vision import Family, family_of, tower_of


def open_media(files: TextFiles, token_text: Callable[[int | None], str]) -> Media | None:
    """The model's way with images; None for a model whose images we don't take.

    `token_text` gives the text of a token's id. CheckpointError for a tower that is declared and not there, and for
    settings that we don't honour.
    """
    config = files.json("config.json")
    family = family_of(config)
    if family is None:
        return None
    if tower_of(config, files.tensor_names()) is None:
        raise CheckpointError("config.json declares a tower for images, but the model's files hold none")
    marks = read_marks(family, config, token_text)
    vision, settings = config["vision_config"], image_settings(files)
    if family == "qwen":
        return QwenMedia(marks, vision, settings)
    if family == "gemma3":
        return Gemma3Media(marks, config, settings)
    return Gemma4Media(marks, vision, settings, unified=family == "gemma4_unified")


def read_marks(family: Family, config: Mapping[str, Any], token_text: Callable[[int | None], str]) -> Marks:
    """How an image is written, by the ids in the configuration; CheckpointError for one that is no token."""

    def text(name: str, default: int) -> str:
        # Gemma 3 says index where the others say id.
        index = config.get(name, config.get(name.replace("_index", "_id"), default))
        found = token_text(index) if isinstance(index, int) else ""
        if not found:
            raise CheckpointError(f"config.json: `{name}` is {index!r}, which is no token of the vocabulary")
        return found

    if family == "qwen":
        pad = text("image_token_id", 248056)
        around = text("vision_start_token_id", 248053), text("vision_end_token_id", 248054)
        return Marks(pad, "", pad, "", around)
    if family == "gemma3":
        start, pad, end = (
            text(f"{name}_token_index", default)
            for name, default in (("boi", 255999), ("image", 262144), ("eoi", 256000))
        )
        return Marks(start, f"\n\n{start}", pad, f"{end}\n\n")
    pad = text("image_token_id", 258880)
    return Marks(pad, text("boi_token_id", 255999), pad, text("eoi_token_id", 258882))


def image_settings(files: TextFiles) -> Mapping[str, Any]:
    """The settings of preprocessing, wherever they are; empty where the model has none."""
    found = files.json("preprocessor_config.json")
    if found:
        return found
    nested = files.json("processor_config.json").get("image_processor")
    return nested if isinstance(nested, dict) else {}
