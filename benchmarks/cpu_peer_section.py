"""The tables of cpu_peers.py in words for a page of docs: `cpu_peer_section.py FIGURES.json [LARGER.json ...]`.

Rows are in the order of their weights' bits; columns without a figure are left out.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

from cpu_peer_rows import weight_bits
from cpu_peer_table import table
from cpu_peer_targets import alone, targets

_ENGINES = {"twofold": "Twofold", "openvino": "OpenVINO", "llama.cpp": "llama.cpp", "vllm": "vLLM"}
_ENGINES |= {"transformers": "transformers", "transformers-cb": "transformers, continuous batching,"}
_ROW = re.compile(
    rf"\b({'|'.join(sorted(map(re.escape, _ENGINES), key=len, reverse=True))}):([a-z]\w*)(?:\+(\w+))?(\+kv16)?"
)
_ORDER = ["twofold", "openvino", "llama.cpp", "vllm", "transformers", "transformers-cb"]


def main() -> None:
    """Print the tables of every file."""
    for name in sys.argv[1:]:
        kept = ordered(json.loads(Path(name).read_text()))
        print(f"## {Path(name).stem}\n", sep="\n")
        for text in (table(kept), targets(kept), alone(kept)):
            print(spoken(without_empty_columns(text)), end="\n\n")


def ordered(kept: dict[str, Any]) -> dict[str, Any]:
    """The same figures, rows of few bits first."""
    place = lambda name: (weight_bits(name) or 99, _ORDER.index(name.partition(":")[0]))  # noqa: E731
    return kept | {"peers": {name: kept["peers"][name] for name in sorted(kept["peers"], key=place)}}


def spoken(text: str) -> str:
    """Names of rows as a reader would start them."""

    def words(found: re.Match[str]) -> str:
        engine, weights, way, narrow = found.groups()
        if engine == "twofold":
            own = {"int8": "`--quantization int8`", "bf16": "weights in bfloat16"}.get(weights, weights)
            options = (f", `--cpu-activations {way}`" if way else "") + (", KV cache in bfloat16" if narrow else "")
            return f"Twofold {own}{options}"
        return f"{_ENGINES[engine]} {weights}" + (f", {way}" if way else "")

    return _ROW.sub(words, text)


def without_empty_columns(text: str) -> str:
    """A Markdown table and what follows it, without the columns that have nothing but dashes."""
    lines = text.split("\n")
    rows = [line.strip("| ").split(" | ") for line in lines if line.startswith("| ")]
    kept = [at for at in range(len(rows[0])) if any(row[at] != "-" for row in rows[2:])] if len(rows) > 2 else []
    shown = ["| " + " | ".join(row[at] for at in kept) + " |" for row in rows] if kept else []
    return "\n".join([*shown, *(line for line in lines if not line.startswith("| "))])


if __name__ == "__main__":
    main()
