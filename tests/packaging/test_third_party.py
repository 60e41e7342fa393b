"""Third-party distributions work from installation to results, without changes to zoo."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tests.conftest import THIRD_PARTY
from tests.export.test_g2p import pronounce, random_arrays

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("sliding")]


def test_plugin_is_listed_with_its_distribution(run) -> None:
    plugins = json.loads(run("zoo", "plugins", "list", "--json").stdout)["plugins"]
    found = next(plugin for plugin in plugins if plugin["name"] == "sliding")
    assert (found["distribution"], found["version"], found["status"]) == ("zoo-sliding", "0.3.0", "ok")
    assert found["provides"]["architectures"] == ["sliding"]
    assert found["provides"]["presets"] == ["sliding-tiny"]


def test_describing_does_not_import_its_model(run) -> None:
    code = "import sys, zoo.cli; zoo.cli.main(['list']); print('torch' in sys.modules, file=sys.stderr)"
    done = run("python", "-c", code)
    assert "sliding-tiny" in done.stdout
    assert done.stderr.strip() == "False"


def test_build_export_verify_and_run(run, tmp_path: Path) -> None:
    run("zoo", "export", "sliding-tiny", "--onnx", "--set", "window=5")
    assert json.loads((tmp_path / "sliding-tiny/parity.json").read_text())["verified"] is True
    assert json.loads(run("zoo", "verify", "sliding-tiny", "--json").stdout)["verified"] is True
    results = json.loads(run("zoo", "run", "sliding-tiny", "abc", "--max-new-tokens", "4", "--json").stdout)
    assert len(results["results"][0]["generated_ids"]) == 4


def test_save_and_load_give_the_same_logits(run) -> None:
    run(
        "python",
        "-c",
        """
import torch, zoo
model = zoo.create_model("sliding-tiny", seed=3)
zoo.save(model, "saved")
again = zoo.load("saved")
ids = torch.randint(0, 260, (2, 9))
assert torch.equal(model(ids), again(ids))
assert again.head.weight is again.embedding.weight
""",
    )


def test_model_without_its_plugin_names_it(run) -> None:
    run("zoo", "build", "sliding-tiny")
    for arguments in (["--no-plugins"], ["--disable-plugin", "sliding"]):
        failed = run("zoo", *arguments, "export", "./sliding-tiny", "--onnx", status=5)
        assert "'zoo-sliding', version '0.3.0'" in failed.stderr
        assert len(failed.stderr.strip().splitlines()) == 1


def test_third_party_model_exports_to_a_third_party_format(run, pt2, tmp_path: Path) -> None:
    run("zoo", "export", "sliding-tiny", "--format", "pt2", "--set", "max_seq_len=32")
    evidence = json.loads((tmp_path / "sliding-tiny/evidence.pt2.json").read_text())
    assert (evidence["verified"], [*evidence["files"]]) == (True, ["model.pt2"])
    assert evidence["exporter"] == {"name": "pt2", "distribution": "zoo-pt2", "version": "0.2.0"}
    assert json.loads(run("zoo", "verify", "sliding-tiny", "--format", "pt2", "--json").stdout)["verified"] is True


def test_third_party_format_model_and_task_work(run, g2p, tmp_path: Path) -> None:
    plugins = json.loads(run("zoo", "plugins", "list", "--json").stdout)["plugins"]
    provides = next(plugin["provides"] for plugin in plugins if plugin["name"] == "g2p")
    assert (provides["importers"], provides["tasks"]) == (["g2p-en"], ["grapheme-to-phoneme"])
    np.savez(tmp_path / "random.npz", **random_arrays())
    run("zoo", "import", "random.npz", "--model-type", "g2p-en", "-o", "g2p")
    run("zoo", "export", "g2p", "--onnx")
    symbols = json.loads((tmp_path / "g2p/config.json").read_text())["config"]["phonemes"]
    spoken = [symbols[number] for number in pronounce(random_arrays(), "plugin")[0]]
    assert run("zoo", "run", "g2p", "plugin").stdout.split() == spoken


def test_own_tests_of_third_parties_pass(run, described: str, tmp_path: Path) -> None:
    shutil.copytree(THIRD_PARTY / f"zoo-{described}" / "tests", tmp_path / "tests")
    done = run("python", "-m", "pytest", "-q", "tests")
    assert " passed" in done.stdout.splitlines()[-1]


def test_commands_of_third_party_readmes_work(run, described: str, tmp_path: Path) -> None:
    """Every command, except those that need other files."""
    lines = (THIRD_PARTY / f"zoo-{described}" / "README.md").read_text().split("```")[1].splitlines()[1:]
    commands = [line.partition("#")[0].strip() for line in lines]
    commands = [command for command in commands if "pip install" not in command and "path/to" not in command]
    Image.fromarray(np.random.default_rng(0).integers(0, 256, (40, 50, 3), np.uint8)).save(tmp_path / "photo.png")
    assert commands
    for command in commands:
        run("bash", "-c", command)


def test_third_party_command_works(run, scores: None) -> None:
    assert "rank  Order texts by their perplexity." in run("zoo", "--help").stdout
    code = "import sys, zoo.cli; zoo.cli.main(['rank', '--help']); print('torch' in sys.modules, file=sys.stderr)"
    done = run("python", "-c", code)
    assert "Order texts by their perplexity under" in done.stdout
    assert done.stderr.strip() == "False"
