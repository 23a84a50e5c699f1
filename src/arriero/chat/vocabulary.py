"""A `tokenizers.Tokenizer` from GGUF metadata: byte-level BPE (`gpt2`), SentencePiece BPE (`llama`, `gemma4`).

Source: the GGUF specification's `tokenizer.ggml.*` keys.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, normalizers, pre_tokenizers, processors
from tokenizers.models import BPE, WordPiece

from arriero.chat.pretokenizers import family
from arriero.errors import CheckpointError

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)
"""Values of `tokenizer.ggml.token_type`."""

_SPACE = "▁"
_MARKS = {
    "unknown": ("unknown_token_id",),
    "first": ("cls_token_id", "bos_token_id"),
    "last": ("seperator_token_id", "separator_token_id", "eos_token_id"),
}
"""Special tokens of WordPiece, by the keys that may hold them (one of them misspelled by its makers)."""
_LONGEST = 1000
"""Characters of a piece that is made of others; the time to find its parts grows with the square."""


def tokenizer_from_gguf(metadata: Mapping[str, Any]) -> Tokenizer:
    """Build the tokenizer that a GGUF file describes.

    Raises CheckpointError for a missing or inconsistent key and for a kind that we don't run (Unigram).
    """
    kind = metadata.get("tokenizer.ggml.model")
    if kind == "bert":
        return _wordpiece(metadata)
    if kind not in ("gpt2", "llama", "gemma4"):
        raise CheckpointError(
            f"tokenizer.ggml.model is {kind!r}; only 'gpt2' (byte-level BPE), 'llama' (SentencePiece BPE), 'gemma4' "
            "(the same with merges) and 'bert' (WordPiece) can be run"
        )
    tokens = _list(metadata, "tokenizer.ggml.tokens", str)
    types: Sequence[int] = [NORMAL] * len(tokens)
    if "tokenizer.ggml.token_type" in metadata:
        types = _list(metadata, "tokenizer.ggml.token_type", int)
    if len(types) != len(tokens):
        raise CheckpointError(f"tokenizer.ggml.token_type has {len(types)} entries for {len(tokens)} tokens")
    vocabulary = {token: index for index, token in enumerate(tokens)}
    if kind == "gpt2":
        tokenizer = _byte_level(metadata, vocabulary)
    elif kind == "llama":
        scores = _list(metadata, "tokenizer.ggml.scores", float)
        if len(scores) != len(tokens):
            raise CheckpointError(f"tokenizer.ggml.scores has {len(scores)} entries for {len(tokens)} tokens")
        prefix = bool(metadata.get("tokenizer.ggml.add_space_prefix", True))
        merges = merges_from_scores(tokens, scores, types, vocabulary)
        tokenizer = _sentencepiece(metadata, tokens, vocabulary, merges, prefix)
    else:
        # No merge holds a line break: a run of them is a token as a whole.
        types = [USER_DEFINED if token and not token.strip("\n") else t for token, t in zip(tokens, types, strict=True)]
        tokenizer = _sentencepiece(metadata, tokens, vocabulary, _merges(metadata, vocabulary), prefix=False)
    # `tokenizers` gives an added token its id by its text: a text that stands twice in the vocabulary keeps one id.
    for special in (True, False):
        wanted = CONTROL if special else USER_DEFINED
        added = [
            AddedToken(token, special=special, normalized=False)
            for token, type_ in zip(tokens, types, strict=True)
            if type_ == wanted and token
        ]
        (tokenizer.add_special_tokens if special else tokenizer.add_tokens)(added)
    return tokenizer


def _wordpiece(metadata: Mapping[str, Any]) -> Tokenizer:
    """WordPiece as BERT has it: lower case, without accents, a mark in front of a text and one behind it.

    The files spell a piece that begins a word with `▁` in front, others bare, where BERT has `##` in front of others.
    """
    tokens = _list(metadata, "tokenizer.ggml.tokens", str)
    vocabulary: dict[str, int] = {}
    for index, token in enumerate(tokens):
        if token.startswith(_SPACE):
            spelled = token[len(_SPACE) :]
        else:
            spelled = token if token.startswith("[") and token.endswith("]") else f"##{token}"
        vocabulary.setdefault(spelled, index)
    marks = {}
    for name, keys in _MARKS.items():
        found = next((metadata[f"tokenizer.ggml.{key}"] for key in keys if f"tokenizer.ggml.{key}" in metadata), None)
        if not isinstance(found, int) or not 0 <= found < len(tokens):
            raise CheckpointError(f"tokenizer.ggml.{keys[0]} is {found!r}, outside the vocabulary")
        marks[name] = (tokens[found], found)
    tokenizer = Tokenizer(WordPiece(vocabulary, unk_token=marks["unknown"][0], max_input_chars_per_word=100))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True, strip_accents=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    tokenizer.post_processor = processors.BertProcessing(marks["last"], marks["first"])
    controls = dict.fromkeys(text for text, _ in marks.values())
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in controls])
    return tokenizer


def _list(metadata: Mapping[str, Any], key: str, kind: type) -> Sequence[Any]:
    values = metadata.get(key)
    if values is None:
        raise CheckpointError(f"the file has no {key}: its vocabulary is incomplete, download it again")
    if not isinstance(values, Sequence) or not values or not isinstance(values[0], kind):
        raise CheckpointError(f"{key} must be a list of {kind.__name__}; it is {type(values).__name__}")
    return values


def _merges(metadata: Mapping[str, Any], vocabulary: Mapping[str, int]) -> list[tuple[str, str]]:
    merges = []
    for line in _list(metadata, "tokenizer.ggml.merges", str):
        at = line.find(" ", 1)
        left, right = line[:at], line[at + 1 :]
        if at < 0 or not right:
            raise CheckpointError(f"tokenizer.ggml.merges holds {line!r}; a merge is two pieces with a blank between")
        if left + right in vocabulary and left in vocabulary and right in vocabulary:
            merges.append((left, right))
    return merges


def _byte_level(metadata: Mapping[str, Any], vocabulary: dict[str, int]) -> Tokenizer:
    # The library's gpt-oss goes by its architecture, whatever rule its file names.
    by_architecture = {"gptoss": "gpt-4o"}.get(metadata.get("general.architecture", ""))
    rule = family(by_architecture or metadata.get("tokenizer.ggml.pre"))
    tokenizer = Tokenizer(BPE(vocabulary, _merges(metadata, vocabulary), ignore_merges=rule.ignore_merges))
    normalizer = rule.normalizer()
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    tokenizer.pre_tokenizer = rule.pre_tokenizer()
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _sentencepiece(
    metadata: Mapping[str, Any],
    tokens: Sequence[str],
    vocabulary: dict[str, int],
    merges: list[tuple[str, str]],
    prefix: bool,
) -> Tokenizer:
    """BPE over characters, blanks written as `▁`, unknown characters as byte tokens; `prefix` puts one in front."""
    unknown = metadata.get("tokenizer.ggml.unknown_token_id", 0)
    if not isinstance(unknown, int) or not 0 <= unknown < len(tokens):
        raise CheckpointError(f"tokenizer.ggml.unknown_token_id is {unknown!r}, outside the vocabulary")
    model = BPE(vocabulary, merges, unk_token=tokens[unknown], fuse_unk=True, byte_fallback=True)
    tokenizer = Tokenizer(model)
    replace = normalizers.Replace(" ", _SPACE)
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend(_SPACE), replace]) if prefix else replace
    steps = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if prefix else steps)
    return tokenizer


def merges_from_scores(
    tokens: Sequence[str], scores: Sequence[float], types: Sequence[int], vocabulary: Mapping[str, int]
) -> list[tuple[str, str]]:
    """The merges that a SentencePiece BPE vocabulary implies, likeliest first.

    SentencePiece joins the two neighbours whose joined piece scores highest. That is BPE with one merge for each way to
    divide a piece into two pieces, ranked by the piece's score; divisions of one piece rank by the ids of their parts.
    Raises CheckpointError for a piece of more than a thousand characters.
    """
    usable = {token: index for token, index in vocabulary.items() if types[index] in (NORMAL, UNUSED)}
    for token, index in usable.items():
        if len(token) > _LONGEST:
            raise CheckpointError(f"tokenizer.ggml.tokens: piece {index} has {len(token)} characters: not a vocabulary")
    ranked = [index for token, index in usable.items() if len(token) > 1]
    ranked.sort(key=lambda index: -scores[index])
    merges: list[tuple[str, str]] = []
    find = usable.get
    for index in ranked:
        token = tokens[index]
        divisions = []
        for at in range(1, len(token)):
            left = find(token[:at])
            if left is not None:
                right = find(token[at:])
                if right is not None:
                    divisions.append((left, right))
        if len(divisions) > 1:
            divisions.sort()
        merges += [(tokens[left], tokens[right]) for left, right in divisions]
    return merges
