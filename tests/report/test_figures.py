"""Pictures: true to the data, the same bytes every time, nothing covered, nothing that needs a
network.
"""

import io
import itertools
import re
import xml.etree.ElementTree as ET

import pytest
from PIL import Image

from halfulp.report.panels import draw, draw_panels, draw_png
from halfulp.report.svg import COLORS, WIDTH

EVIL = "<script>alert('x')</script> & \"$x^2$\""


def series(label, y, *, x=None, low=None, high=None, style="line"):
    x = list(range(len(y))) if x is None else x
    return {"label": label, "x": x, "y": y, "low": low, "high": high, "style": style}


def figure(*parts, **changes):
    base = {
        "title": "Loss",
        "x_label": "step",
        "y_label": "mean squared error",
        "x_log": False,
        "y_log": False,
    }
    return (
        base
        | {"series": list(parts), "caption": "three seeds", "command": "halfulp demo"}
        | changes
    )


def tree(svg):
    """The picture as XML; an inline one is given the namespace that HTML implies."""
    return ET.fromstring(
        svg
        if "xmlns=" in svg
        else svg.replace("<svg ", '<svg xmlns="http://www.w3.org/2000/svg" ', 1)
    )


def texts(svg):
    found = {}
    for node in tree(svg).iter("{http://www.w3.org/2000/svg}text"):
        if node.get("y") is not None:  # powers of ten are set in pieces
            found["".join(node.itertext()).strip()] = float(node.get("y"))
    return found


def threads(svg):
    """The thin lines from a curve's end to its name, by color."""
    return {color: lines[0] for color, lines in curves(svg, inside=False).items()}


def curves(svg, *, inside=True):
    """Points of every line inside the axes, by color; other paths are markers, bands and threads to
    names.
    """
    found = {}
    for node in tree(svg).iter("{http://www.w3.org/2000/svg}path"):
        color = re.search(r"stroke: (#\w{6})", node.get("style", ""))
        if color and color[1].upper() in COLORS and "fill: none" in node.get("style"):
            if (node.get("clip-path") is not None) != inside:
                continue
            numbers = [float(part) for part in re.findall(r"-?[\d.]+", node.get("d"))]
            found.setdefault(color[1].upper(), []).append(
                list(zip(numbers[::2], numbers[1::2], strict=True))
            )
    return found


TWO = figure(
    series("flash", [1.0, 2.0, 4.0], low=[0.9, 1.8, 3.0], high=[1.1, 2.4, 5.0]),
    series("math", [1.0, 1.0, 1.0]),
)


def test_the_same_data_gives_the_same_bytes():
    first = draw(TWO)
    # nothing is left behind by another picture
    draw(figure(series("other", [3.0, 1.0], style="points")))
    assert draw(TWO) == first
    assert not re.search(r"\b20\d\d-\d\d", first), "a date would change the bytes"


def test_other_data_gives_another_picture():
    moved = figure(series("flash", [1.0, 2.0, 4.1]), series("math", [1.0, 1.0, 1.0]))
    assert draw(moved) != draw(TWO)


def test_curves_follow_the_data():
    lines = curves(draw(TWO))
    (flash, *_), (math, *_) = lines[COLORS[0]], lines[COLORS[1]]
    assert len(flash) == len(math) == 3
    heights = [y for _, y in flash]
    assert heights[0] > heights[1] > heights[2], "a rising curve has falling y in SVG"
    assert heights[1] - heights[2] == pytest.approx(2 * (heights[0] - heights[1]), abs=0.1)
    assert len({y for _, y in math}) == 1
    assert math[0] == flash[0]


def test_a_logarithmic_axis_is_one():
    svg = draw(figure(series("a", [1.0, 10.0, 100.0]), series("b", [1.0, 1.0, 1.0]), y_log=True))
    heights = [y for _, y in curves(svg)[COLORS[0]][0]]
    assert heights[0] - heights[1] == pytest.approx(heights[1] - heights[2], abs=0.1)


@pytest.mark.parametrize("y_log", [False, True])
def test_missing_and_unfit_numbers_leave_a_gap(y_log):
    holes = [1.0, None, 0.5, 0.25] if not y_log else [1.0, 0.0, 0.5, 0.25]
    line = curves(draw(figure(series("a", holes), series("b", [1.0, 1.0, 1.0, 1.0]), y_log=y_log)))[
        COLORS[0]
    ][0]
    assert len(line) == 3
    assert "nan" not in draw(figure(series("a", holes), y_log=y_log)).lower()


def test_a_curve_without_numbers_is_drawn_as_nothing():
    svg = draw(figure(series("gone", [None, None]), series("here", [1.0, 2.0])))
    assert "here" in texts(svg)
    assert "gone" not in texts(svg), "a name at the end of a curve that has no end"


def test_text_is_text_and_what_was_given():
    shown = texts(draw(TWO))
    assert {"step", "mean squared error", "flash", "math"} <= set(shown)


def test_numbers_in_text_are_not_touched():
    label = "0.00123 < 4.56789, 1.5e-12345.6789"
    svg = draw(
        figure(
            series(label, [1.0, 2.0]),
            series("b", [1.0, 2.0]),
            title=label,
            x_label=label,
            y_label=label,
        )
    )
    assert label in texts(svg)
    assert tree(svg).get("aria-label") == label


def test_hostile_text_stays_text():
    svg = draw(
        figure(
            series(EVIL, [1.0, 2.0]),
            series("b", [1.0, 2.0]),
            title=EVIL,
            x_label=EVIL,
            y_label=EVIL,
        )
    )
    assert "<script" not in svg
    assert EVIL in texts(svg)
    assert tree(svg).get("aria-label") == EVIL


@pytest.mark.parametrize(
    "ends", [(1.0, 1.0, 1.0, 1.0), (1.0, 1.01, 5.0, 5.01), (9.0, 9.0, 9.0, 0.0)]
)
def test_names_at_the_ends_do_not_touch(ends):
    names = ["one", "two", "three", "four"]
    svg = draw(figure(*(series(name, [0.0, end]) for name, end in zip(names, ends, strict=True))))
    heights = sorted(texts(svg)[name] for name in names)
    assert min(b - a for a, b in itertools.pairwise(heights)) > 10, (
        "points between lines of text of 9.5 points"
    )
    assert heights[0] > 0
    assert heights[-1] < 220


@pytest.mark.parametrize("y_log", [False, True])
def test_a_thread_leads_from_the_end_of_its_curve_to_its_name(y_log):
    ends = {"one": 2.0, "two": 2.1, "three": 40.0, "four": None}
    parts = [
        series(name, [1.0, 1.5, end], low=[0.5, 1.0, end], high=[2.0, 3.0, end])
        for name, end in ends.items()
    ]
    svg = draw(figure(*parts, y_log=y_log))
    lines, names = curves(svg), texts(svg)
    for (name, _), color in zip(ends.items(), COLORS, strict=False):
        thread = threads(svg)[color]
        assert thread[0] == pytest.approx(lines[color][0][-1], abs=0.05)
        assert thread[-1][1] == pytest.approx(names[name], abs=6)


@pytest.mark.parametrize("count", [2, 5, 12])
@pytest.mark.parametrize("style", ["line", "points"])
def test_a_legend_stands_above_the_data(count, style):
    names = [
        f"a name that is too long for curve {i}" if style == "line" else f"name {i}"
        for i in range(count)
    ]
    svg = draw(
        figure(*(series(name, [float(i), 5.0], style=style) for i, name in enumerate(names)))
    )
    clip = next(node for node in tree(svg).iter() if node.tag.endswith("rect"))
    shown = texts(svg)
    assert min(shown[name] for name in names) > 0
    assert (
        max(shown[name] for name in names)
        < shown["mean squared error"] - 8
        < float(clip.get("y")) - 8
    )
    heights = sorted({shown[name] for name in names})
    assert all(b - a > 10 for a, b in itertools.pairwise(heights))


def test_curves_differ_in_more_than_color():
    svg = draw(figure(*(series(f"c{i}", [float(i), 2.0 * i] * 10) for i in range(5))))
    dashes = re.findall(
        r'd="M[^"]*" (?:clip-path="[^"]*" )?style="fill: none; (stroke-dasharray: [^;]*)', svg
    )
    assert len(set(dashes)) >= 4


@pytest.mark.parametrize("style", ["line", "points", "bar"])
def test_a_range_is_drawn(style):
    x = ["bf16", "fp16", "fp32"] if style == "bar" else None
    parts = [series(name, [1.0, 2.0, 3.0], x=x, style=style) for name in ("a", "b")]
    ranged = [part | {"low": [0.5, 1.0, 2.0], "high": [1.5, 3.0, 4.0]} for part in parts]
    assert len(draw(figure(*ranged))) > len(draw(figure(*parts)))


@pytest.mark.parametrize("y_log", [False, True])
def test_every_bar_is_seen(y_log):
    """A bar on a logarithmic axis would have to begin at zero, which is not there."""
    heights = [1e-3, 1e-9, 1e-15] if y_log else [1.0, 2.0, 3.0]
    svg = draw(figure(series("a", heights, x=["bf16", "fp32", "fp64"], style="bar"), y_log=y_log))
    areas = [
        node
        for node in tree(svg).iter()
        if f"fill: {COLORS[0].lower()}" in node.get("style", "").lower()
    ]
    shown = [node for node in areas if node.tag.endswith("use") or node.get("clip-path")]
    assert len(shown) == 3
    assert {"bf16", "fp32", "fp64"} <= set(texts(svg))


def test_an_inline_picture_takes_the_colors_of_its_page():
    svg = draw(TWO)
    assert "currentColor" in svg
    assert "var(--grid" in svg
    assert "http" not in svg
    assert not re.search(r'<svg[^>]* width="', svg), "the page gives the width"


def test_a_file_has_a_white_ground_and_a_namespace():
    svg = draw(TWO, inline=False)
    ET.fromstring(svg)
    assert "currentColor" not in svg
    assert re.search(r"fill: (#ffffff|white)", svg)


def test_panels_are_placed_side_by_side():
    svg = draw_panels([TWO, TWO | {"title": "Again"}], columns=2)
    lines = curves(svg)[COLORS[0]]
    starts = sorted(line[0][0] for line in lines if len(line) == 3)
    assert len(starts) == 2
    assert starts[1] - starts[0] == pytest.approx(352.8, abs=1)
    assert "Again: mean squared error" in texts(svg)


def test_ids_of_two_pictures_do_not_meet():
    pictures = [draw(TWO), draw(TWO | {"y_label": "other"})]
    ids = [set(re.findall(r' id="([^"]+)"', svg)) for svg in pictures]
    assert ids[0]
    assert not ids[0] & ids[1]
    for svg, names in zip(pictures, ids, strict=True):
        assert set(re.findall(r'(?:href="#|url\(#)([^")]+)', svg)) <= names


def test_powers_of_two_are_named_as_people_write_them():
    svg = draw(figure(series("a", [1.0, 2.0, 3.0], x=[512, 1024, 2048]), x_log=True))
    assert {"512", "1k", "2k"} <= set(texts(svg))


def test_a_logarithmic_axis_of_other_numbers_names_few_of_them_in_full():
    areas = [2025, 4096, 8281, 16384, 65536]
    shown = texts(draw(figure(series("bf16", [1.0, 2.0, 3.0, 4.0, 5.0], x=areas), x_log=True)))
    assert {"2000", "5000", "10000", "20000", "50000"} <= set(shown)


def test_a_picture_file_is_a_png_too():
    one = figure(series("bf16", [1.0, 2.0]), series("fp32", [2.0, 1.0]))
    png = draw_png(one)
    assert png == draw_png(one)
    with Image.open(io.BytesIO(png)) as picture:
        assert picture.format == "PNG"
        assert picture.width == round(WIDTH * 160)
        assert picture.convert("RGB").getpixel((0, 0)) == (255, 255, 255)


@pytest.mark.parametrize("heights", [[3.1e-7, 3.4e-7, 3.9e-7], [1.2e-3, 4e-3, 9e-3]])
def test_a_narrow_logarithmic_axis_names_its_numbers_briefly(heights):
    shown = texts(draw(figure(series("a", heights), y_log=True)))
    ticks = [name for name in shown if re.fullmatch(r"[\d.]+(e-\d)?", name) and float(name) < 0.1]
    ticks = [name for name in ticks if float(name) > 0]
    assert len(ticks) >= 3
    assert all(heights[0] * 0.9 <= float(name) <= heights[-1] * 1.1 for name in ticks)


def test_ticks_close_to_each_other_are_told_apart():
    shown = texts(draw(figure(series("a", [4.5713, 4.5966, 4.5735]), y_log=True)))
    ticks = [name for name in shown if re.fullmatch(r"4\.5\d+", name)]
    assert len(ticks) == len(set(ticks)) >= 3


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        (figure(), "without series"),
        (figure(series("a", [1.0], style="pie")), "accepted are line, points, bar"),
    ],
)
def test_what_cannot_be_drawn_is_refused(wrong, says):
    with pytest.raises(ValueError, match=says):
        draw(wrong)


def test_no_figures_are_refused():
    with pytest.raises(ValueError, match="at least one"):
        draw_panels([])


ROWS = figure(
    series(
        "speed", [1.0, None, 3.25], x=["sdpa", "noisy", "a_kernel_with_a_long_name"], style="row"
    )
)


def test_rows_have_their_name_and_their_value_beside_each_other():
    shown = texts(draw(ROWS))
    heights = [shown[name] for name in ROWS["series"][0]["x"]]
    assert heights == sorted(heights)
    assert [shown["1.00"], shown["–"], shown["3.25"]] == pytest.approx(heights, abs=2)


def test_rows_fit_into_their_panel():
    svg = draw_panels([ROWS, ROWS])
    width = float(re.search(r'viewBox="0 0 ([\d.]+)', svg)[1])
    at = [float(x) for x in re.findall(r'<text[^>]*? x="(-?[\d.]+)"', svg)]
    assert min(at) >= 0
    assert max(at) <= width


def test_rows_stand_alone():
    with pytest.raises(ValueError, match="accepted is one series of rows"):
        draw(figure(ROWS["series"][0], series("a", [1.0])))


def test_a_picture_in_a_file_shrinks_with_its_window():
    assert "max-width:100%" in draw(TWO, inline=False)


@pytest.mark.parametrize("end", [99, 121, 124, 980, 1240, 9800, 12400, 98000])
def test_a_number_at_the_right_edge_is_not_cut(end):
    svg = tree(draw(figure(series("a", [1.0, 2.0], x=[0, end]))))
    width = float(svg.get("viewBox").split()[2])
    middle = [
        (float(node.get("x")), "".join(node.itertext()).strip())
        for node in svg.iter("{http://www.w3.org/2000/svg}text")
        if "middle" in (node.get("style") or "") and node.get("x")
    ]
    assert len(middle) > 3
    assert all(x + 0.6 * 9.5 * len(text) / 2 <= width for x, text in middle), middle
