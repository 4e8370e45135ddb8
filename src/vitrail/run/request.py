"""What is asked of one run of ``vitrail generate``: plain data, which travels to the ranks as JSON."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import re
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import UsageError

MOST_STEPS = 1_000_000
MOST_PIXELS = 65_536
LONGEST_NAME = 200  # bytes of a file's name; file systems allow 255, and a temporary one is longer
DTYPES = ("float32", "bfloat16", "float16")
_SLUG = re.compile(r"[^a-z0-9]+")


@dataclass(frozen=True)
class Request:
    """``None`` leaves a value to the model. ``count`` images per prompt have seeds ``seed``, ``seed + 1``, ...

    ``sizes`` (height and width each) make it a job of compiling ahead, ``save_to`` one of saving: no pictures then.
    """

    model: str | None = None
    prompts: tuple[str, ...] = ()
    output: str = "vitrail.png"
    tp: int | None = None
    device: str | None = None
    dtype: str | None = None
    height: int | None = None
    width: int | None = None
    steps: int | None = None
    seed: int = 0
    guidance: float | None = None
    count: int = 1
    as_json: bool = False
    compile: bool = False
    whole: bool = False
    shard: tuple[str, ...] | None = None
    free_text_encoder: bool = False
    sizes: tuple[tuple[int, int], ...] = ()
    save_to: str | None = None
    slices: bool = False

    def check(self) -> Request:
        """Raise `UsageError` for what no model could do."""
        if self.tp is not None and self.tp < 1:
            raise UsageError(f"--tp {self.tp}: the degree must be at least 1")
        if self.dtype is not None and self.dtype not in DTYPES:
            raise UsageError(f"--dtype {self.dtype}: unknown", hint=f"known: {', '.join(DTYPES)}")
        if self.steps is not None and self.steps < 1:
            raise UsageError(f"--steps {self.steps}: at least 1 step is needed")
        if self.steps is not None and self.steps > MOST_STEPS:
            raise UsageError(f"--steps {self.steps}: at most {MOST_STEPS}")
        if self.guidance is not None and not math.isfinite(self.guidance):
            raise UsageError(f"--guidance {self.guidance}: not a number to guide by")
        for what, size in (("height", self.height), ("width", self.width)):
            if size is not None and size > MOST_PIXELS:
                raise UsageError(f"--{what} {size}: at most {MOST_PIXELS}")
        if self.whole and not self.compile:
            raise UsageError("--whole says how to compile", hint="give --compile too")
        if self.count < 1:
            raise UsageError(f"-n {self.count}: at least 1 image is needed")
        if not 0 <= self.seed < 2**63 - self.count:
            raise UsageError(f"--seed {self.seed}: a seed is an integer from 0 below 2^63")
        if any(not prompt.strip() for prompt in self.prompts):
            raise UsageError("a prompt is empty")
        if len(os.fsencode(Path(self.output).name)) > LONGEST_NAME:
            raise UsageError(f"--output: the name is longer than {LONGEST_NAME} bytes")
        for prompt in self.prompts:
            try:
                prompt.encode()
            except UnicodeEncodeError:
                raise UsageError("a prompt is not UTF-8 text") from None
        if not self.output.lower().endswith((".png", "/")) and not (self.output and Path(self.output).is_dir()):
            raise UsageError(
                f"--output {self.output}: pictures are PNG files", hint="give a name ending in .png, or a folder"
            )
        return self

    def pictures(self) -> list[Picture]:
        """Every picture of the run, in order, with the path it will have."""
        jobs = [(prompt, self.seed + index) for prompt in self.prompts for index in range(self.count)]
        target = Path(self.output)
        if self.output.endswith("/") or (self.output and target.is_dir()):
            names = [f"{_SLUG.sub('-', prompt.lower()).strip('-')[:60] or 'picture'}-{seed}" for prompt, seed in jobs]
            unique = [name if names.count(name) == 1 else f"{name}-{place}" for place, name in enumerate(names, 1)]
            return [
                Picture(prompt, seed, str(target / f"{name}.png"))
                for (prompt, seed), name in zip(jobs, unique, strict=True)
            ]
        if len(jobs) == 1:
            return [Picture(*jobs[0], str(target))]
        width = len(str(len(jobs)))
        return [
            Picture(prompt, seed, str(target.with_name(f"{target.stem}-{place:0{width}}.png")))
            for place, (prompt, seed) in enumerate(jobs, 1)
        ]

    def check_output(self) -> None:
        """Raise `UsageError` unless every picture can be written; a folder named with a final slash is made."""
        folder = Path(self.pictures()[0].path).parent
        try:
            if self.output.endswith("/"):
                folder.mkdir(parents=True, exist_ok=True)
            if not folder.is_dir():
                raise UsageError(f"--output {self.output}: there is no folder {folder}")
            descriptor, name = tempfile.mkstemp(dir=folder, prefix=".vitrail-")
            os.close(descriptor)
            os.unlink(name)
        except OSError as error:
            raise UsageError(f"--output {self.output}: {folder} cannot be written to: {error.strerror}") from None

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Request:
        values: dict[str, Any] = json.loads(text)
        sizes = tuple((height, width) for height, width in values["sizes"])
        shard = None if values["shard"] is None else tuple(values["shard"])
        return cls(**{**values, "prompts": tuple(values["prompts"]), "sizes": sizes, "shard": shard})


@dataclass(frozen=True)
class Picture:
    prompt: str
    seed: int
    path: str
