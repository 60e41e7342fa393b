"""Texts of the labels from which zero-shot classification chooses."""

from __future__ import annotations

from collections.abc import Sequence

from zoo.errors import UsageError, task_option

__all__ = ["read_labels", "text_of_label"]


def read_labels(labels: Sequence[str], template: str, task: str) -> tuple[str, ...]:
    """Return labels without spaces around them.

    Args:
        labels: the names of classes.
        template: the text of a label, with ``{}`` for it.
        task: of errors.

    Raises:
        UsageError: there is no label, or an empty one, or the template has more than one place for it, or none.
    """
    where, remedy = f"task {task}", task_option("labels=FIRST,SECOND", "set {}")
    names = tuple(map(str.strip, labels))
    if not any(names):
        raise UsageError("no labels", where, remedy)
    if "" in names:
        raise UsageError(f"label {names.index('') + 1} of {len(names)} is empty", where, remedy)
    if "{}" not in template:
        raise UsageError(f"hypothesis_template {template!r} has no {{}} for the label", where)
    if template.count("{") + template.count("}") > 2:  # which the format strings of Python give other meanings
        raise UsageError(f"hypothesis_template {template!r} has braces beside one {{}} for the label", where)
    return names


def text_of_label(template: str, label: str) -> str:
    """Return the text of a label.

    >>> text_of_label("This is a photo of {}.", "a cat")
    'This is a photo of a cat.'
    """
    return template.replace("{}", label)
