"""The conformance kit: checks that every architecture must pass.

In a plugin's own tests, each check becomes one test::

    from zoo.testing import parametrize_with_checks

    @parametrize_with_checks(["my-architecture"])
    def test_conformance(check):
        check()

``zoo plugins check NAME`` runs them from the command line, each in a separate process, and
``zoo plugins check --explain CHECK`` prints what a check expects, why, and how to fix a failure.

Outputs are compared in float64 with random weights, so that zeros hide no difference and rounding causes none.
Importing this package does not import torch.
"""

from zoo.testing.check import Check, CheckFailure, Inapplicable, find_check
from zoo.testing.running import Result, all_checks, parametrize_with_checks, run_check, run_checks
from zoo.testing.subject import Subject, find_subject

__all__ = [
    "Check",
    "CheckFailure",
    "Inapplicable",
    "Result",
    "Subject",
    "all_checks",
    "find_check",
    "find_subject",
    "parametrize_with_checks",
    "run_check",
    "run_checks",
]
