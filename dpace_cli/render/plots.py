"""Plots: one drawing, saved as PNG for papers and as SVG that takes its colours from the page it stands in.

An arm keeps its colour and marker in every plot. The reference is grey; the others take the colours of Okabe
and Ito, darkened or lightened for contrast, which people with any colour vision tell apart. Nothing is said
by colour alone: markers differ as well, and each plot has its table.
"""

from __future__ import annotations

import io
import re
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import IO

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator, PercentFormatter
from matplotlib.transforms import ScaledTranslation

from dpace_cli.stats import Estimate

LIGHT = ("#6b7280", "#0072b2", "#c2410c", "#007a5a", "#a3467f", "#8a6a00", "#4f46e5", "#8b2f2f")
DARK = ("#9ca3af", "#5ab4f0", "#ff9d5c", "#3ecf9e", "#f08fc8", "#e0c04a", "#a5a0ff", "#f29a9a")
"""Colours of the arms on a light and on a dark page, the reference first."""

_MARKERS = "osD^vPX*"
_INK, _MUTED, _LINE, _PAGE = "#1f2937", "#5b6472", "#d9dde3", "#ffffff"
_HEAT = LinearSegmentedColormap.from_list("heat", ["#f3f4f6", "#9ecae1", "#2b7bba", "#08306b"])

# In SVG, colours that occur nowhere else stand for the page's own and are replaced by its CSS variables.
_STAND_INS = {_INK: "--ink", _MUTED: "--muted", _LINE: "--line", _PAGE: "--page"}
_STAND_INS |= {colour: f"--arm-{number}" for number, colour in enumerate(LIGHT)}

_STYLE = {
    "font.family": "sans-serif", "font.size": 9.5, "axes.titlesize": 10.5, "axes.titleweight": "bold",
    "axes.titlelocation": "left", "axes.titlepad": 9, "axes.edgecolor": _LINE, "axes.labelcolor": _MUTED,
    "axes.labelsize": 9, "axes.spines.top": False, "axes.spines.right": False, "axes.spines.left": False,
    "axes.axisbelow": True, "grid.color": _LINE, "grid.linewidth": 0.7, "text.color": _INK, "xtick.color": _MUTED,
    "ytick.color": _MUTED, "xtick.labelcolor": _INK, "ytick.labelcolor": _INK, "xtick.major.size": 0,
    "ytick.major.size": 0, "xtick.labelsize": 9, "ytick.labelsize": 9, "legend.frameon": False,
    "legend.fontsize": 9, "figure.facecolor": _PAGE, "axes.facecolor": "none", "savefig.facecolor": _PAGE,
    "svg.fonttype": "none", "svg.hashsalt": "dpace", "lines.linewidth": 1.8, "lines.markersize": 5,
}  # fmt: skip


@dataclass(frozen=True)
class Plot:
    """A drawing that can be repeated in either form.

    Attributes:
        name: stem of its file names.
        title: what it shows. alt: the same for someone who cannot see it, with the main figures.
        draw: makes the figure.
    """

    name: str
    title: str
    alt: str
    draw: Callable[[], Figure]

    def png(self, file: IO[bytes]) -> None:
        """Write it with its title on white, at 200 dots an inch."""
        with matplotlib.rc_context(_STYLE):
            figure = self.draw()
            figure.suptitle(self.title, x=0.01, ha="left", fontsize=11.5, fontweight="bold")
            FigureCanvasAgg(figure)
            figure.savefig(file, format="png", dpi=200, bbox_inches="tight", metadata={"Software": None})

    def svg(self) -> str:
        """An `<svg>` element for an HTML page that defines --ink, --muted, --line, --page and --arm-0, --arm-1, ..."""
        buffer = io.StringIO()
        with matplotlib.rc_context(_STYLE | {"savefig.facecolor": "none", "figure.facecolor": "none"}):
            self.draw().savefig(buffer, format="svg", bbox_inches="tight", metadata={"Date": None, "Creator": None})
        text = buffer.getvalue()
        text = text[text.index("<svg") :]
        text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
        for colour, variable in _STAND_INS.items():
            text = text.replace(colour, f"var({variable})")
        # Ids have to be unique on the page, and the text has to take the page's font.
        text = re.sub(r'(\bid="|url\(#|href="#)', rf"\g<1>{self.name}-", text)
        text = re.sub(r"font: (?:[\w.% ]*?)([\d.]+px) [^;\"]+", r"font-size: \1", text)
        box = re.search(r'viewBox="([^"]+)"', text)[1]
        head = (
            f'<svg viewBox="{box}" preserveAspectRatio="xMinYMin meet" '
            'xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink" class="plot" role="img" '
            f'aria-labelledby="{self.name}-alt"><title id="{self.name}-alt">{_escape(self.alt)}</title>'
        )
        return head + text[text.index(">") + 1 :]


def slug(text: str) -> str:
    """Text as part of a file name or id."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", text).strip("-")


def _escape(text: str) -> str:
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


@dataclass(frozen=True)
class Look:
    """Colour and marker of each arm, the reference first."""

    arms: tuple[str, ...]

    def colour(self, arm: str) -> str:
        place = self._place(arm)
        return LIGHT[0] if place == 0 else LIGHT[1 + (place - 1) % (len(LIGHT) - 1)]

    def marker(self, arm: str) -> str:
        """Where the colours come again, with other markers."""
        place = self._place(arm)
        return _MARKERS[(place + 2 * self._round(place)) % len(_MARKERS)]

    def line(self, arm: str) -> str:
        return ("-", "--", ":")[min(self._round(self._place(arm)), 2)]

    def _round(self, place: int) -> int:
        """How often the colours were used up before this arm."""
        return max(place - 1, 0) // (len(LIGHT) - 1)

    def _place(self, arm: str) -> int:
        return self.arms.index(arm) if arm in self.arms else 0


def dots(
    name: str, title: str, alt: str, axis: str, rows: Sequence[str],
    arms: dict[str, Sequence[Estimate | None]], look: Look, at: float | None = None,
) -> Plot:  # fmt: skip
    """Figures with their intervals: a row for each data set, a dot for each arm, a line at a value of interest."""

    def draw() -> Figure:
        apart = 0.17 if len(arms) <= 4 else 0.12
        figure, axes = _axes(0.7 + len(rows) * max(0.34, apart * len(arms) + 0.14), look, list(arms))
        axes.grid(axis="x")
        if at is not None:
            axes.axvline(at, color=_MUTED, linewidth=1, dash_capstyle="butt", linestyle=(0, (4, 3)))
        step = 0.72 / max(len(arms), 1)
        for row in range(len(rows)):
            there = [(arm, own[row]) for arm, own in arms.items() if own[row] is not None]
            for place, (arm, found) in enumerate(there):
                y = row + (place - (len(there) - 1) / 2) * step
                if found.low is not None and found.high is not None:
                    axes.plot([found.low, found.high], [y, y], color=look.colour(arm), linewidth=1.6, alpha=0.75)
                axes.plot(found.value, y, look.marker(arm), color=look.colour(arm), markersize=6)
        axes.set_yticks(range(len(rows)), rows)
        axes.set_ylim(len(rows) - 0.5, -0.5)
        for row in range(1, len(rows)):
            axes.axhline(row - 0.5, color=_LINE, linewidth=0.7)
        axes.set_xlabel(axis)
        axes.spines["bottom"].set_visible(False)
        return figure

    return Plot(name, title, alt, draw)


def lines(
    name: str, title: str, alt: str, x_axis: str, y_axis: str,
    series: dict[str, tuple[Sequence[float], Sequence[float | None]]], look: Look, percent: bool = False,
) -> Plot:  # fmt: skip
    """A line for each arm over whole numbers (position, step)."""

    def draw() -> Figure:
        figure, axes = _axes(3.2, look, list(series), y_axis)
        axes.grid(axis="y")
        for arm, (x, y) in series.items():
            values = [np.nan if value is None else value for value in y]
            axes.plot(x, values, look.line(arm), color=look.colour(arm), marker=look.marker(arm))
        longest = max((max(x, default=1) for x, _ in series.values()), default=1)
        if longest <= 64:
            axes.set_xticks(_ticks(int(longest)))
        else:
            axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=8))
        if percent:
            axes.set_ylim(0, 1.02)
            axes.yaxis.set_major_formatter(PercentFormatter(1, decimals=0))
        else:
            axes.set_ylim(bottom=0)
        axes.set_xlabel(x_axis)
        return figure

    return Plot(name, title, alt, draw)


def histograms(
    name: str, title: str, alt: str, axis: str, arms: dict[str, Sequence[float]], look: Look
) -> Plot:  # fmt: skip
    """A panel for each arm, the first arm's outline behind the others; the panels share their scales."""

    def draw() -> Figure:
        columns = min(len(arms), 3)
        rows = -(-len(arms) // columns)
        figure = Figure(figsize=(7.2, 0.5 + 2.1 * rows), layout="constrained")
        panels = figure.subplots(rows, columns, sharex=True, sharey=True, squeeze=False).ravel()
        first = next(iter(arms.values()))
        for axes, (arm, shares) in zip(panels, arms.items()):
            lengths = np.arange(1, len(shares))
            axes.grid(axis="y")
            axes.bar(lengths, shares[1:], width=0.78, color=look.colour(arm))
            if shares is not first:
                edges = np.arange(0.5, len(first))
                axes.stairs(first[1:], edges, color=_INK, linewidth=1.1)
            axes.set_title(_folded(arm), color=_INK)
            axes.yaxis.set_major_formatter(PercentFormatter(1, decimals=0))
            axes.set_xticks([1, *range(4, len(shares), 4)] if len(shares) > 9 else lengths)
        for axes in panels[len(arms) :]:
            axes.set_visible(False)
        figure.supxlabel(axis, fontsize=9, color=_MUTED)
        if len(arms) > 1:
            figure.legend(
                [Line2D([], [], color=_INK, linewidth=1.1)], [f"outline: {next(iter(arms))}"],
                loc="outside upper right",
            )  # fmt: skip
        return figure

    return Plot(name, title, alt, draw)


def weights(
    name: str, title: str, alt: str, shares: Sequence[float], decay: Sequence[float], confidence: Sequence[float],
    accepted: Sequence[float], gamma: str,
) -> Plot:  # fmt: skip
    """Where the weight lies (bars, with the fixed decay as an outline), and how sure and right the drafter is."""

    def draw() -> Figure:
        figure = Figure(figsize=(7.2, 4.8), layout="constrained")
        above, below = figure.subplots(2, 1, sharex=True, height_ratios=(1.3, 1))
        k = np.arange(1, len(shares) + 1)
        above.grid(axis="y")
        above.bar(k, shares, width=0.8, color=LIGHT[1], label="D-PACE")
        above.stairs(decay, np.arange(0.5, len(shares) + 1), color=_INK, linewidth=1.2, label=f"fixed decay, {gamma}")
        above.yaxis.set_major_formatter(PercentFormatter(1, decimals=0))
        above.set_title("Share of all position weight", fontweight="normal", fontsize=9, color=_MUTED)
        above.legend(loc="best")
        below.grid(axis="y")
        below.plot(k, confidence, color=LIGHT[2], marker=_MARKERS[2], label="confidence")
        below.plot(k, accepted, color=LIGHT[3], marker=_MARKERS[3], label="first k tokens right")
        below.set_ylim(0, 1.02)
        below.yaxis.set_major_formatter(PercentFormatter(1, decimals=0))
        below.set_xticks(_ticks(len(k)))
        below.set_xlabel("position k in the block")
        below.legend(loc="best")
        return figure

    return Plot(name, title, alt, draw)


def dynamics(name: str, title: str, alt: str, steps: Sequence[int | str], shares: np.ndarray) -> Plot:
    """How the weight moves over training: heat map and lines.

    Args:
        shares: [steps, positions] share of all weight; NaN where there is none.
    """

    def draw() -> Figure:
        figure = Figure(figsize=(7.2, 5.6), layout="constrained")
        above, below = figure.subplots(2, 1, height_ratios=(1, 1.25))
        k = np.arange(1, shares.shape[1] + 1)
        image = above.imshow(shares, aspect="auto", cmap=_HEAT, vmin=0, extent=(0.5, len(k) + 0.5, len(steps), 0))
        ticks = sorted({round(at) for at in np.linspace(0, len(steps) - 1, min(len(steps), 8))})
        above.set_yticks([at + 0.5 for at in ticks], [str(steps[at]) for at in ticks])
        above.set_title("Share of all position weight, by training step", fontweight="normal", fontsize=9, color=_MUTED)
        above.set_xticks(_ticks(len(k)))
        above.spines["bottom"].set_visible(False)
        bar = figure.colorbar(image, ax=above, format=PercentFormatter(1, decimals=0), pad=0.01, aspect=12)
        bar.outline.set_visible(False)
        below.grid(axis="y")
        shown = sorted({round(at) for at in np.linspace(0, len(steps) - 1, min(len(steps), 5))})
        for place, at in enumerate(shown):
            strength = 0.35 + 0.65 * (place + 1) / len(shown)
            below.plot(k, shares[at], color=LIGHT[1], alpha=strength, marker=_MARKERS[place], label=f"step {steps[at]}")
        below.set_ylim(bottom=0)
        below.yaxis.set_major_formatter(PercentFormatter(1, decimals=0))
        below.set_xticks(_ticks(len(k)))
        below.set_xlabel("position k in the block")
        below.legend(loc="upper right")
        return figure

    return Plot(name, title, alt, draw)


def _axes(height: float, look: Look, arms: Sequence[str], y_axis: str = "") -> tuple[Figure, Axes]:
    """Axes with the legend above them: read first, and never over the data. Below it, what the y axis shows."""
    longest = max(map(len, arms), default=1)
    columns = max(1, min(len(arms), 100 // (longest + 8)))
    figure = Figure(figsize=(7.2, height + 0.2 * -(-len(arms) // columns)), layout="constrained")
    axes = figure.subplots()
    if y_axis:
        axes.set_title(y_axis, fontweight="normal", fontsize=9, color=_MUTED)
    handles = [
        Line2D([], [], color=look.colour(arm), marker=look.marker(arm), linestyle=look.line(arm)) for arm in arms
    ]
    lifted = axes.transAxes + ScaledTranslation(0, (0.28 if y_axis else 0.02), figure.dpi_scale_trans)
    axes.legend(
        handles, list(arms), loc="lower left", bbox_to_anchor=(0, 1), bbox_transform=lifted, ncols=columns,
        borderaxespad=0.2,
    )  # fmt: skip
    return figure, axes


def _ticks(count: int) -> list[int]:
    """Positions 1 to `count`, thinned where they would crowd."""
    step = -(-count // 16)
    return list(range(1, count + 1, step))


def _folded(name: str) -> str:
    return "\n".join(textwrap.wrap(name, 22))
