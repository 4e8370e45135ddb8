"""Builds the C++ core against the torch that is installed, and puts `neuron_sim.pth` beside the package.

The `.pth` must lie in site-packages itself, also for an editable install, because only there are such files read.
"""

import base64
import hashlib
import json
import os
import shutil
import sys
import zipfile
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py
from setuptools.command.editable_wheel import editable_wheel

HERE = Path(__file__).parent
PTH = "neuron_sim.pth"


def refuse(message):
    sys.exit(f"\nneuron-sim cannot be built: {message}\n")


try:
    import torch
    from torch.utils.cpp_extension import BuildExtension, CppExtension, get_cxx_compiler
except ModuleNotFoundError as error:
    refuse(
        f"no module named {error.name!r} here. Its C++ core is compiled against the torch that is installed, so "
        "install torch 2.13 or newer first, then run: pip install --no-build-isolation ./neuron-sim (without "
        "--no-build-isolation, pip builds in an empty environment that does not see your torch)."
    )

if shutil.which(get_cxx_compiler()) is None:
    refuse(
        f"no C++ compiler ({get_cxx_compiler()!r}) was found on PATH. Install one (Debian, Ubuntu: apt install g++; "
        "Fedora: dnf install gcc-c++), or name one in the environment variable CXX, and run the installation again."
    )


class BuildPy(build_py):
    """Adds the `.pth` file at the top of what is installed."""

    def run(self):
        super().run()
        if not self.editable_mode:
            self.copy_file(str(HERE / PTH), str(Path(self.build_lib, PTH)))

    def get_outputs(self, include_bytecode=1):
        return [
            *super().get_outputs(include_bytecode),
            *([] if self.editable_mode else [str(Path(self.build_lib, PTH))]),
        ]


class EditableWheel(editable_wheel):
    """Adds the `.pth` file to the wheel that an editable install is made of."""

    def run(self):
        super().run()
        (wheel,) = Path(self.dist_dir).glob("*.whl")
        add_to_wheel(wheel, PTH, (HERE / PTH).read_bytes())


def add_to_wheel(wheel, name, content):
    """Write `content` as `name` into a wheel, and into its RECORD, without which it would not be uninstalled."""
    digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()
    changed = wheel.with_suffix(".new")
    with zipfile.ZipFile(wheel) as old, zipfile.ZipFile(changed, "w", zipfile.ZIP_DEFLATED) as new:
        for item in old.infolist():
            data = old.read(item)
            if item.filename.endswith(".dist-info/RECORD"):
                data += f"{name},sha256={digest},{len(content)}\n".encode()
            new.writestr(item, data)
        new.writestr(name, content)
    changed.replace(wheel)


class BuildCore(BuildExtension):
    """Also notes which torch the core was built for, and its size: boot.py refuses to load anything else."""

    def run(self):
        super().run()
        extension = Path(self.get_ext_fullpath(self.extensions[0].name))
        note = {"torch": torch.__version__, "file": extension.name, "bytes": extension.stat().st_size}
        (extension.parent / "_core_built_for.json").write_text(json.dumps(note) + "\n")


os.environ.setdefault("MAX_JOBS", str(max(1, min(4, (os.cpu_count() or 2) // 2))))
setup(
    ext_modules=[
        CppExtension(
            "neuron_sim._core",
            sorted(str(path.relative_to(HERE)) for path in (HERE / "src/neuron_sim/csrc").glob("*.cpp")),
            extra_compile_args=["-O2", "-g0", "-fvisibility=hidden", "-Wall", "-Wno-interference-size"],
        )
    ],
    cmdclass={"build_ext": BuildCore, "build_py": BuildPy, "editable_wheel": EditableWheel},
)
