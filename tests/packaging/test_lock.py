"""The lock of a distribution that pip installed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.packaging.conftest import THIRD_PARTY

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("sliding")]


def test_lock_holds_for_what_pip_installs_and_refuses_what_was_changed(run, environment: Path, tmp_path: Path) -> None:
    """A new build of the same sources, without bytecode and for another reason, is the same distribution."""
    assert run("zoo", "plugins", "freeze").stdout == "zoo.lock: zoo-sliding 0.3.0\n"
    (locked,) = json.loads((tmp_path / "zoo.lock").read_text())["distributions"]
    assert (locked["name"], locked["plugins"]) == ("zoo-sliding", {"sliding": "zoo_sliding"})
    for optimisation in ((), ("-O",), ("-OO",)):  # the interpreter writes bytecode, which is then looked at
        code = "import zoo_sliding, zoo_sliding.config, zoo_sliding.model"
        run("python", *optimisation, "-c", code)
        assert "sliding-tiny" in run("zoo", "--locked", "list").stdout
    pip = ["pip", "install", "-q", "--no-deps", "--no-index", "--no-build-isolation", "--force-reinstall"]
    run(*pip, "--no-compile", str(THIRD_PARTY / "zoo-sliding"))
    assert "sliding-tiny" in run("zoo", "--locked", "list").stdout

    site = Path(next((environment / "lib").glob("python*"))) / "site-packages"
    model = site / "zoo_sliding/model.py"
    genuine = model.read_text()
    try:
        model.write_text(genuine + "\n")
        error = run("zoo", "--locked", "list", status=5).stderr
        assert error.startswith("error: zoo-sliding 0.3.0 is altered: ")
        assert f": {model}: pip install --force-reinstall " in error
        assert error.count("\n") == 1
        run("zoo", "plugins", "freeze", "--force", status=5)
        assert "sliding-tiny" not in run("zoo", "--locked", "-P", "no:sliding", "list").stdout
    finally:
        model.write_text(genuine)
    run("zoo", "--locked", "list")
