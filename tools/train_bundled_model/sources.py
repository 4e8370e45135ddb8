"""Where the pictures and the words come from: a colour emoji font and a table of emoji labels."""

from __future__ import annotations

import shutil
import subprocess
import tarfile
import tempfile
from pathlib import Path

FONT_PACKAGE = "fonts-noto-color-emoji"
FONT_FILE = "NotoColorEmoji.ttf"
# Labels are looked up by their exact English text, which changes between releases.
LABELS_PACKAGE = "emojibase-data@17.0.0"
LABELS_FILE = "en/data.json"


class SourceError(RuntimeError):
    """A source could not be fetched or is not what it should be."""


def collect(folder: Path, font: Path | None, labels: Path | None) -> None:
    """Put the font and the label table into `folder`, fetching whichever has no path given."""
    with tempfile.TemporaryDirectory() as scratch:
        font = font or _fetch_font(Path(scratch))
        labels = labels or _fetch_labels(Path(scratch))
        for source, name in ((font, "font.ttf"), (_labels_file(labels), "labels.json")):
            if not source.is_file():
                raise SourceError(f"no such file: {source}")
            shutil.copyfile(source, folder / name)


def _labels_file(path: Path) -> Path:
    """Accept the unpacked npm package as well as its English table."""
    return path / LABELS_FILE if path.is_dir() else path


def _fetch_font(scratch: Path) -> Path:
    _run(["apt-get", "download", FONT_PACKAGE], scratch, "--font FILE")
    packages = sorted(scratch.glob(f"{FONT_PACKAGE}_*.deb"))
    if not packages:
        raise SourceError(f"apt-get downloaded no {FONT_PACKAGE} package; give --font FILE instead")
    _run(["dpkg-deb", "-x", packages[0].name, "font"], scratch, "--font FILE")
    found = sorted((scratch / "font").rglob(FONT_FILE))
    if not found:
        raise SourceError(f"{packages[0].name} holds no {FONT_FILE}; give --font FILE instead")
    return found[0]


def _fetch_labels(scratch: Path) -> Path:
    _run(["npm", "pack", "--silent", LABELS_PACKAGE], scratch, "--emojibase PATH")
    archives = sorted(scratch.glob("emojibase-data-*.tgz"))
    if not archives:
        raise SourceError(f"npm packed no {LABELS_PACKAGE}; give --emojibase PATH instead")
    with tarfile.open(archives[0]) as archive:
        archive.extractall(scratch / "labels", filter="data")
    return scratch / "labels" / "package"


def _run(command: list[str], folder: Path, instead: str) -> None:
    try:
        subprocess.run(command, cwd=folder, check=True, capture_output=True, text=True)
    except FileNotFoundError as error:
        raise SourceError(f"{command[0]} is not installed; give {instead} instead") from error
    except subprocess.CalledProcessError as error:
        reason = (error.stderr or error.stdout).strip().splitlines()
        raise SourceError(
            f"`{' '.join(command)}` failed: {reason[-1] if reason else error}; give {instead} instead"
        ) from error
