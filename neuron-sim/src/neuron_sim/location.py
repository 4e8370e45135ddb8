"""Whose line it was: the innermost frame that is the user's, and the innermost of a library that it called.

PyTorch's frames and neuron-sim's own are passed over. What is installed (in site-packages or dist-packages) and
Python's own library are not the user's: of them, only the innermost is kept, because a line inside diffusers says which
layer it was.
"""

import os
import re
import sys
from dataclasses import dataclass
from functools import cache
from types import FrameType


@dataclass(frozen=True)
class Location:
    """A line of the user's program. Outside of any (a thread of autograd's, say) the file is "<no Python frame>".

    `via` is the line of a library that the user's line led to, as "diffusers/models/embeddings.py:80", or empty.
    """

    file: str
    line: int
    module: str
    via: str = ""

    def __str__(self) -> str:
        return f"{self.file}:{self.line}" + (f" (in {self.via})" if self.via else "")


NOWHERE = Location("<no Python frame>", 0, "")
_INSTALLED = (f"{os.sep}site-packages{os.sep}", f"{os.sep}dist-packages{os.sep}")
_PYTHON = os.path.dirname(os.__file__) + os.sep


_passed_over: list[str] = []


def pass_over(folder: str) -> None:
    """Pass over the files of one more folder: a tool that runs the user's model is not the user."""
    _passed_over.append(folder.rstrip(os.sep) + os.sep)
    _own_folders.cache_clear()
    _is_own.cache_clear()


@cache
def _own_folders() -> tuple[str, ...]:
    torch_init = getattr(sys.modules.get("torch"), "__file__", None)
    folders = [os.path.dirname(__file__)] + ([os.path.dirname(torch_init)] if torch_init else [])
    return (*(folder + os.sep for folder in folders), *_passed_over)


@cache
def _is_own(file: str) -> bool:
    # typing_extensions: the wrapper of PyTorch's deprecated functions.
    return file.startswith(("<frozen", *_own_folders())) or os.path.basename(file) == "typing_extensions.py"


@cache
def _library_path(file: str) -> str:
    """The path below site-packages or Python's own library; empty for a user's file."""
    for folder in (*_INSTALLED, _PYTHON):
        if folder in file:
            return file.rpartition(folder)[2]
    return ""


def user_location(within: str | None = None) -> Location:
    """The user's innermost line in the calling thread; a library's, where no frame is the user's.

    What called the file `within` is not looked at.
    """
    frame: FrameType | None = sys._getframe(1)
    innermost: Location | None = None
    via = ""
    while frame is not None:
        file = frame.f_code.co_filename
        if file == within:
            break
        if not _is_own(file):
            where = _library_path(file)
            if not where:
                return Location(file, frame.f_lineno, frame.f_globals.get("__name__", ""), via)
            if innermost is None:
                via = f"{where}:{frame.f_lineno}"
                innermost = Location(file, frame.f_lineno, frame.f_globals.get("__name__", ""))
        frame = frame.f_back
    return innermost or NOWHERE


_TRACE_LINE = re.compile(r'^\s*File "(.+)", line (\d+), in ', re.MULTILINE)


def traced_location(trace: str | None) -> Location:
    """The same from a stack as text, outermost frame first, as FX keeps it in a node's `stack_trace`."""
    innermost: Location | None = None
    via = ""
    for file, line in reversed(_TRACE_LINE.findall(trace or "")):
        if _is_own(file):
            continue
        where = _library_path(file)
        if not where:
            return Location(file, int(line), "", via)
        if innermost is None:
            via = f"{where}:{line}"
            innermost = Location(file, int(line), "")
    return innermost or NOWHERE
