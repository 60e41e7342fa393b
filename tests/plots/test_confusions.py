"""Confusion matrices: rows are labels, columns answers, as in scikit-learn."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.plots.reading import check_files
from zoo.errors import UsageError
from zoo.plots import confusion

NAMES = ("cat", "$dog$", "a <name> of more than twenty-four characters", "never")


def counted(wanted: np.ndarray, found: np.ndarray, names: tuple[str, ...]) -> list[tuple[str, str, int]]:
    pairs, counts = np.unique(np.stack([wanted, found], 1), axis=0, return_counts=True)
    return [(names[one], names[other], int(count)) for (one, other), count in zip(pairs, counts, strict=True)]


def test_cells_are_shares_of_rows(tmp_path: Path) -> None:
    """A matrix for each variant. Counts are written in the cells that are not empty; rows without targets are white."""
    from sklearn import metrics

    rng = np.random.default_rng(0)
    wanted, *answers = (rng.integers(0, 3, 60) for _ in range(3))
    plot = confusion("model: labels and answers", NAMES, {
        name: counted(wanted, found, NAMES) for name, found in zip(("torch", "int8"), answers, strict=True)
    })  # fmt: skip
    *panels, bar = plot.figure.axes
    assert bar.get_ylabel() == "share of the label's inputs"
    for axes, found, name in zip(panels, answers, ("torch", "int8"), strict=True):
        matrix = metrics.confusion_matrix(wanted, found, labels=range(4))
        shares = np.asarray(axes.images[0].get_array().filled(np.nan))
        np.testing.assert_allclose(shares[:3], matrix[:3] / matrix[:3].sum(1, keepdims=True))
        assert np.isnan(shares[3]).all()
        texts = {
            (int(text.get_position()[1]), int(text.get_position()[0])): int(text.get_text()) for text in axes.texts
        }
        assert texts == {(row, column): matrix[row, column] for row, column in np.argwhere(matrix)}
        assert (axes.get_xlabel(), axes.get_ylabel()) == ("answer (class)", "label (class)")
        assert axes.get_title("left") == name
    shown = check_files(plot, tmp_path)
    assert {"model: labels and answers", "torch", "int8", "cat", "$dog$", "a <name> of more than t…"} <= set(shown)


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("classes", [30, 1, 100])
def test_many_classes(classes: int, tmp_path: Path) -> None:
    """Counts are drawn for up to 20 classes, and names for up to 40."""
    names = tuple(f"class-{number}" for number in range(classes))
    numbers = np.arange(classes).repeat(3)
    plot = confusion("model", names, {"torch": counted(numbers, numbers, names)})
    axes = plot.figure.axes[0]
    assert len(axes.texts) == (classes if classes <= 20 else 0)
    assert ("class-0" in check_files(plot, tmp_path)) == (classes <= 40)
    assert (np.diag(axes.images[0].get_array()) == 1).all()


@pytest.mark.parametrize("classes", [0, 1001])
def test_limits(classes: int) -> None:
    with pytest.raises(UsageError, match=rf"a plot shows 1 to 1,000 classes, got {classes:,}"):
        confusion("model", [str(number) for number in range(classes)], {"torch": []})
