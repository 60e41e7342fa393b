"""Classes in a column of labels: which there are, and what a label says. Torch-free.

A class is given as its name or its number. Writers of tables turn integers into floats where a value is missing, so 1.0
and "1.0" stand for the class 1.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from decimal import Decimal
from numbers import Real
from typing import Any

import numpy as np

from zoo.classes import ClassifierConfig, default_names
from zoo.contract import Objective
from zoo.errors import ArtifactError, UsageError
from zoo.registry import ModelSpec
from zoo.training.data.rows import RowError
from zoo.training.data.sources import Source

__all__ = ["IGNORED", "class_name", "classes_of", "items_of"]

IGNORED = -100
"""The label of a token without a target, as in ``torch.nn.functional.cross_entropy``."""
_NUMBER = re.compile(r"[+-]?(0|[1-9]\d*)(\.\d*)?([eE][+-]?\d+)?")
_NO_NUMBERS = ("", "nan", "inf", "infinity")
"""Texts that writers put in place of a missing or infinite number, in lower case and without a sign."""
_MANY = 20
"""Number of classes up to which integers may each be the label of less than two rows."""


def items_of(label: Any) -> list[Any]:
    """Return the labels in a list, or the single one."""
    return list(label) if isinstance(label, list | tuple | np.ndarray) else [label]


def class_name(label: Any) -> str:
    """Return a label as text, a number without a fraction of zero.

    >>> class_name(1.0), class_name("1.0"), class_name(1.5), class_name("v1.0")
    ('1', '1', '1.5', 'v1.0')
    """
    if isinstance(label, bool | np.bool_):
        return str(bool(label))
    if isinstance(label, int):
        return str(label)
    if isinstance(label, Real | Decimal) and math.isfinite(label):
        return str(int(float(label))) if float(label).is_integer() else str(label)
    if isinstance(label, str) and _NUMBER.fullmatch(label) and math.isfinite(float(label)):
        return str(int(float(label))) if "." in label and float(label).is_integer() else label
    return str(label)


def classes_of(spec: ModelSpec, values: Mapping[str, Any], objective: Objective, source: Source) -> dict[str, Any]:
    """Return the classes in the data, or the number of outputs of a regression, for a head that is fresh.

    Args:
        spec: the model before training.
        values: configuration values that the user sets; the result is empty if they declare the classes.
        objective: names the columns.
        source: the data.

    Raises:
        ArtifactError: there are fewer than two classes, because a row cannot be read.
        UsageError: the labels are numbers of which nearly all differ, or names that differ in spaces only.
    """
    config = spec.config
    if not isinstance(config, ClassifierConfig) or "label" not in objective.columns:
        return {}
    problem, task = values.get("problem_type"), values.get("task", config.task)
    same = config.task == task and problem in (None, config.problem_type)
    named = config.labels not in ((), default_names(config.num_classes))
    if same and (named or (config.problem_type == "regression" and config.num_classes == 1)):
        return {}
    if {"labels", "num_classes"} & values.keys():
        return {}
    if problem == "regression":
        first = next((row["label"] for row in source.rows if isinstance(row, Mapping) and "label" in row), None)
        return {"num_classes": max(1, len(items_of(first))), "labels": ()}
    counts, several, alike, broken = _count(source)
    if len(counts) < 2 and broken is not None:  # rather than the number of classes
        raise ArtifactError(broken.what, broken.where)
    if not counts:
        return {}
    tags = task == "token-classification"  # which has a label per token
    names = _names(counts, source, regression=not tags)
    several = several and not tags
    problem = problem or ("multi_label_classification" if several else "single_label_classification")
    if problem == "single_label_classification" and len(names) == 1:
        raise UsageError(f"all labels are {names[0]!r}", source.name, "give rows of at least two classes")
    if several and len(names) > 1 and alike:
        what = f"every row has every class ({', '.join(names[:5])}), so there is nothing to learn"
        raise UsageError(what, source.name, "list the classes that apply to a row, not an indicator for each class")
    return {"num_classes": len(names), "labels": names, "problem_type": problem}


def _count(source: Source) -> tuple[Counter[str], bool, bool, RowError | None]:
    """Return the number of labels of each class, whether any row has a list, whether all rows have the same classes,
    and the first broken row."""
    counts: Counter[str] = Counter()
    combinations: set[frozenset[str]] = set()
    several = False
    broken: RowError | None = None
    for row in source.rows:
        if isinstance(row, RowError):
            broken = broken or row
            continue
        label = row.get("label")
        several = several or isinstance(label, list | tuple | np.ndarray)
        named = list(_classes(label))
        counts.update(named)
        if len(combinations) < 2:
            combinations.add(frozenset(named))
    return counts, several, len(combinations) < 2, broken


def _classes(label: Any) -> Iterator[str]:
    """Yield the classes that a label names. Others, such as NaN, are reported when the row becomes an example."""
    for item in items_of(label):
        if isinstance(item, str) and item:
            yield item
        elif isinstance(item, Real | Decimal | np.bool_) and item != IGNORED and math.isfinite(item):
            yield class_name(item)


def _names(found: Counter[str], source: Source, *, regression: bool) -> tuple[str, ...]:
    """Return the names of classes in order. Raises :class:`UsageError` as :func:`classes_of`."""
    names = {name for name in found if name.lower().lstrip("+-") not in _NO_NUMBERS}
    numbers = {name for name in names if _NUMBER.fullmatch(name)}
    if numbers and names & {"True", "False"}:
        what = f"labels are both truth values and numbers, as True and {min(numbers)}"
        raise UsageError(what, source.name, "write all of them in one way")
    if names and numbers == names:
        counts: Counter[str] = Counter()
        for name in names:
            counts[class_name(name)] += found[name]
        _check_few(counts, source, regression=regression)
        return tuple(sorted(counts, key=lambda name: (float(name), name)))
    shown = {name.strip(): name for name in sorted(found)}
    if len(shown) < len(found):
        one = next(name for name in found if shown[name.strip()] != name)
        raise UsageError(f"the classes {one!r} and {shown[one.strip()]!r} differ in spaces only", source.name)
    return tuple(sorted(found, key=lambda name: (not name.isdecimal(), int(name) if name.isdecimal() else 0, name)))


def _check_few(counts: Counter[str], source: Source, *, regression: bool) -> None:
    """Raise :class:`UsageError` if numbers are rather measurements than classes."""
    different, labels = len(counts), counts.total()
    fractions = any(not float(name).is_integer() for name in counts)
    unique = 2 * different > labels
    if (unique and different > _MANY) or (fractions and (unique or different > _MANY)):
        what = f"the labels are {different:,} different numbers in {labels:,} rows, too many for classes"
        remedy = "train a regression with --set problem_type=regression" if regression else "name another column"
        raise UsageError(what, source.name, remedy)
