"""What a text-to-image run has learned, to look at: pictures it draws from names, beside those it
was shown.

A drawing counts as right where, of all pictures of the data, the named one is nearest to it; a
model that ignored the name would be right once in as many drawings as there are names.
"""

from __future__ import annotations

import base64
import io
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from halfulp.runs.threads import one_thread
from halfulp.targets import is_code
from halfulp.training.attention import AttentionPlan, attention_function
from halfulp.training.checkpoint import checkpoints, restore
from halfulp.training.config import Pictures
from halfulp.training.pictures import PictureWorkload
from halfulp.training.run_json import read_config
from halfulp.training.workload import build_workload

_SIDE = 96  # pixels of a picture on the sheet, about
_TEXT = 30  # pixels below it
_GAP = 6
_INSTEAD = "torch:fp32"


@dataclass(frozen=True)
class Drawn:
    """Pictures drawn from names, and the pictures of these names in the data."""

    names: tuple[str, ...]
    drawn: np.ndarray  # uint8 [count, size, size, 3]
    originals: np.ndarray  # uint8 [count, size, size, 3]
    nearest: tuple[str, ...]  # the name of the picture in the data that is nearest to the drawing
    source: str  # of the data
    replaced: tuple[str, ...] = ()  # attention that was not run but torch:fp32 instead, and why

    @property
    def right(self) -> int:
        """How many drawings are nearest to a picture of their own name."""
        return sum(name == found for name, found in zip(self.names, self.nearest, strict=True))


def draw_run(folder: Path, names: Sequence[str] | None = None, *, trust: bool = False) -> Drawn:
    """Draw with the last checkpoint of a text-to-image run.

    Attention that cannot run here, or that is code which the folder names, is replaced by
    torch:fp32; `Drawn.replaced` says which.

    Args:
        folder: the run's.
        names: of pictures of its data; all of them, but at most 64, if None.
        trust: import and run the code that the folder names.

    Raises:
        ValueError: the folder holds no text-to-image run or no checkpoint, or a name is not one of
            its data.
    """
    config = read_config(folder)
    if not isinstance(config.workload, Pictures):
        raise ValueError(
            f"run={str(folder)!r}: it is no text-to-image training; accepted is one of Pictures"
        )
    checkpoint = next(checkpoints(folder / "checkpoints"), None)
    if checkpoint is None:
        raise ValueError(f"run={str(folder)!r}: it has no checkpoint; accepted is a run that has")
    plan, replaced = _runnable(config.attention, trust)
    with one_thread():
        workload = build_workload(replace(config, attention=plan), "cpu")
        restore(checkpoint, workload.model)
        assert isinstance(workload, PictureWorkload)
        found = draw_workload(workload, names)
    return replace(found, replaced=replaced)


def _runnable(plan: AttentionPlan, trust: bool) -> tuple[AttentionPlan, tuple[str, ...]]:
    """The plan with what cannot or may not run here in fp32 instead, and what that is."""
    left_out: dict[str, str] = {}
    for choice in dict.fromkeys(a.attention for a in plan.assignments):
        if is_code(choice) and not trust:
            left_out[choice] = "code that the folder names, which --trust runs"
            continue
        try:
            attention_function(choice)
        except ValueError as error:
            left_out[choice] = str(error)
    assignments = (
        replace(a, attention=_INSTEAD) if a.attention in left_out else a for a in plan.assignments
    )
    said = tuple(f"{choice} ({why})" for choice, why in left_out.items())
    return AttentionPlan(tuple(assignments)), said


def draw_workload(workload: PictureWorkload, names: Sequence[str] | None = None) -> Drawn:
    """Draw with a model as it is now; arguments and errors as `draw_run`."""
    pictures = workload.pictures
    wanted = (
        list(dict.fromkeys(pictures.names))[:64]
        if names is None
        else [name.lower() for name in names]
    )
    for name in wanted:
        if name not in pictures.names:
            some = ", ".join(list(dict.fromkeys(pictures.names))[:8])
            raise ValueError(
                f"names={name!r}: accepted are names of {pictures.source}, such as {some}"
            )
    drawn = workload.draw(wanted)
    apart = [np.square(pictures.pixels.astype(np.float64) - one).mean((1, 2, 3)) for one in drawn]
    nearest = tuple(pictures.names[int(distances.argmin())] for distances in apart)
    originals = pictures.pixels[[pictures.names.index(name) for name in wanted]]
    return Drawn(tuple(wanted), drawn, originals, nearest, pictures.source)


def contact_sheet(found: Drawn, columns: int = 6) -> bytes:
    """Return a PNG file: for every name its drawing, the picture in the data beside it, and the
    name below.
    """
    from PIL import Image, ImageDraw, ImageFont

    count, size = found.drawn.shape[:2]
    columns = min(columns, count)
    side = size * max(1, round(_SIDE / size))
    width, height = 2 * side + _GAP, side + _TEXT
    rows = -(-count // columns)
    sheet = Image.new("RGB", (columns * (width + 2 * _GAP), rows * (height + 2 * _GAP)), "white")
    pen, font = ImageDraw.Draw(sheet), ImageFont.load_default(12)
    for i, name in enumerate(found.names):
        x, y = (
            (i % columns) * (width + 2 * _GAP) + _GAP,
            (i // columns) * (height + 2 * _GAP) + _GAP,
        )
        for picture, left in ((found.drawn[i], x), (found.originals[i], x + side + _GAP)):
            sheet.paste(
                Image.fromarray(picture).resize((side, side), Image.Resampling.NEAREST), (left, y)
            )
        lines = textwrap.wrap(name, max(8, width // 7), max_lines=2, placeholder="…")
        pen.multiline_text((x, y + side + 1), "\n".join(lines), fill="black", font=font, spacing=1)
    buffer = io.BytesIO()
    sheet.save(buffer, format="PNG", optimize=True)
    return buffer.getvalue()


def sheet_block(found: Drawn) -> dict[str, Any]:
    """Return the contact sheet as a page's block: a picture in the page itself, and what it shows
    in words.
    """
    text = base64.b64encode(contact_sheet(found)).decode()
    caption = (
        "Left of each pair: drawn by the model from the name below; right: the picture in the data"
        f" ({found.source}). {found.right} of {len(found.names)} drawings are nearest to the"
        " picture of their name."
    )
    if found.replaced:
        caption += f" Drawn with {_INSTEAD} in the place of {'; '.join(found.replaced)}."
    names = ", ".join(found.names)
    return {
        "kind": "picture",
        "source": f"data:image/png;base64,{text}",
        "alt": f"Drawn: {names}",
        "caption": caption,
    }


def sheets_of(
    folders: Sequence[Path], most: int = 4, *, trust: bool = False
) -> list[dict[str, Any]]:
    """Return the sheets of the first `most` text-to-image runs among these folders, each under the
    run's name, or why a run has none; `trust` as in `draw_run`.
    """
    drawing = [f for f in folders if isinstance(read_config(f).workload, Pictures)]
    found: list[dict[str, Any]] = []
    for folder in drawing[:most]:
        try:
            block = sheet_block(draw_run(folder, trust=trust))
        except ValueError as error:
            block = {"kind": "text", "text": f"No pictures: {error}."}
        found.append(block | {"title": folder.name})
    return found
