"""The cache of traces: what a model depends on may change, and a cached trace may be out of date."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import Result
from tests.export.parity.small_plugin import DISTRIBUTION, PLUGIN, PRESETS, source
from tests.precisions import quantize
from zoo import memo
from zoo.artifact import ModelDirectory
from zoo.errors import ArtifactError, ParityError, UsageError, ZooError
from zoo.registry import registry
from zoo.testing import find_check, find_subject, run_check
from zoo.testing.running import all_checks
from zoo_export.trace import cache
from zoo_export.trace.key import key
from zoo_export.trace.make import Options, make_graphs, unlinked_graphs

Zoo = Callable[..., Result]
VARIABLE = "ZOO_SMALL_FACTOR"
FACTORS = {
    "module": "def factor():\n    return 1.0",
    "data": "from pathlib import Path\n\ndef factor():\n    return float(Path('factor.txt').read_text())",
    "environment": f"import os\n\ndef factor():\n    return float(os.environ['{VARIABLE}'])",
}
"""Modules beside the plugin's package, which the architecture does not name."""
USE = (
    ("from torch import nn\n", "from torch import nn\nfrom {module}_helper import factor\n"),
    ("return self.norm(F.gelu(self.second(x))", "return factor() * self.norm(F.gelu(self.second(x))"),
)
RANDOM = "import os, torch\n\ndef factor():\n    return torch.rand(()) if os.environ.get('ZOO_SMALL_FACTOR') else 1.0"


@pytest.fixture
def model(
    install: Callable[..., Path], zoo: Zoo, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Callable[[str], Path]:
    """Build a model whose output is multiplied by a number from a helper module. Return the module's file."""

    def make(helper: str) -> Path:
        monkeypatch.setenv(memo.VARIABLE, str(tmp_path / "cache"))
        folder = install(DISTRIBUTION, PLUGIN, files={**source(*USE), "{module}_helper.py": helper})
        Path("zoo.toml").write_text(PRESETS)
        assert zoo("build", "sound-small", "-o", "model").status == 0
        return folder / "zoo_small_helper.py"

    return make


def forget_modules() -> None:
    for name in [name for name in sys.modules if name.startswith("zoo_small")]:
        del sys.modules[name]


@pytest.mark.slow
@pytest.mark.parametrize("kind", FACTORS)
def test_trace_of_an_earlier_state_is_not_used(
    model: Callable[[str], Path], zoo: Zoo, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """The helper's code is a part of the key; a model that reads more has none."""
    monkeypatch.setenv(VARIABLE, "1")
    Path("factor.txt").write_text("1")
    helper = model(FACTORS[kind])
    assert zoo("export", "model", "--onnx").status == 0
    stored = ModelDirectory.open(Path("model"))
    before = make_graphs(stored)
    helper.write_text(FACTORS[kind].replace("1.0", "1.25"))
    Path("factor.txt").write_text("1.25")
    monkeypatch.setenv(VARIABLE, "1.25")
    forget_modules()
    assert make_graphs(stored) == make_graphs(stored, cached=False) != before
    assert zoo("export", "model", "--onnx", "--force").status == 0
    assert zoo("verify", "model").status == 0


@pytest.mark.slow
def test_laws_are_checked_again(model: Callable[[str], Path], zoo: Zoo, monkeypatch: pytest.MonkeyPatch) -> None:
    """Cached outcomes of an earlier state of the model are not used for the present one."""
    monkeypatch.delenv(VARIABLE, raising=False)
    model(RANDOM)
    assert zoo("export", "model", "--onnx").status == 0
    monkeypatch.setenv(VARIABLE, "1")
    zoo("export", "model", "--onnx", "--force").failed(4, "violates the law eval-deterministic")


@pytest.mark.slow
def test_checks_of_the_kit_ignore_stale_traces(model: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "1")
    model(FACTORS["environment"])
    unlinked_graphs(registry().resolve("sound-small"), "float32", Options())
    monkeypatch.setenv(VARIABLE, "1.25")
    subject = find_subject("sound-small")
    for name in ("onnx-export", "onnx-parity", "onnx-dynamic"):
        result = run_check(find_check(all_checks(), name), subject)
        assert result.status == "passed", result


@pytest.mark.slow
@pytest.mark.parametrize("profile", ["portable", "cpu"])
def test_one_stale_graph_of_several(empty_cache: Path, copy_of: Callable[..., Path], zoo: Zoo, profile: str) -> None:
    """The graph of another configuration stands for the stale one, directly or as the source of a profile's."""
    folder = copy_of("transformer-tiny")
    stored = ModelDirectory.open(folder)
    options = Options.from_dict({"profile": profile})
    other = registry().resolve("transformer-tiny", ("norm_eps=0.1",))
    plain = Options(opset=options.operators, functions=profile == "portable")
    made = unlinked_graphs(stored.spec, "float32", options)
    stale = unlinked_graphs(other, "float32", plain)["decoder"]
    names = {setting: key(stored.spec, "decoder", "float32", setting.facts()) for setting in (plain, options)}
    (empty_cache / names[options]).unlink()
    cache.write(names[plain], stale)
    assert zoo("export", folder, "--onnx", "--profile", profile).status == 0
    assert unlinked_graphs(stored.spec, "float32", options) == made


@pytest.mark.slow
def test_stale_trace_of_a_smaller_precision(empty_cache: Path, copy_of: Callable[..., Path]) -> None:
    folder, options = copy_of("gpt-tiny"), Options(windows=False)  # as half precision is traced
    name = key(registry().resolve("gpt-tiny"), "model", "float16", options.facts())
    other = registry().resolve("gpt-tiny", ("norm_eps=0.1",))
    stale = unlinked_graphs(other, "float16", options)["model"]
    cache.write(name, stale)
    quantize(folder, "float16")
    assert cache.read(name) not in (None, stale)


@pytest.fixture
def empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(memo.VARIABLE, str(tmp_path / "traces"))
    return tmp_path / "traces"


@pytest.mark.parametrize("error", [ParityError("x"), ArtifactError("x"), UsageError("x")])
@pytest.mark.parametrize("known", [True, False])
def test_failure_with_cached_results_is_repeated_once(empty_cache: Path, error: ZooError, known: bool) -> None:
    if known:
        cache.write("number", b"1")
    found: list[Any] = []

    def fail() -> None:
        found.append(cache.read("number"))
        cache.write("number", b"2")
        found.append(cache.read("number"))
        raise error

    with pytest.raises(type(error)):
        cache.repeat_if_stale(fail)
    repeated = known and not isinstance(error, UsageError)
    assert found == [b"1" if known else None, b"2"] + [None, b"2"] * repeated
    assert cache.read("number") == b"2"


def test_copy_of_another_entry_is_ignored(empty_cache: Path) -> None:
    cache.write("one", b"1")
    (empty_cache / "two").write_bytes((empty_cache / "one").read_bytes())
    assert (cache.read("one"), cache.read("two")) == (b"1", None)
