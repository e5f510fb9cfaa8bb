"""Plots: whether one can be drawn, which is checked before measuring, and an empty one. matplotlib is imported only then."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from gradwire.errors import UsageError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

KINDS = (".png", ".svg", ".pdf")


def check(option: str, file: Path, *, kinds: Sequence[str] = KINDS, extra: str = "plot") -> None:
    """Raise if `file`, the value of `option`, cannot be drawn; `extra` is the extra to install."""
    if file.suffix.lower() not in kinds:
        raise UsageError(f"{option} {file}: unsupported file type. Use a name that ends in {', '.join(kinds)}.")
    if not file.parent.is_dir():
        raise UsageError(f"{option} {file}: there is no folder {file.parent}. Create it first.")
    if importlib.util.find_spec("matplotlib") is None:
        raise UsageError(
            f"{option} {file}: matplotlib is not installed. pip install gradwire[{extra}], or omit {option}."
        )


def new_figure(width: float, height: float) -> Figure:
    """An empty figure, of that many inches, that `savefig` writes to a file."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    return figure
