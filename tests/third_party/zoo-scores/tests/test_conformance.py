"""The conformance checks on one of the presets. ``zoo plugins check scores`` checks the plugin itself."""

from zoo.testing import parametrize_with_checks


@parametrize_with_checks(["scores-gpt-tiny"])
def test_conformance(check):
    check()
