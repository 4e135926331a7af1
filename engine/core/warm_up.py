"""One small request before the first user's: what is made at first use is paid for at the start."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from ...errors import TwofoldError
from ...log import get_logger
from ..messages import EngineRequest
from ..sampling_params import SamplingParams

if TYPE_CHECKING:
    from .engine_core import EngineCore

logger = get_logger(__name__)

_NAME = "warm-up"
# One step for the prompt and one for a row of decoding, which records its graph.
_NUM_TOKENS = 2


def warm_up(core: EngineCore) -> None:
    """Draw two tokens after a prompt of one, or pool it where the model has labels and no vocabulary to draw from.

    Costs the time of two steps. The salt keeps users' prompts off what the prefix cache may keep of it.
    """
    start = time.monotonic()
    info = core.info()
    request = EngineRequest(
        request_id=_NAME,
        prompt_token_ids=[0],
        params=SamplingParams(max_tokens=_NUM_TOKENS, ignore_eos=True, seed=0),
        cache_salt=_NAME,
        pooling="score" if info.num_labels else None,
    )
    try:
        core.add_request(request)
    except TwofoldError as error:
        logger.debug("no warm-up: %s", error)
        return
    while core.has_work():
        core.step()
    logger.info("warmed up in %.2f s", time.monotonic() - start)
