"""Cutting, holding back and counting, sample by sample (B010, B011, B057, B061, B062, B093)."""

from __future__ import annotations

import pytest
from counting_core import ByteTokenizer
from tokenizer_zoo import EOS, byte_level_tokenizer
from twofold.engine.messages import AbortRequest, EngineRequest, TokenLogprobs, TokenOutput
from twofold.engine.output_processor import OutputProcessor
from twofold.engine.outputs import SampleDelta
from twofold.engine.sampling_params import SamplingParams


def make_request(request_id: str = "r", **params: object) -> EngineRequest:
    return EngineRequest(request_id=request_id, prompt_token_ids=[65], params=SamplingParams(**params))


def run(text: str | list[int], *, burst: int = 1, stop_token: bool = False, **params: object) -> list[SampleDelta]:
    """All deltas of one request whose core emits ``text`` and then ends: by its last token, or by length."""
    processor = OutputProcessor(ByteTokenizer())
    processor.add(make_request(**params))
    ids = list(text.encode()) if isinstance(text, str) else text
    deltas: list[SampleDelta] = []
    for start in range(0, len(ids), burst):
        tokens = ids[start : start + burst]
        output = TokenOutput(request_id="r", token_ids=tokens)
        if start + burst >= len(ids):
            output.finish_reason, output.stop_token = ("stop", tokens[-1]) if stop_token else ("length", None)
        deltas += processor.process([output])[0]
    assert len(processor) == 0
    return deltas


@pytest.mark.parametrize("params", [{}, {"stop": ("ö",)}, {"n": 2}, {"skip_special_tokens": False}])
def test_rows_are_outputs_of_one_token(params: dict) -> None:
    """Both ways in, mixed as a core may mix them, for texts that cut characters anywhere."""
    ids = [*"a😀é".encode(), 0, 0xF0, 0x9F, 97, *"xöy".encode()]
    one_way, mixed = OutputProcessor(ByteTokenizer()), OutputProcessor(ByteTokenizer())
    for processor in (one_way, mixed):
        processor.add(make_request(**params))
    for number, token in enumerate(ids):
        outputs = [TokenOutput(request_id="r", token_ids=[token], num_cached_tokens=number % 3)]
        want = one_way.process(outputs)
        got = mixed.process(outputs) if number % 3 == 0 else mixed.process_tokens([("r", 0, token, number % 3)])
        assert got == want
        if want[0][0].finish_reason is not None:
            break
    assert mixed.process_tokens([("unknown", 0, 1, 0), ("r", 5, 1, 0)]) == ([], [])
    assert len(one_way) == len(mixed)


def joined(deltas: list[SampleDelta]) -> tuple[str, str | None, int]:
    assert all(delta.finish_reason is None for delta in deltas[:-1])
    tokens = sum(len(delta.token_ids) for delta in deltas)
    assert tokens == deltas[-1].num_completion_tokens
    return "".join(delta.text for delta in deltas), deltas[-1].finish_reason, tokens


@pytest.mark.parametrize("burst", [1, 3, 100])
@pytest.mark.parametrize(
    ("stop", "want"),
    [
        (["STOP"], ("xy", "stop", 6)),
        (["STOQ"], ("xySTOPz", "length", 7)),
        (["yS", "STOP"], ("x", "stop", 3)),
        (["zz"], ("xySTOPz", "length", 7)),
    ],
)
def test_stop_strings(stop: list[str], want: tuple[str, str, int], burst: int) -> None:
    deltas = run("xySTOPz", stop=tuple(stop), burst=burst)
    assert joined(deltas) == want
    assert deltas[-1].stop_reason == ("STOP" if want[0] == "xy" else "yS" if want[0] == "x" else None)


def test_match_at_the_last_token_beats_length() -> None:
    assert joined(run("xySTOP", stop=("STOP",))) == ("xy", "stop", 6)


@pytest.mark.parametrize(
    ("params", "stop_token", "want"),
    [
        ({"stop_token_ids": (100,)}, True, "abc"),
        ({"stop_token_ids": (100,), "include_stop_str_in_output": True}, True, "abcd"),
        ({"stop": ("cd",)}, False, "ab"),
        ({"stop": ("cd",), "include_stop_str_in_output": True}, False, "abcd"),
    ],
)
def test_stop_tokens_cut_exactly_themselves(params: dict, stop_token: bool, want: str) -> None:
    deltas = run("abcd", stop_token=stop_token, **params)
    assert joined(deltas) == (want, "stop", 4)
    assert deltas[-1].stop_reason == (100 if stop_token else "cd")


@pytest.mark.parametrize(
    ("skip", "include", "want"),
    [(True, False, "abc"), (False, False, "abc"), (True, True, "abc"), (False, True, "abc<eos>")],
)
def test_special_stop_token(skip: bool, include: bool, want: str) -> None:
    params = {"stop_token_ids": (0,), "skip_special_tokens": skip, "include_stop_str_in_output": include}
    assert joined(run([97, 98, 99, 0], stop_token=True, **params)) == (want, "stop", 4)


def test_end_of_text_has_no_stop_reason_and_flushes() -> None:
    deltas = run([97, 83, 84, 0], stop_token=True, stop=("STOP",))
    assert joined(deltas) == ("aST", "stop", 4)
    assert deltas[-1].stop_reason is None


def test_incomplete_character_before_the_end() -> None:
    assert joined(run([97, 0xF0, 0x9F, 0x98])) == ("a\ufffd", "length", 4)
    assert joined(run([97, 0xF0, 0x9F, 0], stop_token=True)) == ("a\ufffd", "stop", 4)


def test_stop_string_of_several_bytes() -> None:
    assert joined(run("é你😀", stop=("你",))) == ("é", "stop", 5)


@pytest.mark.parametrize(("min_tokens", "want"), [(2, "a"), (3, "a"), (4, "abcd"), (6, "abcd")])
def test_stop_string_before_min_tokens_ends_nothing(min_tokens: int, want: str) -> None:
    """ "bc" is complete with the third token, and again with the sixth."""
    text, reason, _ = joined(run("abcdbcx", stop=("bc",), min_tokens=min_tokens))
    assert (text, reason) == (want, "stop")


def test_abort_is_asked_for_and_late_tokens_are_dropped() -> None:
    processor = OutputProcessor(ByteTokenizer())
    processor.add(make_request(stop=("b",), n=2))
    deltas, aborts = processor.process(
        [
            TokenOutput(request_id="r", index=0, token_ids=[97, 98, 99]),
            TokenOutput(request_id="r", index=1, token_ids=[97]),
        ]
    )
    assert aborts == [AbortRequest(request_id="r", index=0)]
    assert [(d.index, d.text, d.token_ids, d.finish_reason) for d in deltas] == [
        (0, "a", [97, 98], "stop"),
        (1, "a", [97], None),
    ]
    late = [TokenOutput(request_id="r", index=0, token_ids=[100]), TokenOutput(request_id="gone", token_ids=[1])]
    assert processor.process(late) == ([], [])
    assert "r" in processor
    end = TokenOutput(request_id="r", index=1, token_ids=[99], finish_reason="length")
    deltas, aborts = processor.process([end])
    assert (deltas[0].text, deltas[0].num_completion_tokens, aborts) == ("c", 2, [])
    assert len(processor) == 0


def test_samples_do_not_share_characters() -> None:
    processor = OutputProcessor(ByteTokenizer())
    processor.add(make_request(n=2))
    texts = {0: "", 1: ""}
    for first, second in zip("é你".encode(), "你é".encode(), strict=True):
        outputs = [
            TokenOutput(request_id="r", index=index, token_ids=[token]) for index, token in ((0, first), (1, second))
        ]
        for delta in processor.process(outputs)[0]:
            texts[delta.index] += delta.text
    assert texts == {0: "é你", 1: "你é"}


def test_logprobs_follow_the_tokens() -> None:
    processor = OutputProcessor(ByteTokenizer())
    processor.add(make_request(logprobs=0, prompt_logprobs=0, stop=("c",)))
    ids = [*"é".encode(), 98, 99, 100]
    logprobs = [TokenLogprobs(token_id=i, logprob=-1.0, rank=1) for i in ids]
    output = TokenOutput(request_id="r", token_ids=ids, logprobs=logprobs, prompt_logprobs=[None], num_cached_tokens=1)
    (delta,), _ = processor.process([output])
    assert [item.token_id for item in delta.logprobs or []] == ids[:4]
    assert delta.text_offsets == [0, 0, 1, 2]
    assert (delta.prompt_logprobs, delta.num_prompt_tokens, delta.num_cached_tokens) == ([None], 1, 1)


def test_error_of_a_sample_keeps_its_text() -> None:
    processor = OutputProcessor(ByteTokenizer())
    processor.add(make_request(stop=("zz",)))
    processor.process([TokenOutput(request_id="r", token_ids=[97, 122])])
    (delta,), aborts = processor.process([TokenOutput(request_id="r", finish_reason="error", error="bad row")])
    assert (delta.text, delta.finish_reason, delta.error, aborts) == ("z", "error", "bad row", [])


def test_special_tokens_inside_a_byte_level_text() -> None:
    tokenizer = byte_level_tokenizer()
    processor = OutputProcessor(tokenizer)
    processor.add(make_request())
    ids = [*tokenizer.encode("one"), tokenizer.backend.token_to_id(EOS), *tokenizer.encode(" two")]
    deltas, _ = processor.process([TokenOutput(request_id="r", token_ids=ids)])
    assert deltas[0].text == "one two"


def test_joined_deltas_equal_separate_ones() -> None:
    deltas = run("héllo STO wörld", stop=("STOP",))
    whole = deltas[0]
    text = "".join(delta.text for delta in deltas)
    for delta in deltas[1:]:
        whole.extend(delta)
    assert (whole.text, whole.finish_reason, whole.num_completion_tokens) == (text, "length", len(whole.token_ids))


def test_nothing_is_left_behind() -> None:
    processor = OutputProcessor(ByteTokenizer())
    for number in range(2000):
        processor.add(make_request(str(number), n=2))
        processor.process([TokenOutput(request_id=str(number), index=0, token_ids=[97])])
        processor.remove(str(number))
        processor.remove(str(number))
    assert len(processor) == 0


def test_a_token_after_a_broken_character_begins_behind_it() -> None:
    """The first bytes of an emoji show as one U+FFFD, once the next token tells that no more will come."""
    processor = OutputProcessor(ByteTokenizer())
    processor.add(make_request(logprobs=0))
    ids = [97, *"😀".encode()[:2], 98, 99]
    logprobs = [TokenLogprobs(token_id=i, logprob=-1.0, rank=1) for i in ids]
    (delta,), _ = processor.process([TokenOutput(request_id="r", token_ids=ids, logprobs=logprobs)])
    assert delta.text == "a\ufffdbc"
    assert delta.text_offsets == [0, 1, 1, 2, 3]
