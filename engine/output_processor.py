"""From a core's token outputs to text deltas: detokenizing, stop strings and the accounting of each sample."""

from __future__ import annotations

from collections.abc import Iterable

from .detokenizer import IncrementalDetokenizer, TokenDecoder, WholeTexts
from .messages import AbortRequest, EngineRequest, TokenOutput
from .outputs import SampleDelta
from .stop_strings import StopChecker


class OutputProcessor:
    """Follows every open request; a sample is forgotten once it has finished, its request with its last sample."""

    def __init__(self, tokenizer: TokenDecoder) -> None:
        self._tokenizer = tokenizer
        self._texts = WholeTexts(tokenizer)
        self._requests: dict[str, dict[int, _Sample]] = {}

    def __len__(self) -> int:
        return len(self._requests)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._requests

    def add(self, request: EngineRequest) -> None:
        """Begin to follow a request, before its first output can arrive."""
        samples = range(request.params.n)
        self._requests[request.request_id] = {
            index: _Sample(self._tokenizer, self._texts, request, index) for index in samples
        }

    def open_samples(self, request_id: str) -> list[int]:
        """Indices of the request's unfinished samples; none for an unknown request."""
        return list(self._requests.get(request_id, ()))

    def remove(self, request_id: str) -> None:
        """Forget a request that was aborted or rejected; its late outputs will be ignored."""
        self._requests.pop(request_id, None)

    def process(self, outputs: list[TokenOutput]) -> tuple[list[SampleDelta], list[AbortRequest]]:
        """One delta per output of an open sample, and what the core must stop because a stop string matched."""
        deltas: list[SampleDelta] = []
        aborts: list[AbortRequest] = []
        for output in outputs:
            sample = self._requests.get(output.request_id, {}).get(output.index)
            if sample is None:
                continue
            delta = sample.advance(output)
            deltas.append(delta)
            if delta.finish_reason is None:
                continue
            if output.finish_reason is None:
                aborts.append(AbortRequest(request_id=output.request_id, index=output.index))
            self._end(output.request_id, output.index)
        return deltas, aborts

    def process_tokens(self, rows: Iterable[tuple[str, int, int, int]]) -> tuple[list[SampleDelta], list[AbortRequest]]:
        """`process` of outputs that are one token and no end: (request_id, index, token, num_cached_tokens) each."""
        deltas: list[SampleDelta] = []
        aborts: list[AbortRequest] = []
        requests = self._requests
        for request_id, index, token, num_cached_tokens in rows:
            samples = requests.get(request_id)
            sample = None if samples is None else samples.get(index)
            if sample is None:
                continue
            delta = sample.advance_token(token, num_cached_tokens)
            deltas.append(delta)
            if delta.finish_reason is not None:
                aborts.append(AbortRequest(request_id=request_id, index=index))
                self._end(request_id, index)
        return deltas, aborts

    def _end(self, request_id: str, index: int) -> None:
        samples = self._requests[request_id]
        del samples[index]
        if not samples:
            self.remove(request_id)


class _Sample:
    """The text state of one sample."""

    def __init__(self, tokenizer: TokenDecoder, texts: WholeTexts, request: EngineRequest, index: int) -> None:
        params = request.params
        self._request = request
        self._index = index
        self._params = params
        self._texts = texts
        self._detokenizer = IncrementalDetokenizer(tokenizer, request.prompt_token_ids, params, texts)
        self._checker = StopChecker(params.stop, include=params.include_stop_str_in_output)
        self._num_prompt_tokens = len(request.prompt_token_ids)
        self._num_tokens = 0
        self._num_chars = 0
        self._num_cached_tokens = 0

    def advance_token(self, token: int, num_cached_tokens: int) -> SampleDelta:
        """`advance` by one token and nothing else."""
        request_id = self._request.request_id
        if self._params.stop:
            output = TokenOutput(request_id=request_id, token_ids=[token], num_cached_tokens=num_cached_tokens)
            return self.advance(output)
        text = self._detokenizer.push_token(token)
        self._num_tokens += 1
        self._num_chars += len(text)
        if num_cached_tokens > self._num_cached_tokens:
            self._num_cached_tokens = num_cached_tokens
        return SampleDelta(
            request_id=request_id,
            index=self._index,
            text=text,
            token_ids=[token],
            num_prompt_tokens=self._num_prompt_tokens,
            num_completion_tokens=self._num_tokens,
            num_cached_tokens=self._num_cached_tokens,
        )

    def advance(self, output: TokenOutput) -> SampleDelta:
        """Take in one output of the core; tokens after a stop string are dropped."""
        texts: list[str] = []
        offsets: list[int] = []
        for position, token in enumerate(output.token_ids):
            offset = self._num_chars
            self._num_tokens += 1
            last = position + 1 == len(output.token_ids)
            if not (last and token == output.stop_token) or self._params.include_stop_str_in_output:
                text = self._detokenizer.push((token,))
                # What stands for a broken character of tokens before comes first.
                offset += max(0, len(text) - len(self._texts[token] or text))
                texts.append(self._show(text))
            offsets.append(offset)
            if self._checker.matched is not None:
                break
        if output.finish_reason is not None and self._checker.matched is None:
            texts.append(self._show(self._detokenizer.finish()))
        if output.finish_reason is not None and self._checker.matched is None:
            texts.append(self._checker.flush())
        return self._delta(output, "".join(texts), offsets)

    def _show(self, text: str) -> str:
        self._num_chars += len(text)
        if not self._params.stop:
            return text
        return self._checker.push(text, can_stop=self._num_tokens >= self._params.min_tokens)

    def _delta(self, output: TokenOutput, text: str, offsets: list[int]) -> SampleDelta:
        matched = self._checker.matched
        with_logprobs = output.logprobs is not None
        self._num_cached_tokens = max(self._num_cached_tokens, output.num_cached_tokens)
        return SampleDelta(
            request_id=output.request_id,
            index=self._index,
            text=text,
            token_ids=output.token_ids[: len(offsets)],
            logprobs=output.logprobs[: len(offsets)] if output.logprobs is not None else None,
            text_offsets=offsets if with_logprobs else None,
            prompt_logprobs=output.prompt_logprobs,
            finish_reason=output.finish_reason if matched is None else "stop",
            stop_reason=self._stop_token(output) if matched is None else matched,
            error=output.error,
            error_param=output.error_param,
            embedding=output.embedding,
            queue_seconds=output.queue_seconds,
            num_prompt_tokens=self._num_prompt_tokens,
            num_completion_tokens=self._num_tokens,
            num_cached_tokens=self._num_cached_tokens,
        )

    def _stop_token(self, output: TokenOutput) -> int | None:
        return output.stop_token if output.stop_token in self._params.stop_token_ids else None
