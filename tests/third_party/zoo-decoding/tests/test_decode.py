"""Every strategy continues a text with likelier tokens than chance, and streams the same text."""

import pytest

import zoo
from zoo_export import export_model
from zoo_runtime import load_session


@pytest.fixture(scope="module")
def session(tmp_path_factory):
    folder = zoo.save(zoo.create_model("gpt-tiny"), tmp_path_factory.mktemp("models") / "gpt", tokenizer="bytes")
    export_model(folder)
    with load_session(folder, threads=1) as opened:
        yield opened


@pytest.mark.parametrize("strategy", ["sample", "lookahead", "drafts"])
def test_streamed_text_is_that_of_a_batch(session, strategy):
    options = {"task": "decode", "strategy": strategy, "tokens": 6}
    first, *_ = session.run(["time flies", "x", "an arrow"], **options)
    assert len(first["generated_ids"]) == 6
    assert "".join(session.stream("time flies", **options)) == first["generated"]
