"""Pictures that say how they were made."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from PIL import Image
from PIL.PngImagePlugin import PngInfo

from ..errors import UsageError, VitrailError

KEY = "vitrail"


def write(image: Image.Image, path: Path, facts: dict[str, Any]) -> None:
    """Write ``image`` with ``facts`` as metadata: each one as text, and all of them as JSON. Whole or not at all."""
    info = PngInfo()
    for name, value in facts.items():
        info.add_itxt(name, value if isinstance(value, str) else json.dumps(value, ensure_ascii=False))
    info.add_itxt(KEY, json.dumps(facts, ensure_ascii=False))
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        image.save(temporary, format="PNG", pnginfo=info)
        os.replace(temporary, path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise VitrailError(f"{path} cannot be written: {error.strerror or error}") from None


def read_facts(path: Path) -> dict[str, Any]:
    """The facts that `write` put into a picture. Raises `UsageError` for another file."""
    try:
        with Image.open(path) as image:
            text = image.info.get(KEY)
    except FileNotFoundError:
        raise UsageError(f"there is no file {path}") from None
    except OSError:
        raise UsageError(f"{path} is not a picture") from None
    if text is None:
        raise UsageError(f"{path} does not say how it was made: vitrail did not make it, or its metadata was removed")
    return dict(json.loads(text))
