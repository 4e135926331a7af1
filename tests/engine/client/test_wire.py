"""Everything that crosses the line between client and core arrives as it was."""

from __future__ import annotations

import msgspec
import pytest
from twofold.engine.client import wire
from twofold.engine.messages import AbortRequest, EngineInfo, EngineRequest, EngineStats, TokenLogprobs, TokenOutput
from twofold.engine.sampling_params import MAX_SEED, SamplingParams
from twofold.errors import ConfigError, ContextLengthError, EngineDeadError, RequestError, TwofoldError

PARAMS = SamplingParams(
    n=3,
    max_tokens=None,
    temperature=0,
    logit_bias={0: -100, 7: 0.5},
    seed=MAX_SEED,
    stop=("é", "\x00"),
    stop_token_ids=(1, 2),
    logprobs=20,
)
LOGPROBS = TokenLogprobs(token_id=1, logprob=float("-inf"), rank=2, top=[(3, -0.25), (1, float("-inf"))])
TO_CORE = [
    wire.Add(EngineRequest(request_id="r", prompt_token_ids=[1, 2], params=PARAMS, cache_salt="s", arrival_time=1.5)),
    wire.Abort([AbortRequest(request_id="r"), AbortRequest(request_id="q", index=2)]),
    wire.Shutdown(),
]
FROM_CORE = [
    wire.Ready(
        EngineInfo(
            model_name="m",
            vocab_size=1,
            max_model_len=2,
            block_size=16,
            num_blocks=3,
            device="cpu",
            dtype="float32",
            kernels=[{"op": "linear"}],
        )
    ),
    wire.Dead(wire.Failure("ConfigError", "no")),
    wire.Rejected("r", wire.Failure("RequestError", "no", "prompt", "code")),
    wire.Outputs(
        [TokenOutput(request_id="r", token_ids=[1], logprobs=[LOGPROBS], prompt_logprobs=[None, LOGPROBS])],
        EngineStats(num_steps=2**40),
    ),
    wire.pack_outputs([TokenOutput(request_id="r", index=1, token_ids=[5], num_cached_tokens=7)], None),
    wire.Heartbeat(1.5),
]


@pytest.mark.parametrize("message", TO_CORE, ids=lambda m: type(m).__name__)
def test_to_core(message: wire.ToCore) -> None:
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(message), type=wire.ToCore) == message


@pytest.mark.parametrize("message", FROM_CORE, ids=lambda m: type(m).__name__)
def test_from_core(message: wire.FromCore) -> None:
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(message), type=wire.FromCore) == message


def test_only_outputs_of_one_token_become_rows() -> None:
    plain = [TokenOutput(request_id=name, index=3, token_ids=[ord(name)], num_cached_tokens=2) for name in "ab"]
    others = [
        TokenOutput(request_id="c", token_ids=[1, 2]),
        TokenOutput(request_id="d", token_ids=[]),
        TokenOutput(request_id="e", token_ids=[1], finish_reason="length"),
        TokenOutput(request_id="f", token_ids=[1], logprobs=[LOGPROBS]),
        TokenOutput(request_id="g", token_ids=[1], prompt_logprobs=[None]),
        TokenOutput(request_id="h", finish_reason="stop", embedding=b"1234"),
    ]
    message = wire.pack_outputs([plain[0], *others, plain[1]], EngineStats(num_steps=1))
    assert message.outputs == others and message.stats == EngineStats(num_steps=1)
    assert message.tokens == wire.Tokens(["a", "b"], [3, 3], [97, 98], [2, 2])


@pytest.mark.parametrize(
    "error",
    [
        TwofoldError("a"),
        ConfigError("b"),
        RequestError("c", param="stop", code="x"),
        ContextLengthError("d", param="prompt"),
        EngineDeadError("e"),
    ],
    ids=lambda e: type(e).__name__,
)
def test_errors_keep_their_class(error: TwofoldError) -> None:
    again = wire.to_error(wire.to_failure(error))
    assert (type(again), str(again)) == (type(error), str(error))
    assert getattr(again, "param", None) == getattr(error, "param", None)
    assert getattr(again, "code", None) == getattr(error, "code", None)


def test_foreign_errors_are_named() -> None:
    again = wire.to_error(wire.to_failure(KeyError("oops")))
    assert type(again) is EngineDeadError
    assert "KeyError: 'oops'" in str(again)
