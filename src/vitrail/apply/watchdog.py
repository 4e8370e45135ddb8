"""Tells who is missing when a collective waits.

A thread on every rank looks, once a second, at what its own rank does. When that has waited longer than
``VITRAIL_WATCHDOG_SECONDS`` in one collective, it raises a flag in the store the ranks met through; every rank's
thread then writes what its rank is doing, and the first that waits tells it all.

Uses ``_get_default_store``, which is private to PyTorch (tested: 2.13.0): there is no other way to the store that the
ranks already share.
"""

from __future__ import annotations

import atexit
import json
import logging
import sys
import threading
import time
import traceback
from collections.abc import Mapping
from typing import Any

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore
from torch.distributed.distributed_c10d import _get_default_store

from .. import env
from ..layout import MeshAxis
from .flight import FLIGHT

log = logging.getLogger("vitrail.watchdog")

TICK_SECONDS = 1.0
STACK_BYTES = 512 * 1024
ANSWER_SECONDS = 4 * TICK_SECONDS


_watched: set[str] = set()
_ending = threading.Event()


def watch(axis: MeshAxis) -> None:
    """Start watching over the ranks of ``axis``, once."""
    if axis.group in _watched:
        return
    _watched.add(axis.group)
    # A connection of its own: the main thread may sit in a blocking call on the other.
    store = PrefixStore(f"vitrail/watchdog/{axis.group}", _get_default_store().clone())  # type: ignore[attr-defined]
    thread = threading.Thread(
        target=_run, args=(axis, store, env.WATCHDOG_SECONDS.read()), name="vitrail-watchdog", daemon=True
    )
    before = threading.stack_size(STACK_BYTES)
    thread.start()
    threading.stack_size(before)
    # Not in the middle of a call on the store while the interpreter takes it down.
    atexit.register(_end, thread)


def _end(thread: threading.Thread) -> None:
    _ending.set()
    thread.join(timeout=TICK_SECONDS)


def _run(axis: MeshAxis, store: Any, after: float) -> None:
    me = axis.ranks[axis.index]
    round_ = 0
    patience = after
    last = -1
    while not _ending.wait(TICK_SECONDS) and dist.is_initialized():
        try:
            mine = FLIGHT.look()
            if mine.collectives != last:
                last, patience = mine.collectives, after
            if mine.waiting and mine.seconds > patience:
                patience *= 2
                store.set(f"asked/{round_}", str(me))
            if not store.check([f"asked/{round_}"]):
                continue
            store.set(f"state/{round_}/{me}", json.dumps(_state()))
            asker = int(store.get(f"asked/{round_}"))
            if asker == me:
                log.warning("%s", report(axis, _collect(axis, store, round_)))
            round_ += 1
        except (dist.DistError, RuntimeError):  # the store is gone: the run is ending
            break
    _watched.discard(axis.group)


def _collect(axis: MeshAxis, store: Any, round_: int) -> dict[int, Mapping[str, Any]]:
    states: dict[int, Mapping[str, Any]] = {}
    deadline = time.monotonic() + ANSWER_SECONDS
    while len(states) < axis.degree and time.monotonic() < deadline:
        for rank in axis.ranks:
            key = f"state/{round_}/{rank}"
            if rank not in states and store.check([key]):
                states[rank] = json.loads(store.get(key))
        time.sleep(TICK_SECONDS / 10)
    return states


def _state() -> dict[str, Any]:
    activity = FLIGHT.look()
    stack = ""
    if not activity.waiting:
        frame = sys._current_frames().get(threading.main_thread().ident or 0)
        last = traceback.extract_stack(frame)[-1] if frame else None
        stack = f"{last.filename}:{last.lineno} in {last.name}" if last else ""
    return {**vars(activity), "stack": stack}


def report(axis: MeshAxis, states: Mapping[int, Mapping[str, Any]]) -> str:
    """Say in words which ranks wait for which, and where: ``states`` by global rank, without those that are silent."""
    waiting: dict[str, list[int]] = {}
    others: list[str] = []
    longest = 0.0
    furthest = max((state["collectives"] for state in states.values()), default=0)
    for rank in axis.ranks:
        state = states.get(rank)
        if state is None:
            others.append(f"rank {rank} does not answer: it has ended, or is stopped")
        elif state["waiting"] and state["collectives"] == furthest:
            place = f"step {state['step']}, collective {state['collectives']}"
            what = f"{state['what']} of {state['module'] or 'the model'} ({place})"
            waiting.setdefault(what, []).append(rank)
            longest = max(longest, state["seconds"])
        elif state["waiting"]:
            place = f"{state['what']} of {state['module'] or 'the model'}, collective {state['collectives']}"
            others.append(f"rank {rank} waits elsewhere: in {place}")
        else:
            module = f" of {state['module']}" if state["module"] else ""
            others.append(
                f"rank {rank} has not come: {state['what']}{module} for {state['seconds']:.0f} s, "
                f"collective {state['collectives']}, at {state['stack']}"
            )
    waits = "; ".join(f"rank {', '.join(map(str, ranks))} waits in {what}" for what, ranks in waiting.items())
    return f"after {longest:.0f} s, {waits}. " + "; ".join(
        others or ["all ranks are there: the collective itself is slow"]
    )
