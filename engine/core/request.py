"""Sample: the unit of scheduling, one of the ``n`` completions of a request."""

from __future__ import annotations

import enum
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ..messages import EngineRequest, TokenLogprobs
from ..sampling_params import SamplingParams

if TYPE_CHECKING:
    from ..grammar.constraint import Constraint
    from .pooler import Pooler

SampleId = tuple[str, int]


class Status(enum.Enum):
    """Where a sample is in its life; preemption leads from RUNNING back to WAITING."""

    WAITING = enum.auto()
    RUNNING = enum.auto()
    FINISHED = enum.auto()


@dataclass(slots=True, eq=False, kw_only=True)
class Sample:
    """One completion in the making.

    ``order``            place in the line, unique; lower ones go first and are preempted last.
    ``tokens``           prompt and output so far: the tokens that the sample wants computed.
    ``max_num_tokens``   prompt and output at most.
    ``stop_ids``         tokens that end the output.
    ``leader``           sample 0 of the request, whose prompt blocks the others share; None for sample 0.
    ``blocks``           KV blocks held, in the order of the tokens; ``row`` of the batch, -1 while waiting.
    ``block_keys``       the root key, then the keys of the first full blocks, as far as anyone asked.
    ``num_registered_blocks``  leading blocks that have been offered to the prefix cache.
    ``num_cached_tokens``      prompt tokens taken from the prefix cache when the sample first started.
    ``queue_seconds``    from ``queued_at`` until it first started.
    ``constraint``       what its tokens must follow; ``waits_for_constraint`` while that is being made.
    ``pooler``           makes the vector of a pooling request, which draws no tokens.
    ``prompt_logprobs``  filled chunk by chunk when asked for, then handed over with the first output.
    """

    request: EngineRequest
    index: int
    order: int
    tokens: list[int]
    max_num_tokens: int
    stop_ids: frozenset[int]
    leader: Sample | None = None
    siblings: list[Sample] = field(default_factory=list)
    status: Status = Status.WAITING
    row: int = -1
    blocks: list[int] = field(default_factory=list)
    block_keys: list[bytes] = field(default_factory=list)
    num_registered_blocks: int = 0
    num_computed_tokens: int = 0
    num_cached_tokens: int = 0
    has_started: bool = False
    queued_at: float = field(default_factory=time.monotonic)
    queue_seconds: float = 0.0
    constraint: Constraint | None = None
    waits_for_constraint: bool = False
    pooler: Pooler | None = None
    prompt_logprobs: list[TokenLogprobs | None] | None = None

    @property
    def id(self) -> SampleId:
        return self.request.request_id, self.index

    @property
    def params(self) -> SamplingParams:
        return self.request.params

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.request.prompt_token_ids)

    @property
    def num_tokens(self) -> int:
        return len(self.tokens)

    @property
    def num_output_tokens(self) -> int:
        return len(self.tokens) - len(self.request.prompt_token_ids)

    @property
    def wants_prompt_logprobs(self) -> bool:
        """True until every prompt token has been computed with its log-probability."""
        return self.prompt_logprobs is not None and len(self.prompt_logprobs) < self.num_prompt_tokens

    @property
    def needs_every_token(self) -> bool:
        """True where every prompt token's hidden state is read, so that none may come from the prefix cache."""
        return self.wants_prompt_logprobs or (self.pooler is not None and self.pooler.needs_every_token)

    def output_rows(self, count: int) -> tuple[int, int]:
        """Of the next ``count`` tokens: the first whose hidden state is read, and how many are."""
        if self.pooler is not None:
            return self.pooler.rows(self.num_computed_tokens, count)
        if self.wants_prompt_logprobs:
            return 0, count
        return count - 1, int(self.num_computed_tokens + count == len(self.tokens))

    @property
    def can_be_forked(self) -> bool:
        """True while siblings may share the prompt's blocks: all of them but the last token's are computed."""
        return self.status is Status.RUNNING and self.num_computed_tokens >= self.num_prompt_tokens - 1

    @property
    def waits_for_leader(self) -> bool:
        """True while the leader is on its way to a prompt that this sample can share."""
        leader = self.leader
        if leader is None or self.has_started or leader.status is Status.FINISHED:
            return False
        return not leader.can_be_forked

    def num_wanted_tokens(self) -> int:
        """Tokens to compute next: all that are left; a leader with waiting siblings stops before the prompt's last."""
        remaining = len(self.tokens) - self.num_computed_tokens
        if remaining > 1 and self.siblings:
            until_fork = self.num_prompt_tokens - 1 - self.num_computed_tokens
            if until_fork > 0 and any(sibling.waits_for_leader for sibling in self._waiting_siblings()):
                return until_fork
        return remaining

    def _waiting_siblings(self) -> list[Sample]:
        return [sibling for sibling in self.siblings if sibling.status is Status.WAITING]
