"""Chats with an image: the answers of transformers' processor and model, from the command line and from Python."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from tests.exported import CHAT_TEMPLATE, sign_export
from tests.runtime.image_chat_models import NEW, TEMPLATE, generated_about, picture, save_llava
from zoo.checkpoints import export_checkpoint, import_checkpoint
from zoo.errors import ArtifactError
from zoo.tokenizers.chat import rendering
from zoo_runtime import Pair, load_session

Exported = Callable[..., Path]
Zoo = Callable[..., Any]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("llava")


@pytest.fixture(scope="module")
def theirs(folder: Path) -> Any:
    return save_llava(folder / "hub")


@pytest.fixture(scope="module")
def model(folder: Path, theirs: Any) -> Path:
    imported = import_checkpoint(folder / "hub", folder / "ours", verify=True)
    assert imported.spec.architecture.name == "llava"
    assert imported.answers.counts["images to pixels"] == 4
    assert imported.answers.counts["images and prompts to inputs"] == 32
    assert imported.answers.counts["chats with an image to inputs"] == 3
    sign_export(folder / "ours")
    return folder / "ours"


@pytest.fixture(scope="module")
def cat(folder: Path) -> Path:
    return picture(folder)


def messages(image: Any, *more: dict[str, Any]) -> list[dict[str, Any]]:
    """Return a chat about an image, of which the parts are in the other order than in the prompt."""
    return [{"role": "user", "content": [{"type": "text", "text": "w3 w9 w1"}, {"type": "image", **image}]}, *more]


TALK = (
    {"role": "assistant", "content": [{"type": "text", "text": "w5"}]},
    {"role": "user", "content": [{"type": "text", "text": "w7 w7"}]},
)


def test_answers_about_a_picture_equal_those_of_transformers(
    folder: Path, theirs: Any, model: Path, cat: Path, zoo: Zoo
) -> None:
    opened = Image.open(cat).convert("RGB")
    wanted = generated_about(theirs, folder / "hub", messages({"image": opened}))
    done = zoo("run", model, "--image", cat, "w3 w9 w1", "--max-new-tokens", NEW, "--json")
    (row,) = done.json["results"]
    assert (row["tokens"], row["generated_ids"]) == wanted
    assert row["tokens"] == 1 + 16 + 3 + 2  # <s>, the image, the text, and the words of the template
    line = zoo("run", model, "--image", cat, "w3 w9 w1", "--max-new-tokens", NEW, "--no-stream").out.strip()
    assert line == row["generated"].strip()
    url = f"data:image/png;base64,{base64.b64encode(cat.read_bytes()).decode()}"
    with load_session(model, chat=True) as session:
        for value in (
            Pair(str(cat), "w3 w9 w1"),
            messages({"path": str(cat)}),
            messages({"image": opened}),
            messages({"image": cat.read_bytes()}),
            messages({"type": "image_url", "image_url": {"url": url}}),
            messages({"type": "image_url", "image_url": {"url": url.replace("image/png", "application/octet-stream")}}),
            messages({"type": "image_url", "image_url": {"url": url.replace("data:image/png", "DATA:Image/PNG;a=b")}}),
        ):
            assert session.run(value, max_new_tokens=NEW)["generated_ids"] == wanted[1]
        assert "".join(session.stream(Pair(str(cat), "w3 w9 w1"), max_new_tokens=NEW)) == row["generated"]


def test_conversations_and_texts_without_an_image_are_answered_too(
    folder: Path, theirs: Any, model: Path, cat: Path, zoo: Zoo
) -> None:
    opened = Image.open(cat).convert("RGB")
    wanted = generated_about(theirs, folder / "hub", messages({"image": opened}, *TALK))
    first = generated_about(theirs, folder / "hub", messages({"image": opened}))
    assert wanted[1] != first[1]
    talk = json.dumps(messages({"path": str(cat)}, *TALK))
    done = zoo("run", model, "--chat", talk, "w3 w9", "--max-new-tokens", NEW, "--json").json["results"]
    assert (done[0]["tokens"], done[0]["generated_ids"]) == wanted
    assert done[1]["tokens"] == 1 + 2 + 2
    Path("chats.jsonl").write_text(json.dumps({"messages": messages({"path": str(cat)}, *TALK)}) + "\n")
    rows = zoo("run", model, "--chat", "--input", "chats.jsonl", "--max-new-tokens", NEW, "--json").json["results"]
    assert rows[0]["generated_ids"] == wanted[1]


def test_template_that_begins_the_text_itself_gets_no_second_token(tmp_path: Path, cat: Path) -> None:
    """And one in the file of earlier versions of transformers is read."""
    theirs = save_llava(tmp_path / "hub", "{{ bos_token }}" + TEMPLATE)
    written = tmp_path / "hub" / "chat_template.jinja"
    (tmp_path / "hub" / "chat_template.json").write_text(json.dumps({"chat_template": written.read_text()}))
    wanted = generated_about(theirs, tmp_path / "hub", messages({"image": Image.open(cat).convert("RGB")}))
    written.unlink()
    import_checkpoint(tmp_path / "hub", tmp_path / "ours", verify=False)
    sign_export(tmp_path / "ours")
    with load_session(tmp_path / "ours", chat=True) as session:
        found = session.run(Pair(str(cat), "w3 w9 w1"), max_new_tokens=NEW)
    assert (found["tokens"], found["generated_ids"]) == wanted


def test_template_that_loops_where_there_is_an_image(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only transformers' chats have it there: it renders them with the same limits."""
    monkeypatch.setattr(rendering, "_SECONDS", 0.5)  # of 5, to be quick
    loops = "".join(f"{{% for {name} in range(99999) %}}" for name in "abc") + "{% endfor %}" * 3
    found = "{% if messages[0].content[1].image %}" + loops + "{% endif %}"
    save_llava(tmp_path / "hub", found + TEMPLATE)
    answers = import_checkpoint(tmp_path / "hub", tmp_path / "ours", verify=True).answers
    said = "the processor's chat template cannot be rendered (it takes more than 0.5 s of processor time)"
    assert answers.reasons["chats with an image to inputs"] == said


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ([{"type": "image"}], "a part of a message with the type 'image' has no image"),
        ([{"type": "image", "path": "cat.png"}] * 2, "the chat has 2 images, of which only one is supported"),
        ([{"type": "image_url", "image_url": {"url": "https://a.example/cat.png"}}], "images are not fetched"),
        ([{"type": "image_url", "image_url": {"url": "data:image/png;base64,%%"}}], "the image is not base64"),
        ([{"type": "image", "path": "none.png"}], "cannot be read as an image"),
        ([{"type": "text", "text": "<image>"}], "the prompt has a place for an image, but there is none"),
    ],
)
def test_chats_that_cannot_be_read(model: Path, content: list[dict[str, Any]], said: str) -> None:
    with load_session(model, chat=True) as session, pytest.raises(ArtifactError, match=said):
        session.run([{"role": "user", "content": content}])


def test_options_that_exclude_each_other(model: Path, cat: Path, exported_model: Exported, zoo: Zoo) -> None:
    zoo("run", model, "--image", cat).failed(2, "an image needs a text about it", "give the image and a TEXT")
    Path("texts.txt").write_text("w1\n")
    zoo("run", model, "--image", cat, "--input", "texts.txt").failed(2, "an image needs a text about it")
    zoo("run", model, "--image", "none.png", "w1").failed(3, "cannot be read as an image")
    other = exported_model("llama-tiny")
    zoo("run", other, "--image", cat, "w1").failed(3, "the model has no chat template")


def test_model_of_texts_alone_refuses_an_image(folder: Path, cat: Path, exported_model: Exported, zoo: Zoo) -> None:
    export_checkpoint(exported_model("llama-tiny"), folder / "texts")
    (folder / "texts" / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    import_checkpoint(folder / "texts", folder / "chatty", verify=False)
    sign_export(folder / "chatty")
    refused = zoo("run", folder / "chatty", "--image", cat, "hi")
    refused.failed(2, "the task text-generation reads no chats with an image", f"--image {cat}: leave it out")
