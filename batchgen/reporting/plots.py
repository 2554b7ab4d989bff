"""The page's plots, by matplotlib as SVG.

Weighed: plotly and Bokeh put 1 to 5 MB of script into every page, vega-altair as much or a 30 MB converter beside it;
matplotlib's SVG is some KB without a script, and takes the page's colours, light or dark, by CSS: it is drawn in
stand-in colours, in whose place CSS variables are put.
"""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from batchgen.reporting.spending import Pace

if TYPE_CHECKING:
    from matplotlib.axes import Axes

WIDTHS = {"wide": 10.6, "narrow": 4.4}
"""Inches of 72 pixels, by the CSS class that shows a plot on such screens alone."""
SERIES = 6
"""Colours of `--series-1` and so on."""
_INK, _LINE = "#010101", "#020202"
_COLOURS = {_INK: "var(--ink)", _LINE: "var(--line)"} | {
    f"#0303{n:02x}": f"var(--series-{n + 1})" for n in range(SERIES)
}
_STYLE: Any = {
    "text.parse_math": False,
    "svg.fonttype": "none",
    "svg.hashsalt": "batchgen",
    "font.size": 11,
    "text.color": _INK,
    "axes.labelcolor": _INK,
    "xtick.color": _INK,
    "ytick.color": _INK,
    "axes.edgecolor": _LINE,
    "grid.color": _LINE,
    "axes.spines.top": False,
    "axes.spines.right": False,
}


def pace_plots(pace: Pace) -> dict[str, str]:
    """Images a second over the time of work, by worker; the text of an SVG for each of `WIDTHS`."""
    unit, seconds = _unit(pace.work_s)

    def draw(axes: Axes) -> None:
        times = (pace.edges_s[:-1] + pace.edges_s[1:]) / 2 / seconds
        colours = [f"#0303{n:02x}" for n in range(len(pace.rates))]
        axes.stackplot(times, *pace.rates.values(), labels=list(pace.rates), colors=colours, alpha=0.8, linewidth=0)
        for moment in pace.breaks_s:
            axes.axvline(moment / seconds, color=_INK, linewidth=1, linestyle=(0, (2, 3)))
        axes.set(xlim=(0, pace.work_s / seconds), xlabel=unit, ylabel="images/s")
        axes.set_ylim(bottom=0)
        axes.grid(axis="y", linewidth=0.6)
        axes.set_axisbelow(True)
        if len(pace.rates) > 1:
            axes.legend(frameon=False, loc="lower left", bbox_to_anchor=(0, 1), ncols=1, fontsize=10)

    return {
        name: _svg(draw, width, 3.0 + 0.22 * (len(pace.rates) > 1) * len(pace.rates)) for name, width in WIDTHS.items()
    }


def stage_plots(stage_s: Mapping[str, float]) -> dict[str, str]:
    """Seconds of each stage as bars, the first on top."""

    def draw(axes: Axes) -> None:
        bars = axes.barh(list(stage_s), list(stage_s.values()), color="#030300", height=0.62)
        axes.bar_label(bars, [f"{seconds:,.1f} s" for seconds in stage_s.values()], color=_INK, padding=5)
        axes.invert_yaxis()
        axes.set_xlim(0, max(stage_s.values()) * 1.18)
        axes.spines["bottom"].set_visible(False)
        axes.tick_params(length=0)
        axes.set_xticks([])

    return {name: _svg(draw, width, 0.5 + 0.42 * len(stage_s)) for name, width in WIDTHS.items()}


def _unit(seconds: float) -> tuple[str, float]:
    if seconds < 300:
        return "seconds of work", 1.0
    return ("minutes of work", 60.0) if seconds < 3 * 3600 else ("hours of work", 3600.0)


def _svg(draw: Callable[[Axes], None], width: float, height: float) -> str:
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    with rc_context(_STYLE):
        figure = Figure(figsize=(width, height), layout="constrained")
        figure.patch.set_alpha(0)
        axes = figure.subplots()
        axes.patch.set_alpha(0)
        draw(axes)
        buffer = io.StringIO()
        figure.savefig(buffer, format="svg", metadata={"Date": None})
    return _embedded(buffer.getvalue())


def _embedded(svg: str) -> str:
    """What of a file is put into a page: without prolog and metadata, names that plots share, and colours and fonts of
    its own."""
    text = svg[svg.index("<svg ") :]
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    text = re.sub(r'<g id="[^"]*"', "<g", text)
    text = re.sub(r' width="[\d.]+pt"| height="[\d.]+pt"', "", text, count=2)
    text = re.sub(r"font: ([\d.]+px) [^;\"]*", r"font: \1 var(--font)", text)
    for stand_in, variable in _COLOURS.items():
        text = text.replace(stand_in, variable)
    return text
