"""Pictures: a figure's plain data becomes a small SVG that reads on a phone, on paper and in dark
mode.

A picture is drawn about as wide as a phone, so that its text stays legible wherever it is shown and
a page sets several side by side. Colors are Okabe and Ito's, told apart by every kind of color
vision; each line is also named at its own end and dashed in its own way, so that nothing depends on
color. The same data gives the same bytes.
"""

from __future__ import annotations

import io
import math
import re
import zlib
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from halfulp.report.rows import draw_rows, is_rows
from halfulp.report.text import tick_text

WIDTH = 4.9  # inches at 72 points: 353 points, one phone
HEIGHT = 3.3
COLORS = ("#D55E00", "#0072B2", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#7A7A7A")
_DASHES: tuple[Any, ...] = (
    "-",
    (0, (6, 2)),
    (0, (1.5, 1.5)),
    (0, (6, 2, 1.5, 2)),
    (0, (3, 1.5)),
    (0, (8, 3)),
    "-",
)
_MARKERS = "osD^vPX"
# Stand-ins that become the page's own text and grid colors in an inline picture.
_INK, _GRID = "#1b1b1d", "#d9d9d6"
_FONTS = ["DejaVu Sans"]
_CSS_FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, 'Helvetica Neue', Arial, sans-serif"
_LEFT, _BOTTOM, _TOP = 0.135, 0.155, 0.885  # of a panel: where the axes stand
_LEGEND_LINE = 0.2  # inches
_CHARACTER = 0.0152  # of a panel's width, for names at the ends of lines
_LONGEST_END_LABEL = 22  # characters; a longer name would leave too little for the data
_MOST_END_LABELS = 7

FigureData = Mapping[str, Any]


def draw(figure: FigureData, *, inline: bool = True) -> str:
    """Return the SVG text of one figure.

    Args:
        figure: {"title", "x_label", "y_label", "x_log", "y_log", "series", "caption", "command"}; a
            series is {"label", "x", "y", "low", "high", "style"} with style "line", "points", "bar"
            or, alone, "row" and None for a missing number. Title, caption and command are not part
            of the picture, except as its accessible name.
        inline: for a page, in whose text and grid colors it is then drawn; else a file with a white
            ground.

    Raises:
        ValueError: there is no series, a style is unknown, or rows are not the only series.
    """
    return draw_panels([figure], columns=1, inline=inline)


def draw_panels(figures: Sequence[FigureData], *, columns: int = 2, inline: bool = False) -> str:
    """Return one SVG of several figures in a grid, each under its title where there is more than
    one.

    Raises:
        ValueError: there are no figures, or one cannot be drawn (see `draw`).
    """
    if not figures:
        raise ValueError("figures of length 0: accepted is at least one")
    for figure in figures:
        _check(figure)
    import matplotlib
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    rows = math.ceil(len(figures) / columns)
    height = HEIGHT + max(_legend_height(figure["series"]) for figure in figures)
    with matplotlib.rc_context(_settings()):
        canvas = Figure(figsize=(WIDTH * columns, height * rows))
        FigureCanvasSVG(canvas)
        for i, figure in enumerate(figures):
            axes = canvas.add_subplot(rows, columns, i + 1)
            _place(axes, divmod(i, columns), height, _room(figure["series"]))
            _draw_axes(axes, figure, titled=len(figures) > 1)
        buffer = io.StringIO()
        ground = {} if inline else {"facecolor": "white"}
        canvas.savefig(
            buffer,
            format="svg",
            metadata={"Date": None, "Creator": None},
            transparent=inline,
            **ground,
        )
    return _finish(
        buffer.getvalue(), " · ".join(str(figure["title"]) for figure in figures), inline
    )


def _check(figure: FigureData) -> None:
    if not figure["series"]:
        raise ValueError(f"figure {figure['title']!r} without series: accepted is at least one")
    for series in figure["series"]:
        if series["style"] not in ("line", "points", "bar", "row"):
            raise ValueError(f"style={series['style']!r}: accepted are line, points, bar, row")
    if len(figure["series"]) > 1 and any(one["style"] == "row" for one in figure["series"]):
        raise ValueError(
            f"figure {figure['title']!r} with rows and more: accepted is one series of rows"
        )


def _settings() -> Any:
    return {
        "svg.fonttype": "none",
        "svg.hashsalt": "halfulp",
        "svg.id": "halfulp",
        "font.family": _FONTS,
        "font.size": 10.5,
        "axes.labelsize": 10.5,
        "axes.unicode_minus": True,
        "text.color": _INK,
        "axes.labelcolor": _INK,
        "axes.edgecolor": _GRID,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.grid": True,
        "axes.grid.axis": "y",
        "axes.axisbelow": True,
        "grid.color": _GRID,
        "grid.linewidth": 0.6,
        "xtick.color": _GRID,
        "ytick.color": _GRID,
        "xtick.labelcolor": _INK,
        "ytick.labelcolor": _INK,
        "xtick.labelsize": 9.5,
        "ytick.labelsize": 9.5,
        "ytick.major.size": 0,
        "ytick.minor.size": 0,
        "xtick.minor.size": 0,
        "lines.linewidth": 1.8,
        "lines.solid_capstyle": "round",
        "mathtext.default": "regular",
    }


def _room(series: Sequence[Mapping[str, Any]]) -> float:
    """What names at the ends of lines need of a panel's width; a small margin where there are
    none.
    """
    if not _fits_end_labels(series):
        return 0.015
    return 0.06 + _CHARACTER * max(len(str(one["label"])) for one in series)


def _legend_columns(series: Sequence[Mapping[str, Any]]) -> int:
    return 2 if max(len(str(one["label"])) for one in series) <= _LONGEST_END_LABEL else 1


def _legend_height(series: Sequence[Mapping[str, Any]]) -> float:
    """Inches that a legend above the axes adds to a panel; none where names stand at the ends of
    lines.
    """
    if _fits_end_labels(series) or len(series) < 2:
        return 0.0
    return _LEGEND_LINE * math.ceil(len(series) / _legend_columns(series))


def _place(axes: Any, cell: tuple[int, int], height: float, room: float) -> None:
    """Fixed margins, so that panels align and the names at the right fit; `height` of a panel in
    inches.
    """
    width, total = axes.get_figure().get_size_inches()
    row, column = cell
    bottom = total - (row + 1) * height + _BOTTOM * HEIGHT
    place = (
        (column + _LEFT) * WIDTH,
        bottom,
        (1 - room - _LEFT) * WIDTH,
        (_TOP - _BOTTOM) * HEIGHT,
    )
    axes.set_position([part / (total if i % 2 else width) for i, part in enumerate(place)])


def _draw_axes(axes: Any, figure: FigureData, *, titled: bool) -> None:
    series = figure["series"]
    bars = any(one["style"] == "bar" for one in series)
    if is_rows(series):
        draw_rows(axes, series[0], panel=_panel(axes), color=COLORS[1], ink=_INK)
    elif bars:
        _draw_bars(axes, figure)
    else:
        _set_scales(axes, figure)
        for i, one in enumerate(series):
            _draw_series(axes, one, i)
    if _fits_end_labels(series):
        _name_ends(axes, series)
    elif len(series) > 1:
        _legend_above(axes, series)
    _label_axes(axes, figure, titled=titled)


def _set_scales(axes: Any, figure: FigureData) -> None:
    numbers = [x for one in figure["series"] for x in one["x"]]
    if not figure["x_log"] or not all(isinstance(x, (int, float)) and x > 0 for x in numbers):
        pass
    elif _powers_of_two(numbers):
        axes.set_xscale("log", base=2)
        ticks = sorted(set(numbers))
        axes.set_xticks(ticks if len(ticks) <= 7 else ticks[::2], minor=False)
        axes.xaxis.set_major_formatter(_plain_ticks())
        axes.xaxis.set_minor_locator(_no_ticks())
    else:
        axes.set_xscale("log")
    if figure["y_log"]:
        axes.set_yscale("log", nonpositive="mask")


def _powers_of_two(numbers: Sequence[float]) -> bool:
    return all(math.log2(x).is_integer() for x in numbers)


def _plain_ticks() -> Any:
    from matplotlib.ticker import FuncFormatter

    return FuncFormatter(lambda x, _: f"{x / 1024:g}k" if x >= 1024 and x % 1024 == 0 else f"{x:g}")


def _no_ticks() -> Any:
    from matplotlib.ticker import NullLocator

    return NullLocator()


def _number(y: float | None) -> float:
    return math.nan if y is None else float(y)


def _draw_series(axes: Any, one: Mapping[str, Any], index: int) -> None:
    color, label = COLORS[index % len(COLORS)], _text(one["label"])
    y = [_number(value) for value in one["y"]]
    if one["low"] is not None and one["high"] is not None:
        low, high = ([_number(value) for value in one[side]] for side in ("low", "high"))
        if one["style"] == "points":
            below, above = _distances(y, low, high)
            axes.errorbar(
                one["x"], y, yerr=(below, above), fmt="none", ecolor=color, elinewidth=1, capsize=2
            )
        else:
            axes.fill_between(one["x"], low, high, color=color, alpha=0.18, linewidth=0)
    if one["style"] == "points":
        axes.plot(
            one["x"],
            y,
            linestyle="none",
            marker=_MARKERS[index % 7],
            markersize=5,
            color=color,
            label=label,
        )
    else:
        marker = _MARKERS[index % 7] if len(y) <= 12 else None
        dashes = _DASHES[index % len(_DASHES)]
        axes.plot(
            one["x"],
            y,
            color=color,
            linestyle=dashes,
            marker=marker,
            markersize=4,
            zorder=3 - index / 100,
            label=label,
        )


def _distances(
    y: Sequence[float], low: Sequence[float], high: Sequence[float]
) -> tuple[list[float], list[float]]:
    below = [max(0.0, b - a) for a, b in zip(low, y, strict=True)]
    above = [max(0.0, b - a) for a, b in zip(y, high, strict=True)]
    return below, above


def _draw_bars(axes: Any, figure: FigureData) -> None:
    """Grouped bars over names with a thin line from low to high; points on a logarithmic axis,
    which has no zero.
    """
    series = figure["series"]
    names = list(dict.fromkeys(str(x) for one in series for x in one["x"]))
    width = 0.8 / len(series)
    if figure["y_log"]:
        axes.set_yscale("log", nonpositive="mask")
    for i, one in enumerate(series):
        at = [names.index(str(x)) + (i - (len(series) - 1) / 2) * width for x in one["x"]]
        y = [_number(value) for value in one["y"]]
        if figure["y_log"]:
            _draw_series(axes, {**one, "x": at, "style": "points"}, i)
            continue
        error = None
        if one["low"] is not None and one["high"] is not None:
            error = _distances(
                y, [_number(v) for v in one["low"]], [_number(v) for v in one["high"]]
            )
        style = {"ecolor": _INK, "elinewidth": 0.8}
        label = _text(one["label"])
        axes.bar(
            at,
            y,
            width * 0.92,
            color=COLORS[i % len(COLORS)],
            label=label,
            yerr=error,
            error_kw=style,
        )
    axes.set_xticks(range(len(names)), names)
    axes.set_xlim(-0.5, len(names) - 0.5)


def _label_axes(axes: Any, figure: FigureData, *, titled: bool) -> None:
    """Say what y is above the axis rather than along it: read without turning the head, and no
    width is lost.
    """
    axes.set_xlabel(_text(figure["x_label"]))
    text = f"{figure['title']}: {figure['y_label']}" if titled else figure["y_label"]
    weight = "bold" if titled else "normal"
    axes.text(
        0,
        1.045,
        _text(text),
        transform=_from_panel_edge(axes),
        ha="left",
        va="bottom",
        fontweight=weight,
    )
    from matplotlib.ticker import MaxNLocator

    for axis, (low, high) in ((axes.xaxis, axes.get_xlim()), (axes.yaxis, axes.get_ylim())):
        if axis.get_scale() == "log" and axis.get_transform().base == 10 and high < 30 * low:
            _short_log_ticks(axis, low, high)
    if axes.get_yscale() == "linear" and not is_rows(figure["series"]):
        axes.yaxis.set_major_locator(MaxNLocator(nbins=5))
    if axes.get_xscale() == "linear" and not any(
        one["style"] in ("bar", "row") for one in figure["series"]
    ):
        axes.xaxis.set_major_locator(MaxNLocator(nbins=5))


def _short_log_ticks(axis: Any, low: float, high: float) -> None:
    """Within a decade or so, numbers between the powers of ten are named as well, and all of them
    briefly: 3.6e-7.
    """
    from matplotlib.ticker import FuncFormatter, MaxNLocator, NullLocator

    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    ticks = [digit * 10.0**power for power in powers for digit in (1, 2, 3, 4, 6)]
    inside = [tick for tick in ticks if low <= tick <= high]
    if len(inside) < 3:
        inside = [tick for tick in MaxNLocator(4).tick_values(low, high) if low <= tick <= high]
    axis.set_ticks(inside)
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(FuncFormatter(lambda value, _: tick_text(value)))


def _from_panel_edge(axes: Any) -> Any:
    """x from the panel's left edge in fractions of the picture, y in fractions of the axes."""
    from matplotlib.transforms import Affine2D, blended_transform_factory

    panel = _panel(axes)
    left = (math.floor(axes.get_position().x0 / panel) + 0.01) * panel
    return blended_transform_factory(
        Affine2D().translate(left, 0) + axes.get_figure().transFigure, axes.transAxes
    )


def _panel(axes: Any) -> float:
    """A panel's width as a fraction of the picture's."""
    return float(WIDTH / axes.get_figure().get_size_inches()[0])


def _text(text: object) -> str:
    """Text as it stands: matplotlib would read mathematics between dollar signs."""
    return str(text).replace("$", r"\$")


def _fits_end_labels(series: Sequence[Mapping[str, Any]]) -> bool:
    longest = max((len(str(one["label"])) for one in series), default=0)
    several = 1 < len(series) <= _MOST_END_LABELS
    return (
        several and longest <= _LONGEST_END_LABEL and all(one["style"] == "line" for one in series)
    )


def _name_ends(axes: Any, series: Sequence[Mapping[str, Any]]) -> None:
    """Name each line at its right end, moved apart where the ends are close, with a thread to its
    line.
    """
    axes.set_xlim(axes.get_xlim())  # fixed before heights are read off and threads are drawn
    axes.set_ylim(axes.get_ylim())
    ends = [end for i, one in enumerate(series) if (end := _last(axes, one, i)) is not None]
    heights = _apart([end[2] for end in ends], gap=0.078)
    for (index, x, y), height in zip(ends, heights, strict=True):
        color = COLORS[index % len(COLORS)]
        axes.plot(
            [x, 1.025, 1.06],
            [y, height, height],
            transform=axes.transAxes,
            clip_on=False,
            color=color,
            linewidth=0.8,
        )
        label = _text(series[index]["label"])
        axes.text(
            1.075, height, label, transform=axes.transAxes, va="center", ha="left", fontsize=9.5
        )


def _last(axes: Any, one: Mapping[str, Any], index: int) -> tuple[int, float, float] | None:
    """Index and the last drawn point of a line, in axes coordinates."""
    log_x, log_y = axes.get_xscale() == "log", axes.get_yscale() == "log"
    for x, y in zip(reversed(one["x"]), reversed(one["y"]), strict=True):
        if y is None or not math.isfinite(y) or (log_y and y <= 0) or (log_x and x <= 0):
            continue
        left, height = axes.transAxes.inverted().transform(axes.transData.transform((x, y)))
        return index, float(left), float(height)
    return None


def _apart(wanted: Sequence[float], gap: float) -> list[float]:
    """Positions near the wanted ones, in the same order, at least `gap` apart and inside 0 to 1 if
    there is room.
    """
    order = sorted(range(len(wanted)), key=lambda i: wanted[i])
    placed: list[float] = []
    for i in order:
        placed.append(max(wanted[i], placed[-1] + gap) if placed else max(wanted[i], 0.0))
    overflow = placed[-1] - 1.0 if placed else 0.0
    if overflow > 0:
        ceiling = 1.0
        for j in range(len(placed) - 1, -1, -1):
            placed[j] = min(placed[j], ceiling)
            ceiling = placed[j] - gap
    result = [0.0] * len(wanted)
    for j, i in enumerate(order):
        result[i] = placed[j]
    return result


def _legend_above(axes: Any, series: Sequence[Mapping[str, Any]]) -> None:
    """A legend outside the axes, so that it never covers data."""
    axes.legend(
        loc="lower left",
        bbox_to_anchor=(0, 1.145),
        bbox_transform=_from_panel_edge(axes),
        ncols=_legend_columns(series),
        frameon=False,
        borderaxespad=0,
        borderpad=0,
        fontsize=9.5,
        columnspacing=1.2,
    )


def _finish(svg: str, title: str, inline: bool) -> str:
    """Drop what only matplotlib needs, name the picture, and let the page color and set the
    text.
    """
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>|<!--.*?-->|<style.*?</style>", "", svg, flags=re.DOTALL)
    svg = re.sub(r"(?:font-family: |(font: [^;\"]*?))'DejaVu Sans'[^;\"]*(; )?", _drop_family, svg)
    svg = svg.replace("xlink:href", "href").replace(
        ' xmlns:xlink="http://www.w3.org/1999/xlink"', ""
    )
    svg = re.sub(r"<[^>]+>", lambda tag: re.sub(r"-?\d+\.\d{3,}", _hundredths, tag[0]), svg)
    svg = re.sub(r" transform=\"rotate\(-0 [^\"]*\"", "", svg)
    svg = re.sub(r"\s*\n\s*", " ", svg).replace("> <", ">\n<").replace('z " ', 'z" ')
    if inline:
        svg = svg.replace(_INK, "currentColor").replace(_GRID, "var(--grid, #d9d9d6)")
        svg = re.sub(r' (?:width|height)="[^"]*pt"', "", svg, count=2)
        svg = svg.replace(' xmlns="http://www.w3.org/2000/svg"', "")
    fitted = "" if inline else ";max-width:100%;height:auto"
    style = f"font-family:{_CSS_FONT};stroke-linejoin:round;stroke-linecap:butt{fitted}"
    named = f'<svg role="img" aria-label="{escape(title)}" style="{style}" '
    return _own_ids(svg.replace("<svg ", named, 1).strip() + "\n")


def _hundredths(match: re.Match[str]) -> str:
    """A coordinate to a hundredth of a point."""
    return f"{float(match[0]):.2f}".rstrip("0").rstrip(".")


def _drop_family(match: re.Match[str]) -> str:
    """The root names the fonts once; the shorthand `font` must name one itself."""
    return f"{match[1]}system-ui, sans-serif{match[2] or ''}" if match[1] else ""


def _own_ids(svg: str) -> str:
    """Keep the ids that something refers to, under a prefix of this picture's own: a page holds
    many pictures.
    """
    used = set(re.findall(r'(?:href="#|url\(#)([^")]+)', svg))
    prefix = f"f{zlib.crc32(svg.encode()):08x}-"
    svg = re.sub(
        r' id="([^"]+)"', lambda match: f' id="{prefix}{match[1]}"' if match[1] in used else "", svg
    )
    return re.sub(r'((?:href="#|url\(#))', rf"\1{prefix}", svg)
