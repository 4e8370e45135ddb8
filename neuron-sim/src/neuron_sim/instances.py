"""The machines that can be simulated: chips, cores, memory. Data in `instances.json`."""

import json
import re
from collections.abc import Collection
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

from neuron_sim.errors import ConfigurationError
from neuron_sim.topology import Degrees, Torus


@dataclass(frozen=True)
class Instance:
    """An instance type. `logical_nc_config` is the family's default number of physical cores in a logical one."""

    name: str
    family: str
    chips: int
    cores_per_chip: int
    logical_nc_config: int
    hbm_bytes_per_chip: int
    host_bytes: int | None
    degrees: Degrees | None = None
    torus: Torus | None = None

    def logical_cores(self, logical_nc_config: int) -> int:
        """How many logical cores the whole machine has."""
        return self.chips * self.cores_per_chip // logical_nc_config

    def bytes_per_core(self, logical_nc_config: int) -> int:
        """A logical core's share of its chip's memory."""
        return self.hbm_bytes_per_chip * logical_nc_config // self.cores_per_chip

    def group_problem(self, cores: Collection[int], logical_nc_config: int) -> str | None:
        """Why these logical cores cannot form a process group, or None. One core always can."""
        if len(cores) <= 1:
            return None
        if self.degrees is not None and (problem := self.degrees.problem(len(cores))):
            return problem
        if self.torus is not None:
            return self.torus.problem(cores, self.cores_per_chip // logical_nc_config)
        return None


@cache
def _data() -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads(files("neuron_sim").joinpath("instances.json").read_text("utf-8"))
    return loaded


def names() -> list[str]:
    """The instance types known by name."""
    return sorted(_data()["instances"])


def instance(name: str) -> Instance:
    """The instance type of that name, or `family:chips` for a machine of so many chips ("trn3:4").

    Raises `ConfigurationError`, which lists the names known, for any other.
    """
    families = _data()["families"]
    known = _data()["instances"].get(name)
    if known is None:
        match = re.fullmatch(r"([a-z0-9]+):([1-9][0-9]*)", name)
        if match is None or match[1] not in families:
            raise ConfigurationError(
                f"unknown instance type {name!r} (NEURON_SIM_INSTANCE); known: {', '.join(names())}; "
                f"or family:chips with a family of {', '.join(families)}"
            )
        known = {"family": match[1], "chips": int(match[2])}
    family = families[known["family"]]
    host = known.get("host_gib")
    return Instance(
        name=name,
        family=known["family"],
        chips=known["chips"],
        cores_per_chip=family["cores_per_chip"],
        logical_nc_config=family["logical_nc_config"],
        hbm_bytes_per_chip=family["hbm_gib_per_chip"] << 30,
        host_bytes=None if host is None else host << 30,
        degrees=Degrees(tuple(family["degrees"]), family["degree_multiple"]) if "degrees" in family else None,
        torus=Torus(*known["torus"]) if "torus" in known else None,
    )
