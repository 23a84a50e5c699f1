"""A server with tiny encoders and a Llama in real runners."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors

from arriero.create.create import create
from arriero.create.request import CreateRequest
from arriero.formats.safetensors import write
from tests.helpers.checkpoint_folder import write_folder
from tests.helpers.live_server import LiveServer, live_server
from tests.model.test_encoders_gguf import write as write_gguf

BERT = Path(__file__).parents[1] / "model" / "encoders" / "bert"
WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *"abcdefghij", "##a", "##b", "hello", "world", "near", "far"]


def wordpiece() -> Tokenizer:
    """A lower-casing vocabulary of whole words and letters, with BERT's marks around each text."""
    made = Tokenizer(models.WordPiece({word: index for index, word in enumerate(WORDS)}, unk_token="[UNK]"))
    made.normalizer = normalizers.BertNormalizer(lowercase=True)
    made.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    made.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    made.add_special_tokens(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"])
    return made


def encoder_folder(folder: Path, pooling: dict[str, Any]) -> Path:
    """The tiny BERT as sentence-transformers lays a model out."""
    (folder / "1_Pooling").mkdir(parents=True)
    for name in ("config.json", "model.safetensors"):
        (folder / name).write_bytes((BERT / name).read_bytes())
    (folder / "tokenizer.json").write_text(wordpiece().to_str())
    (folder / "tokenizer_config.json").write_text(json.dumps({"cls_token": "[CLS]", "sep_token": "[SEP]"}))
    kinds = {"": "Transformer", "1_Pooling": "Pooling", "2_Normalize": "Normalize"}
    modules = [
        {"idx": index, "name": str(index), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for index, (path, kind) in enumerate(kinds.items())
    ]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
    (folder / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": 12}))
    return folder


def gemma_folder(folder: Path) -> Path:
    """The tiny EmbeddingGemma with two matrices behind its pooling, each in a folder of its own."""
    encoder_folder(folder, {"pooling_mode_mean_tokens": True})
    for name in ("config.json", "model.safetensors"):
        (folder / name).write_bytes((BERT.parent / "gemma3_encoder" / name).read_bytes())
    kinds = {
        "": "Transformer",
        "1_Pooling": "Pooling",
        "2_Dense": "Dense",
        "3_Dense": "Dense",
        "4_Normalize": "Normalize",
    }
    modules = [
        {"idx": i, "path": path, "type": f"sentence_transformers.models.{k}"}
        for i, (path, k) in enumerate(kinds.items())
    ]
    (folder / "modules.json").write_text(json.dumps(modules))
    for index, matrix in enumerate(gemma_matrices()):
        place = folder / f"{index + 2}_Dense"
        place.mkdir()
        config = {"bias": False, "activation_function": "torch.nn.modules.linear.Identity"}
        (place / "config.json").write_text(json.dumps(config))
        write(place / "model.safetensors", {"linear.weight": matrix})
    return folder


def gemma_matrices() -> list[np.ndarray]:
    chance = np.random.default_rng(4)
    return [chance.normal(size=shape).astype(np.float32) for shape in ((64, 32), (32, 64))]


def store(running: LiveServer, name: str, folder: Path) -> None:
    """Create a model of everything in a folder."""
    paths = sorted(path for path in folder.rglob("*") if path.is_file())
    files = {
        path.relative_to(folder).as_posix(): running.store.blobs.ingest([path.read_bytes()]).digest for path in paths
    }
    create(running.store, CreateRequest(model=name, files=files), lambda status: None)


@contextmanager
def embedding_server(folder: Path) -> Iterator[LiveServer]:
    """`mean`, `first`, `strange` (a pooling that there isn't) and `gguf` are encoders, `llama` generates."""
    mean = {"word_embedding_dimension": 32, "pooling_mode_mean_tokens": True, "pooling_mode_cls_token": False}
    with live_server(folder, [sys.executable, "-m", "arriero.runner"], max_loaded_models=16) as running:
        store(running, "mean", encoder_folder(folder / "mean", mean))
        store(running, "first", encoder_folder(folder / "first", {"pooling_mode": "cls"}))
        store(running, "strange", encoder_folder(folder / "strange", {"pooling_mode_max_tokens": True}))
        store(running, "gemma", gemma_folder(folder / "gemma"))
        store(running, "llama", write_folder(folder / "llama"))
        write_gguf(folder / "bert.gguf", "bert", "bert", pooling_type=2)
        digest = running.store.blobs.ingest([(folder / "bert.gguf").read_bytes()]).digest
        create(running.store, CreateRequest(model="gguf", files={"bert.gguf": digest}), lambda status: None)
        yield running
