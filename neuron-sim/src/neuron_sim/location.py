"""Whose line it was: the innermost frame of Python that is not PyTorch's or neuron-sim's own."""

import os
import sys
from dataclasses import dataclass
from functools import cache
from types import FrameType


@dataclass(frozen=True)
class Location:
    """A line of the user's program. Outside of any (a thread of autograd's, say) the file is "<no Python frame>"."""

    file: str
    line: int
    module: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}"


NOWHERE = Location("<no Python frame>", 0, "")


@cache
def _own_folders() -> tuple[str, ...]:
    torch_init = getattr(sys.modules.get("torch"), "__file__", None)
    folders = [os.path.dirname(__file__)] + ([os.path.dirname(torch_init)] if torch_init else [])
    return tuple(folder + os.sep for folder in folders)


@cache
def _is_own(file: str) -> bool:
    # typing_extensions: the wrapper of PyTorch's deprecated functions.
    return file.startswith(("<frozen", *_own_folders())) or os.path.basename(file) == "typing_extensions.py"


def user_location() -> Location:
    """The innermost line of the calling thread outside PyTorch and neuron-sim."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        file = frame.f_code.co_filename
        if not _is_own(file):
            return Location(file, frame.f_lineno, frame.f_globals.get("__name__", ""))
        frame = frame.f_back
    return NOWHERE
