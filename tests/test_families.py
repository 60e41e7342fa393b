"""Small configurations of transformers' model types in benchmarks/families.py."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def families() -> ModuleType:
    spec = importlib.util.spec_from_file_location("families", ROOT / "benchmarks" / "families.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["families"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def test_width_of_a_key_is_the_sum_of_its_parts(families: ModuleType) -> None:
    config = families.shrink("mistral4")
    assert config.head_dim == config.qk_nope_head_dim + config.qk_rope_head_dim == 16


def test_tokens_and_experts_are_within_the_small_sizes(families: ModuleType) -> None:
    assert families.shrink("splinter").question_token_id < families.SMALL["vocab_size"]
    assert families.shrink("deepseek_v2").num_experts_per_tok == 2
