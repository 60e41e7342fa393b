"""Sphinx configuration. Build with ``sphinx-build -W --keep-going -n -b html docs docs/_build``."""

from __future__ import annotations

import sys
import tomllib
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent / "_ext"))

import zoo

_ROOT = Path(__file__).parents[1]
_REPOSITORY = tomllib.loads((_ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["urls"]["Repository"]

project = "zoo"
author = "The zoo authors"
release = version = zoo.__version__
html_theme = "furo"
html_title = f"zoo {release}"
html_show_copyright = False
html_theme_options = {"source_repository": f"{_REPOSITORY}/", "source_branch": "main", "source_directory": "docs/"}
html_static_path = ["_static"]
html_css_files = ["zoo.css"]
html_math_renderer = "mathml"
extensions = [
    "myst_parser", "sphinx.ext.autodoc", "sphinx_copybutton", "sphinx_design", "zoo_console", "zoo_docs", "zoo_figures",
    "zoo_math",
]  # fmt: skip
copybutton_exclude = ".linenos, .gp, .go"  # prompts, and the output below commands
exclude_patterns = ["_build"]

myst_enable_extensions = ["colon_fence", "dollarmath"]
myst_heading_anchors = 3

autodoc_member_order = "bysource"
autodoc_typehints_format = "short"
autodoc_preserve_defaults = True

# Names from other libraries, and typing-only names.
_LIBRARIES = "abc|collections|contextlib|importlib|numpy|onnxruntime|os|pathlib|torch|types|typing"
_TYPES = (
    r"nn\.Module|Array|Arrays|ChatTemplate|Encoding|Ids|Path|Side|Strategy|(tokenizers\.)?Tokenizer|Provider|Memory"
    r"|dict\[str|Mapping\[str|tuple\[(int|str)|Tensor|zoo\.contract\.tensors\.AttentionInputs"
    r"|Dims|Labels|Weights|ort\.InferenceSession|zoo\.config\.T|zoo\.nn\.recurrent\.S|zoo\.nn\.recording\.Item"
    r"|zoo_runtime\.running\.runner\.Item|zoo\.probe\.pipeline\.Executor|(zoo_runtime\.openvino\.compiled\.)?CompiledGraph"
)
nitpick_ignore_regex = [(r"py:.*", rf"({_LIBRARIES})(\..*)?"), (r"py:.*", _TYPES)]

nitpick_ignore = [("py:class", "Figure")]
