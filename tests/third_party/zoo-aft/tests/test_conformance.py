"""What zoo asks of every architecture, of the form with most parts: the smallest preset has no biases."""

from zoo.testing import parametrize_with_checks


@parametrize_with_checks(["aft-tiny"])
def test_conformance(check):
    check()
