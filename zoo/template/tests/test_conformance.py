"""The contract of zoo, one test for each of its checks."""

from collections.abc import Callable

from zoo.testing import parametrize_with_checks


@parametrize_with_checks(["my-arch"])
def test_conformance(check: Callable[[], None]) -> None:
    """``zoo plugins check my-arch --explain CHECK`` says what a check is for."""
    check()
