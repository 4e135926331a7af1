"""Which of the project's targets the kept figures meet: Twofold's best row beside the best peer of the same bits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from cpu_peer_rows import weight_bits
from cpu_peer_table import COLUMNS, Figure, figure, markdown

AHEAD = 1.3
READ_SHARE = 0.7
PRODUCT_SHARE = 0.6
# What shares are of, by the keys of machine_speed.py.
_READS = {"read bandwidth": "read_large_pages_gbs", "bandwidth of a matrix times a vector": "read_matrix_gbs"}
_PRODUCTS = {
    "fbgemm's int8 product": ("int8_fbgemm_gflops",),
    "the best int8 product": ("int8_product_gflops", "int8_onednn_gflops", "int8_fbgemm_gflops"),
}
_FORMS = {(workload, key): form for _, workload, key, form in COLUMNS}
# What each workload is judged by.
_KEYS = {
    "w1": "decode_tok_s",
    "w2": "prefill_tok_s",
    "w3c8": "output_tok_s",
    "w3c32": "output_tok_s",
    "w4": "seconds",
    "w4warm": "seconds",
}
_SIMPLE = ("vllm", "transformers", "transformers-cb")


@dataclass(frozen=True)
class Target:
    """``ratio`` times the best row of ``peers`` (all without any) with weights of ``bits``, on one workload."""

    workload: str
    bits: int
    ratio: float
    peers: tuple[str, ...] = ()


TARGETS = [
    *(Target(workload, bits, AHEAD) for bits in (4, 8) for workload in _KEYS),
    Target("w2", 32, 1.0, ("openvino",)),
    *(Target(workload, bits, 1.0, _SIMPLE) for bits in (16, 32) for workload in _KEYS),
]
Row = tuple[str, Figure]


def targets(kept: dict[str, Any]) -> str:
    """Markdown: a row for each target that was measured."""
    rows = [["target", "Twofold", "best peer", "ratio", "wanted", "verdict"]]
    for target in TARGETS:
        rows += _against_peers(kept, target)
    for bits in (4, 8, 16, 32):
        rows += _of_bandwidth(kept, bits)
    for bits in (4, 8):
        rows += _of_products(kept, bits)
    return "\n".join(markdown(rows))


def alone(kept: dict[str, Any]) -> str:
    """Markdown: each row of Twofold by itself beside the best peer of the same bits, since a server has one setting."""
    rows = [["Twofold's row", *_KEYS, f"at least {AHEAD}x"]]
    for name, row in kept["peers"].items():
        if not name.startswith("twofold:") or not row.get("runs"):
            continue
        bits, cells, ratios = weight_bits(name), [], []
        for workload, key in _KEYS.items():
            theirs = best(kept, Target(workload, bits or 0, AHEAD), False)
            mine = figure(row, workload, key)
            if theirs and mine:
                ratios.append(_ratio(key, mine, theirs[1]))
                cells.append(f"{ratios[-1]:.2f}x")
            else:
                cells.append("-")
        if ratios:
            rows.append([name, *cells, f"{sum(ratio >= AHEAD for ratio in ratios)} of {len(ratios)}"])
    return "\n".join(markdown(rows))


def best(kept: dict[str, Any], target: Target, ours: bool) -> Row | None:
    """The quickest row of Twofold, or of the peers."""
    key, found = _KEYS[target.workload], []
    for name, row in kept["peers"].items():
        engine = name.partition(":")[0]
        wanted = engine == "twofold" if ours else engine in target.peers or (not target.peers and engine != "twofold")
        if wanted and weight_bits(name) == target.bits and (one := figure(row, target.workload, key)):
            found.append((name, one))
    pick = min if key == "seconds" else max
    return pick(found, key=lambda row: row[1].value) if found else None


def _against_peers(kept: dict[str, Any], target: Target) -> list[list[str]]:
    ours, theirs = best(kept, target, True), best(kept, target, False)
    if ours is None:
        return []
    key, title = _KEYS[target.workload], f"{target.workload} at {target.bits} bits"
    title += f" against {' and '.join(target.peers[:2])}" if target.peers else ""
    if theirs is None:
        return [[title, _shown(target.workload, key, ours), "not measured", "-", f"{target.ratio}x", "not known"]]
    lines = [_compared(title, target.workload, key, ours, theirs, target.ratio)]
    if target.workload.startswith("w3") and target.ratio > 1:
        mine, its = (figure(kept["peers"][name], target.workload, "itl_p99_ms") for name, _ in (ours, theirs))
        assert mine and its, "kept with the same run"
        lines.append(
            _compared("its p99 between tokens", target.workload, "itl_p99_ms", (ours[0], mine), (theirs[0], its), 1.0)
        )
    return lines


def _compared(title: str, workload: str, key: str, ours: Row, theirs: Row, wanted: float) -> list[str]:
    ratio = _ratio(key, ours[1], theirs[1])
    sure = not (ours[1].disturbed or theirs[1].disturbed)
    shown = (_shown(workload, key, row) for row in (ours, theirs))
    return [title, *shown, f"{ratio:.2f}x", f"{wanted}x", _verdict(ratio >= wanted, sure)]


def _ratio(key: str, ours: Figure, theirs: Figure) -> float:
    """How many times as good."""
    ratio = ours.value / theirs.value
    return 1 / ratio if key in ("seconds", "itl_p99_ms") else ratio


def _shown(workload: str, key: str, row: Row) -> str:
    return f"{row[0]}: {row[1].text(_FORMS[workload, key])}"


def _verdict(met: bool, sure: bool) -> str:
    return ("met" if met else "missed") + ("" if sure else " (disturbed)")


def _of_bandwidth(kept: dict[str, Any], bits: int) -> list[list[str]]:
    """Bytes of weights that the quickest row reads a second, beside this run's reads: in order, and of a matrix."""
    rows = {name: row for name, row in kept["peers"].items() if row.get("weight_bytes")}
    ours = best({"peers": rows}, Target("w1", bits, 1.0), True)
    if ours is None:
        return []
    rate, shown = ours[1].value * rows[ours[0]]["weight_bytes"] / 1e9, _shown("w1", _KEYS["w1"], ours)
    return [
        _share(f"w1 at {bits} bits, of the {name}", shown, rate, speed, "GB/s", READ_SHARE, ours[1])
        for name, key in _READS.items()
        if (speed := _ceiling(kept, key)) is not None
    ]


def _of_products(kept: dict[str, Any], bits: int) -> list[list[str]]:
    """Operations of the layers' products a second while a prompt is read, beside int8 products of this run: fbgemm's,
    and the best, which on processors with tiles is oneDNN's."""
    ours = best(kept, Target("w2", bits, 1.0), True)
    if ours is None or "layer_parameters" not in kept:
        return []
    rate, shown = ours[1].value * 2 * kept["layer_parameters"] / 1e9, _shown("w2", _KEYS["w2"], ours)
    return [
        _share(f"w2 at {bits} bits, of {name}", shown, rate, speed, "GFLOP/s", PRODUCT_SHARE, ours[1])
        for name, keys in _PRODUCTS.items()
        if (speed := max(_ceiling(kept, key) or 0.0 for key in keys))
    ]


def _share(title: str, shown: str, rate: float, bound: float, unit: str, wanted: float, of: Figure) -> list[str]:
    share = rate / bound
    told = f"{rate:,.4g} of {bound:,.4g} {unit}"
    return [title, shown, told, f"{share:.0%}", f"{wanted:.0%}", _verdict(share >= wanted, not of.disturbed)]


def _ceiling(kept: dict[str, Any], key: str) -> float | None:
    return max((speed[key] for speed in kept["machine"].get("speeds", []) if key in speed), default=None)
