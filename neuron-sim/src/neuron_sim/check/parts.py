"""The parts of what is checked: the denoiser, and of a pipeline its text encoders and its VAE's decode."""

import functools
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from neuron_sim.check import vitrail_api
from neuron_sim.check.options import Options
from neuron_sim.errors import ConfigurationError

PIXELS_A_TOKEN = 16  # a VAE that halves three times, and patches of two by two: most of diffusers' transformers
TEXT_TOKENS = 512
# As pipelines call their text encoders, the most particular way first.
_CALLS: tuple[Mapping[str, bool], ...] = (
    {"output_hidden_states": True, "use_cache": False},
    {"output_hidden_states": True},
    {},
)
_AREA = ("image", "tokens", "video")


@dataclass
class Part:
    """One model and how it is called. `candidates` make its inputs, in the order in which they are tried.

    `weights` are the parameters of the largest rank; `note` says what was assumed.
    """

    name: str
    model: nn.Module
    method: str
    candidates: list[Callable[[], dict[str, Any]]]
    parameters: int
    weights: int
    is_sharded: bool = False
    plan: str = ""
    by_blocks: bool = True
    notes: list[str] = field(default_factory=list)


def of(options: Options) -> list[Part]:
    """The parts of the model that was named, sharded as vitrail shards it; what it leaves whole is whole.

    Raises `ConfigurationError` for a model that is not known, a degree that it cannot be sharded over, and a size that
    it does not make.
    """
    subjects = vitrail_api.find(options.model, options.config)
    pipeline = _pipeline(subjects[0].folder, options.model)
    multiple = (vitrail_api.size_multiple(pipeline) if pipeline is not None else None) or PIXELS_A_TOKEN
    for what, value in (("width", options.width), ("height", options.height)):
        if value % multiple:
            raise ConfigurationError(
                f"--size {options.width}x{options.height}: this model makes multiples of {multiple}, and the {what} "
                f"is {value}; the nearest are {value // multiple * multiple or multiple} and "
                f"{-(-value // multiple) * multiple}"
            )
    found = [_denoiser(subject, options, multiple) for subject in subjects]
    if pipeline is not None:
        found += list(_others(pipeline, options))
    return found


def _pipeline(component: Path | None, named: str) -> Path | None:
    """The pipeline's folder, where it was the pipeline that was named and not one of its models."""
    if component is None or component.resolve() == Path(named).resolve():
        return None
    return component.parent if (component.parent / "model_index.json").is_file() else None


def _denoiser(subject: Any, options: Options, multiple: int) -> Part:
    model = subject.model
    parameters = sum(parameter.numel() for parameter in model.parameters())
    part = Part(subject.name, model, "forward", [], parameters, parameters)
    if subject.inputs is not None:
        part.candidates = [functools.partial(dict, given) for given in subject.inputs]
        part.notes.append("inputs: the file's own (vitrail_inputs), whatever --size says")
    elif found := vitrail_api.probes(model):
        part.candidates = list(_probed(model, found, options, multiple))
    else:
        part.candidates = [lambda: vitrail_api.guessed_inputs(subject.model)]
        part.notes.append("inputs: guessed from the forward's parameters, and small, whatever --size says")
        if options.tp > 1:  # guessing runs the forward, which must still be whole
            guessed = vitrail_api.guessed_inputs(model)
            part.candidates = [lambda: guessed]
    if options.tp > 1:
        part.weights, part.plan = vitrail_api.shard(model, subject.inputs, options.tp)
        part.is_sharded = True
    return part


def _probed(
    model: nn.Module, probes: tuple[Any, ...], options: Options, multiple: int
) -> Iterator[Callable[[], dict[str, Any]]]:
    config = dict(getattr(model, "config", {}))

    def unlike(probe: Any) -> int:
        flags = {key: value for key, value in probe.config.items() if isinstance(value, bool | str | None)}
        return sum(config.get(key, value) != value for key, value in flags.items())

    for probe in sorted(probes, key=unlike):
        sizes = _sizes(probe.sizes[0], options, multiple)
        for specification in probe.inputs.values():
            yield functools.partial(vitrail_api.make_inputs, specification, {**config, **sizes})


def _sizes(names: dict[str, int], options: Options, multiple: int) -> dict[str, int]:
    """One picture of the size asked for, as far as the names of the sizes tell; --set has the last word."""
    rows, columns = options.height // multiple, options.width // multiple
    sizes = {}
    for name, small in names.items():
        if name in ("batch", "frames"):
            sizes[name] = 1
        elif name in ("rows", "height", "columns", "width"):
            sizes[name] = rows if name in ("rows", "height") else columns
        elif name in _AREA:
            sizes[name] = rows * columns
        else:
            is_text = any(word in name for word in ("text", "txt", "prompt", "caption", "context"))
            sizes[name] = TEXT_TOKENS if is_text else small
    unknown = options.sizes.keys() - names.keys()
    if unknown and not options.sizes.keys() & names.keys():
        raise ConfigurationError(f"--set {min(unknown)}=…: this model's inputs are sized by {', '.join(sorted(names))}")
    return {**sizes, **{name: size for name, size in options.sizes.items() if name in names}}


def _others(folder: Path, options: Options) -> Iterator[Part]:
    index = json.loads((folder / "model_index.json").read_text("utf-8"))
    for name, entry in index.items():
        if not isinstance(entry, list) or len(entry) != 2 or not (folder / name / "config.json").is_file():
            continue
        library, kind = entry
        if name.startswith("text_encoder") and library == "transformers":
            model = _of_transformers(folder / name, kind)
            yield _part(name, model, "forward", [_text(model, options, how) for how in _CALLS])
        elif name == "vae" and library == "diffusers":
            model = _of_diffusers(folder / name, kind)
            part = _part(name, model, "decode", [_latents(model, options, 4), _latents(model, options, 5)])
            part.by_blocks = False
            yield part


def _part(name: str, model: nn.Module, method: str, candidates: list[Callable[[], dict[str, Any]]]) -> Part:
    parameters = sum(parameter.numel() for parameter in model.parameters())
    return Part(f"{name} ({type(model).__name__})", model, method, candidates, parameters, parameters)


def _of_transformers(folder: Path, kind: str) -> nn.Module:
    import transformers

    cls = getattr(transformers, kind, None)
    if cls is None:
        raise ConfigurationError(f"{folder}: transformers {transformers.__version__} has no class {kind}")
    return _built(folder, kind, lambda: cls(cls.config_class.from_pretrained(folder)))


def _of_diffusers(folder: Path, kind: str) -> nn.Module:
    import diffusers

    cls = getattr(diffusers, kind, None)
    if cls is None:
        raise ConfigurationError(f"{folder}: diffusers {diffusers.__version__} has no class {kind}")
    return _built(folder, kind, lambda: cls.from_config(json.loads((folder / "config.json").read_text("utf-8"))))


def _built(folder: Path, kind: str, build: Callable[[], nn.Module]) -> nn.Module:
    try:
        return vitrail_api.skeleton(build).eval()
    except Exception as error:
        why = " ".join(f"{type(error).__name__}: {error}".split())[:200]
        raise ConfigurationError(f"{kind} cannot be made from {folder / 'config.json'}: {why}") from error


def _text(model: nn.Module, options: Options, how: Mapping[str, bool]) -> Callable[[], dict[str, Any]]:
    config = getattr(model, "config", None)
    longest = getattr(config, "max_position_embeddings", None) or TEXT_TOKENS
    tokens = min(options.sizes.get("text", TEXT_TOKENS), int(longest))

    def make() -> dict[str, Any]:
        ids = torch.empty(1, tokens, dtype=torch.int64, device="meta")
        return {"input_ids": ids, "attention_mask": torch.empty_like(ids), **how}

    return make


def _latents(model: nn.Module, options: Options, dimensions: int) -> Callable[[], dict[str, Any]]:
    config = dict(getattr(model, "config", {}))
    channels = config.get("latent_channels") or config.get("z_dim") or 4
    halved = 2 ** (len(config.get("block_out_channels") or config.get("dim_mult") or (0,) * 4) - 1)
    shape = (1, channels, *(1,) * (dimensions - 4), options.height // halved, options.width // halved)
    return lambda: {"z": torch.empty(shape, device="meta")}
