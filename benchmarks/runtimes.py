"""Presets by runtime: which runtimes reproduce the exported graphs of every small preset.

    pip install -c constraints.txt -e ".[openvino,web]" && npm install onnxruntime-web
    python benchmarks/runtimes.py [--runtime RUNTIME]... [--opset 23|18]... [--variant web] [PRESET]...

Each preset, with random biases and norms, is exported in opset 23 and in opset 18, and compared with the model on every
runtime as `zoo verify --runtime` does. With `--variant web`, the export has the profile `web` instead. A number is the
largest error as a share of its limit.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import get_args

import torch

from zoo.errors import ZooError
from zoo.models import create, persist
from zoo.registry import registry
from zoo_export.export import export_model
from zoo_export.trace.make import Options
from zoo_export.verify import Runtime, verify_model

OPSETS = (23, 18)


def make(name: str, folder: Path) -> Path:
    """Build a preset with random biases and norms, as graphs could drop initial ones unnoticed."""
    spec = registry().resolve(name)
    model = create.build(spec, seed=0, dtype="float32")
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter += 0.5 * torch.randn(parameter.shape, generator=generator)
    return persist.save_spec(spec, model, folder / name)


def export(folder: Path, options: Options) -> str:
    """Export a model, and return the reason of a failure, or nothing."""
    try:
        export_model(folder, options=options, force=True)
    except ZooError as error:
        return str(error).removesuffix(f": {folder}")
    return ""


def compare(folder: Path, runtime: Runtime, variant: str) -> float | str:
    """Return the largest error as a share of its limit, or the reason of a failure."""
    try:
        evidence = verify_model(folder, runtime=runtime, variant=variant).evidence
    except ZooError as error:
        return str(error).removesuffix(f": {folder}")
    return max(
        errors["max_abs_error"] / errors["limit"]
        for graph in evidence["graphs"].values()
        for levels in graph["outputs"].values()
        for errors in levels.values()
    )


def rows(names: list[str], exports: list[Options], runtimes: list[Runtime], reasons: dict[str, int]) -> Iterator[str]:
    """Yield a row of the table for each preset, collecting the reasons of failures with their numbers."""
    for name in names:
        cells = []
        with tempfile.TemporaryDirectory() as place:
            folder = make(name, Path(place))
            for options in exports:
                refusal = export(folder, options)
                for runtime in runtimes:
                    found = refusal or compare(folder, runtime, options.variant)
                    number = reasons.setdefault(found, len(reasons) + 1) if isinstance(found, str) else 0
                    cells.append(f"fails ({number})" if isinstance(found, str) else f"{found:.2f}")
        yield f"| {name} | {' | '.join(cells)} |"


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", metavar="PRESET", nargs="*", help="presets; by default every small one")
    small = sorted({*registry().names("*-tiny"), *registry().names("*-test")})
    small = [name for name in small if registry().resolve(name).source is None]  # none published
    parser.add_argument("--runtime", action="append", choices=get_args(Runtime), help="by default every one")
    parser.add_argument("--opset", action="append", type=int, choices=OPSETS, help="by default both")
    parser.add_argument("--variant", choices=["web"], help="by default the plain export")
    given = parser.parse_args()
    names, opsets, runtimes = given.names or small, given.opset or [*OPSETS], given.runtime or [*get_args(Runtime)]
    exports = [Options(profile="web")] if given.variant else [Options(opset=opset) for opset in opsets]
    torch.set_num_threads(1)
    columns = [
        f"{runtime}, {options.variant or f'opset {options.opset}'}" for options in exports for runtime in runtimes
    ]
    print(f"| | {' | '.join(columns)} |\n| --- |{' ---: |' * len(columns)}")
    reasons: dict[str, int] = {}
    for row in rows(names, exports, runtimes, reasons):
        print(row, flush=True)
    for reason, number in reasons.items():
        print(f"\n({number}) {reason}")


if __name__ == "__main__":
    main()
