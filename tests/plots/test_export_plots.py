"""Plots of the exporter: errors of modules, errors of precisions by layer, and speed."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file

from tests.exported import signed_export
from tests.plots.reading import artists, check_files, labels, values
from zoo.errors import ArtifactError, UsageError
from zoo.models import persist
from zoo_export import plot_bench, plot_layers, plot_modules
from zoo_export.parity.modules import ModuleError
from zoo_export.parity.plot import draw_modules
from zoo_export.variants.quantized.packing import read_dequantized

__all__ = ["signed_export"]

Exported = Callable[..., Path]


@pytest.mark.slow
def test_errors_of_modules_are_those_of_the_table(exported_model: Exported, zoo: Any, tmp_path: Path) -> None:
    folder = exported_model("gpt-tiny")
    done = zoo("diff", folder, "--json", "--figure", "a.svg")
    modules = done.json["graphs"]["model"]
    plot = plot_modules(folder)
    assert labels(plot.figure.axes[0].yaxis) == [f"{item['path']} ({item['kind']})" for item in modules]
    for key in ("error", "torch_error", "limit"):
        x, y = values(plot, f"{key.partition('_')[0]}-model")
        wanted = np.array([item[key] for item in modules])
        assert np.array_equal(x[wanted > 0], wanted[wanted > 0])
        assert len(set(x[wanted == 0])) <= 1  # one place for zero
        assert np.array_equal(y, range(len(modules)))
    assert {"head (Linear)", "PyTorch in its dtype", "allowed"} <= set(check_files(plot, tmp_path))
    assert zoo("diff", folder, "--all", "--figure", "b.svg").status == 0
    assert Path("b.svg").read_bytes() == Path("1.svg").read_bytes()
    assert len(Path("a.svg").read_bytes()) < len(Path("b.svg").read_bytes())  # without the modules inside blocks


def test_modules_that_diverge_are_marked(tmp_path: Path) -> None:
    sound = ModuleError("a", "Linear", "m:1", 1e-6, 1e-6, 1.0, 5e-6)
    wrong = ModuleError("b", "Linear", "m:1", 1e-3, 1e-6, 1.0, 5e-6)
    plot = draw_modules("model", {"encoder": [sound, wrong], "decoder": [sound], "empty": []})
    x, y = values(plot, "diverges-encoder")
    assert (x.tolist(), y.tolist()) == ([1e-3], [1])
    assert [axes.get_title(loc="left") for axes in plot.figure.axes] == ["encoder", "decoder"]
    assert {"diverges", "b (Linear)"} <= set(check_files(plot, tmp_path))
    with pytest.raises(UsageError, match="no module can be compared"):
        draw_modules("model", {"model": []})


@pytest.mark.slow
def test_errors_of_weights_and_blocks(exported_model: Exported, zoo: Any, tmp_path: Path) -> None:
    """Weights are dequantised from the stored file; outputs are those of a module with these weights."""
    folder = exported_model("gpt-tiny", seed=3)
    done = zoo("quantize", folder, "--dtype", "int4", "--figure", "a.png", "--quiet", "--force")
    assert (done.status, done.out) == (0, "")
    plot = plot_layers(folder, "int4")
    assert Path("a.png").read_bytes() == plot.write("b.png").read_bytes()
    stored = load_file(folder / "model.safetensors")
    rounded = dict(read_dequantized(folder / "model.int4.safetensors"))
    (drawing,) = artists(plot, "weights")
    table, axes = np.asarray(drawing.get_array()), plot.figure.axes[0]
    seen = 0
    for row, kind in enumerate(labels(axes.yaxis)):
        for column, layer in enumerate(labels(axes.xaxis)):
            name = kind.replace("*", layer) if "*" in kind else kind
            if ("*" in kind) == (layer != "none"):
                one, other = stored[name].astype(np.float64), rounded[name].reshape(stored[name].shape)
                assert np.isclose(table[row, column], 100 * np.linalg.norm(other - one) / np.linalg.norm(one))
                seen += 1
            else:
                assert np.isnan(table[row, column])
    assert seen == len(rounded)
    outputs: list[list[torch.Tensor]] = []
    tokens = int(plot.title.split("outputs on ")[1].split()[0])
    text = (Path(zoo_export_folder()) / "sample_text.txt").read_bytes()[:tokens]
    for weights in ({}, rounded):
        model = persist.load(folder)
        with torch.no_grad():
            for name, weight in weights.items():
                parameter = model.get_parameter(name)
                parameter.copy_(torch.from_numpy(weight).view_as(parameter))
            kept: list[torch.Tensor] = []
            for block in model.blocks:
                block.register_forward_hook(lambda _module, _given, output, kept=kept: kept.append(output.double()))
            model(torch.tensor([[*text]]))
        outputs.append(kept)
    _, drawn = values(plot, "blocks-blocks.*")
    exact = [100 * float((b - a).norm() / a.norm()) for a, b in zip(*outputs, strict=True)]
    assert np.allclose(drawn, exact, rtol=0.05)  # the plot also rounds activations, as ONNX Runtime does
    assert {"weights", "outputs of blocks", "relative error in %"} <= set(check_files(plot, tmp_path))


def zoo_export_folder() -> str:
    import zoo_export

    return str(zoo_export.__path__[0])


@pytest.mark.slow
@pytest.mark.parametrize(("name", "precision"), [("gpt-tiny", "float16"), ("t5-tiny", "int8"), ("vit-tiny", "int8")])
def test_every_precision_and_kind_of_model(name: str, precision: Any, exported_copy: Exported, zoo: Any) -> None:
    folder = exported_copy(name)
    assert zoo("quantize", folder, "--dtype", precision, "--figure", "a.svg", "--quiet").status == 0
    plot = plot_layers(folder, precision)
    (drawing,) = artists(plot, "weights")
    errors = np.asarray(drawing.get_array())
    assert 0.01 < np.nanmax(errors) < 2
    assert [line for axes in plot.figure.axes for line in axes.get_lines() if str(line.get_gid()).startswith("blocks-")]


def test_figures_of_precisions_that_cannot_be(
    exported_copy: Exported, zoo: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = exported_copy("gpt-tiny")
    with pytest.raises(ArtifactError, match="not exported for int8"):
        plot_layers(folder, "int8")
    monkeypatch.setattr("zoo_export.export.export_variant", lambda *_, **__: pytest.fail("it was quantised"))
    zoo("quantize", folder, "--dtype", "int8", "--figure", "a.pdf").failed(2, "unsupported figure format: a.pdf")
    Path("a.svg").write_text("mine")
    zoo("quantize", folder, "--dtype", "int8", "--figure", "a.svg").failed(2, "already exists: a.svg")
    monkeypatch.setattr("zoo_export.diff.diff_model", lambda *_, **__: pytest.fail("it was compared"))
    zoo("diff", folder, "--figure", "a.svg").failed(2, "already exists: a.svg")
    zoo("diff", folder, "--force").failed(2, "--force applies to --figure only")


def measured(*lengths: int) -> dict[str, Any]:
    """Return a result of ``zoo bench`` with made-up speeds."""
    cases = [
        {
            "graph": "model", "phase": phase, "batch": batch, "length": length, "waited": None,
            "limit": {"bound": "memory" if phase == "decode" else None, "seconds": 1e-5},
            "backends": {
                name: {"tokens_per_second": 1000.0 * length * batch * factor, "of_limit": 0.25 if factor == 1 else None}
                for name, factor in (("onnxruntime", 1), ("torch", 0.5))
            },
        }
        for length in lengths
        for batch in (1, 8)
        for phase in ("prefill", "decode")
    ]  # fmt: skip
    return {"model": "gpt-tiny", "variant": "int8", "provider": "cpu", "cpu": "a processor", "cases": cases}


def test_speeds_are_those_measured(tmp_path: Path) -> None:
    plot = plot_bench(measured(16, 32, 64))
    assert plot.title == "gpt-tiny (int8): speed on cpu, a processor"
    for phase in ("prefill", "decode"):
        for batch in (1, 8):
            for name, factor in (("onnxruntime", 1), ("torch", 0.5)):
                x, y = values(plot, f"model-{phase}-{batch}-{name}")
                assert x.tolist() == [16, 32, 64]
                assert y.tolist() == [1000.0 * length * batch * factor for length in (16, 32, 64)]
    assert values(plot, "model-decode-8-limit")[1].tolist() == pytest.approx([8e5] * 3)
    assert not list(artists(plot, "model-prefill-1-limit"))
    texts = check_files(plot, tmp_path)
    assert {"tokens per second", "tokens in the call", "tokens before it", "torch, batch 8", "model: decode"} <= set(
        texts
    )


def test_speeds_at_one_length_are_bars(tmp_path: Path) -> None:
    plot = plot_bench(measured(16))
    assert [bar.get_width() for bar in artists(plot, "speed-torch")] == [8000.0, 8000.0, 64000.0, 64000.0]
    assert values(plot, "limit")[0].tolist() == pytest.approx([1e5, 8e5])
    assert {"25%", "machine limit", "model prefill"} <= set(check_files(plot, tmp_path))
    with pytest.raises(UsageError, match="no measurements to plot"):
        plot_bench({})


@pytest.mark.slow
def test_bench_draws_what_it_measures(zoo: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    result = measured(16, 32) | {"dtype": "float32", "threads": None, "left_out": {}}
    monkeypatch.setattr("zoo_export.bench.bench_model", lambda *_, **__: result)
    for option in ("--figure", "--plot"):
        done = zoo("bench", "folder", option, f"{option[2:]}.svg", "--json")
        assert done.json["cases"] == json.loads(json.dumps(result["cases"]))
    assert (
        Path("figure.svg").read_bytes()
        == Path("plot.svg").read_bytes()
        == plot_bench(result).write("c.svg").read_bytes()
    )
