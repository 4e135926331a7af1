"""A model whose residual stream is turned by an orthogonal matrix, merged into the weights: the same function.

Rounding suffers from outliers; turned by a Hadamard matrix with random signs (arXiv:2404.00456) every feature becomes a
mix of all, and outliers are spread. Norm weights go into the matrices after them first; what writes the residual
stream is turned forward, what reads it back. The head needs a norm weight and the embedding none: they part.
"""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import Tensor

from ..engine.weights.checkpoint import Checkpoint
from ..errors import ConfigError

MODEL_TYPES = ("llama", "mistral", "mixtral", "olmoe", "phi3", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe")
SEED = 0
HEAD, EMBEDDING, LAST_NORM = "lm_head.weight", "model.embed_tokens.weight", "model.norm.weight"
_LAYER = r"^(model\.layers\.\d+\.)"
_NORM = re.compile(_LAYER + r"(?:input|post_attention)_layernorm\.weight$")
_QKV = re.compile(_LAYER + r"self_attn\.(?:[qkv]|qkv)_proj\.weight$")
_MLP = re.compile(
    _LAYER + r"(?:mlp|block_sparse_moe)\.(?:.*\.)?(?:(?:gate|up|gate_up)_proj|w1|w3|gate|shared_expert_gate)\.weight$"
)
_WRITES = re.compile(_LAYER + r"(?:.*\.)(?:o_proj|down_proj|w2)\.(weight|bias)$")


class RotatedCheckpoint(Checkpoint):
    """``source`` turned, tensor by tensor as they are read; linear layers come in float32, the rest in its own type.

    ConfigError for a family that has anything but plain norms between the residual stream and its matrices.
    """

    def __init__(self, source: Checkpoint, config: dict[str, Any]) -> None:
        super().__init__(source.path)
        model_type = config.get("model_type")
        if model_type not in MODEL_TYPES:
            raise ConfigError(f"--rotate: {model_type} models cannot be rotated; {', '.join(MODEL_TYPES)} can")
        self._source = source
        self._has_head = HEAD in source.names and not config.get("tie_word_embeddings", False)
        for name in source.names:
            if name.startswith("model.layers.") and len(source.shape(name)) == 2 and not self._is_turned(name):
                raise ConfigError(f"--rotate: {name} is a matrix whose part in the model is not known")
        self._turn: Tensor | None = None

    @property
    def names(self) -> frozenset[str]:
        return self._source.names | {HEAD}

    @property
    def unties(self) -> bool:
        """Whether the head is the embedding in the source; here it is a tensor of its own."""
        return not self._has_head

    def shape(self, name: str) -> tuple[int, ...]:
        return self._source.shape(self._origin(name))

    def dtype(self, name: str) -> torch.dtype:
        is_linear = _QKV.match(name) or _MLP.match(name) or _WRITES.match(name)
        return torch.float32 if is_linear else self._source.dtype(self._origin(name))

    def location(self, name: str) -> str:
        return self._source.location(self._origin(name))

    def _origin(self, name: str) -> str:
        return EMBEDDING if name == HEAD and not self._has_head else name

    def _is_turned(self, name: str) -> bool:
        return any(pattern.match(name) for pattern in (_QKV, _MLP, _WRITES))

    def _read(self, name: str) -> Tensor:
        tensor = self._source.get(self._origin(name))
        if name == LAST_NORM or _NORM.match(name):
            return torch.ones_like(tensor)
        if name == EMBEDDING:
            return self._turned(tensor).to(tensor.dtype)
        if name == HEAD:
            return self._turned(tensor.float() * self._source.get(LAST_NORM).float()).to(tensor.dtype)
        for pattern, norm in ((_QKV, "input_layernorm"), (_MLP, "post_attention_layernorm")):
            if match := pattern.match(name):
                return self._turned(tensor.float() * self._source.get(f"{match[1]}{norm}.weight").float())
        if _WRITES.match(name):
            return self._turned(tensor.float().mT).mT.contiguous() if tensor.ndim > 1 else self._turned(tensor)
        return tensor

    def _turned(self, tensor: Tensor) -> Tensor:
        if self._turn is None:
            self._turn = rotation_matrix(self._source.shape(EMBEDDING)[1]).float()
        return tensor.float() @ self._turn


def rotation_matrix(size: int, seed: int = SEED) -> Tensor:
    """An orthogonal matrix float64 [size, size]: a Hadamard matrix with random signs; where none is known for
    ``size``, a random one."""
    generator = torch.Generator().manual_seed(seed)
    hadamard = hadamard_matrix(size)
    if hadamard is None:
        factor, upper = torch.linalg.qr(torch.randn(size, size, generator=generator, dtype=torch.float64))
        return factor * upper.diagonal().sign()
    signs = torch.randint(0, 2, (size,), generator=generator) * 2.0 - 1
    return signs.double()[:, None] * hadamard / size**0.5


def hadamard_matrix(size: int) -> Tensor | None:
    """Entries of 1 and -1, rows orthogonal; Sylvester's doubling of one by Paley. None where neither gives ``size``."""
    doublings, core = 0, size
    while core > 1:
        matrix = _paley(core)
        if matrix is not None:
            break
        if core % 2:
            return None
        doublings, core = doublings + 1, core // 2
    else:
        matrix = torch.ones(1, 1, dtype=torch.float64)
    for _ in range(doublings):
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    return matrix


def _paley(size: int) -> Tensor | None:
    """Of order q + 1 for a prime q = 3 mod 4, or 2 (q + 1) for q = 1 mod 4."""
    if _is_prime(size - 1) and (size - 1) % 4 == 3:
        inner = _jacobsthal(size - 1)
        matrix = torch.ones(size, size, dtype=torch.float64)
        matrix[1:, 0] = -1
        matrix[1:, 1:] = inner + torch.eye(size - 1)
        return matrix
    half, odd = divmod(size, 2)
    if odd or not _is_prime(half - 1) or (half - 1) % 4 != 1:
        return None
    conference = torch.ones(half, half, dtype=torch.float64)
    conference[0, 0] = 0
    conference[1:, 1:] = _jacobsthal(half - 1)
    plus = torch.tensor([[1.0, 1.0], [1.0, -1.0]], dtype=torch.float64)
    zero = torch.tensor([[1.0, -1.0], [-1.0, -1.0]], dtype=torch.float64)
    return torch.kron(conference, plus) + torch.kron(torch.eye(half, dtype=torch.float64), zero)


def _jacobsthal(prime: int) -> Tensor:
    """[q, q]: 1 where i - j is a square mod q, -1 where it is none, 0 on the diagonal."""
    squares = {value * value % prime for value in range(1, prime)}
    symbol = torch.tensor([0.0] + [1.0 if value in squares else -1.0 for value in range(1, prime)], dtype=torch.float64)
    index = torch.arange(prime)
    return symbol[(index[:, None] - index) % prime]


def _is_prime(number: int) -> bool:
    return number > 1 and all(number % factor for factor in range(2, int(number**0.5) + 1))
