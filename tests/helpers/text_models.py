"""Models of text only: folders with a tokenizer and configuration files, and GGUF-like metadata, made for a test."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from arriero.chat.files import TextFiles
from arriero.chat.model_text import ModelText
from arriero.chat.templates import ChatTemplates
from arriero.chat.tokenizer import Tokenizer
from arriero.source import FolderSource

FIXTURES = Path(__file__).resolve().parent.parent / "chat" / "fixtures"

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def fixture(name: str) -> Any:
    """A golden file of tests/chat."""
    return json.loads((FIXTURES / name).read_text("utf-8"))


def fixture_id(text: str, family: str = "qwen2") -> int:
    """The id of an added token of a fixture tokenizer."""
    added = fixture(f"tokenizer_{family}.json")["tokenizer"]["added_tokens"]
    return next(int(entry["id"]) for entry in added if entry["content"] == text)


def folder(path: Path, *, family: str = "qwen2", **files: Any) -> FolderSource:
    """A model folder with the fixture tokenizer; keywords are JSON files by stem, `chat_template` a Jinja text."""
    path.mkdir(exist_ok=True)
    (path / "tokenizer.json").write_text(json.dumps(fixture(f"tokenizer_{family}.json")["tokenizer"]), "utf-8")
    for name, content in files.items():
        if name == "chat_template":
            (path / "chat_template.jinja").write_text(content, "utf-8")
        else:
            (path / f"{name}.json").write_text(json.dumps(content), "utf-8")
    return FolderSource(str(path))


def model(path: Path, **files: Any) -> ModelText:
    """The text side of such a folder."""
    return ModelText.open(folder(path, **files))


def tokenizer_of(metadata: dict[str, Any]) -> Tokenizer:
    """The tokenizer of GGUF metadata."""
    files = TextFiles({}, metadata)
    return Tokenizer.from_files(files, ChatTemplates.open(files))


def byte_level_metadata(pre: str | None, family: str = "qwen2") -> dict[str, Any]:
    """The fixture tokenizer as a GGUF file describes it."""
    described = fixture(f"tokenizer_{family}.json")["tokenizer"]
    vocabulary: dict[str, int] = described["model"]["vocab"]
    tokens = sorted(vocabulary, key=vocabulary.__getitem__)
    types = [1] * len(tokens)
    for entry in described["added_tokens"]:
        tokens.append(entry["content"])
        types.append(3 if entry["special"] else 4)
    metadata = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.merges": [" ".join(pair) for pair in described["model"]["merges"]],
        "tokenizer.ggml.bos_token_id": tokens.index("<|endoftext|>"),
        "tokenizer.ggml.eos_token_id": tokens.index("<|im_end|>"),
    }
    return metadata | ({} if pre is None else {"tokenizer.ggml.pre": pre})
