"""Pages of a model directory that somebody else has made: its texts are shown, and none of them runs."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

import zoo
from tests.export.publish.test_web_page import done, loads
from zoo_export import export_model
from zoo_export.trace.make import Options
from zoo_runtime import load_session

Exported = Callable[..., Path]
HOSTILE = (
    "</script><script>pwned = 1</script>",
    "<img src=x onerror='pwned = 2'>",
    '"><svg onload=pwned=3>',
    "\u2028pwned = 4\u2029//",
    "-->]]><!--<script>",
    "`${pwned = 5}`",
    "javascript:pwned=6",
    "{{title}}{{script}}",
    "\u202eright to left\u2066",
    "\x07\x1b[31m\x7f",
)
"""Texts that would run if they were inserted as HTML or JavaScript, and characters that are not shown."""
RAN = "() => typeof pwned !== 'undefined' || document.querySelectorAll('svg[onload], img[onerror]').length > 0"


def written(folder: Path, **values: Any) -> None:
    """Change the description of a model, as its author could."""
    description = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(description | values))


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("name", ['a"><svg onload=pwned=7>', "<img src=x onerror=pwned=8>\u2028"])
def test_labels_names_and_descriptions(
    copy_of: Exported, seal: Any, publish: Any, serve: Any, tab: Any, name: str
) -> None:
    folder = copy_of(
        "rnn-tiny", "--set", f"labels={json.dumps(HOSTILE)}", "--set", f"num_classes={len(HOSTILE)}"
    ).rename(name)
    written(folder, name=HOSTILE[0], description=" ".join(HOSTILE))
    seal(folder)
    assert export_model(folder).passed
    page = loads(tab(serve(publish(folder)).url))
    page.click("#run")
    done(page)
    assert sorted(page.locator("#output th").all_text_contents()) == sorted(HOSTILE)
    assert page.title().split() == name.split()
    assert page.text_content("#facts").startswith(" ".join(HOSTILE))
    assert HOSTILE[0] in page.text_content("#evidence")
    assert not page.evaluate(RAN)
    assert page.locator("script").count() == 1


@pytest.fixture
def speaking(tmp_path: Path) -> Path:
    """Return a decoder whose tokens are hostile, exported."""
    letters = {letter: number for number, letter in enumerate("abcdefghijklmnopqrstuvwxyz ")}
    tokenizer = Tokenizer(models.BPE(vocab=letters, merges=[]))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.Split(" ", "isolated"), decoders.Fuse()
    tokenizer.add_tokens([AddedToken(text, normalized=False) for text in HOSTILE])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    settings = {"max_seq_len": 32, "vocab_size": tokenizer.get_vocab_size(), "eos_token_id": None}
    model = zoo.create_model("gpt-tiny", **settings)
    zoo.save(model, tmp_path / "speaking", tokenizer=str(tmp_path / "tokenizer.json"))
    return tmp_path / "speaking"


def test_tokens(speaking: Path, publish: Any, serve: Any, tab: Any) -> None:
    """As a prompt and as generated text, with every token that is no letter."""
    assert export_model(speaking).passed
    page = loads(tab(serve(publish(speaking)).url))
    page.fill("#text", "".join(HOSTILE))
    page.fill("#max_new_tokens", "12")
    options = {"max_new_tokens": 12, "suppress_tokens": list(range(27)), "no_repeat_ngram_size": 1}
    with load_session(speaking) as session:
        (wanted,) = session.run(["a"], **{**options, "max_new_tokens": len(HOSTILE)})
    assert sorted(wanted["generated_ids"]) == list(range(27, 27 + len(HOSTILE)))
    page.click("#run")
    assert "<script>" in done(page)
    found = page.evaluate(
        """async (options) => {
          const { loadSession } = await import("./zoo.js"), session = await loadSession(), pieces = [];
          for await (const piece of session.stream("a", options)) {
            pieces.push(piece);
            document.getElementById("output").append(piece);
          }
          return pieces.join("");
        }""",
        {**options, "max_new_tokens": len(HOSTILE)},
    )
    assert found == wanted["generated"]
    assert not page.evaluate(RAN)


@pytest.mark.slow
def test_tokens_in_an_attention_page(speaking: Path, tab: Any) -> None:
    """In every view, the saved drawing and the frame of a notebook."""
    export_model(speaking, options=Options(attentions=True))
    folder = speaking.rename(speaking.with_name('a"><svg onload=pwned=7> b'))
    page = zoo.attention_page(folder, "".join(HOSTILE), generate=3)
    view = tab(page.write(folder.with_name("page.html")).as_uri())
    for name in ("overview", "lines", "matrix", "text"):
        view.evaluate("name => { location.hash = `view=${name}&query=2&key=1&layer=1`; }", name)
        view.wait_for_function("name => attentionPage.state.view === name", arg=name)
        view.wait_for_selector("#stage[data-ready=all]")
        assert not view.evaluate(RAN)
    assert view.title() == f"Attention of {folder.name}"
    assert "<script>" in view.inner_text("#stage")
    controls = r"[\x00-\x08\x0b-\x1f\x7f\u2028\u2029\u202a-\u202e\u2066-\u2069]"
    assert not re.search(controls, "".join(view.locator("#stage button bdi").all_text_contents()))
    with view.expect_download() as saved:
        view.click("#save-svg")
    assert "<script" not in Path(saved.value.path()).read_text(encoding="utf-8")
    frame = view.context.new_page()
    frame.set_content(page._repr_html_())
    frame.frame_locator("iframe").locator("#stage[data-ready=all]").wait_for()
    assert not frame.evaluate(RAN)
    assert not frame.frames[1].evaluate(RAN)
