"""What the documents show exists: commands parse, targets are there, Python compiles, links lead somewhere."""

import re
import shlex
import subprocess
from pathlib import Path

import pytest
import twofold
from twofold import cli, env

ROOT = Path(twofold.__file__).parent
DOCUMENTS = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")])
NAMES = [str(path.relative_to(ROOT)) for path in DOCUMENTS]


def code_blocks(language: str) -> list[tuple[str, str]]:
    """(document, text) of each fenced block in that language."""
    pattern = re.compile(rf"^```{language}\n(.*?)^```", re.MULTILINE | re.DOTALL)
    return [(name, block) for name in NAMES for block in pattern.findall((ROOT / name).read_text())]


def shell_lines() -> list[tuple[str, list[str]]]:
    """(document, words) of every command in a bash block, comments dropped."""
    lines = []
    for name, block in code_blocks("bash"):
        for line in block.replace("\\\n", " ").splitlines():
            if words := shlex.split(line, comments=True):
                lines.append((name, words))
    return lines


COMMANDS = [(name, words) for name, words in shell_lines() if words[0] == "twofold"]


@pytest.mark.parametrize(("name", "words"), COMMANDS, ids=[" ".join(words) for _, words in COMMANDS])
def test_commands_parse(name: str, words: list[str]) -> None:
    args = cli.build_parser(words[1]).parse_args(words[1:])
    assert args.command == words[1]


def test_every_command_is_shown() -> None:
    assert {words[1] for _, words in COMMANDS} >= set(cli.COMMANDS)


def test_make_targets_exist() -> None:
    targets = {words[-1] for _, words in shell_lines() if "make" in words}
    targets |= set(re.findall(r"`make ([a-z-]+)`", "".join(path.read_text() for path in DOCUMENTS)))
    assert {"demo", "test", "lint", "test-slow"} <= targets
    for target in targets:
        result = subprocess.run(["make", "-n", target], cwd=ROOT, capture_output=True, text=True, timeout=60)
        assert result.returncode == 0, result.stderr


def test_scripts_exist() -> None:
    paths = [word for _, words in shell_lines() for word in words if word.startswith(("benchmarks/", "docker/"))]
    assert paths
    assert [path for path in paths if not (ROOT / path).is_file()] == []


@pytest.mark.parametrize(("name", "block"), code_blocks("python"))
def test_python_compiles_and_its_names_exist(name: str, block: str) -> None:
    compile(block, name, "exec")
    for names in re.findall(r"^from twofold import (.*)$", block, re.MULTILINE):
        for word in names.split(","):
            assert word.strip() in twofold.__all__


@pytest.mark.parametrize("name", NAMES)
def test_links_lead_somewhere(name: str) -> None:
    document = ROOT / name
    for target in re.findall(r"\]\(([^)\s]+)\)", document.read_text()):
        if not re.match(r"[a-z]+:|#", target):
            assert (document.parent / target.split("#")[0]).exists(), f"{name} links to {target}"


def options(parser: object) -> set[str]:
    found: set[str] = set()
    for action in parser._actions:  # type: ignore[attr-defined]
        found |= set(action.option_strings)
        if isinstance(action.choices, dict):
            for child in action.choices.values():
                found |= options(child)
    return found


@pytest.mark.parametrize("command", list(cli.COMMANDS))
def test_every_option_is_in_the_guide(command: str) -> None:
    text = (ROOT / "docs/cli.md").read_text()
    missing = {option for option in options(cli.build_parser(command)) if not re.search(rf"{option}(?![\w-])", text)}
    assert missing <= {"-h", "--help", "--version"}


def test_every_environment_variable_is_in_the_guide() -> None:
    text = (ROOT / "docs/configuration.md").read_text()
    for variable in re.findall(r"environ\.get\(\"(\w+)\"", Path(env.__file__).read_text()):
        assert f"`{variable}`" in text


def test_every_sampling_parameter_is_in_the_guide() -> None:
    from twofold import SamplingParams

    text = (ROOT / "docs/sampling.md").read_text()
    for name, field in SamplingParams.__dataclass_fields__.items():
        row = re.search(rf"^\| `{name}` \| (.*?) \|", text, re.MULTILINE)
        assert row, name
        default = field.default if field.default_factory is not None and not callable(field.default_factory) else {}
        assert row[1] == str(default), name
