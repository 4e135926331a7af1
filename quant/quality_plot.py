"""A picture of the errors by decoder layer. matplotlib draws it; without it there is none."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping, Sequence
from pathlib import Path

from .report import ModuleError

REMEDY = "pip install 'twofold[plot]'"


def can_plot() -> bool:
    """Whether matplotlib is installed."""
    return importlib.util.find_spec("matplotlib") is not None


def save_plot(layers: Mapping[int, Sequence[ModuleError]], path: Path, title: str) -> bool:
    """Write a PNG: relative weight error over decoder layers, a line for each kind of projection; False without
    matplotlib."""
    if not can_plot():
        return False
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    kinds: dict[str, dict[int, list[float]]] = {}
    for number, errors in layers.items():
        for error in errors:
            kind = error.module.rpartition(".")[2]
            kinds.setdefault(kind, {}).setdefault(number, []).append(error.relative_rms)
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.add_subplot()
    axes.set_title(title)
    for kind, values in kinds.items():
        means = [sum(every) / len(every) for every in values.values()]
        axes.plot(list(values), means, marker=".", linewidth=1, label=kind)
    axes.set_xlabel("decoder layer")
    axes.set_ylabel("relative error of the weights")
    axes.set_ylim(bottom=0)
    axes.margins(x=0.02)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(alpha=0.25)
    axes.legend(fontsize="small", loc="center left", bbox_to_anchor=(1, 0.5), frameon=False)
    figure.savefig(path, dpi=120)
    return True
