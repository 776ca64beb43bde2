"""What every picture shares: its colors and fonts, its place on a panel, and SVG that a page can
hold.

Matplotlib writes a file for itself; what is left here is small, takes the page's own colors and
fonts, and has the same bytes for the same data.
"""

from __future__ import annotations

import io
import math
import re
import textwrap
import xml.etree.ElementTree as ET
import zlib
from html import escape
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from markupsafe import Markup

WIDTH = 4.9  # inches at 72 points: 353 points, one phone
COLORS = ("#D55E00", "#0072B2", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#7A7A7A")
# Stand-ins that become the page's own text and grid colors in an inline picture.
INK, GRID = "#1b1b1d", "#d9d9d6"
_FONTS = ["DejaVu Sans"]
_CSS_FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, 'Helvetica Neue', Arial, sans-serif"


def settings() -> Any:
    """Return matplotlib's settings for every picture."""
    return {
        "svg.fonttype": "none",
        # without a salt matplotlib draws the ids at random, and no two files have the same bytes
        "svg.hashsalt": "halfulp",
        "svg.id": "halfulp",
        "font.family": _FONTS,
        "font.size": 10.5,
        "axes.labelsize": 10.5,
        "axes.unicode_minus": True,
        "text.color": INK,
        "axes.labelcolor": INK,
        "axes.edgecolor": GRID,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.grid": True,
        "axes.grid.axis": "y",
        "axes.axisbelow": True,
        "grid.color": GRID,
        "grid.linewidth": 0.6,
        "xtick.color": GRID,
        "ytick.color": GRID,
        "xtick.labelcolor": INK,
        "ytick.labelcolor": INK,
        "xtick.labelsize": 9.5,
        "ytick.labelsize": 9.5,
        "ytick.major.size": 0,
        "ytick.minor.size": 0,
        "xtick.minor.size": 0,
        "lines.linewidth": 1.8,
        "lines.solid_capstyle": "round",
        "mathtext.default": "regular",
    }


def write_svg(canvas: Any, title: str, said: str = "", *, inline: bool) -> str:
    """Return the SVG text of a matplotlib figure; `title` is its accessible name, `said` what it
    shows, in words.

    Inline it is drawn in the text and grid colors of its page; else it is a file with a white
    ground.
    """
    from matplotlib.backends.backend_svg import FigureCanvasSVG

    FigureCanvasSVG(canvas)
    buffer = io.StringIO()
    ground = {} if inline else {"facecolor": "white"}
    canvas.savefig(
        buffer,
        format="svg",
        metadata={"Date": None, "Creator": None},
        transparent=inline,
        **ground,
    )
    return _finish(buffer.getvalue(), title, said, inline)


def write_png(canvas: Any, dots: int = 160) -> bytes:
    """Return the PNG of a matplotlib figure on a white ground, at so many dots an inch."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    FigureCanvasAgg(canvas)
    buffer = io.BytesIO()
    canvas.savefig(buffer, format="png", dpi=dots, facecolor="white", metadata={"Software": None})
    return buffer.getvalue()


def plain(text: object) -> str:
    """Text as it stands: matplotlib would read mathematics between dollar signs."""
    return str(text).replace("$", r"\$")


def wrapped(text: object, characters: int) -> str:
    """Text on lines of at most so many characters, broken inside a word where it has no space."""
    return "\n".join(textwrap.wrap(str(text), characters)) or str(text)


def from_panel_edge(axes: Any) -> Any:
    """x from the panel's left edge in fractions of the picture, y in fractions of the axes."""
    from matplotlib.transforms import Affine2D, blended_transform_factory

    panel = panel_width(axes)
    left = (math.floor(axes.get_position().x0 / panel) + 0.01) * panel
    return blended_transform_factory(
        Affine2D().translate(left, 0) + axes.get_figure().transFigure, axes.transAxes
    )


def panel_width(axes: Any) -> float:
    """A panel's width as a fraction of the picture's."""
    return float(WIDTH / axes.get_figure().get_size_inches()[0])


def _finish(svg: str, title: str, said: str, inline: bool) -> str:
    """Drop what only matplotlib needs, name the picture, and let the page color and set the
    text.
    """
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>|<!--.*?-->|<style.*?</style>", "", svg, flags=re.DOTALL)
    svg = re.sub(r"(?:font-family: |(font: [^;\"]*?))'DejaVu Sans'[^;\"]*(; )?", _drop_family, svg)
    svg = svg.replace("xlink:href", "href").replace(
        ' xmlns:xlink="http://www.w3.org/1999/xlink"', ""
    )
    # numbers inside of tags are coordinates; a text's stay as they are
    svg = re.sub(r"<[^>]+>", lambda tag: re.sub(r"-?\d+\.\d{3,}", _hundredths, tag[0]), svg)
    svg = re.sub(r" transform=\"rotate\(-0 [^\"]*\"", "", svg)
    svg = re.sub(r"\s*\n\s*", " ", svg).replace("> <", ">\n<").replace('z " ', 'z" ')
    if inline:
        svg = svg.replace(INK, "currentColor").replace(GRID, "var(--grid, #d9d9d6)")
        svg = re.sub(r' (?:width|height)="[^"]*pt"', "", svg, count=2)
        svg = svg.replace(' xmlns="http://www.w3.org/2000/svg"', "")
    fitted = "" if inline else ";max-width:100%;height:auto"
    style = f"font-family:{_CSS_FONT};stroke-linejoin:round;stroke-linecap:butt{fitted}"
    described = ' aria-describedby="said"' if said else ""
    named = f'<svg role="img" aria-label="{escape(title)}"{described} style="{style}" '
    svg = svg.replace("<svg ", named, 1).strip() + "\n"
    if said:
        svg = svg.replace(">", f'><desc id="said">{escape(said)}</desc>', 1)
    return _own_ids(svg)


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
    used = set(re.findall(r'(?:href="#|url\(#|describedby=")([^")]+)', svg))
    prefix = f"f{zlib.crc32(svg.encode()):08x}-"
    svg = re.sub(
        r' id="([^"]+)"', lambda match: f' id="{prefix}{match[1]}"' if match[1] in used else "", svg
    )
    return re.sub(r'(href="#|url\(#|describedby=")', rf"\1{prefix}", svg)


_TAGS = {"svg", "g", "defs", "clipPath", "desc", "path", "rect", "text", "tspan", "use", "image"}


def checked(svg: str) -> Markup:
    """Return a picture as markup for a page, once it is known to draw and to do nothing else.

    Raises:
        ValueError: it is not well-formed, has an element or attribute that no picture here has, or
            leads out of the page.
    """
    from markupsafe import Markup

    try:
        root = ET.fromstring(svg)
    except ET.ParseError as error:
        raise ValueError(f"svg={svg[:40]!r}: it is not well-formed ({error})") from None
    for node in root.iter():
        tag = node.tag.rpartition("}")[2]
        if tag not in _TAGS:
            raise ValueError(f"svg with <{tag}>: accepted are {', '.join(sorted(_TAGS))}")
        for name, value in node.attrib.items():
            inside = "#" if tag != "image" else "data:image/png;base64,"
            leads_out = name.endswith("href") and not value.startswith(inside)
            if leads_out or name.startswith("on") or re.search(r"url\((?!#)", value):
                raise ValueError(f"svg with {name}={value[:40]!r}: accepted is what it draws alone")
    return Markup(svg)
