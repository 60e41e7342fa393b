"""Running a model with adapters that are data of its graph."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

import zoo as library
from tests.conftest import Result
from zoo.training import merge_adapter
from zoo_runtime import load_session

Zoo = Callable[..., Result]
IDS = [[5, 6, 7], [9, 8, 7, 6, 5], [20, 30]]


def logits(model: Any, ids: list[int]) -> np.ndarray[Any, Any]:
    import torch

    with torch.inference_mode():
        found: np.ndarray[Any, Any] = model(torch.tensor([ids]))[0].numpy()
    return found


def test_texts_are_those_of_the_merged_models(adapted_model: Path, tmp_path: Path) -> None:
    """One batch with three adapters generates what three models do, each alone."""
    names = [None, "first", "second"]
    with load_session(adapted_model, variant="adapters") as session:
        assert session.adapters == ("first", "second")
        mixed = session.run([IDS[1]] * 3, adapter=names, max_new_tokens=6)
        alone = [session.run(IDS[1], adapter=name, max_new_tokens=6) for name in names]
        beams = session.run([IDS[1]] * 3, adapter=names, max_new_tokens=6, num_beams=3)
    assert [answer["generated_ids"] for answer in mixed] == [answer["generated_ids"] for answer in alone]
    assert len({tuple(answer["generated_ids"]) for answer in mixed}) == 3
    for name, answer, searched in zip(names, mixed, beams, strict=True):
        folder = adapted_model
        if name is not None:
            folder = merge_adapter(adapted_model, adapted_model.parent / name, tmp_path / name)
        from zoo_export.export import export_model

        model = library.load(folder).double()
        ids = list(IDS[1])
        for token in answer["generated_ids"]:
            assert int(logits(model, ids)[-1].argmax()) == token
            ids.append(token)
        if name == "first":
            export_model(folder)
            with load_session(folder) as merged:
                wanted = merged.run(IDS[1], max_new_tokens=6, num_beams=3)
            assert wanted["generated_ids"] == searched["generated_ids"]
