"""A checkpoint whose greedy output is a script: the chain model.

One Llama layer whose output projections are zero, an identity embedding (hidden size = vocabulary), norms of one and a
head with ``lm_head[f(t), t] = 4``: the next token is f(current token), by arithmetic and with no hook in the engine. A
script may hold any tokens as long as no token is left by two different edges.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

EOS = "<|eos|>"
CHAT_TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"


def byte_alphabet() -> dict[int, str]:
    """Byte value -> the character that stands for it in byte-level vocabularies (GPT-2's printable mapping)."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    table = {value: chr(value) for value in printable}
    for extra, value in enumerate(v for v in range(256) if v not in table):
        table[value] = chr(256 + extra)
    return table


class ChainTokenizer:
    """Byte-level vocabulary: ids 0..255 are the bytes; then extra byte strings; then special tokens, EOS first."""

    def __init__(self, pieces: Sequence[bytes] = (), specials: Sequence[str] = ()) -> None:
        self.pieces: dict[bytes, int] = {bytes([value]): value for value in range(256)}
        for piece in pieces:
            self.pieces.setdefault(piece, len(self.pieces))
        self.special_ids = {text: len(self.pieces) + i for i, text in enumerate([EOS, *specials])}

    @property
    def size(self) -> int:
        return len(self.pieces) + len(self.special_ids)

    @property
    def eos(self) -> int:
        return self.special_ids[EOS]

    def id(self, token: bytes | str) -> int:
        """The id of a special token (str found among them), or of a byte string (str is encoded as UTF-8)."""
        if isinstance(token, str) and token in self.special_ids:
            return self.special_ids[token]
        return self.pieces[token.encode() if isinstance(token, str) else token]

    def save(self, directory: Path, chat_template: str | None = CHAT_TEMPLATE) -> None:
        alphabet = byte_alphabet()
        vocab = {"".join(alphabet[b] for b in piece): index for piece, index in self.pieces.items()}
        backend = Tokenizer(models.BPE(vocab=vocab, merges=[], fuse_unk=False))
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        backend.decoder = decoders.ByteLevel()
        backend.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in self.special_ids])
        fast = PreTrainedTokenizerFast(
            tokenizer_object=backend, eos_token=EOS, pad_token=EOS, clean_up_tokenization_spaces=False
        )
        fast.chat_template = chat_template
        fast.save_pretrained(directory)


def build_chain_model(
    directory: Path,
    scripts: Sequence[Sequence[bytes | str]],
    *,
    specials: Sequence[str] = (),
    eos_tokens: Sequence[str] = (EOS,),
    max_position_embeddings: int = 512,
    chat_template: str | None = CHAT_TEMPLATE,
    vocab_padding: int = 0,
) -> ChainTokenizer:
    """Write a chain model; each script is a path of tokens that greedy decoding follows from its first token.

    A token outside all scripts leads to EOS, and so does the end of a script unless its last token leaves by an edge of
    another one (a script may end with its own first token and so run for ever).
    """
    plain = [token for script in scripts for token in script if token not in (EOS, *specials)]
    pieces = [token.encode() if isinstance(token, str) else token for token in plain]
    tokenizer = ChainTokenizer(pieces, specials)
    size = tokenizer.size + vocab_padding
    size += size % 2  # transformers wants a hidden size that its two heads divide
    follow = {token: tokenizer.eos for token in range(size)}
    edges: dict[int, int] = {}
    for script in scripts:
        ids = [tokenizer.id(token) for token in script]
        for current, following in itertools.pairwise(ids):
            assert edges.setdefault(current, following) == following, f"token {current} is left by two edges"
    follow.update(edges)
    directory.mkdir(parents=True, exist_ok=True)
    save_file(_weights(size, follow), directory / "model.safetensors", metadata={"format": "pt"})
    eos_ids = [tokenizer.id(token) for token in eos_tokens]
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": size,
        "hidden_size": size,
        "intermediate_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 16,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "max_position_embeddings": max_position_embeddings,
        "tie_word_embeddings": False,
        "attention_bias": False,
        "mlp_bias": False,
        "torch_dtype": "float32",
        "eos_token_id": eos_ids if len(eos_ids) > 1 else eos_ids[0],
    }
    (directory / "config.json").write_text(json.dumps(config, indent=1))
    tokenizer.save(directory, chat_template)
    return tokenizer


def _weights(size: int, follow: dict[int, int]) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)

    def noise(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator) * 0.1

    head = torch.zeros(size, size)
    for current, following in follow.items():
        head[following, current] = 4.0
    layer = "model.layers.0"
    return {
        "model.embed_tokens.weight": torch.eye(size),
        f"{layer}.input_layernorm.weight": torch.ones(size),
        f"{layer}.post_attention_layernorm.weight": torch.ones(size),
        f"{layer}.self_attn.q_proj.weight": noise(32, size),
        f"{layer}.self_attn.k_proj.weight": noise(16, size),
        f"{layer}.self_attn.v_proj.weight": noise(16, size),
        f"{layer}.self_attn.o_proj.weight": torch.zeros(size, 32),
        f"{layer}.mlp.gate_proj.weight": noise(16, size),
        f"{layer}.mlp.up_proj.weight": noise(16, size),
        f"{layer}.mlp.down_proj.weight": torch.zeros(size, 16),
        "model.norm.weight": torch.ones(size),
        "lm_head.weight": head,
    }
