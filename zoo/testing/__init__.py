"""The conformance kit: what every architecture is held to, as checks that anybody can run.

In a plugin's own tests, each check is one test::

    from zoo.testing import parametrize_with_checks

    @parametrize_with_checks(["my-architecture"])
    def test_conformance(check):
        check()

``zoo plugins check NAME`` runs them from the command line, each in another process, and
``zoo plugins check --explain CHECK`` says what one expects, why, and how to mend what it finds.

Laws are checked in float64, on random weights, so that nothing is equal because it is 0, and nothing differs by more
than rounding does. Importing this package does not import torch.
"""

from zoo.testing.check import Check, CheckFailure, Inapplicable, find_check
from zoo.testing.running import CHECKS, Result, parametrize_with_checks, run_check, run_checks
from zoo.testing.subject import Subject, find_subject

__all__ = [
    "CHECKS",
    "Check",
    "CheckFailure",
    "Inapplicable",
    "Result",
    "Subject",
    "find_check",
    "find_subject",
    "parametrize_with_checks",
    "run_check",
    "run_checks",
]
