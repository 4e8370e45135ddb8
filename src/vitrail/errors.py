"""Every error a user can meet, in one tree.

::

    VitrailError                        what was found, what was needed; ``hint`` says what to do
    ├── UsageError          exit 2      the command or the arguments are wrong
    ├── UnsupportedError    exit 3      right, but not something vitrail can do
    │   └── PlanError       exit 3      the plan does not fit the model, or not this degree
    ├── CheckpointError     exit 1      files that are missing, truncated or of another shape
    ├── ShardedModelError   exit 1      an operation that would take a slice for the whole
    ├── DisagreementError   exit 1      ranks that were given different inputs or weights
    └── RankError           exit 1      a rank that died, raised, or did not come

All of them are ``ValueError`` too, so that code written against diffusers' own checks catches them.
"""

from __future__ import annotations

__all__ = [
    "CheckpointError",
    "DisagreementError",
    "PlanError",
    "RankError",
    "ShardedModelError",
    "UnsupportedError",
    "UsageError",
    "VitrailError",
]


class VitrailError(ValueError):
    """Base of all vitrail errors.

    ``exit_code`` is what the command line ends with. ``hint`` is one line that says what to do, or None.
    """

    exit_code = 1

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return self.message if self.hint is None else f"{self.message}\nhint: {self.hint}"


class UsageError(VitrailError):
    exit_code = 2


class UnsupportedError(VitrailError):
    exit_code = 3


class PlanError(UnsupportedError):
    pass


class CheckpointError(VitrailError):
    pass


class ShardedModelError(VitrailError):
    pass


class DisagreementError(VitrailError):
    pass


class RankError(VitrailError):
    pass
