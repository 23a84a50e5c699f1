"""How byte-level vocabularies cut text before merging: GGUF's `tokenizer.ggml.pre` names → splits.

GGUF stores only the name of the rule. The rules are those of the models' own `tokenizer.json`, so that a GGUF file
tokenizes as the folder that it was made from. Patterns run in Oniguruma (look-ahead and Unicode classes).
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

from tokenizers import Regex, normalizers, pre_tokenizers
from tokenizers.normalizers import Normalizer
from tokenizers.pre_tokenizers import PreTokenizer

log = logging.getLogger(__name__)

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_TAIL = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CASED = rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+%s|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*%s"
_SYMBOLS_SLASH = r" ?[^\s\p{L}\p{N}]+[\r\n/]*"

GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_LLAMA3 = rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_TAIL}"
_QWEN2 = rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_TAIL}"
_QWEN35 = (
    rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}"
    rf"| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{_TAIL}"
)
_TEKKEN = rf"{_CASED % ('', '')}|\p{{N}}|{_SYMBOLS_SLASH}|{_TAIL}"
_GPT4O = rf"{_CASED % (_CONTRACTIONS + '?', _CONTRACTIONS + '?')}|\p{{N}}{{1,3}}|{_SYMBOLS_SLASH}|{_TAIL}"
_CJK = r"[一-龥぀-ゟ゠-ヿ]+"
_DEEPSEEK3 = (
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    rf"| ?[\p{{P}}\p{{S}}]+[\r\n]*|{_TAIL}"
)
_BLOOM = r" ?[^(\s|.,!?…。，、।۔،)]+"


@dataclass(frozen=True, slots=True)
class Family:
    """One rule: split patterns applied one after another, and what else the family's tokenizers do."""

    patterns: tuple[str, ...]
    ignore_merges: bool = False
    """A whole chunk that is a vocabulary entry is taken as it is, without merging."""
    add_bos: bool = False
    """The default where the file doesn't say."""
    nfc: bool = False
    """Text is composed (Unicode NFC) first."""

    def pre_tokenizer(self) -> PreTokenizer:
        """Splits, then bytes to GPT-2's printable alphabet."""
        splits: list[PreTokenizer] = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in self.patterns]
        return pre_tokenizers.Sequence([*splits, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])

    def normalizer(self) -> Normalizer | None:
        return normalizers.NFC() if self.nfc else None


_FAMILIES: tuple[tuple[Family, str], ...] = (
    (
        Family((GPT2,)),
        "gpt-2 gpt2 mpt olmo jais trillion phi-2 jina-es jina-de jina-v1-en jina-v2-es jina-v2-de jina-v2-code "
        "roberta-bpe gigachat granite-docling exaone4 modern-bert",
    ),
    (
        Family((r"[\p{P}\$\+<=>\^~\|]+", GPT2, r"\p{N}+", r"[0-9][0-9][0-9]")),
        "default",
    ),
    (Family((_LLAMA3,), ignore_merges=True, add_bos=True), "llama3 llama-v3 llama-bpe falcon3 pixtral lfm2 midm-2.0"),
    (Family((_LLAMA3,)), "dbrx smaug-bpe chatglm-bpe glm4 jais-2 jais2"),
    (Family((_QWEN2,), nfc=True), "qwen2"),
    (Family((_QWEN2,)), "deepseek-r1-qwen stablelm2 megrez hunyuan solar-open kormo"),
    (Family((_QWEN35,), nfc=True), "qwen35"),
    (
        Family((r"\p{N}", GPT2)),
        "smollm starcoder refact command-r codeshell exaone minerva-7b",
    ),
    (Family((_TEKKEN,), ignore_merges=True), "tekken"),
    (Family((_GPT4O,), ignore_merges=True), "gpt-4o llama4 kanana2"),
    (Family((r"\p{N}{1,3}", _CJK, _DEEPSEEK3)), "deepseek-v3 hunyuan-dense joyai-llm"),
    (
        Family((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", r"[一-龥ࠀ-一가-퟿]+", r"\p{N}")),
        "deepseek-coder",
    ),
    (
        Family((r"[\r\n]", r"\s?\p{L}+", r"\s?[\p{P}\p{S}]+", r"\s+$", r"[一-龥ࠀ-一가-퟿]+", r"\p{N}+")),
        "deepseek-llm",
    ),
    (Family((r"[\p{P}\$\+<=>\^~\|`]+", GPT2, r"[0-9][0-9][0-9]")), "falcon"),
    (Family((_BLOOM,)), "bloom poro-chat gpt3-finnish"),
    (Family((_BLOOM, r"\p{N}")), "viking"),
)
FAMILIES: dict[str, Family] = {name: family for family, names in _FAMILIES for name in names.split()}


def family(name: str | None) -> Family:
    """The rule of a `tokenizer.ggml.pre` name.

    A file without the name, or with one that we don't know, gets GPT-2's rule and a warning that names it: most text
    still tokenizes well, digits and punctuation may be cut differently from what the model was trained on.
    """
    if name in FAMILIES:
        return FAMILIES[name]
    what = f"the pre-tokenizer '{name}' is not known" if name else "the file doesn't name its pre-tokenizer"
    log.warning("%s: GPT-2's rule is used; known names are %s", what, ", ".join(sorted(FAMILIES)))
    return FAMILIES["gpt-2"]
