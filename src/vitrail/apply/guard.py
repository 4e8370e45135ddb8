"""A slice looks like an ordinary parameter. What would take it for the whole raises here."""

from __future__ import annotations

from typing import Any, NoReturn

from ..errors import ShardedModelError


def refuse(what: str, name: str) -> NoReturn:
    raise ShardedModelError(
        f"{name} is sharded: this rank holds only its slice, so {what} would silently take the slice for the whole",
        hint="do it with the unsharded model, before sharding or loaded again without it",
    )


class GuardedSlice:
    """In front of a module class whose parameters are slices.

    ``state_dict``, ``load_state_dict``, ``copy.deepcopy`` and pickling of this module, or of any module above it,
    come past here.
    """

    def _save_to_state_dict(self, *_: Any, **__: Any) -> NoReturn:
        refuse("state_dict()", type(self).__name__)

    def _load_from_state_dict(self, *_: Any, **__: Any) -> NoReturn:
        refuse("load_state_dict()", type(self).__name__)

    def __deepcopy__(self, memo: dict[int, Any]) -> NoReturn:
        refuse("copy.deepcopy()", type(self).__name__)

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        refuse("pickling", type(self).__name__)


class GuardedRoot:
    """In front of the class of a sharded model: the same, before anything is written or changed."""

    def state_dict(self, *_: Any, **__: Any) -> NoReturn:
        refuse("state_dict()", type(self).__name__)

    def load_state_dict(self, *_: Any, **__: Any) -> NoReturn:
        refuse("load_state_dict()", type(self).__name__)

    def save_pretrained(self, *_: Any, **__: Any) -> NoReturn:
        refuse("save_pretrained()", type(self).__name__)

    def push_to_hub(self, *_: Any, **__: Any) -> NoReturn:
        refuse("push_to_hub()", type(self).__name__)

    def __deepcopy__(self, memo: dict[int, Any]) -> NoReturn:
        refuse("copy.deepcopy()", type(self).__name__)

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        refuse("pickling", type(self).__name__)


class GuardedPipeline:
    """In front of the class of a pipeline with a sharded model, which would be saved last, after the others."""

    def save_pretrained(self, *_: Any, **__: Any) -> NoReturn:
        refuse("save_pretrained()", type(self).__name__)

    def push_to_hub(self, *_: Any, **__: Any) -> NoReturn:
        refuse("push_to_hub()", type(self).__name__)
