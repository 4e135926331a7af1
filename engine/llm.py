"""LLM: the offline API, with the engine in the caller's own process."""

from __future__ import annotations

import itertools
import os
import reprlib
from collections.abc import Iterable, Mapping, Sequence, Set
from types import TracebackType
from typing import Any

import torch

from ..errors import RequestError, TwofoldError
from .config import EngineConfig, check_options
from .core.engine_core import EngineCore
from .generation_progress import GenerationProgress
from .input_processor import InputProcessor
from .interrupt import DelayedInterrupt
from .messages import AbortRequest, EngineInfo, EngineRequest
from .output_processor import OutputProcessor
from .outputs import CompletionOutput, RequestOutput, SampleDelta
from .sampling_params import SamplingParams
from .text_side import find_model, load_text_side
from .tokenizer import Tokenizer

Prompt = str | Sequence[int]
Message = Mapping[str, Any]


class LLM:
    """A model, loaded and ready to complete prompts; use it from one thread.

        with LLM("smollm2-135m-instruct") as llm:
            for output in llm.generate(["The sky is", "Water boils at"], SamplingParams(temperature=0)):
                print(output.outputs[0].text)

    ``model`` is a directory, a ``.gguf`` file, a hub id or a catalogue name; ``options`` are fields of `EngineConfig`.
    """

    def __init__(
        self, model: str | os.PathLike[str], *, dtype: str = "auto", device: str = "auto", **options: Any
    ) -> None:
        check_options(options)
        name = os.fspath(model) if isinstance(model, os.PathLike) else model
        config = EngineConfig(model=name, dtype=dtype, device=device, **options)
        files = find_model(config)
        tokenizer, generation = load_text_side(files, config)
        self._set_up(EngineCore(config), tokenizer, generation)

    @classmethod
    def from_parts(cls, core: EngineCore, tokenizer: Tokenizer, generation: Mapping[str, Any] | None = None) -> LLM:
        """An LLM around a core that is already there; ``generation`` holds sampling defaults."""
        llm = cls.__new__(cls)
        llm._set_up(core, tokenizer, generation)
        return llm

    def _set_up(self, core: EngineCore, tokenizer: Tokenizer, generation: Mapping[str, Any] | None) -> None:
        self.tokenizer = tokenizer
        self._core: EngineCore | None = core
        self._info = core.info()
        self._inputs = InputProcessor(tokenizer, self._info, generation)
        self._outputs = OutputProcessor(tokenizer)
        self._numbers = itertools.count()

    def __enter__(self) -> LLM:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def info(self) -> EngineInfo:
        """The engine's sizes, device, dtype and kernels."""
        return self._info

    def default_params(self, **options: Any) -> SamplingParams:
        """SamplingParams with the defaults of the model's authors, and ``options`` on top."""
        return self._inputs.default_params(**options)

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        progress: bool = True,
        cache_salt: str | None = None,
    ) -> list[RequestOutput]:
        """Complete every prompt, all at once; the outputs are in the order of the prompts.

        A prompt is a text or a list of token ids; ``prompts`` may be a single one. ``params`` is one for all, one for
        each, or None for `default_params`. Raises RequestError before anything runs where a prompt or its parameters
        are wrong. A sample that the engine had to give up has finish_reason ``error`` and says why in ``error``.
        """
        prompts = _as_list(prompts)
        chosen = self._params_for(len(prompts), params)
        return self._complete(prompts, chosen, progress, cache_salt=cache_salt)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        progress: bool = True,
        cache_salt: str | None = None,
        **template: Any,
    ) -> list[RequestOutput]:
        """Answer one conversation, or a list of them, through the model's chat template.

        ``template`` goes to `Tokenizer.render_chat`: ``tools``, ``add_generation_prompt``, ``continue_final_message``,
        ``template_kwargs``. Otherwise as `generate`.
        """
        conversations = _conversations(messages)
        chosen = self._params_for(len(conversations), params)
        texts = [self.tokenizer.render_chat(conversation, **template) for conversation in conversations]
        # A rendered template has all its special tokens already.
        return self._complete(texts, chosen, progress, cache_salt=cache_salt, add_special_tokens=False)

    def logits(self, token_ids: Sequence[int]) -> torch.Tensor:
        """Logits after each token of one sequence, for evaluation: float32 [T, vocabulary]."""
        return self._open_core().logits(self._inputs.check_ids(token_ids))

    def close(self) -> None:
        """Free the model and the cache; the LLM cannot be used afterwards. May be called more than once."""
        core, self._core = self._core, None
        if core is not None:
            core.shutdown()

    def _open_core(self) -> EngineCore:
        if self._core is None:
            raise TwofoldError("this LLM is closed; make a new one")
        return self._core

    def _params_for(
        self, num_prompts: int, params: SamplingParams | Sequence[SamplingParams] | None
    ) -> list[SamplingParams]:
        if params is None or isinstance(params, SamplingParams):
            return [params or self.default_params()] * num_prompts
        chosen = _items(params, "params", "SamplingParams, or a list of one for each prompt")
        for one in chosen:
            if not isinstance(one, SamplingParams):
                raise RequestError(f"params holds {reprlib.repr(one)}; it must hold SamplingParams", param="params")
        if len(chosen) != num_prompts:
            raise RequestError(
                f"{len(chosen)} sampling parameters for {num_prompts} prompts; give one for all or one for each",
                param="params",
            )
        return chosen

    def _complete(
        self, prompts: Sequence[Prompt], params: list[SamplingParams], progress: bool, **options: Any
    ) -> list[RequestOutput]:
        core = self._open_core()
        requests = [
            self._inputs.make_request(prompt, one, request_id=f"request-{next(self._numbers)}", **options)
            for prompt, one in zip(prompts, params, strict=True)
        ]
        results = {r.request_id: _new_output(r, prompt) for r, prompt in zip(requests, prompts, strict=True)}
        self._run(core, requests, results, progress)
        return list(results.values())

    def _run(
        self, core: EngineCore, requests: list[EngineRequest], results: dict[str, RequestOutput], progress: bool
    ) -> None:
        try:
            with DelayedInterrupt() as interrupt, GenerationProgress(len(requests), show=progress) as bar:
                for request in requests:
                    self._outputs.add(request)
                    core.add_request(request)
                while len(self._outputs):
                    interrupt.check()
                    deltas = self._step(core)
                    for delta in deltas:
                        _collect(results[delta.request_id], delta)
                    bar.update(deltas, len(requests) - len(self._outputs))
        except BaseException:
            for request in requests:
                self._outputs.remove(request.request_id)
                core.abort(AbortRequest(request_id=request.request_id))
            raise

    def _step(self, core: EngineCore) -> list[SampleDelta]:
        deltas, aborts = self._outputs.process(core.step())
        for abort in aborts:
            core.abort(abort)
        return deltas


def _as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    if isinstance(prompts, str):
        return [prompts]
    items = _items(prompts, "prompts", "a text, a list of token ids, or a list of those")
    return [items] if items and isinstance(items[0], int) else items


def _conversations(messages: Any) -> list[list[Any]]:
    accepted = 'a list of messages such as {"role": "user", "content": "Hello"}, or a list of such lists'
    items = _items(messages, "messages", accepted)
    many = items if not items or not isinstance(items[0], Mapping) else [items]
    conversations = [_items(conversation, "messages", accepted, whole=messages) for conversation in many]
    for message in itertools.chain(*conversations):
        if not isinstance(message, Mapping):
            raise RequestError(f"messages holds {reprlib.repr(message)}; it must be {accepted}", param="messages")
    return conversations


def _items(value: Any, name: str, accepted: str, *, whole: Any = None) -> list[Any]:
    """``value`` as a list; RequestError, naming it or the ``whole`` that it is of, where it is none."""
    if isinstance(value, (str, bytes, Mapping, Set)) or not isinstance(value, Iterable):
        given = reprlib.repr(value if whole is None else whole)
        raise RequestError(f"{name} is {given}; it must be {accepted}", param=name)
    return list(value)


def _new_output(request: EngineRequest, prompt: Prompt) -> RequestOutput:
    output = RequestOutput(
        request_id=request.request_id,
        prompt=prompt if isinstance(prompt, str) else None,
        prompt_token_ids=list(request.prompt_token_ids),
    )
    output.usage.prompt_tokens = len(request.prompt_token_ids)
    output.outputs = [CompletionOutput(index=index) for index in range(request.params.n)]
    return output


def _collect(output: RequestOutput, delta: SampleDelta) -> None:
    sample = output.outputs[delta.index]
    sample.text += delta.text
    sample.token_ids += delta.token_ids
    if delta.logprobs is not None:
        sample.logprobs = sample.logprobs or []
        sample.logprobs += delta.logprobs
    sample.finish_reason, sample.stop_reason, sample.error = delta.finish_reason, delta.stop_reason, delta.error
    output.prompt_logprobs = output.prompt_logprobs or delta.prompt_logprobs
    output.usage.completion_tokens += len(delta.token_ids)
    output.usage.cached_tokens = max(output.usage.cached_tokens, delta.num_cached_tokens)
