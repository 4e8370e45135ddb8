"""The command line: ``vitrail COMMAND``. One file per command; ``--help`` imports no torch."""

from __future__ import annotations

import os
import sys
import traceback

from cyclopts import App, CycloptsError

from .. import __version__, env
from ..errors import VitrailError
from .compile import compile_
from .generate import generate
from .plan import plan
from .save import save
from .show import fail
from .verify import verify

app = App(
    name="vitrail",
    help="Run diffusers pipelines sharded over any number of devices.",
    version=__version__,
    help_flags=["--help", "-h"],
    version_flags=["--version"],
)
app.command(generate, name="generate")
app.command(compile_, name="compile")
app.command(plan, name="plan")
app.command(save, name="save")
app.command(verify, name="verify")


def main(arguments: list[str] | None = None) -> None:
    """Run the command line. Exit codes: 0 done, 1 failed, 2 usage, 3 unsupported, 130 interrupted."""
    try:
        app(arguments, exit_on_error=False, print_error=False)
    except CycloptsError as error:
        fail(str(error), hint="see vitrail --help", code=2)
    except VitrailError as error:
        if os.environ.get(env.DEBUG.name):
            traceback.print_exc()
        fail(error.message, hint=error.hint, code=error.exit_code)
    except KeyboardInterrupt:
        sys.exit(130)
