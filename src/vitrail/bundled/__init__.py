"""The model that ships with vitrail: a tiny FLUX.2-klein-architecture checkpoint. NOTICE names its sources."""

from __future__ import annotations

from pathlib import Path


def model_folder() -> Path:
    """Where the bundled model lies, in diffusers' format."""
    return Path(__file__).parent / "model"
