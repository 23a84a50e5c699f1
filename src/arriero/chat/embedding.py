"""How a model makes a vector of a text, as its files say: what is pooled, and how long a text may be."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

import msgspec

from arriero.chat.files import TextFiles
from arriero.errors import CheckpointError, UnsupportedFeature
from arriero.formats import json_text
from arriero.runner.messages import Pooling

log = logging.getLogger(__name__)

_GGUF: dict[int, Pooling] = {1: "mean", 2: "cls", 3: "last"}
_MODES: dict[str, Pooling] = {
    "mean": "mean",
    "cls": "cls",
    "lasttoken": "last",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_cls_token": "cls",
    "pooling_mode_lasttoken": "last",
}
_DECODERS = ("ForCausalLM", "ForConditionalGeneration")


@dataclass(frozen=True, slots=True)
class EmbeddingRules:
    """What a model's files say about embeddings."""

    pooling: Pooling
    max_tokens: int
    """Tokens of a text at most, special ones included; 0 = as the model."""
    refused: str = ""
    """Why it can't be done; '' when it can."""

    def check(self, name: str) -> None:
        """Raise UnsupportedFeature for a model whose vectors would be wrong."""
        if self.refused:
            raise UnsupportedFeature(f'"{name}" does not support embeddings here: {self.refused}')

    @classmethod
    def read(cls, files: TextFiles) -> EmbeddingRules:
        """From `modules.json` and what it names (the layout of sentence-transformers), or a GGUF file's pooling type.

        Without either an encoder's tokens are averaged, and a model that generates gives its last token's state.
        """
        default = _default(files)
        if files.metadata:
            kind = next((value for key, value in files.metadata.items() if key.endswith(".pooling_type")), None)
            if kind in (None, 0):
                return cls(default, 0)
            return cls(_GGUF[kind], 0) if kind in _GGUF else cls(default, 0, f"its pooling type is {kind}")
        longest = files.json("sentence_bert_config.json").get("max_seq_length")
        limit = longest if isinstance(longest, int) and longest > 0 else 0
        for module in _modules(files):
            kind, folder = str(module.get("type", "")).rpartition(".")[2], str(module.get("path", ""))
            if kind == "Pooling":
                pooling, refused = _pooling(files, f"{folder}/config.json", default)
                if refused:
                    return cls(default, limit, refused)
                default = pooling
            elif kind == "Dense" and _is_matrix(files, f"{folder}/config.json"):
                continue
            elif kind not in ("Transformer", "Normalize"):
                return cls(default, limit, f"a layer of the kind {kind} stands behind its pooling")
        return cls(default, limit)


def _is_matrix(files: TextFiles, name: str) -> bool:
    """Whether a layer behind the pooling is one of EmbeddingGemma's, which is a matrix and nothing else."""
    config = files.json(name)
    names = files.json("config.json").get("architectures")
    plain = str(config.get("activation_function", "")).endswith("Identity") and not config.get("bias")
    return plain and isinstance(names, list) and "Gemma3TextModel" in names


def _default(files: TextFiles) -> Pooling:
    names = files.json("config.json").get("architectures")
    names = names if isinstance(names, list) else []
    if files.metadata:
        return "mean" if str(files.metadata.get("general.architecture")).endswith(("bert", "embedding")) else "last"
    generates = any(str(name).endswith(_DECODERS) for name in names)
    return "last" if generates else "mean"


def _modules(files: TextFiles) -> list[dict[str, Any]]:
    data = files.bytes("modules.json")
    try:
        value = [] if data is None else json_text.decode(data)
    except (msgspec.DecodeError, RecursionError) as error:
        raise CheckpointError(f"modules.json is not valid JSON: {error}") from error
    if not isinstance(value, list) or not all(isinstance(module, dict) for module in value):
        raise CheckpointError("modules.json must hold a list of objects")
    return value


def _pooling(files: TextFiles, name: str, default: Pooling) -> tuple[Pooling, str]:
    """What a pooling's configuration says, or why it can't be done."""
    if name not in files:
        log.warning("modules.json names %s, which is not there: %s pooling is used", name, default)
        return default, ""
    config = files.json(name)
    mode = config.get("pooling_mode")
    if isinstance(mode, str):
        return (_MODES[mode], "") if mode in _MODES else (default, f"its pooling is {mode!r}")
    chosen = [key for key, value in config.items() if key.startswith("pooling_mode_") and value is True]
    if len(chosen) != 1 or chosen[0] not in _MODES:
        return default, f"its pooling is {' and '.join(chosen) or 'none at all'}"
    return _MODES[chosen[0]], ""
