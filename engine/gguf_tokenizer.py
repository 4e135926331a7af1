"""The tokenizer of a GGUF file, rebuilt as a ``tokenizers`` pipeline from its vocabulary and metadata.

llama.cpp names the pre-tokenizer instead of storing it; the regular expressions below are what the names stand for.
"""

from __future__ import annotations

from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from ..errors import CheckpointError, UnsupportedError
from .weights.gguf_file import GgufFile

# Values of tokenizer.ggml.token_type.
CONTROL, USER_DEFINED = 3, 4

GPT2_SPLIT = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
LLAMA3_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN2_SPLIT = LLAMA3_SPLIT.replace(r"\p{N}{1,3}", r"\p{N}")
TEKKEN_SPLIT = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
DIGIT = r"\p{N}"
# Name of the pre-tokenizer -> the splits it makes, one after the other.
SPLITS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("gpt-2", "phi-2", "jina-en", "mpt", "olmo"), (GPT2_SPLIT,)),
    **dict.fromkeys(("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone"), (DIGIT, GPT2_SPLIT)),
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3"), (LLAMA3_SPLIT,)),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "megrez"), (QWEN2_SPLIT,)),
    "tekken": (TEKKEN_SPLIT,),
}
# Vocabularies whose tokens are taken whole before any merge is tried; they begin a text with BOS unless told not to.
WHOLE_TOKENS = frozenset({"llama-bpe", "llama3", "llama-v3", "tekken"})
NFC = frozenset({"qwen2", "deepseek-r1-qwen"})
SPECIAL_KEYS = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}


def build_tokenizer(file: GgufFile) -> Tokenizer:
    """The file's tokenizer. UnsupportedError names a vocabulary type or pre-tokenizer that is not served."""
    kind = file.require("tokenizer.ggml.model")
    if kind == "gpt2":
        tokenizer = _byte_level(file)
    elif kind == "llama":
        tokenizer = _sentencepiece(file)
    else:
        raise UnsupportedError(f"{file.path.name} has tokenizer type {kind!r}; served are gpt2 and llama")
    _add_tokens(tokenizer, file)
    return tokenizer


def tokenizer_settings(file: GgufFile) -> dict[str, Any]:
    """What tokenizer_config.json would say: special tokens, BOS and EOS, the chat template."""
    tokens = file.require("tokenizer.ggml.tokens")
    settings: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    for name, key in SPECIAL_KEYS.items():
        token_id = file.value(f"tokenizer.ggml.{key}_token_id")
        if token_id is not None and 0 <= token_id < len(tokens):
            settings[name] = tokens[token_id]
    starts_with_bos = file.value("tokenizer.ggml.model") == "llama" or file.value("tokenizer.ggml.pre") in WHOLE_TOKENS
    settings["add_bos_token"] = bool(file.value("tokenizer.ggml.add_bos_token", starts_with_bos))
    settings["add_eos_token"] = bool(file.value("tokenizer.ggml.add_eos_token", False))
    templates = {
        key.removeprefix("tokenizer.chat_template."): file.value(key)
        for key in file.keys
        if key.startswith("tokenizer.chat_template.")
    }
    default = file.value("tokenizer.chat_template")
    if templates and default is not None:
        settings["chat_template"] = [
            {"name": name, "template": text} for name, text in {"default": default, **templates}.items()
        ]
    elif default is not None:
        settings["chat_template"] = default
    return settings


def _byte_level(file: GgufFile) -> Tokenizer:
    """GPT-2's scheme: the text is split, each piece's bytes are merged by rank."""
    name = file.value("tokenizer.ggml.pre")
    if name not in SPLITS:
        raise UnsupportedError(
            f"{file.path.name} names the pre-tokenizer {name!r}, which is not served; served are {', '.join(SPLITS)}"
        )
    merges = [_split_merge(merge) for merge in file.require("tokenizer.ggml.merges")]
    tokenizer = Tokenizer(models.BPE(vocab=_vocabulary(file), merges=merges, ignore_merges=name in WHOLE_TOKENS))
    steps: list[Any] = [pre_tokenizers.Split(Regex(pattern), behavior="isolated") for pattern in SPLITS[name]]
    add_prefix_space = bool(file.value("tokenizer.ggml.add_space_prefix", False))
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=add_prefix_space, use_regex=False))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
    tokenizer.decoder = decoders.ByteLevel()
    if name in NFC:
        tokenizer.normalizer = normalizers.NFC()
    return tokenizer


def _sentencepiece(file: GgufFile) -> Tokenizer:
    """SentencePiece BPE with byte fallback: no pre-tokenizer, spaces are part of the tokens."""
    vocabulary = _vocabulary(file)
    merges = _merges_by_score(vocabulary, file.require("tokenizer.ggml.scores"))
    unknown = file.value("tokenizer.ggml.unknown_token_id", 0)
    tokens = file.require("tokenizer.ggml.tokens")
    tokenizer = Tokenizer(
        models.BPE(vocab=vocabulary, merges=merges, unk_token=tokens[unknown], fuse_unk=True, byte_fallback=True)
    )
    prefix = bool(file.value("tokenizer.ggml.add_space_prefix", True))
    spaces: list[Any] = [normalizers.Prepend("▁")] if prefix else []
    tokenizer.normalizer = normalizers.Sequence([*spaces, normalizers.Replace(" ", "▁")])
    strip: list[Any] = [decoders.Strip(" ", 1, 0)] if prefix else []
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    )
    return tokenizer


def _vocabulary(file: GgufFile) -> dict[str, int]:
    tokens = file.require("tokenizer.ggml.tokens")
    vocabulary = {token: index for index, token in enumerate(tokens)}
    if len(vocabulary) != len(tokens):
        raise CheckpointError(f"{file.path.name} lists {len(tokens)} tokens, but only {len(vocabulary)} are distinct")
    return vocabulary


def _split_merge(merge: str) -> tuple[str, str]:
    left, _, right = merge.partition(" ")
    return left, right


def _merges_by_score(vocabulary: dict[str, int], scores: list[float]) -> list[tuple[str, str]]:
    """Every pair of tokens that makes a token, best score first: SentencePiece stores scores, not merges."""
    ranked: list[tuple[float, int, int, str, str]] = []
    for token, index in vocabulary.items():
        for cut in range(1, len(token)):
            left, right = token[:cut], token[cut:]
            if left in vocabulary and right in vocabulary:
                ranked.append((-scores[index], vocabulary[left], vocabulary[right], left, right))
    return [(left, right) for *_, left, right in sorted(ranked)]


def _add_tokens(tokenizer: Tokenizer, file: GgufFile) -> None:
    """Tokens that are matched whole before anything else; control tokens are special, user-defined ones are text."""
    types = file.value("tokenizer.ggml.token_type") or []
    added = [
        AddedToken(token, special=kind == CONTROL, normalized=False)
        for token, kind in zip(file.require("tokenizer.ggml.tokens"), types, strict=False)
        if kind in (CONTROL, USER_DEFINED)
    ]
    tokenizer.add_tokens([token for token in added if not token.special])
    tokenizer.add_special_tokens([token for token in added if token.special])
