"""Time of `zoo list` with few and with many plugins installed: `python benchmarks/plugins.py`.

Each plugin is an installed package with an architecture, a configuration with a closed-form cost, and a preset. Both
cases are timed in turns, so that other load on the machine affects them equally.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

FEW, MANY, ROUNDS = 3, 200, 15

MODULE = """from pathlib import Path

import zoo

ZOO_API = 1


@zoo.hookimpl
def zoo_architectures():
    return [
        zoo.Architecture(
            name="many-{number}",
            tasks=("feature-extraction",),
            config="zoo_many_{number}.config:Config",
            model="zoo_many_{number}.model:Model",
            reference="None",
        )
    ]


@zoo.hookimpl
def zoo_presets():
    return [Path(__file__).with_name("presets.toml")]
"""
CONFIG = """from dataclasses import dataclass
from typing import Literal

import zoo


@dataclass(frozen=True, kw_only=True)
class Config(zoo.Config):
    task: Literal["feature-extraction"] = "feature-extraction"
    vocab_size: int = 260
    hidden_size: int = 8

    def graphs(self):
        hidden = zoo.floats("last_hidden_state", "batch", "sequence", self.hidden_size)
        return (zoo.Graph(inputs=(zoo.token_ids("input_ids", self.vocab_size),), outputs=(hidden,)),)

    def cost(self):
        return zoo.cost.embedding(self.vocab_size, self.hidden_size)
"""
MODEL = """from torch import nn


class Model(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.config = c
        self.embedding = nn.Embedding(c.vocab_size, c.hidden_size)

    def forward(self, input_ids):
        return self.embedding(input_ids)
"""
PRESETS = 'schema = 1\n\n[models.many-{number}-tiny]\narch = "many-{number}"\nconfig = {{ hidden_size = 16 }}\n'


def install(folder: Path, count: int) -> Path:
    """Create ``count`` installed plugins in a folder, as pip would."""
    for number in range(count):
        package = folder / f"zoo_many_{number}"
        package.mkdir(parents=True)
        (package / "__init__.py").write_text(MODULE.format(number=number))
        (package / "config.py").write_text(CONFIG)
        (package / "model.py").write_text(MODEL)
        (package / "presets.toml").write_text(PRESETS.format(number=number))
        info = folder / f"zoo_many_{number}-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: zoo-many-{number}\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text(f"[zoo.plugins]\nmany-{number} = zoo_many_{number}\n")
    return folder


def listing(folder: Path, cache: Path) -> float:
    """Return the seconds that one `zoo list` takes."""
    environment = {**os.environ, "PYTHONPATH": str(folder), "XDG_CACHE_HOME": str(cache)}
    environment.pop("ZOO_CACHE", None)
    started = time.perf_counter()
    subprocess.run([Path(sys.executable).with_name("zoo"), "list"], env=environment, check=True, capture_output=True)
    return time.perf_counter() - started


def main() -> None:
    """Print the table."""
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        folders = {count: install(root / str(count), count) for count in (FEW, MANY)}
        first = {count: listing(folder, root / f"cache{count}") for count, folder in folders.items()}
        times: dict[int, list[float]] = {count: [] for count in folders}
        for _ in range(ROUNDS):
            for count, folder in folders.items():
                times[count].append(listing(folder, root / f"cache{count}"))
        middle = {count: statistics.median(seconds) for count, seconds in times.items()}
        print("| plugins | first `zoo list`, ms | each later one, ms | ratio |")
        print("| ---: | ---: | ---: | ---: |")
        for count, seconds in middle.items():
            print(f"| {count} | {1000 * first[count]:.0f} | {1000 * seconds:.0f} | {seconds / middle[FEW]:.2f} |")


if __name__ == "__main__":
    main()
