"""What zoo asks of every model, of a preset of ours. ``zoo plugins check scores`` looks at the plugin itself."""

from zoo.testing import parametrize_with_checks


@parametrize_with_checks(["scores-gpt-tiny"])
def test_conformance(check):
    check()
