"""Loading that does not go on without the weights.

diffusers and transformers only log it when a checkpoint lacks tensors: the model then computes with random or missing
values, and the picture is plausible or the error far away.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from contextlib import contextmanager

from ..errors import CheckpointError

log = logging.getLogger(__name__)

_LIBRARIES = ("diffusers", "transformers")
_SIGN = "newly initialized"
_UNUSED = re.compile(r"were not used when initializing|\| UNEXPECTED \|")
_DIFFUSERS = re.compile(r"weights of (\w+) .*newly initialized.*?\[(.*?)\]", re.DOTALL)
_TRANSFORMERS = re.compile(r"^(\S+)\s*\|\s*MISSING", re.MULTILINE)
_REPORT = re.compile(r"(\w+) LOAD REPORT")
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")


class _Kept(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.records: list[logging.LogRecord] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.records.append(record)


@contextmanager
def complete(where: object) -> Iterator[None]:
    """Raise `CheckpointError`, naming class and tensors, when a model loaded inside lacked weights in ``where``.

    What else the libraries log comes out afterwards, as their verbosity would have it.
    """
    loggers = [logging.getLogger(name) for name in _LIBRARIES]
    before = [(logger, logger.level, list(logger.handlers)) for logger in loggers]
    kept = _Kept()
    for logger in loggers:
        logger.setLevel(logging.WARNING)
        logger.handlers[:] = [kept]
    try:
        yield
    finally:
        for logger, level, handlers in before:
            logger.setLevel(level)
            logger.handlers[:] = handlers
    for record in kept.records:
        if _SIGN in record.getMessage():
            raise CheckpointError(_told(record.getMessage(), where), hint="download or copy it again")
    for record in kept.records:
        message = _COLOUR.sub("", record.getMessage())
        if _UNUSED.search(message):
            log.warning("%s", " ".join(message.split())[:300])
            continue
        logger = logging.getLogger(record.name)
        if logger.isEnabledFor(record.levelno):
            logger.handle(record)


def _told(message: str, where: object) -> str:
    message = _COLOUR.sub("", message)
    if found := _DIFFUSERS.search(message):
        name, missing = found[1], [part.strip(" '\"") for part in found[2].split(",")]
    else:
        report = _REPORT.search(message)
        name, missing = report[1] if report else "a model", _TRANSFORMERS.findall(message)
    more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
    return f"{where} is incomplete: the checkpoint of {name} lacks tensor {missing[0] if missing else '?'!r}{more}"
