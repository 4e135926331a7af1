"""Tensors that nothing asked for: which of them are harmless, and the error for all others."""

from __future__ import annotations

import re
from collections.abc import Collection

from ...errors import CheckpointError
from ...log import get_logger
from ...quant.kv_scales import is_kv_scale
from .checkpoint import Checkpoint

logger = get_logger(__name__)

# Buffers that older tools stored beside the parameters; the config says the same.
_DERIVED = re.compile(r"\.(rotary_emb\.(inv_freq|cos_cached|sin_cached)|attn\.masked_bias|attn\.bias)$")
# Parameters that only guess further tokens (multi-token prediction): decoding one token at a time does without them.
_PREDICTION = re.compile(r"^(model\.)?mtp\.")
# Scales of values that no kernel here quantizes: attention's query and probabilities, and outputs of projections.
_UNUSED_SCALE = re.compile(r"\.self_attn\.(q_scale|prob_scale|prob_output_scale|q_proj\.q_scale)$|\.output_scale$")
_LAYER = re.compile(r"^(?:.*\.)?layers\.(\d+)\.")
_DECODER_LAYER = re.compile(r"^(?:model\.)?layers\.(\d+)\.(.+)$")
# What only a layer for prediction has (DeepSeek's and GLM's are stored as the layers after the last one).
_PREDICTION_PART = re.compile(r"eh_proj|enorm|hnorm|shared_head|embed_tokens")
NUM_NAMES_SHOWN = 5


def refuse_unexpected(checkpoint: Checkpoint, num_layers: int, parts: Collection[str]) -> list[str]:
    """CheckpointError names the tensors that no layer asked for; returned are the harmless ones, which are logged.

    ``parts`` are all names that the modules which were loaded may have in their format: what the format did not need of
    these is harmless, as are the buffers, scales and prediction layers above. Those are known by their parts; any other
    layer from number ``num_layers`` on is one that the config leaves out: CheckpointError. A file of which nothing was
    used is not part of the model.
    """
    harmless = check_unexpected(checkpoint, num_layers, parts, checkpoint.taken)
    if harmless:
        logger.warning("not used by this model: %s of %s", _shown(harmless), checkpoint.path)
    return harmless


def check_unexpected(
    checkpoint: Checkpoint, num_layers: int, parts: Collection[str], taken: Collection[str]
) -> list[str]:
    """The same without a log, where ``taken`` are the tensors that were used or would be."""
    harmless, unexpected = [], []
    files = {checkpoint.location(name) for name in taken if checkpoint.has(name)}
    _refuse_layers(checkpoint, num_layers, files)
    for name in sorted(checkpoint.names - set(taken)):
        if _DERIVED.search(name) or is_kv_scale(name):  # whether those are used is said elsewhere
            continue
        layer = _LAYER.match(name)
        is_extra = layer is not None and int(layer[1]) >= num_layers
        is_known = name in parts or _PREDICTION.match(name) or _UNUSED_SCALE.search(name)
        if is_extra or is_known or checkpoint.location(name) not in files:
            harmless.append(name)
        else:
            unexpected.append(name)
    if unexpected:
        raise CheckpointError(
            f"{_shown(unexpected)} in {checkpoint.location(unexpected[0])} belongs to no layer of this model: the "
            f"config does not describe these weights. Use the config.json that was saved with them, or remove what is "
            f"not part of the model from the file"
        )
    return harmless


def _refuse_layers(checkpoint: Checkpoint, num_layers: int, files: Collection[str]) -> None:
    """CheckpointError where the model's files hold more layers than the config says: fewer would answer nonsense."""
    predicting: set[int] = set()
    extra: dict[int, str] = {}
    for name in sorted(checkpoint.names):
        match = _DECODER_LAYER.match(name)
        if match is not None and int(match[1]) >= num_layers and checkpoint.location(name) in files:
            extra.setdefault(int(match[1]), name)
            if _PREDICTION_PART.match(match[2]):
                predicting.add(int(match[1]))
    wrong = sorted(extra.keys() - predicting)
    if wrong:
        name = extra[wrong[0]]
        raise CheckpointError(
            f"{name} in {checkpoint.location(name)} belongs to one of {len(wrong)} layers beyond the {num_layers} that "
            f"the config says (num_hidden_layers; block_count in GGUF). Take the config.json that was saved with these "
            f"weights, or correct it"
        )


def _shown(names: list[str]) -> str:
    """The first names; scales come first, because what they would have scaled is computed without them."""
    ordered = sorted(names, key=lambda name: "scale" not in name.rpartition(".")[2])
    more = f" and {len(names) - NUM_NAMES_SHOWN} more" if len(names) > NUM_NAMES_SHOWN else ""
    return f"tensor{'s' if len(names) > 1 else ''} {', '.join(ordered[:NUM_NAMES_SHOWN])}{more}"
