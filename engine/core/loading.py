"""Loading: from a user's options to the parts of a core."""

from __future__ import annotations

from dataclasses import dataclass, field

from ...kernels.kernel_set import KernelSet
from ...kernels.report import report_lines, unused_activations
from ...log import get_logger
from ...platforms import Platform, select_platform
from ...platforms.cpu import usable_cores
from ...platforms.cpu_threads import check_num_threads
from ...platforms.heap import trim_heap
from ..config import EngineConfig
from ..cpu_bfloat16 import on_device
from ..grammar.vocabulary import Vocabulary
from ..models import Model, load_model
from ..pooling import Pooling, pooling_of
from ..sources import ModelFiles, resolve_model
from ..tokenizer import load_vocabulary

logger = get_logger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class CoreParts:
    """A loaded model and what it runs on. ``vocab_size`` is the tokenizer's: later rows of the head are padding.

    ``vocabulary`` None: no structured output.
    """

    model: Model
    platform: Platform
    kernels: KernelSet
    vocab_size: int
    vocabulary: Vocabulary | None = None
    pooling: Pooling = field(default_factory=Pooling)


def load_parts(config: EngineConfig) -> CoreParts:
    """Fetch, quantize where asked, and load (ModelNotFoundError, CheckpointError, ConfigError, UnsupportedError)."""
    check_num_threads(config.num_threads, usable_cores())
    platform = select_platform(config.device)
    config = on_device(config, platform.spec)
    # Reading formats is many small operations, for which threads only wait for each other; rounding does large ones.
    platform.set_threads(config.num_threads, torch_too=config.quantization is not None)
    files = _find_files(config)
    vocabulary = load_vocabulary(files)
    kernels = KernelSet(platform.spec, strict=config.strict_kernels, cpu_activations=config.cpu_activations)
    model = load_model(files, config, platform, kernels)
    platform.set_threads(config.num_threads, torch_too=kernels.needs_torch_threads())
    trim_heap()
    rows = kernels.report()
    for line in report_lines(rows):
        logger.info("%s", line)
    if note := unused_activations(rows, config.cpu_activations):
        logger.warning("%s", note)
    logger.info("loaded %s: %.2f GiB of weights on %s", config.model, model.weight_bytes / (1 << 30), platform.device)
    return CoreParts(
        model=model,
        platform=platform,
        kernels=kernels,
        vocab_size=vocabulary.size,
        vocabulary=vocabulary,
        pooling=pooling_of(files),
    )


def _find_files(config: EngineConfig) -> ModelFiles:
    if config.quantize is None:
        return resolve_model(config.model)
    from ...quant import ensure_quantized

    return resolve_model(str(ensure_quantized(config.model, config.quantize)))
