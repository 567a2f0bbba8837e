"""What is drawn: bars of training steps, and the times of peers over headrace's by case."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Dict

from headrace.bench._cases import CASES, TITLES
from headrace.bench._comparison import Measured, Results
from headrace.bench._contenders import SWEEPS
from headrace.bench._training import Times

# told apart by everyone, on white and on black
COLORS = ("#d55e00", "#0072b2", "#009e73", "#cc79a7", "#56b4e9", "#e69f00")
INK = "#787f88"  # legible on both


def processor() -> str:
    """The name that the machine gives its processor."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), "unknown processor")


def _pyplot() -> Any:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot

    return matplotlib.pyplot


def training(path: str, results: Dict[str, Times], title: str) -> None:
    """Bars of the least times, logarithmic, with their values."""
    pyplot = _pyplot()
    figure, axes = pyplot.subplots(1, len(results), figsize=(4 * max(len(results), 2), 4), sharey=True, squeeze=False)
    for axis, (operator, times) in zip(axes[0], results.items()):
        names = list(times)
        least = [min(step.both for step in times[name]) * 1e3 for name in names]
        bars = axis.bar(range(len(names)), least, color=["#c0392b"] + ["#7f8c8d"] * (len(names) - 1))
        axis.bar_label(bars, [f"{x:.1f}" if x < 100 else f"{x:.0f}" for x in least], fontsize=8)
        axis.set_xticks(range(len(names)), [n.replace(", ", "\n") for n in names], fontsize=7)
        axis.set_yscale("log")
        axis.margins(y=0.15)
        axis.set_title(operator)
    axes[0][0].set_ylabel("forward + backward, milliseconds (least)")
    figure.suptitle(title, fontsize=10)
    figure.tight_layout()
    figure.savefig(path, format="png", dpi=120)


def _row(axis: Any, y: int, measured: Measured, colors: Dict[str, str]) -> None:
    """The marks of one case, and the ratio of its fastest peer at the right edge."""
    ratios = {name: measured.ratio(name) for name in measured.peers()}
    for name, ratio in ratios.items():
        axis.plot(ratio, y, "o", markersize=5, color=colors[name], markeredgewidth=0)
    if SWEEPS in measured.turns:
        axis.plot(measured.ratio(SWEEPS), y, "|", markersize=7, color=INK)
    least = f"{min(ratios.values()):.2g}" if ratios else "no peer"
    axis.text(1.01, y, least, transform=axis.get_yaxis_transform(), va="center", fontsize=7.5, fontweight="bold")


def _legend(figure: Any, colors: Dict[str, str], title: str) -> None:
    from matplotlib.lines import Line2D

    marks = [Line2D([], [], linestyle="", marker="o", markersize=5, color=color, markeredgewidth=0, label=name)
             for name, color in colors.items()]
    marks.append(Line2D([], [], linestyle="", marker="|", markersize=7, color=INK, label=SWEEPS))
    inch = 1 / figure.get_figheight()
    what = ("time of a call over headrace's, bound calls over bound ones: right of the line headrace is faster (at the "
            "edge: the best peer)")
    for y, text in ((0.18, what), (0.36, title)):
        figure.text(0.5, 1 - y * inch, text, ha="center", va="center", fontsize=8)
    figure.legend(handles=marks, loc="upper center", ncols=min(4, len(marks)), frameon=False, fontsize=8,
                  handletextpad=0.1, columnspacing=1.2, bbox_to_anchor=(0.5, 1 - 0.44 * inch))


def cases(path: str, results: Results, title: str) -> None:
    """An SVG of a row per case: the time of every peer over headrace's; the same results give the same file."""
    pyplot = _pyplot()
    found = {group: [case for case in of if case.line in results] for group, of in CASES.items()}
    found = {group: of for group, of in found.items() if of}
    peers = sorted({name for measured in results.values() for name in measured.peers()})
    colors = dict(zip(peers, COLORS))
    style = {"svg.hashsalt": "headrace", "svg.fonttype": "none", "text.color": INK, "axes.edgecolor": INK,
             "xtick.color": INK, "ytick.color": INK, "axes.titlecolor": INK, "font.family": "sans-serif"}
    row, heading, top = 0.19, 0.32, 0.85  # inches
    with pyplot.rc_context(style):
        y = top
        height = top + sum(len(of) * row + heading for of in found.values()) + heading
        figure, axis = pyplot.figure(figsize=(9, height)), None
        for group, of in found.items():
            y += heading + len(of) * row
            axis = figure.add_axes((0.33, 1 - y / height, 0.62, len(of) * row / height), sharex=axis)
            for i, case in enumerate(of):
                axis.axhline(i, color=INK, linewidth=0.4, alpha=0.4, zorder=0)
                _row(axis, i, results[case.line], colors)
            axis.set_yticks(range(len(of)), [case.label for case in of])
            axis.set_ylim(len(of) - 0.5, -0.5)
            axis.set_title(TITLES[group], fontsize=8.5, loc="left", pad=3)
            axis.set_xscale("log")
            axis.axvline(1, color=INK, linewidth=1)
            axis.tick_params(axis="both", which="both", length=0, labelsize=7.5, labelbottom=False)
            axis.spines[:].set_visible(False)
            axis.patch.set_visible(False)
        if axis is not None:
            axis.tick_params(labelbottom=True)
            axis.xaxis.set_major_formatter("{x:g}")
        _legend(figure, colors, title)
        figure.savefig(path, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
        pyplot.close(figure)
