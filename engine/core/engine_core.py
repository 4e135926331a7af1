"""EngineCore: the step loop's one turn, and everything that a client may ask of it."""

from __future__ import annotations

import dataclasses
import time
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextlib import AbstractContextManager
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from ...errors import ContextLengthError, RequestError
from ...kernels.attention_batch import AttentionBatch
from ...kernels.problems import PlainProblem, dtype_name
from ...log import get_logger
from ...platforms import Platform, cpu_threads
from ...platforms.heap import StepHeap, trim_heap
from ..config import EngineConfig
from ..grammar.compiler import GrammarCompiler
from ..grammar.vocabulary import Vocabulary
from ..messages import AbortRequest, EngineInfo, EngineRequest, EngineStats, TokenLogprobs, TokenOutput
from ..pooling import Pooling
from .admission import check_request, make_samples
from .batch import Batch
from .block_pool import BlockPool
from .decode_graphs import DecodeGraphs, GraphStats
from .kv_cache import KVPlan, allocate_kv_caches, plan_kv_cache
from .prefix_cache import PrefixCache
from .prompt_graphs import PromptGraphs
from .request import Sample
from .runner import ModelRunner, StepResult
from .scheduler import Scheduler
from .step_pace import StepPace
from .warm_up import warm_up

if TYPE_CHECKING:
    from ..grammar.constraint import Constraint
    from ..models.model import Model

logger = get_logger(__name__)

# How long a step with nothing to compute waits for a grammar, in seconds.
_COMPILE_POLL = 0.01


class Kernels(Protocol):
    """The part of KernelSet that the core uses."""

    def select(self, op: str, problem: Any) -> Any: ...
    def report(self) -> list[dict[str, str]]: ...
    def step_memory(self) -> AbstractContextManager[None]: ...
    def give_back_pages(self) -> None: ...


class EngineCore:
    """One model with its KV pool and its queue. Not thread-safe: one thread adds, aborts and steps.

    ``from_parts`` takes a loaded model; ids from ``vocab_size`` up are padding rows of its head (None: it has none).
    """

    def __init__(self, config: EngineConfig) -> None:
        from .loading import load_parts

        parts = load_parts(config)
        self._set_up(config, parts.model, parts.platform, parts.kernels, parts.vocab_size, parts.vocabulary)
        self._pooling = parts.pooling
        warm_up(self)
        if self._prompt_graphs is not None and self._prompt_graphs.prepare(1):
            trim_heap()
        self._counters, self._next_order = EngineStats(num_blocks=self._plan.num_blocks), 0
        self.graphs.num_replays = 0

    @classmethod
    def from_parts(
        cls,
        config: EngineConfig,
        model: Model,
        platform: Platform,
        kernels: Kernels,
        *,
        vocab_size: int | None = None,
        vocabulary: Vocabulary | None = None,
    ) -> EngineCore:
        """A core around a model that is already in memory; without ``vocabulary`` it serves no structured output."""
        core = cls.__new__(cls)
        core._set_up(config, model, platform, kernels, vocab_size, vocabulary)
        return core

    def _set_up(
        self,
        config: EngineConfig,
        model: Model,
        platform: Platform,
        kernels: Kernels,
        vocab_size: int | None,
        vocabulary: Vocabulary | None,
    ) -> None:
        self._config = config
        self._model = model
        self._device = platform.device
        self._kernels = kernels
        self._vocab_size = min(model.config.vocab_size, vocab_size or model.config.vocab_size)
        self._plan: KVPlan = plan_kv_cache(config, model, platform)
        self._caches = allocate_kv_caches(self._plan, model, platform.device)
        self._pool = BlockPool(self._plan.num_blocks)
        self._pace = StepPace(config.max_step_stretch)
        self._heap = StepHeap() if platform.spec.device_type == "cpu" else None
        batch = Batch(
            num_rows=config.max_num_seqs, max_model_len=self._plan.max_model_len, block_size=config.block_size
        )
        self._scheduler = Scheduler(
            pool=self._pool,
            cache=PrefixCache(self._pool, config.block_size, enabled=config.enable_prefix_caching),
            batch=batch,
            block_size=config.block_size,
            max_num_tokens=config.max_num_batched_tokens,
            pace=self._pace,
        )
        self._runner = ModelRunner(
            model=model,
            batch=batch,
            caches=self._caches,
            device=platform.device,
            copy_blocks=kernels.select("copy_blocks", PlainProblem(model.dtype)),
            kernels=kernels,
            vocab_size=self._vocab_size,
        )
        self._graphs, self._prompt_graphs, self._no_graphs = self._make_graphs(platform)
        self._runner.use_graphs(self._graphs, self._prompt_graphs)
        self._grammars = GrammarCompiler(vocabulary, self._vocab_size, model.config.eos_token_ids)
        self._compiling: dict[str, Future[list[Constraint]]] = {}
        self._requests: dict[str, list[Sample]] = {}
        self._pending: list[TokenOutput] = []
        self._counters = EngineStats(num_blocks=self._plan.num_blocks)
        self._next_order = 0
        self._pooling = Pooling()

    def _make_graphs(self, platform: Platform) -> tuple[DecodeGraphs | None, PromptGraphs | None, str]:
        """The graphs of decode steps and of those with prompts; without them the reason, in words."""
        recorder = "the option enforce_eager" if self._config.enforce_eager else platform.graphs()
        if isinstance(recorder, str):
            logger.info("decode steps run without graphs: %s", recorder)
            return None, None, recorder
        num_columns = -(-self._plan.max_model_len // self._plan.block_size)
        rows, tokens = self._config.max_num_seqs, self._config.max_num_batched_tokens
        argmax, model = self._runner.argmax, self._model
        decode = DecodeGraphs(model, self._caches, recorder, argmax, self._device, rows, num_columns)
        prompts = PromptGraphs(model, self._caches, recorder, tokens, rows, num_columns)
        return decode, prompts, ""

    @property
    def graphs(self) -> GraphStats:
        """How decode steps are recorded so far."""
        return GraphStats(refused=self._no_graphs) if self._graphs is None else self._graphs.stats

    def info(self) -> EngineInfo:
        """What a client needs to know; the kernel report is complete once the model is loaded."""
        return EngineInfo(
            model_name=self._config.model,
            vocab_size=self._vocab_size,
            max_model_len=self._plan.max_model_len,
            block_size=self._plan.block_size,
            num_blocks=self._plan.num_blocks,
            device=str(self._device),
            dtype=dtype_name(self._model.dtype),
            kernels=self._kernels.report(),
            hidden_size=self._model.config.hidden_size,
            pooling=self._pooling.kind,
            normalize=self._pooling.normalize,
            pooling_error=self._pooling.error,
            num_labels=self._model.config.num_labels,
            rest_cpus=list(cpu_threads.rest_cpus()),
        )

    def add_request(self, request: EngineRequest) -> None:
        """Queue a request (RequestError, ContextLengthError: nothing of it was kept)."""
        if request.request_id in self._requests:
            raise RequestError(f"request id {request.request_id!r} is in use; choose another", param="request_id")
        check_request(request, self._plan, self._vocab_size, self._model.config.num_labels)
        compiling = self._grammars.start(request.params)
        samples = make_samples(request, self._plan, self._model.config.eos_token_ids, self._next_order)
        self._next_order += len(samples)
        self._requests[request.request_id] = samples
        if compiling is not None:
            self._compiling[request.request_id] = compiling
        self._counters.num_prompt_tokens += len(request.prompt_token_ids)
        for sample in samples:
            self._scheduler.add(sample)

    def abort(self, request: AbortRequest) -> None:
        """End a request or one of its samples now; the next step reports ``abort`` for those that were unfinished."""
        for sample in list(self._requests.get(request.request_id, ())):
            if request.index is None or request.index == sample.index:
                self._finish(sample)
                self._pending.append(
                    TokenOutput(request_id=request.request_id, index=sample.index, finish_reason="abort")
                )

    def has_work(self) -> bool:
        """True while ``step`` has something to compute or to report."""
        return bool(self._requests or self._pending)

    def step(self) -> list[TokenOutput]:
        """Compute one step; returns new tokens and the ends of samples. An exception means that the core is lost."""
        self._attach_constraints()
        outputs, self._pending = self._pending, []
        plan = self._scheduler.schedule()
        if plan:
            start = time.perf_counter()
            result = self._runner.execute(plan)
            if result.samples:  # a step that draws nothing may still be under way on its device
                self._pace.observe(plan, time.perf_counter() - start)
            self._scheduler.commit(plan)
            self._counters.num_steps += 1
            self._collect(result, outputs)
            if self._heap is not None and self._heap.stepped(sum(plan.num_tokens.values())):
                self._give_back_pages()
        elif self._compiling and not outputs:
            wait(self._compiling.values(), timeout=_COMPILE_POLL, return_when=FIRST_COMPLETED)
        return outputs

    def stats(self) -> EngineStats:
        """Gauges and counters now."""
        return dataclasses.replace(
            self._counters,
            num_running=len(self._scheduler.running),
            num_waiting=len(self._scheduler.waiting),
            num_live_blocks=self._pool.num_live,
            num_cached_blocks=self._pool.num_cached,
            num_preemptions=self._scheduler.num_preemptions,
        )

    @torch.inference_mode()
    def logits(self, token_ids: list[int]) -> Tensor:
        """float32 [T, head rows]: the model's logits at each position of a sequence, padding rows included.

        Takes free KV blocks for the time of the call; ContextLengthError where there are not enough.
        """
        size = self._plan.block_size
        num_blocks = -(-len(token_ids) // size)
        if len(token_ids) > self._plan.max_model_len or num_blocks > self._pool.num_free:
            raise ContextLengthError(
                f"the sequence has {len(token_ids)} tokens; at most {self._plan.max_model_len} are served, and "
                f"{self._pool.num_free * size} fit the free part of the KV cache now"
            )
        blocks = self._pool.allocate(num_blocks)
        try:
            return self._sequence_logits(token_ids, blocks)
        finally:
            self._pool.release(blocks)

    def shutdown(self) -> None:
        """Drop all requests and the KV cache."""
        stats = self.graphs
        if stats.num_replays:
            logger.info(
                "%d of %d steps were replayed from %d graphs of %.1f MiB together",
                stats.num_replays,
                self._counters.num_steps,
                stats.num_graphs,
                stats.num_bytes / (1 << 20),
            )
        for request_id in list(self._requests):
            self.abort(AbortRequest(request_id=request_id))
        self._compiling.clear()
        self._grammars.close()
        self._pending.clear()
        self._caches.clear()

    def _give_back_pages(self) -> None:
        self._kernels.give_back_pages()
        if self._prompt_graphs is not None:
            self._prompt_graphs.give_back_pages()

    def _attach_constraints(self) -> None:
        """Let those requests start whose grammars are ready, and end those whose cannot be built."""
        for request_id in [name for name, future in self._compiling.items() if future.done()]:
            future = self._compiling.pop(request_id)
            error = future.exception()
            for sample in list(self._requests.get(request_id, ())):
                sample.waits_for_constraint = False
                if error is None:
                    sample.constraint = future.result()[sample.index]
                    continue
                self._finish(sample)
                self._pending.append(
                    TokenOutput(
                        request_id=request_id,
                        index=sample.index,
                        finish_reason="error",
                        error=str(error),
                        error_param=getattr(error, "param", None),
                    )
                )

    def _collect(self, result: StepResult, outputs: list[TokenOutput]) -> None:
        for sample, token, logprobs in zip(result.samples, result.tokens, result.logprobs, strict=True):
            outputs.append(self._advance(sample, token, logprobs))
        outputs += [self._finish_pooled(sample) for sample in result.pooled]
        self._counters.num_generated_tokens += len(result.samples)

    def _finish_pooled(self, sample: Sample) -> TokenOutput:
        assert sample.pooler is not None
        scores = sample.request.pooling == "score"
        embedding = sample.pooler.result(partial(self._scores, sample.request.score_tokens) if scores else None)
        self._counters.num_cached_tokens += sample.num_cached_tokens
        self._finish(sample)
        return TokenOutput(
            request_id=sample.request.request_id,
            num_cached_tokens=sample.num_cached_tokens,
            finish_reason="error" if embedding is None else "stop",
            error="the hidden states are not finite" if embedding is None else None,
            embedding=embedding,
            queue_seconds=sample.queue_seconds,
        )

    def _scores(self, tokens: list[int], hidden: Tensor) -> Tensor:
        """hidden [K] -> the head's numbers for ``tokens``, or for each label, float32."""
        logits = self._model.compute_logits(hidden[None].to(self._model.dtype))[0]
        return logits[tokens] if tokens else logits

    def _advance(self, sample: Sample, token: int | None, logprobs: TokenLogprobs | None) -> TokenOutput:
        """Append a drawn token to its sample and end the sample where it ends."""
        output = TokenOutput(
            request_id=sample.request.request_id, index=sample.index, num_cached_tokens=sample.num_cached_tokens
        )
        if token is None:
            output.finish_reason = "error"
            output.error = "no token can be drawn: the logits are not finite, or every token is banned"
            constraint, structured = sample.constraint, sample.params.structured
            if constraint is not None and constraint.error is not None and structured is not None:
                output.error = f"the grammar of this request cannot be followed any further: {constraint.error}"
                output.error_param = structured.param
            self._finish(sample)
            return output
        if sample.num_output_tokens == 0:
            output.prompt_logprobs = sample.prompt_logprobs
            output.queue_seconds = sample.queue_seconds
            if sample.index == 0:
                self._counters.num_cached_tokens += sample.num_cached_tokens
        sample.tokens.append(token)
        output.token_ids.append(token)
        if logprobs is not None:
            output.logprobs = [logprobs]
        if sample.constraint is not None:
            sample.constraint.advance(token)
        if token in sample.stop_ids:
            output.finish_reason, output.stop_token = "stop", token
        elif sample.constraint is not None and sample.constraint.is_complete:
            output.finish_reason = "stop"
        elif len(sample.tokens) >= sample.max_num_tokens:
            output.finish_reason = "length"
        if output.finish_reason:
            self._finish(sample)
        return output

    def _finish(self, sample: Sample) -> None:
        self._scheduler.finish(sample)
        samples = self._requests[sample.request.request_id]
        samples.remove(sample)
        if not samples:
            del self._requests[sample.request.request_id]
            self._compiling.pop(sample.request.request_id, None)
        self._counters.num_finished += 1

    def _sequence_logits(self, token_ids: list[int], blocks: list[int]) -> Tensor:
        """Run one sequence through the model, a step's budget at a time."""
        size = self._plan.block_size
        tokens, table = torch.tensor(token_ids), torch.tensor([blocks])
        parts = []
        for start in range(0, len(token_ids), self._config.max_num_batched_tokens):
            positions = torch.arange(start, min(start + self._config.max_num_batched_tokens, len(token_ids)))
            end = start + len(positions)
            attention = AttentionBatch(
                query_start_loc=torch.tensor([0, len(positions)], dtype=torch.int32, device=self._device),
                seq_lens=torch.tensor([end], dtype=torch.int32, device=self._device),
                block_table=table.to(self._device, torch.int32),
                slot_mapping=(table[0, positions // size] * size + positions % size).to(self._device),
                query_lens_host=(len(positions),),
                seq_lens_host=(end,),
            )
            ids = tokens[positions].to(self._device)
            hidden = self._model.forward(ids, positions.to(self._device), self._caches, attention)
            parts.append(self._model.compute_logits(hidden))
        return torch.cat(parts)
