"""How well a model predicts text, and how far it strays from another one on it."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..engine.config import EngineConfig
from ..engine.llm import LLM
from ..engine.model_config import allowed_model_len, load_model_config
from ..engine.sources import ModelFiles, resolve_model
from ..engine.tokenizer import load_tokenizer
from ..errors import ConfigError
from ..log import get_logger
from .calibration.spec import check_text_file
from .calibration.texts import EVALUATION_SAMPLE, sample_path, shortage, text_windows

log = get_logger(__name__)

# (windows done, windows in all)
Progress = Callable[[int, int], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationSpec:
    """``num_windows`` windows of ``length`` tokens of ``source`` (text or JSON lines), spread over it evenly.

    None is a sample that comes with Twofold: a part of the Jargon File that the calibration sample does not hold.
    """

    source: Path | None = None
    num_windows: int = 8
    length: int = 512

    def __post_init__(self) -> None:
        if self.num_windows < 1 or self.length < 2:
            raise ConfigError(
                f"evaluation: {self.num_windows} windows of {self.length} tokens; at least 1 of 2 tokens is needed"
            )
        if self.source is not None:
            check_text_file("evaluation", self.source)

    def __str__(self) -> str:
        source = "the built-in sample" if self.source is None else self.source.name
        return f"{self.num_windows} x {self.length} tokens of {source}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """Figures over all windows.

    ``perplexity`` of each token after the first of its window. Against a reference: ``divergence`` is the mean of
    KL(reference || model) in nats a token, ``same_top`` the share of positions with the same most probable token.
    """

    num_tokens: int
    perplexity: float
    reference_perplexity: float | None = None
    divergence: float | None = None
    same_top: float | None = None

    def rows(self) -> list[tuple[str, str]]:
        """The figures as lines of name and value."""
        rows = [("tokens", str(self.num_tokens)), ("perplexity", f"{self.perplexity:.4f}")]
        if self.reference_perplexity is not None:
            rows.append(("reference", f"{self.reference_perplexity:.4f}"))
        if self.divergence is not None:
            rows.append(("divergence", f"{self.divergence:.5f} nats a token"))
        if self.same_top is not None:
            rows.append(("same top token", f"{self.same_top:.2%}"))
        return rows

    def as_dict(self) -> dict[str, Any]:
        """The figures for JSON."""
        return asdict(self)


def evaluate(
    config: EngineConfig,
    spec: EvaluationSpec | None = None,
    *,
    reference: EngineConfig | None = None,
    progress: Progress | None = None,
) -> Evaluation:
    """Evaluate the model of ``config``; one model is in memory at a time, the reference's log-probabilities on disk.

    ConfigError where the text is too short, or the two models do not share their vocabulary.
    """
    return next(evaluate_each([config], spec, reference=reference, progress=progress))


def evaluate_each(
    configs: Sequence[EngineConfig],
    spec: EvaluationSpec | None = None,
    *,
    reference: EngineConfig | None = None,
    progress: Progress | None = None,
) -> Iterator[Evaluation]:
    """`evaluate` of each model in turn; the reference is run once for all. The text is read before any weight is."""
    spec = spec or EvaluationSpec()
    windows = _common_windows([reference, *configs] if reference is not None else configs, spec)
    runs = len(configs) + (reference is not None)
    note = progress or (lambda done, total: None)
    done = 0
    with tempfile.TemporaryDirectory() as folder:
        expected: _Stored | None = None
        if reference is not None:
            expected = _Stored(Path(folder) / "logits", windows)
            with open_llm(reference) as llm:
                for index, window in enumerate(windows):
                    expected.put(index, llm.logits(window.tolist()))
                    done += 1
                    note(done, runs * len(windows))
        for config in configs:
            sums = _Sums()
            with open_llm(config) as llm:
                for index, window in enumerate(windows):
                    logits = llm.logits(window.tolist())
                    sums.add(window, logits, None if expected is None else expected.get(index))
                    done += 1
                    note(done, runs * len(windows))
            yield sums.result()


def open_llm(config: EngineConfig) -> LLM:
    """An LLM from a whole config."""
    fields = {name: getattr(config, name) for name in config.__dataclass_fields__}
    return LLM(fields.pop("model"), **fields)


def _common_windows(configs: Sequence[EngineConfig], spec: EvaluationSpec) -> Tensor:
    """The token windows int64 [B, L] of ``spec``, which all models must share, vocabulary included: ConfigError."""
    models = [(resolve_model(config.model), config) for config in configs]
    configured = [(files, load_model_config(files), config) for files, config in models]
    length = min(spec.length, *(allowed_model_len(one.max_model_len, model) for _, model, one in configured))
    if length < spec.length:
        log.warning("windows of %d tokens instead of %d: the model has no more positions", length, spec.length)
    found = [_windows(files, spec, length) for files, _, _ in configured]
    sizes = {model.vocab_size for _, model, _ in configured}
    if len(sizes) > 1 or any(not torch.equal(found[0], one) for one in found[1:]):
        raise ConfigError(
            "the reference has another vocabulary or tokenizer; compare a model with the one it was made from"
        )
    said = shortage(spec.source, found[0], spec.num_windows)
    if said is not None:
        log.warning("evaluation: %s", said)
    return found[0]


def _windows(files: ModelFiles, spec: EvaluationSpec, length: int) -> Tensor:
    every = text_windows(load_tokenizer(files), spec.source or sample_path(EVALUATION_SAMPLE), length)
    count = min(spec.num_windows, len(every))
    return every[torch.linspace(0, len(every) - 1, count).round().long()]


class _Stored:
    """Logits of all windows, float16, in a file: [windows, L, V]."""

    def __init__(self, path: Path, windows: Tensor) -> None:
        self._path = path
        self._windows = windows
        self._values: Tensor | None = None

    def put(self, index: int, logits: Tensor) -> None:
        if self._values is None:
            shape = (*self._windows.shape, logits.shape[1])
            values = torch.from_file(str(self._path), shared=True, size=math.prod(shape), dtype=torch.float16)
            self._values = values.view(shape)
        self._values[index] = logits

    def get(self, index: int) -> Tensor:
        """One window's logits in float32."""
        assert self._values is not None, "nothing was stored"
        return self._values[index].float()


class _Sums:
    def __init__(self) -> None:
        self._num_predicted = self._num_positions = 0
        self._loss = self._reference_loss = self._divergence = self._same = 0.0
        self._compares = False

    def add(self, window: Tensor, logits: Tensor, expected: Tensor | None) -> None:
        scores = logits.cpu().log_softmax(-1)
        self._loss += _loss(scores, window)
        self._num_predicted += len(window) - 1
        if expected is None:
            return
        self._compares = True
        wanted = expected.log_softmax(-1)
        self._reference_loss += _loss(wanted, window)
        self._num_positions += len(window)
        for ours, theirs in _chunks(scores, wanted):
            self._divergence += float((theirs.exp() * (theirs - ours)).sum())
            self._same += float((theirs.argmax(-1) == ours.argmax(-1)).sum())

    def result(self) -> Evaluation:
        perplexity = math.exp(self._loss / self._num_predicted)
        if not self._compares:
            return Evaluation(num_tokens=self._num_predicted, perplexity=perplexity)
        return Evaluation(
            num_tokens=self._num_predicted,
            perplexity=perplexity,
            reference_perplexity=math.exp(self._reference_loss / self._num_predicted),
            divergence=self._divergence / self._num_positions,
            same_top=self._same / self._num_positions,
        )


def _loss(scores: Tensor, window: Tensor) -> float:
    return -float(scores[:-1].gather(1, window[1:, None]).double().sum())


def _chunks(scores: Tensor, wanted: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    yield from zip(scores.split(64), wanted.split(64), strict=True)
