"""Small real tokenizers of each family, made with the ``tokenizers`` library, behind the face that the engine knows.

``decode`` is the library's own; ``token_bytes`` follows the definition of the vocabulary's spelling.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Sequence

from chain_model import byte_alphabet
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

EOS = "<|eos|>"
THINK = ("<think>", "</think>")
TEXTS = (
    "The quick  brown fox, it's 12.5 years old!\n\n\tIndented   line .",
    "  two leading spaces, and don't forget: we've got n't ' s",
    "é你好，世界😀👨‍👩‍👧 naïve façade Ωmega",
    "def f(x):\n    return x  # ok\n\n\n",
    " ひらがな カタカナ 漢字  ",
    "🏳️‍🌈 flags 🇩🇪🇫🇷 and zero\u200bwidth\u00a0space",
    "<think>hm</think> 1 2 3",
    "\n",
    " ",
    "",
)


def sample_texts(count: int, seed: int = 0) -> list[str]:
    """The texts above, then random joins of their pieces."""
    rng = random.Random(seed)
    pieces = [p for text in TEXTS for p in re.findall(r"\S+|\s+", text)] + ["  ", " ", "\n", "😀", "你"]
    made = ["".join(rng.choices(pieces, k=rng.randint(1, 12))) for _ in range(count)]
    return [*TEXTS, *made][:count]


class ZooTokenizer:
    """One tokenizer of the library, with the engine's names."""

    def __init__(self, backend: Tokenizer, *, byte_level: bool) -> None:
        self.backend = backend
        self._byte_level = byte_level
        self._bytes = {char: value for value, char in byte_alphabet().items()}
        self.vocab_size = backend.get_vocab_size()
        self._added = {i: t.content for i, t in backend.get_added_tokens_decoder().items()}
        self.special_ids = frozenset(i for i, t in backend.get_added_tokens_decoder().items() if t.special)
        self.max_token_length = max(len(text) for text in backend.get_vocab())

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return self.backend.encode(text, add_special_tokens=add_special_tokens).ids

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        return self.backend.decode(list(ids), skip_special_tokens=skip_special_tokens)

    def token_bytes(self, token_id: int) -> bytes:
        if token_id in self._added:
            return self._added[token_id].encode()
        text = self.backend.id_to_token(token_id)
        if self._byte_level:
            return bytes(self._bytes[char] for char in text)
        if re.fullmatch(r"<0x[0-9A-F]{2}>", text):
            return bytes([int(text[3:5], 16)])
        return text.replace("▁", " ").encode()


def _finish(backend: Tokenizer, *, byte_level: bool) -> ZooTokenizer:
    backend.add_special_tokens([AddedToken(EOS, special=True, normalized=False)])
    backend.add_tokens([AddedToken(text, special=False, normalized=False) for text in THINK])
    return ZooTokenizer(backend, byte_level=byte_level)


def byte_level_tokenizer() -> ZooTokenizer:
    """GPT-2 style: every token is a string of bytes."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=360, show_progress=False, initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    backend.train_from_iterator(TEXTS, trainer)
    return _finish(backend, byte_level=True)


def metaspace_tokenizer(style: str) -> ZooTokenizer:
    """Metaspace with byte fallback. ``style`` "llama" strips one leading space, "metaspace" drops the first mark."""
    trained = Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    latin = [re.sub(r"[^ -~\n]", "", text) for text in TEXTS]
    trained.train_from_iterator(latin, trainers.BpeTrainer(vocab_size=200, show_progress=False))
    model = json.loads(trained.to_str())["model"]
    vocab = {"<unk>": 0, **{f"<0x{value:02X}>": value + 1 for value in range(256)}}
    for text in model["vocab"]:
        vocab.setdefault(text, len(vocab))
    merges = [tuple(merge) for merge in model["merges"]]
    backend = Tokenizer(models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    parts = {
        "llama": [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)],
        "metaspace": [decoders.ByteFallback(), decoders.Metaspace(prepend_scheme="first")],
    }
    backend.decoder = decoders.Sequence(parts[style])
    return _finish(backend, byte_level=False)
