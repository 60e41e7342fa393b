"""The conformance checks."""

from zoo.testing import parametrize_with_checks


@parametrize_with_checks(["mixer"])
def test_conformance(check):
    check()
