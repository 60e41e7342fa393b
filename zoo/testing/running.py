"""Runs the checks as tests, in this process, or as jobs in a subprocess."""

from __future__ import annotations

import functools
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from zoo import plugins
from zoo.contract import Architecture, KeyValues
from zoo.errors import PluginError
from zoo.plugins import Plugin
from zoo.plugins.places import described
from zoo.registry import load_reference
from zoo.testing import building, describing, laws, learning, state, weights
from zoo.testing.check import Check, CheckFailure, Inapplicable, check_names, find_check
from zoo.testing.subject import Subject, declared, find_subject

__all__ = ["Result", "all_checks", "parametrize_with_checks", "run_check", "run_checks"]

_CHECKS = (
    Check(describing.light_import, of_plugin=True),
    Check(describing.api_version, of_plugin=True),
    Check(describing.presets, of_plugin=True),
    Check(describing.config_round_trip),
    Check(describing.unknown_keys),
    Check(describing.documented),
    Check(describing.declaration),
    Check(building.parameter_count),
    Check(building.names),
    Check(building.meta_device),
    Check(building.seeded),
    Check(building.declared_tensors),
    Check(building.weights_round_trip),
    Check(building.signature),
    Check(laws.eval_deterministic),
    Check(laws.inputs_unchanged),
    Check(laws.empty_past),
    Check(laws.batch_invariance),
    Check(laws.lengths),
    Check(laws.padding_invariance),
    Check(laws.causality),
    Check(laws.cache),
    Check(laws.dtype_invariance),
    Check(laws.grad_invariance),
    Check(weights.attention_weights),
    Check(building.gradients),
    Check(learning.learning),
    Check(learning.reproducible_training),
    Check(building.half_precision),
    Check(state.global_state),
)
"""The kit's own checks, cheap ones first. Exporters add more: :attr:`zoo.Exporter.checks`."""


def all_checks() -> tuple[Check, ...]:
    """Return all checks: the kit's own, cheap ones first, then those of loaded exporters."""
    functions = [
        function
        for plugin in plugins.active().loaded()
        for exporter in plugin.exporters
        if exporter.checks is not None
        for function in load_reference(exporter.checks, plugin)
    ]
    return (*_CHECKS, *map(Check, functions))


Status = Literal["passed", "failed", "expected failure", "skipped"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Result:
    """Result of one check."""

    check: str
    status: Status
    seconds: float
    expected: str = ""
    """For a failure: what the check expected."""
    happened: str = ""
    """For a failure: what happened instead."""
    reason: str = ""
    """Reason for skipping the check or expecting it to fail."""
    traceback: str = ""
    """Traceback of an unexpected exception."""


def run_check(check: Check, subject: Subject | Plugin, expected_failure: str | None = None) -> Result:
    """Run one check, and return its result whatever it raises, except :class:`KeyboardInterrupt`.

    Args:
        check: one of :func:`all_checks`.
        subject: the model, or the plugin for a check that is ``of_plugin``.
        expected_failure: reason why the check is known to fail. A pass is then a failure.
    """
    started = time.perf_counter()
    facts: dict[str, Any] = {"status": "passed"}
    try:
        check(subject)
    except Inapplicable as reason:
        facts = {"status": "skipped", "reason": str(reason)}
    except CheckFailure as failure:
        facts = {"status": "failed", "expected": failure.expected, "happened": failure.happened}
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        facts = {"status": "failed", "expected": check.summary, "happened": _what(error, subject),
                 "traceback": "".join(traceback.format_exception(error))}  # fmt: skip
    if expected_failure is not None and facts["status"] == "failed":
        facts |= {"status": "expected failure", "reason": expected_failure}
    elif expected_failure is not None and facts["status"] == "passed":
        failure_text = f"the expected failure ({expected_failure})"
        facts = {
            "status": "failed",
            "expected": failure_text,
            "happened": "it passes: remove it from expected_failures",
        }
    return Result(check=check.name, seconds=time.perf_counter() - started, **facts)


_JOINED = "Sizes of tensors must match except in dimension"
"""Part of torch's message when keys are appended to a past of another size."""


def _what(error: BaseException, subject: Subject | Plugin) -> str:
    """Describe an error, with the innermost line of the plugin's own code."""
    plugin = subject if isinstance(subject, Plugin) else subject.plugin
    if _JOINED not in str(error) or isinstance(subject, Plugin):
        return described(error, plugin)
    pasts = [past for graph in subject.graphs for past in graph.pasts if isinstance(past, KeyValues)]
    declared = {f"graphs() declares a past of {past.num_heads} heads of size {past.head_dim}" for past in pasts}
    return described(error, plugin, remedy="; ".join(sorted(declared)))


def run_checks(name: str, *, expected_failures: Mapping[str, str] | None = None) -> list[Result]:
    """Run every check in this process, on a preset or on an architecture's smallest preset.

    Args:
        name: an architecture or a preset.
        expected_failures: reasons by check, in addition to those that the architecture declares.

    Raises:
        UsageError: unknown name or check.
        PluginError: the plugin does not load, or expects the failure of an unknown check.
    """
    subject = find_subject(name)
    reasons = _expected(subject.spec.architecture, expected_failures)
    return [run_check(check, subject, reasons.get(check.name)) for check in all_checks()]


def _expected(architecture: Architecture, more: Mapping[str, str] | None) -> dict[str, str]:
    check_names(all_checks(), more or {}, "expected_failures")
    try:
        check_names(all_checks(), architecture.expected_failures, f"expected_failures of {architecture.name}")
    except Exception as error:
        raise PluginError(str(error)) from error
    return {**architecture.expected_failures, **(more or {})}


def parametrize_with_checks(
    names: Sequence[str], *, expected_failures: Mapping[str, str] | None = None
) -> Callable[[Any], Any]:
    """Return a decorator that runs a test for each name and check; the test calls its argument ``check``.

    Args:
        names: presets, and architectures, which stand for their smallest presets.
        expected_failures: reasons by check, in addition to those that the architectures declare. An expected failure
            that passes is a failure.

    Raises:
        UsageError: unknown name or check.
        PluginError: a plugin does not load, or expects the failure of an unknown check.
    """
    import pytest

    def one(check: Check, find: Callable[[], Subject]) -> None:
        try:
            check(find())
        except Inapplicable as reason:
            pytest.skip(str(reason))

    parameters = []
    for name in names:
        reasons = _expected(declared(name), expected_failures)
        find = functools.cache(functools.partial(find_subject, name))
        for check in all_checks():
            reason = reasons.get(check.name)
            marks = [] if reason is None else [pytest.mark.xfail(strict=True, reason=reason)]
            parameters.append(pytest.param(functools.partial(one, check, find), id=f"{name}-{check.name}", marks=marks))
    decorator: Callable[[Any], Any] = pytest.mark.parametrize("check", parameters)
    return decorator


@functools.cache
def _select(name: str) -> plugins.Plugins:
    """Load the built-in plugins and those of one name; only for use in a subprocess of its own."""
    plugins.select(replace(plugins.Selection.from_environment(), only=frozenset({name})))
    return plugins.active(retry=True)


def _plugin(argument: Mapping[str, Any]) -> Plugin:
    loaded = _select(argument["plugin"])
    return next(item for item in loaded.all if item.key == argument["key"])


_subject = functools.cache(find_subject)


def describe_job(_: str, argument: Mapping[str, Any]) -> dict[str, Any]:
    """List what to check of a plugin, as a job of :mod:`zoo.plugins.isolation`.

    Returns the reason why it did not load (or None), its models, and its expected failures.
    """
    plugin = _plugin(argument)
    if plugin.status != "ok":
        return {"reason": f"{plugin.status}: {plugin.reason}"}
    names = argument["models"] or [f"{plugin.distribution}:{item.name}" for item in plugin.architectures]
    expected: dict[str, str] = {}
    models = []
    for architecture in plugin.architectures:
        expected |= _expected(architecture, None)
    for name in names:
        spec = _subject(name).spec
        if (spec.plugin.name, spec.plugin.distribution) != (plugin.name, plugin.distribution):
            raise PluginError(f"the architecture of {name} is provided by {spec.plugin}")
        models.append(
            {
                "name": name,
                "model": spec.name,
                "expected_failures": dict(spec.architecture.expected_failures),
            }
        )
    return {"reason": None, "models": models, "expected_failures": expected}


def check_job(_: str, argument: Mapping[str, Any]) -> dict[str, Any]:
    """Run one check, as a job of :mod:`zoo.plugins.isolation`. Returns the :class:`Result` as plain data."""
    plugin = _plugin(argument)
    check = find_check(all_checks(), argument["check"])
    subject = plugin if check.of_plugin else _subject(argument["model"])
    result = run_check(check, subject, argument["expected_failure"])
    return {name: getattr(result, name) for name in Result.__slots__}
