"""The key of a cached trace covers the code that a model can reach."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from zoo_export.trace.reachable import code_digest

MODEL = {
    "at the top": "from reach_lib.post import post\n\ndef forward(x):\n    return post(x)\n",
    "inside forward": "def forward(x):\n    from reach_lib import post\n    return post.post(x)\n",
    "as a module": "import reach_lib.post as p\n\ndef forward(x):\n    return p.post(x)\n",
    "through another module": "import reach_between\n\ndef forward(x):\n    return reach_between.post(x)\n",
    "relative": "def forward(x):\n    from reach_lib.relative import post\n    return post(x)\n",
}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder on the path with a package, and a module that imports it."""
    (tmp_path / "reach_lib").mkdir()
    (tmp_path / "reach_lib/__init__.py").write_text("")
    (tmp_path / "reach_lib/post.py").write_text("def post(x):\n    return x\n")
    (tmp_path / "reach_lib/relative.py").write_text("from .post import post\n")
    (tmp_path / "reach_between.py").write_text("from reach_lib.post import post\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    yield tmp_path
    for name in [name for name in sys.modules if name.startswith("reach_")]:
        del sys.modules[name]


def digest(folder: Path, code: str) -> str | None:
    (folder / "reach_model.py").write_text(code)
    return code_digest(["reach_model"])


@pytest.mark.parametrize("code", MODEL.values(), ids=MODEL)
def test_digest_changes_with_imported_code(folder: Path, code: str) -> None:
    before = digest(folder, code)
    assert before is not None
    assert before == digest(folder, code)
    (folder / "reach_lib/post.py").write_text("def post(x):\n    return x + 0.5\n")
    assert digest(folder, code) not in (before, None)


def test_package_with_paths_in_place_of_texts(folder: Path) -> None:
    """transformers gives its own specification a path."""
    import reach_lib

    reach_lib.__spec__.submodule_search_locations = [folder / "reach_lib"]
    before = digest(folder, MODEL["at the top"])
    (folder / "reach_lib/post.py").write_text("def post(x):\n    return x + 0.5\n")
    assert digest(folder, MODEL["at the top"]) not in (before, None)


def test_parents_count(folder: Path) -> None:
    before = digest(folder, MODEL["at the top"])
    (folder / "reach_lib/__init__.py").write_text("import torch\ntorch.relu = torch.tanh\n")
    assert digest(folder, MODEL["at the top"]) != before


def test_functions_of_other_modules_count(folder: Path) -> None:
    """One module has replaced a function of another, which does not import it."""
    (folder / "reach_patch.py").write_text("def post(x):\n    return 2 * x\n")
    code = MODEL["at the top"]
    before = digest(folder, code)
    import reach_lib.post
    import reach_patch

    reach_lib.post.post = reach_patch.post
    patched = digest(folder, code)
    (folder / "reach_patch.py").write_text("def post(x):\n    return 3 * x\n")
    assert len({before, patched, digest(folder, code)}) == 3


@pytest.mark.parametrize(
    "code",
    [
        "exec('def forward(x): return x')",
        "import importlib\nhelper = importlib.import_module('json')",
        "from importlib import import_module as imported\nhelper = imported('json')",
        "import os\nfactor = os.environ.get('FACTOR')",
        "from os import getenv as value",
        "import numpy as np\ntable = np.load('table.npy')",
        "from pathlib import Path\ntable = Path('table').read_text()",
        "table = open('table')",
        "import __main__",
        "import reach_made",
        "import torch\ntorch.ops.load_library('x.so')",
        "import os.path as osp\nfactor = 1.5 if osp.exists('flag') else 1.0",
        "import os\nfactor = len(os.listdir('.'))",
        "from glob import glob as found",
        "from pathlib import Path\nfactor = 1.5 if Path('flag').exists() else 1.0",
        "from pathlib import Path\nfactor = Path('flag').stat().st_size",
        "from configparser import ConfigParser",
        "import pandas as pd\ntable = pd.read_csv('table.csv')",
        "import zipfile",
        "import platform",
        "import sys\nfactor = len(sys.argv)",
        "import time",
    ],
)
def test_code_that_reads_more_has_no_digest(folder: Path, code: str) -> None:
    sys.modules["reach_made"] = ModuleType("reach_made")
    assert digest(folder, code) is None
    (folder / "reach_lib/post.py").write_text(code)
    assert digest(folder, MODEL["at the top"]) is None


@pytest.mark.parametrize("kind", ["main", "generated"])
def test_replaced_functions_have_no_digest(folder: Path, kind: str) -> None:
    """A script, or generated code, has replaced a function."""
    assert digest(folder, MODEL["at the top"]) is not None
    import reach_lib.post

    scope: dict[str, object] = {"__name__": "__main__" if kind == "main" else "reach_lib.post"}
    exec(compile("def post(x): return 2 * x", __file__ if kind == "main" else "<string>", "exec"), scope)
    vars(reach_lib.post)["post"] = scope["post"]
    assert digest(folder, MODEL["at the top"]) is None


def test_versioned_packages_and_missing_ones_are_left_out(folder: Path) -> None:
    code = "import torch, numpy\ntry:\n    import reach_missing\nexcept ImportError:\n    pass\n"
    assert digest(folder, code) is not None
