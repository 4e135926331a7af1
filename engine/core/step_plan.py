"""StepPlan: what one step computes."""

from __future__ import annotations

from dataclasses import dataclass, field

from .request import Sample, SampleId


@dataclass(slots=True)
class StepBudget:
    """What is left of a step: ``num_tokens`` in all, of which ``num_prompt_tokens`` may go to prompts."""

    num_tokens: int
    num_prompt_tokens: int

    @property
    def has_prompt_tokens(self) -> bool:
        return self.num_tokens > 0 and self.num_prompt_tokens > 0

    def take(self, wanted: int) -> int:
        """As many of the tokens that a sample wants as are left. Who wants just one waits for what it draws."""
        if wanted == 1:
            self.num_tokens -= 1
            return 1
        count = min(wanted, self.num_tokens, self.num_prompt_tokens)
        self.num_tokens -= count
        self.num_prompt_tokens -= count
        return count


@dataclass(slots=True)
class StepPlan:
    """The scheduler's decision: how many tokens of which samples, with what must happen to the KV blocks before.

    ``num_tokens`` keeps the order of ``samples``; whether a sample is in its prompt or in its output plays no role.
    ``block_copies`` holds (source, target) pairs to copy before anything is written.
    """

    num_tokens: dict[SampleId, int] = field(default_factory=dict)
    samples: list[Sample] = field(default_factory=list)
    block_copies: list[tuple[int, int]] = field(default_factory=list)
    num_preempted: int = 0

    def add(self, sample: Sample, count: int) -> None:
        """Compute ``count`` more tokens of a sample in this step."""
        self.samples.append(sample)
        self.num_tokens[sample.id] = count

    @property
    def is_decode(self) -> bool:
        """Whether every sample computes its last token alone, to draw the next one and for nothing else."""
        return all(count == 1 for count in self.num_tokens.values()) and all(
            sample.num_computed_tokens + 1 == sample.num_tokens
            and sample.pooler is None
            and not sample.wants_prompt_logprobs
            for sample in self.samples
        )

    def __bool__(self) -> bool:
        return bool(self.samples)
