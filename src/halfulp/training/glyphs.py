"""Named pictures from what is installed: the emoji font, scikit-learn's digits, or shapes drawn
here.

Text-to-image training needs pictures with texts. Debian's fonts-noto-color-emoji holds 1405
drawings whose texts are the Unicode names; they are read from the installed font and never stored
elsewhere. Shapes need nothing at all.
"""

from __future__ import annotations

import io
import itertools
import unicodedata
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal, TypeAlias

import numpy as np

Source: TypeAlias = Literal["emoji", "digits", "shapes"]

FONT_FOLDERS = (
    Path("/usr/share/fonts"),
    Path("/usr/local/share/fonts"),
    Path("~/.local/share/fonts").expanduser(),
)
FONT_FILE = "NotoColorEmoji.ttf"

_COLORS = {
    "red": (220, 40, 40),
    "orange": (240, 140, 20),
    "yellow": (235, 205, 30),
    "green": (40, 160, 70),
    "blue": (40, 90, 210),
    "purple": (140, 60, 180),
    "brown": (130, 85, 45),
    "black": (30, 30, 30),
}
# How far inside a shape a point of [-1, 1]² lies, y downwards; negative outside.
_SHAPES: dict[str, Callable[[Any, Any], Any]] = {
    "circle": lambda x, y: 0.75 - np.hypot(x, y),
    "ring": lambda x, y: 0.18 - abs(np.hypot(x, y) - 0.6),
    "square": lambda x, y: 0.65 - np.maximum(abs(x), abs(y)),
    "frame": lambda x, y: 0.16 - abs(np.maximum(abs(x), abs(y)) - 0.6),
    "diamond": lambda x, y: (0.85 - abs(x) - abs(y)) / 2**0.5,
    "triangle": lambda x, y: np.minimum(0.6 - y, (y + 0.85 - 2 * abs(x)) / 5**0.5),
    "plus": lambda x, y: np.minimum(
        0.75 - np.maximum(abs(x), abs(y)), 0.22 - np.minimum(abs(x), abs(y))
    ),
    "bar": lambda x, y: np.minimum(0.8 - abs(x), 0.22 - abs(y)),
}


@dataclass(frozen=True)
class NamedPictures:
    """Pictures with their names, in the order of the source."""

    names: tuple[str, ...]  # lower case
    pixels: np.ndarray  # uint8 [count, size, size, 3], on white
    source: str  # where they come from, in words


def available_source(wanted: str = "auto") -> Source:
    """Return the source itself, or for "auto" the first that is installed here: emoji, digits,
    shapes.
    """
    if wanted == "auto":
        return "emoji" if emoji_font() else "digits" if _has_digits() else "shapes"
    if wanted not in ("emoji", "digits", "shapes"):
        raise ValueError(f"data={wanted!r}: accepted are auto, emoji, digits, shapes")
    return wanted  # type: ignore[return-value]


@lru_cache(maxsize=4)
def load_pictures(source: str, size: int, count: int | None = None) -> NamedPictures:
    """Return pictures of `size` × `size` pixels.

    Args:
        source: "emoji", "digits", "shapes", or "auto" for the first of these that is installed.
        size: pixels a side.
        count: how many, spread evenly over the source; None: all.

    Raises:
        ValueError: the source is not installed here, or has fewer pictures.
    """
    readers: dict[str, Callable[[int], NamedPictures]] = {
        "emoji": _emoji,
        "digits": _digits,
        "shapes": _shapes,
    }
    whole = readers[available_source(source)](size)
    total = len(whole.names)
    if count is None or count == total:
        return whole
    if not 1 <= count <= total:
        raise ValueError(f"count={count}: accepted are 1 to {total} pictures of {whole.source}")
    chosen = [i * total // count for i in range(count)]
    return NamedPictures(tuple(whole.names[i] for i in chosen), whole.pixels[chosen], whole.source)


@lru_cache(maxsize=1)
def emoji_font() -> Path | None:
    """Return the installed emoji font with bitmaps, or None."""
    from fontTools.ttLib import TTFont

    for path in itertools.chain.from_iterable(_files(folder) for folder in FONT_FOLDERS):
        with TTFont(path, lazy=True) as font:
            if "CBDT" in font:
                return path
    return None


def _files(folder: Path) -> Iterator[Path]:
    return iter(sorted(folder.rglob(FONT_FILE))) if folder.is_dir() else iter(())


def _emoji(size: int) -> NamedPictures:
    """The glyphs of single code points that have a name, in the order of the code points."""
    path = emoji_font()
    if path is None:
        raise ValueError(
            f"data='emoji': there is no {FONT_FILE} with bitmaps (Debian's fonts-noto-color-emoji);"
            " accepted here are digits and shapes"
        )
    from fontTools.ttLib import TTFont

    names, pixels = [], []
    with TTFont(path, lazy=True) as font:
        (bitmaps,) = font["CBDT"].strikeData
        for point, glyph in sorted(font.getBestCmap().items()):
            name, data = (
                unicodedata.name(chr(point), ""),
                getattr(bitmaps.get(glyph), "imageData", None),
            )
            if name and data is not None:
                names.append(name.lower())
                pixels.append(_on_white(data, size))
    return NamedPictures(tuple(names), np.stack(pixels), f"Noto Color Emoji, {path}")


def _on_white(png: bytes, size: int) -> np.ndarray:
    """A PNG file's picture on a white square, in `size` × `size` pixels."""
    from PIL import Image

    with Image.open(io.BytesIO(png)) as file:
        picture = file.convert("RGBA")
    side = max(picture.size)
    ground = Image.new("RGBA", (side, side), "white")
    ground.alpha_composite(picture, ((side - picture.width) // 2, (side - picture.height) // 2))
    return np.asarray(ground.convert("RGB").resize((size, size), Image.Resampling.BOX))


def _has_digits() -> bool:
    from importlib.util import find_spec

    return find_spec("sklearn") is not None


def _digits(size: int) -> NamedPictures:
    """Scikit-learn's 1797 handwritten digits of 8 × 8 pixels, dark on white, enlarged."""
    if not _has_digits():
        raise ValueError("data='digits': scikit-learn is not installed; accepted here is shapes")
    from PIL import Image
    from sklearn.datasets import load_digits

    found = load_digits()
    gray = (255 - found.images * (255 / 16)).round().astype(np.uint8)
    enlarged = [
        np.asarray(
            Image.fromarray(one).convert("RGB").resize((size, size), Image.Resampling.BICUBIC)
        )
        for one in gray
    ]
    names = tuple(unicodedata.name(str(digit)).lower() for digit in found.target)
    return NamedPictures(names, np.stack(enlarged), "scikit-learn's digits")


def _shapes(size: int) -> NamedPictures:
    """Eight shapes in eight colors, edges blended over one pixel; every eighth one differs in
    both.
    """
    y, x = np.meshgrid(*[(np.arange(size) + 0.5) * (2 / size) - 1] * 2, indexing="ij")
    colors, names, pixels = list(_COLORS.items()), [], []
    for (number, (shape, inside)), step in itertools.product(
        enumerate(_SHAPES.items()), range(len(colors))
    ):
        color, rgb = colors[(number + step) % len(colors)]
        cover = np.clip(inside(x, y) * (size / 2) + 0.5, 0, 1)[..., None]
        names.append(f"{color} {shape}")
        pixels.append((255 + cover * (np.array(rgb) - 255)).round().astype(np.uint8))
    return NamedPictures(tuple(names), np.stack(pixels), "shapes drawn by halfulp")
