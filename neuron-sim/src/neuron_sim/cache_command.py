"""`neuron-sim cache list|stat|verify|clear|export|import`: the compiled programs on disk."""

import dataclasses
import json
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from neuron_sim import cache_archive, env
from neuron_sim.errors import ConfigurationError
from neuron_sim.neffcache import EntryError, NeffCache


@dataclass(frozen=True)
class Found:
    """A file of the cache: what it is for, or why it is not what its name says."""

    path: Path
    size: int
    purpose: dict[str, Any] | None
    problem: str | None


def run(action: str, folder: str | None, as_json: bool) -> int:
    """Do it. Returns 1 when `verify` finds a bad file. Raises `ConfigurationError` where there is no usable folder."""
    cache = _open(folder)
    try:
        return {"list": _list, "stat": _stat, "verify": _verify, "clear": _clear}[action](cache, as_json)
    except OSError as error:
        raise ConfigurationError(f"the cache in {cache.folder} cannot be used: {error}") from error


def move(action: str, file: str | None, folder: str | None, trust_code: bool, as_json: bool) -> int:
    """`export` to an archive or `import` from one. Returns 1 when a program was refused.

    Raises `ConfigurationError` where there is no usable folder or archive.
    """
    cache = _open(folder)
    if file is None:
        raise ConfigurationError(f"name the archive: neuron-sim cache {action} FILE")
    try:
        if action == "export":
            outcome = cache_archive.export(cache, Path(file))
        else:
            outcome = cache_archive.take(cache, Path(file), trust_code)
    except OSError as error:
        raise ConfigurationError(f"{action} between {cache.folder} and {file} failed: {error}") from error
    if as_json:
        print(json.dumps(dataclasses.asdict(outcome), indent=2))
    else:
        for name, why in outcome.refused.items():
            print(f"{name}: refused: {why}")
        there = f", {outcome.there_already:,} were there" if outcome.there_already else ""
        print(f"{outcome.taken:,} programs {action}ed{there}, {len(outcome.refused):,} refused")
    return int(bool(outcome.refused))


def _open(folder: str | None) -> NeffCache:
    cache = NeffCache(Path(folder or env.NEFF_CACHE_DIR.read()), Path(env.NEFF_LOCAL_CACHE_DIR.read()), 0)
    if cache.folder.exists() and not cache.folder.is_dir():
        raise ConfigurationError(f"{cache.folder} ({env.NEFF_CACHE_DIR.name}) is no folder; name one that is")
    return cache


def _examine(cache: NeffCache) -> list[Found]:
    found = []
    for path in cache.files():
        size = path.lstat().st_size
        try:
            found.append(Found(path, size, cache.check(path).purpose, None))
        except (EntryError, OSError) as error:
            found.append(Found(path, size, None, str(error)))
    return found


def _describe(file: Found) -> str:
    if file.purpose is None:
        return f"bad: {file.problem}"
    return str(file.purpose.get("call") or file.purpose.get("kind"))


def _list(cache: NeffCache, as_json: bool) -> int:
    found = _examine(cache)
    if as_json:
        print(json.dumps([_as_data(file) for file in found], indent=2))
    else:
        for file in found:
            print(f"{file.path.stem[:16]}  {file.size:>10,}  {_describe(file)}")
    return 0


def _stat(cache: NeffCache, as_json: bool) -> int:
    found = _examine(cache)
    kinds = Counter(str(file.purpose.get("kind")) for file in found if file.purpose is not None)
    targets = Counter(json.dumps(file.purpose.get("target")) for file in found if file.purpose is not None)
    summary = {
        "folder": str(cache.folder),
        "files": len(found),
        "bytes": sum(file.size for file in found),
        "bad": sum(file.problem is not None for file in found),
        "unfinished": len(cache.unfinished()),
        "kinds": dict(kinds),
    }
    if as_json:
        print(json.dumps(summary | {"targets": dict(targets)}, indent=2))
        return 0
    for name, value in summary.items():
        shown = ", ".join(f"{count:,} {kind}" for kind, count in kinds.items()) or "none" if name == "kinds" else value
        print(f"{name:<10}  {shown:,}" if isinstance(shown, int) else f"{name:<10}  {shown}")
    for target, count in targets.most_common():
        print(f"{'for':<10}  {count:,} programs: {target}")
    return 0


def _verify(cache: NeffCache, as_json: bool) -> int:
    found = _examine(cache)
    bad = [file for file in found if file.problem is not None]
    if as_json:
        print(json.dumps({"files": len(found), "bad": [_as_data(file) for file in bad]}, indent=2))
    else:
        for file in bad:
            print(f"{file.path}: {file.problem}")
        print(f"{len(found):,} files, {len(bad):,} bad" + ("; they are written again when needed" if bad else ""))
    return int(bool(bad))


def _clear(cache: NeffCache, as_json: bool) -> int:
    removed = 0
    for path in [*cache.files(), *cache.unfinished()]:
        path.unlink(missing_ok=True)
        removed += 1
    print(json.dumps({"removed": removed}) if as_json else f"{removed:,} files removed from {cache.folder}")
    return 0


def _as_data(file: Found) -> dict[str, Any]:
    return {"file": str(file.path), "bytes": file.size, "purpose": file.purpose, "problem": file.problem}
