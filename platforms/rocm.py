"""AMD GPUs through torch's ROCm build, which answers under the name ``torch.cuda``."""

from __future__ import annotations

from typing import Any

from ..log import get_logger
from .arch_table import ArchFacts, amd_facts
from .spec import Fp8Kind
from .torch_gpu import TorchGpuPlatform

logger = get_logger(__name__)


class RocmPlatform(TorchGpuPlatform):
    vendor = "amd"

    def arch_facts(self, properties: Any) -> ArchFacts:
        facts = amd_facts(properties.gcnArchName)
        if facts.fp8 is Fp8Kind.NONE:
            logger.info("%s has no FP8 matrix instructions: FP8 weights are widened to 16 bits", facts.arch)
        return facts
