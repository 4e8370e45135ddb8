"""What the commands have in common: errors and warnings on stderr, results on stdout."""

from __future__ import annotations

import os
import sys
from typing import NoReturn

from rich.console import Console
from rich.text import Text

from .. import env


def _say(kind: str, style: str, text: str) -> None:
    console = Console(stderr=True, soft_wrap=True, highlight=False)
    console.print(Text.assemble((f"{kind}: ", style), text))


def fail(message: str, *, hint: str | None, code: int) -> NoReturn:
    """Show an error, and a hint where there is one, and end with ``code``. Of several ranks the first shows it."""
    if os.environ.get(env.RANK.name, "0") in ("", "0") or code == 2:
        _say("error", "bold red", message)
        if hint:
            _say("hint", "cyan", hint)
    sys.exit(code)


def warn(message: str) -> None:
    _say("warning", "yellow", message)
