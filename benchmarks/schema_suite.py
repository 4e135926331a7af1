"""How much of a public JSON-schema test suite structured output covers: ``python benchmarks/schema_suite.py FOLDER``.

FOLDER holds the suite's files, each a list of ``{"description", "schema", "tests": [{"data", "valid"}]}``, as
https://github.com/json-schema-org/JSON-Schema-Test-Suite and its npm package ``json-schema-test-suite`` have them. A
schema is refused, or its grammar judges every instance: right, too narrow (a valid one is not taken: the model just
cannot write it) or wrong (an invalid one is taken). Instances are written with the keys in the order of the schema's
properties, which is the order that the engine's answers have.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from twofold.engine.grammar.grammar_text import check_structured, grammar_text, llguidance, parser_limits
from twofold.engine.structured_output import StructuredOutput
from twofold.errors import RequestError

EOS = 256


class _Bytes:
    """A vocabulary of the 256 bytes and an end."""

    eos_token_id, bos_token_id = EOS, None
    tokens = [*(bytes([value]) for value in range(256)), b"<eos>"]
    special_token_ids = [EOS]

    def __call__(self, text: bytes | str) -> list[int]:
        return list(text if isinstance(text, bytes) else text.encode())


def main() -> None:
    """Print a table by file, the totals, and what was wrong."""
    arguments = argparse.ArgumentParser(description="structured output over a JSON-schema test suite")
    arguments.add_argument("folder", type=Path, help="folder with the suite's JSON files, such as tests/draft4")
    folder = arguments.parse_args().folder
    library = llguidance()
    tokenizer = library.LLTokenizer(library.TokenizerWrapper(_Bytes()), n_vocab=EOS + 1, eos_token=[EOS])
    totals: Counter[str] = Counter()
    wrong: list[str] = []
    print(f"{'file':28} schemas refused | instances right narrow wrong")
    for path in sorted(folder.glob("*.json")):
        counts = judge_file(json.loads(path.read_text(encoding="utf-8")), tokenizer, wrong, path.stem)
        totals += counts
        print(f"{path.stem:28} {_row(counts)}")
    print(f"{'all':28} {_row(totals)}")
    for line in wrong:
        print("taken though invalid:", line)


def judge_file(groups: list[dict[str, Any]], tokenizer: Any, wrong: list[str], name: str) -> Counter[str]:
    """Counts of one file's schemas and instances; ``wrong`` gets a line for each instance that is taken and invalid."""
    counts: Counter[str] = Counter()
    for group in groups:
        counts["schemas"] += 1
        schema = group["schema"]
        form = StructuredOutput(json=schema)
        try:
            check_structured(form)
        except RequestError:
            counts["refused"] += 1
            continue
        for test in group["tests"]:
            taken = _takes(tokenizer, form, json.dumps(_ordered(test["data"], schema), ensure_ascii=False))
            verdict = "right" if taken == test["valid"] else "narrow" if test["valid"] else "wrong"
            counts[verdict] += 1
            if verdict == "wrong":
                wrong.append(f"{name}: {group['description']}: {test['description']}")
    return counts


def _takes(tokenizer: Any, form: StructuredOutput, text: str) -> bool:
    matcher = llguidance().LLMatcher(tokenizer, grammar_text(form, {}), limits=parser_limits(), log_level=0)
    tokens = list(text.encode())
    return matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()


def _ordered(data: Any, schema: Any) -> Any:
    """Keys that the schema names first, in its order, then the others; other schemas within it are followed loosely."""
    properties = schema.get("properties") if isinstance(schema, Mapping) else None
    named = properties if isinstance(properties, Mapping) else {}
    if isinstance(data, dict):
        keys = [key for key in named if key in data] + [key for key in data if key not in named]
        return {key: _ordered(data[key], named.get(key)) for key in keys}
    if isinstance(data, list):
        items = schema.get("items") if isinstance(schema, Mapping) else None
        return [_ordered(item, items) for item in data]
    return data


def _row(counts: Counter[str]) -> str:
    return (
        f"{counts['schemas']:7} {counts['refused']:7} | {counts['right'] + counts['narrow'] + counts['wrong']:9} "
        f"{counts['right']:5} {counts['narrow']:6} {counts['wrong']:5}"
    )


if __name__ == "__main__":
    main()
