"""zoo's conformance kit, one test per check."""

from collections.abc import Callable

from zoo.testing import parametrize_with_checks


@parametrize_with_checks(["my-arch"])
def test_conformance(check: Callable[[], None]) -> None:
    """``zoo plugins check my-arch --explain CHECK`` explains a check."""
    check()
