"""The conformance checks, on AFT-local, which has the most parts. The smallest preset has no biases."""

from zoo.testing import parametrize_with_checks


@parametrize_with_checks(["aft-tiny"])
def test_conformance(check):
    check()
