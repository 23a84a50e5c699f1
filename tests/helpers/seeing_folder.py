"""A tiny Qwen 3.5 with its tower, a byte-level tokenizer and a template of parts, as a folder that can be imported."""

from __future__ import annotations

import json
from pathlib import Path

import mlx.core as mx

from tests.helpers.pictures import GOLDENS
from tests.helpers.stored_model import byte_tokenizer

MARKS = ("<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|image_pad|>", "<|vision_end|>")
VOCAB = 256 + len(MARKS)
TEMPLATE = (
    "{%- for m in messages %}<|im_start|>{{ m.role }}{{ '\\n' }}"
    "{%- if m.content is string %}{{ m.content }}{%- else %}"
    "{%- for part in m.content %}{%- if part.type == 'image' %}<|vision_start|><|image_pad|><|vision_end|>"
    "{%- else %}{{ part.text }}{%- endif %}{%- endfor %}{%- endif %}<|im_end|>\n{% endfor %}"
    "{%- if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def write_seeing_folder(folder: Path) -> Path:
    """The golden's weights with a larger vocabulary; pictures become 8 to 64 patches of 4 pixels."""
    folder.mkdir(parents=True)
    golden = GOLDENS / "qwen3_5"
    config = json.loads((golden / "config.json").read_text())
    tokenizer = byte_tokenizer(MARKS)
    config["text_config"] |= {"vocab_size": VOCAB, "eos_token_id": tokenizer.token_to_id("<|im_end|>")}
    config["image_token_id"] = tokenizer.token_to_id("<|image_pad|>")
    config["vision_start_token_id"] = tokenizer.token_to_id("<|vision_start|>")
    config["vision_end_token_id"] = tokenizer.token_to_id("<|vision_end|>")
    tensors = dict(mx.load(str(golden / "model.safetensors")))
    hidden = config["text_config"]["hidden_size"]
    for seed, name in enumerate(("model.language_model.embed_tokens.weight", "lm_head.weight")):
        assert name in tensors
        noise = mx.random.normal((VOCAB, hidden), key=mx.random.key(seed))
        tensors[name] = (noise if seed == 0 else 0.2 * noise).astype(mx.bfloat16)
    # So loud that replies depend on the image.
    tensors["model.visual.merger.linear_fc2.weight"] *= 8
    mx.save_safetensors(str(folder / "model.safetensors"), tensors)
    sizes = {"size": {"shortest_edge": 16 * 16, "longest_edge": 32 * 32}}
    files = {
        "config.json": config,
        "preprocessor_config.json": sizes | {"image_mean": [0.5] * 3, "image_std": [0.5] * 3},
        "tokenizer.json": json.loads(tokenizer.to_str()),
        "tokenizer_config.json": {"eos_token": "<|im_end|>", "chat_template": TEMPLATE},
    }
    for name, value in files.items():
        (folder / name).write_text(json.dumps(value))
    return folder
