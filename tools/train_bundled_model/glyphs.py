"""Read the bitmaps of a colour emoji font."""

from __future__ import annotations

import io
from pathlib import Path

import numpy
import torch
import torch.nn.functional as F
from fontTools.ttLib import TTFont
from PIL import Image

# Noto's bitmaps are 136 x 128; they are centred on a square of this side before shrinking.
BITMAP = 136
SIZE = 64
MARGIN = 2

VARIATION_SELECTOR = 0xFE0F


class EmojiFont:
    """The bitmaps of a font with a CBDT table, by code points."""

    def __init__(self, path: Path) -> None:
        font = TTFont(path)
        self._names: dict[int, str] = font.getBestCmap()
        self._bitmaps = font["CBDT"].strikeData[0]
        self._ligatures: dict[tuple[str, ...], str] = {}
        for lookup in font["GSUB"].table.LookupList.Lookup:
            for table in lookup.SubTable:
                # Type 7 wraps another lookup to reach past 64 KiB, type 4 holds ligatures.
                table = table.ExtSubTable if table.LookupType == 7 else table
                if table.LookupType != 4:
                    continue
                for first, ligatures in table.ligatures.items():
                    for ligature in ligatures:
                        self._ligatures[(first, *ligature.Component)] = ligature.LigGlyph

    def picture(self, hexcode: str) -> torch.Tensor | None:
        """The emoji as premultiplied RGBA, `[4, SIZE, SIZE]` in 0..1, or None where the font lacks it."""
        points = [int(point, 16) for point in hexcode.split("-")]
        # Fonts differ in whether a sequence keeps its variation selectors.
        glyph = self._glyph(points) or self._glyph([point for point in points if point != VARIATION_SELECTOR])
        if glyph is None or glyph not in self._bitmaps:
            return None
        bitmap = Image.open(io.BytesIO(self._bitmaps[glyph].imageData)).convert("RGBA")
        canvas = Image.new("RGBA", (BITMAP, BITMAP), (0, 0, 0, 0))
        canvas.paste(bitmap, ((BITMAP - bitmap.width) // 2, (BITMAP - bitmap.height) // 2))
        return _shrink(torch.from_numpy(numpy.asarray(canvas, dtype=numpy.float32) / 255).permute(2, 0, 1))

    def _glyph(self, points: list[int]) -> str | None:
        names = [self._names.get(point) for point in points]
        known = tuple(name for name in names if name is not None)
        if len(known) != len(names):
            return None
        return known[0] if len(known) == 1 else self._ligatures.get(known)


def _shrink(rgba: torch.Tensor) -> torch.Tensor:
    # Premultiplied, so that the colour of invisible pixels does not bleed into the edges.
    premultiplied = torch.cat([rgba[:3] * rgba[3:], rgba[3:]])
    inner = SIZE - 2 * MARGIN
    small = F.interpolate(premultiplied[None], (inner, inner), mode="bicubic", antialias=True)[0]
    return F.pad(small.clamp(0, 1), (MARGIN,) * 4)
