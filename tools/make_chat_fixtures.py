"""Make the golden values of tests/chat with reference implementations: transformers and sentencepiece.

    python tools/make_chat_fixtures.py       # writes tests/chat/fixtures/*.json

The vocabularies are trained here on a few sentences, so that the files are small and ours.
"""

from __future__ import annotations

import io
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import sentencepiece
import tokenizers
import transformers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

ROOT = Path(__file__).resolve().parent.parent
FIXTURES = ROOT / "tests" / "chat" / "fixtures"
TEMPLATES = ROOT / "tests" / "chat" / "templates"
PLAIN_ONLY = frozenset(("methods",))
"""Templates that read turns which the conversation with calls doesn't have."""

CORPUS = [
    "The arriero leads the llamas over the pass before the snow comes, and the llamas follow the arriero.",
    "Ďábelské ódy zní přes údolí, žluťoučký kůň úpěl; naïve café, Straße, größer, œuvre.",
    "def carry(load, path):\n    for step in path:\n        if step > 10:\n            return load * 2\n",
    "漢字とかなと漢字、山を越えて歩く。한국어 문장도 있다.",
    "It's 12345 metres, isn't it? We've counted 100, 200 and 300; they'll see. I'm sure you'd agree!!!",
    '{"name": "walk", "arguments": {"to": "Cuzco", "km": 42.5}}\n\n\n\tdone\r\n',
    "👩‍👩‍👧 🇨🇿 🦙🦙 → ∑ ≈ ½ €",
] * 3

TEXTS = [
    "",
    " ",
    "  ",
    "hello world",
    " leading",
    "trailing ",
    "double  space   three",
    "It's they'll I'M WE'VE don't",
    "0",
    "00",
    "000",
    "0000",
    "1234567 89",
    "ďábelské 漢字 👩‍👩‍👧 🇨🇿",
    "e\u0301 composed é",
    "\tword \n}  }\n\n  1 \nword",
    "def f(x):\n    return x  # ok\n\n\n",
    "<|im_start|>user\nhi<|im_end|>\n",
    "<tool>walk</tool> <pad_me> x <pad_me>y",
    "a<tag>xb <tag> b",
    "snowman \u2603 \U0001f9e2 \ufeff",
    "the llamas " * 40,
    "a\r\nb\r\n\r\nc",
    "naïve-café_Straße/œuvre\\x",
    '[1, 2, 3] {"a": null} == != <= >= -> =>',
]

QWEN_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
LLAMA3_SPLIT = QWEN_SPLIT.replace(r"|\p{N}|", r"|\p{N}{1,3}|")


def byte_level(split: str, *, nfc: bool, bos: bool) -> tokenizers.Tokenizer:
    """A trained byte-level tokenizer in the layout of Qwen's (NFC) or Llama 3's (BOS template)."""
    tokenizer = tokenizers.Tokenizer(models.BPE(ignore_merges=not nfc))
    if nfc:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(split), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=600, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_special_tokens(["<|endoftext|>", "<|im_start|>", "<|im_end|>"])
    tokenizer.add_tokens(
        [
            AddedToken("<tag>", normalized=False),
            AddedToken("<tag>x", normalized=False),
            AddedToken("<tool>", normalized=False),
            AddedToken("<pad_me>", normalized=False, lstrip=True, rstrip=True),
        ]
    )
    if bos:
        index = tokenizer.token_to_id("<|endoftext|>")
        tokenizer.post_processor = processors.TemplateProcessing(
            single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", index)]
        )
    return tokenizer


def tokenizer_fixture(split: str, *, nfc: bool, bos: bool) -> dict[str, Any]:
    """`tokenizer.json` and what transformers makes of every text."""
    tokenizer = byte_level(split, nfc=nfc, bos=bos)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, clean_up_tokenization_spaces=False)
    cases = []
    for text in TEXTS:
        ids = fast.encode(text, add_special_tokens=False)
        cases.append({"text": text, "ids": ids, "decoded": fast.decode(ids), "with_bos": fast.encode(text)})
    return {"tokenizer": json.loads(tokenizer.to_str()), "cases": cases}


def sentencepiece_fixture(*, prefix: bool) -> dict[str, Any]:
    """GGUF-like metadata of a trained SentencePiece BPE model and the ids that sentencepiece gives."""
    model = io.BytesIO()
    with tempfile.TemporaryDirectory() as folder:
        corpus = Path(folder) / "corpus.txt"
        corpus.write_text("\n".join(CORPUS), "utf-8")
        sentencepiece.SentencePieceTrainer.train(
            input=str(corpus),
            model_writer=model,
            model_type="bpe",
            vocab_size=520,
            byte_fallback=True,
            normalization_rule_name="identity",
            add_dummy_prefix=prefix,
            remove_extra_whitespaces=False,
            split_digits=True,
            allow_whitespace_only_pieces=True,
            hard_vocab_limit=False,
            user_defined_symbols=["\n", "<tool>"],
            control_symbols=["<turn>"],
            minloglevel=2,
        )
    processor = sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())
    count = processor.get_piece_size()
    kinds = [
        2 if processor.is_unknown(i) else 3 if processor.is_control(i) else 6 if processor.is_byte(i) else 1
        for i in range(count)
    ]
    tokens = [processor.id_to_piece(index) for index in range(count)]
    for symbol in ("\n", "<tool>"):
        kinds[tokens.index(symbol)] = 4
    metadata = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": [processor.get_score(index) for index in range(count)],
        "tokenizer.ggml.token_type": kinds,
        "tokenizer.ggml.bos_token_id": processor.bos_id(),
        "tokenizer.ggml.eos_token_id": processor.eos_id(),
        "tokenizer.ggml.unknown_token_id": processor.unk_id(),
        "tokenizer.ggml.add_space_prefix": prefix,
    }
    cases = []
    for text in TEXTS:
        ids = processor.encode(text)
        cases.append({"text": text, "ids": ids, "decoded": processor.decode(ids)})
    return {"metadata": metadata, "cases": cases}


MESSAGES: list[dict[str, Any]] = [
    {"role": "system", "content": 'You are <b>terse</b> & "exact".'},
    {"role": "user", "content": "Wie spät ist es? 漢字"},
    {"role": "assistant", "content": "<think>\nhm\n</think>\n\nTwelve.\n"},
    {"role": "user", "content": "  and now?  "},
]
CALLS: list[dict[str, Any]] = [
    {"role": "user", "content": "Weather in Brno?"},
    {
        "role": "assistant",
        "content": "",
        "tool_calls": [
            {
                "type": "function",
                "id": "call12345",
                "function": {"name": "weather", "arguments": {"city": "Brno", "days": 2, "exact": True, "unit": None}},
            }
        ],
    },
    {"role": "tool", "content": '{"sky": "clear <&>"}', "name": "weather", "tool_call_id": "call12345"},
]
TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "Tells the weather <now> & later",
            "parameters": {
                "type": "object",
                "properties": {
                    "city": {"type": "string", "description": "Město", "default": "Praha"},
                    "days": {"type": ["integer", "null"], "minimum": 1},
                    "unit": {"enum": ["C", "F"]},
                },
                "required": ["city"],
                "additionalProperties": False,
            },
        },
    }
]


def template_fixture() -> list[dict[str, Any]]:
    """Every template rendered by transformers for two conversations."""
    fast = PreTrainedTokenizerFast(
        tokenizer_object=byte_level(QWEN_SPLIT, nfc=True, bos=False), bos_token="<|im_start|>", eos_token="<|im_end|>"
    )
    cases = []
    for path in sorted(TEMPLATES.glob("*.jinja")):
        for conversation, messages, tools in (("plain", MESSAGES, None), ("calls", CALLS, TOOLS)):
            if conversation == "calls" and path.stem in PLAIN_ONLY:
                continue
            text = fast.apply_chat_template(
                messages,
                tools,
                chat_template=path.read_text("utf-8"),
                tokenize=False,
                add_generation_prompt=True,
                enable_thinking=conversation == "calls",
            )
            cases.append({"template": path.name, "conversation": conversation, "text": text})
    return cases


def make() -> dict[str, Any]:
    """File name → content of every fixture."""
    return {
        "tokenizer_qwen2.json": tokenizer_fixture(QWEN_SPLIT, nfc=True, bos=False),
        "tokenizer_llama3.json": tokenizer_fixture(LLAMA3_SPLIT, nfc=False, bos=True),
        "sentencepiece.json": sentencepiece_fixture(prefix=False),
        "sentencepiece_prefix.json": sentencepiece_fixture(prefix=True),
        "templates.json": {"plain": MESSAGES, "calls": CALLS, "tools": TOOLS, "cases": template_fixture()},
    }


def main() -> int:
    """Write the files."""
    FIXTURES.mkdir(parents=True, exist_ok=True)
    for name, content in make().items():
        (FIXTURES / name).write_text(json.dumps(content, ensure_ascii=False, separators=(",", ":")) + "\n", "utf-8")
        print(name, (FIXTURES / name).stat().st_size)
    print(f"transformers {transformers.__version__}, sentencepiece {sentencepiece.__version__}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
