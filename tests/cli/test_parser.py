"""The parser: wrong values are named together with the right ones and the closest match."""

import argparse

import pytest
from twofold.cli.engine_options import add_engine_arguments, engine_config
from twofold.cli.parser import (
    CommandParser,
    byte_size,
    closest,
    memory_size,
    natural_int,
    number,
    positive_int,
    whole_number,
)
from twofold.engine.config import EngineConfig
from twofold.errors import ConfigError


@pytest.fixture
def parser() -> CommandParser:
    parser = CommandParser(prog="twofold serve")
    add_engine_arguments(parser)
    return parser


def usage_error(parser: CommandParser, arguments: list[str], capsys: pytest.CaptureFixture) -> str:
    with pytest.raises(SystemExit) as stop:
        parser.parse_args(arguments)
    assert stop.value.code == 2
    return capsys.readouterr().err


def test_defaults_are_those_of_engine_config(parser: CommandParser) -> None:
    assert engine_config(parser.parse_args(["some/model"])) == EngineConfig(model="some/model")


def test_every_option_reaches_the_config(parser: CommandParser) -> None:
    line = (
        "m --device cpu --dtype bfloat16 --quantize rtn:4:32 --max-model-len 512 --block-size 32 --kv-cache-bytes 1.5G "
        "--memory-fraction 0.5 --max-num-seqs 3 --max-num-batched-tokens 99 --no-enable-prefix-caching --seed 7 "
        "--num-threads 2 --strict-kernels --allow-pickle --chat-template t.jinja"
    )
    assert engine_config(parser.parse_args(line.split())) == EngineConfig(
        model="m",
        device="cpu",
        dtype="bfloat16",
        quantize="rtn:4:32",
        max_model_len=512,
        block_size=32,
        kv_cache_bytes=3 * 2**29,
        memory_fraction=0.5,
        max_num_seqs=3,
        max_num_batched_tokens=99,
        enable_prefix_caching=False,
        seed=7,
        num_threads=2,
        strict_kernels=True,
        allow_pickle=True,
        chat_template="t.jinja",
    )


def test_every_field_of_engine_config_has_an_option(parser: CommandParser) -> None:
    options = {action.dest for action in parser._actions}
    assert set(EngineConfig.__dataclass_fields__) <= options


def test_every_option_has_a_help_line(parser: CommandParser) -> None:
    assert [action.dest for action in parser._actions if not action.help] == []


def test_wrong_choice_names_value_choices_and_closest(parser: CommandParser, capsys: pytest.CaptureFixture) -> None:
    error = usage_error(parser, ["m", "--device", "cuad"], capsys)
    assert "--device" in error and "'cuad'" in error and "auto, cpu, cuda, rocm" in error
    assert "did you mean cuda?" in error


def test_unknown_option_names_the_closest(parser: CommandParser, capsys: pytest.CaptureFixture) -> None:
    error = usage_error(parser, ["m", "--max-num-seq", "3"], capsys)
    assert "unknown option --max-num-seq" in error and "did you mean --max-num-seqs?" in error


def test_options_are_not_abbreviated(parser: CommandParser, capsys: pytest.CaptureFixture) -> None:
    assert "unknown option --dev" in usage_error(parser, ["m", "--dev", "cpu"], capsys)


def test_one_error_line_and_a_pointer_to_the_help(parser: CommandParser, capsys: pytest.CaptureFixture) -> None:
    lines = usage_error(parser, ["m", "--block-size", "x"], capsys).splitlines()
    assert lines == [
        "twofold serve: argument --block-size: 'x' is not a whole number",
        "Try `twofold serve --help`.",
    ]


def test_config_that_does_not_fit_is_a_config_error(parser: CommandParser) -> None:
    with pytest.raises(ConfigError, match="block_size is 12"):
        engine_config(parser.parse_args(["m", "--block-size", "12"]))


@pytest.mark.parametrize(
    ("text", "value"),
    [("0", 0), ("17", 17), ("1K", 1024), ("2kb", 2048), ("4G", 2**32), ("4GiB", 2**32), ("0.5M", 2**19), ("1T", 2**40)],
)
def test_byte_size(text: str, value: int) -> None:
    assert byte_size(text) == value


@pytest.mark.parametrize("text", ["", "G", "-1", "4X", "1 2", "nan", "4GG", "\N{ARABIC-INDIC DIGIT FOUR}G"])
def test_byte_size_refuses(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="is not a size"):
        byte_size(text)


def test_numbers() -> None:
    assert positive_int("1_000") == 1000
    assert natural_int("0") == 0
    assert number(0, 1)("0.25") == 0.25 and number(0, 1)("0") == 0 and number(0, 1, above=True)("1") == 1
    wrong = [(positive_int, "0"), (natural_int, "-1"), (number(0, 1), "1.5"), (number(0, 1), "nan")]
    for convert, text in (*wrong, (number(0, 1, above=True), "0")):
        with pytest.raises(argparse.ArgumentTypeError, match="must be"):
            convert(text)


def test_only_ascii_digits() -> None:
    four = "\N{ARABIC-INDIC DIGIT FOUR}"
    assert int(four) == 4
    for convert in (positive_int, natural_int, whole_number, number(0, 10)):
        with pytest.raises(argparse.ArgumentTypeError, match="is not a"):
            convert(four)
    assert whole_number("-1") == -1


def test_a_short_word_with_another_beginning_is_no_slip() -> None:
    devices = ["auto", "cpu", "cuda", "rocm"]
    assert closest("tpu", devices) == closest("gpu", devices) == ""
    assert closest("cup", devices) == "; did you mean cpu?"
    assert closest("ucda", devices) == "; did you mean cuda?"


def test_closest_says_nothing_without_a_likeness() -> None:
    assert closest("xyz", ["serve", "chat"]) == ""


def test_memory_without_a_unit() -> None:
    assert memory_size("12G") == 12 << 30 and memory_size("8589934592") == 8 << 30 and memory_size("12K") == 12 << 10
    with pytest.raises(argparse.ArgumentTypeError, match="12 means 12 bytes; add a unit, as in 12G"):
        memory_size("12")
    with pytest.raises(argparse.ArgumentTypeError, match="below 0"):
        memory_size("-5GiB")
