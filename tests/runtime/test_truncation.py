"""Truncation of texts: to the tokens of transformers, by the file of sentence-transformers, and never silently."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from transformers import AutoModel, BertConfig, BertModel, BertTokenizerFast

from tests.exported import sign_export
from zoo import UsageError, load_tokenizer
from zoo.artifact.provenance import Origin
from zoo.checkpoints.importing import import_checkpoint
from zoo.errors import ZooWarning
from zoo.tokenizers.long_texts.truncation import text_limit
from zoo_runtime import Pair, load_session
from zoo_runtime.running.text_runner import TextRunner

Exported = Callable[..., Path]
Zoo = Callable[..., Any]
POSITIONS = 32
WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *"abcdefgh"]
LONG = "a b c d e f g h " * 4
LIMIT = 7


def saved(folder: Path, **stated: Any) -> Path:
    """Write a sentence encoder with 24 positions in the files of sentence-transformers."""
    folder.mkdir()
    (folder / "words.txt").write_text("\n".join(WORDS))
    BertTokenizerFast(str(folder / "words.txt"), model_max_length=20).save_pretrained(folder)
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=len(WORDS), hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=48,
        max_position_embeddings=24,
    )  # fmt: skip
    BertModel(config, add_pooling_layer=False).save_pretrained(folder)
    types = [{"type": f"sentence_transformers.models.{name}"} for name in ("Transformer", "Pooling")]
    (folder / "modules.json").write_text(json.dumps(types))
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "config.json").write_text(json.dumps({"pooling_mode_mean_tokens": True}))
    (folder / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": LIMIT, **stated}))
    return folder


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved(tmp_path_factory.mktemp("sentence") / "hub")


@pytest.fixture(scope="module")
def encoder(hub: Path) -> Path:
    import_checkpoint(hub, hub.parent / "ours")
    sign_export(hub.parent / "ours")
    return hub.parent / "ours"


def pooled(hub: Path, texts: Sequence[str], length: int) -> np.ndarray[Any, Any]:
    """Return transformers' mean hidden states of truncated texts."""
    tokenizer, model = BertTokenizerFast.from_pretrained(hub), AutoModel.from_pretrained(hub, add_pooling_layer=False)
    vectors = []
    for text in texts:
        fed = tokenizer(text, truncation=True, max_length=length, return_tensors="pt")
        with torch.inference_mode():
            vectors.append(model(**fed).last_hidden_state[0].mean(0).numpy())
    return np.stack(vectors)


def test_sentence_encoder_truncates_by_default(hub: Path, encoder: Path, zoo: Zoo) -> None:
    texts = ["a b", LONG, "h " * LIMIT]
    done = zoo("run", encoder, *texts, "--json")
    assert done.status == 0
    assert [row["tokens"] for row in done.json["results"]] == [4, LIMIT, LIMIT]
    found = np.array([row["embedding"] for row in done.json["results"]])
    np.testing.assert_allclose(found, pooled(hub, texts, LIMIT), rtol=0, atol=1e-5)
    assert done.err == f"warning: 2 texts truncated to {LIMIT} tokens: {encoder}\n"
    with load_session(encoder, truncate=False) as session:
        whole = session.run("h " * LIMIT)["embedding"]
    assert abs(whole - found[2]).max() > 1e-4
    zoo("run", encoder, LONG, "--no-truncate").failed(3, "34 tokens exceed the model's 24 positions", "--truncate")


@pytest.mark.filterwarnings("ignore:.* truncated to")
def test_arrays_of_the_tokenizer_are_those_of_a_run(encoder: Path) -> None:
    texts = ["a b", LONG, "h"]
    tokenizer = load_tokenizer(encoder)
    with load_session(encoder) as session:
        found = session.execute(session.graphs[0], tokenizer(texts))["sentence_embedding"]
        wanted = [row["embedding"] for row in session.run(texts, batch_size=3)]
    np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-6)


@pytest.mark.parametrize(("stated", "tokens"), [(None, 20), (1000, 24)])
def test_stated_length_is_limited(tmp_path: Path, stated: int | None, tokens: int) -> None:
    """Without a length of its own, a sentence encoder has its tokenizer's, and at most its positions."""
    import_checkpoint(saved(tmp_path / "hub", max_seq_length=stated), tmp_path / "ours")
    sign_export(tmp_path / "ours")
    with load_session(tmp_path / "ours") as session, pytest.warns(ZooWarning, match=f"1 text truncated to {tokens} "):
        assert session.run(LONG)["tokens"] == tokens


def test_bad_length_is_an_error(tmp_path: Path, zoo: Zoo) -> None:
    import_checkpoint(saved(tmp_path / "hub", max_seq_length="all"), tmp_path / "ours", verify=False)
    sign_export(tmp_path / "ours")
    error = "max_seq_length must be a positive integer, got 'all'"
    zoo("run", tmp_path / "ours", "a").failed(3, error, "sentence_bert_config.json")


@pytest.mark.parametrize("value", [LONG, Pair("a b", LONG), Pair(LONG, "a b c"), Pair(LONG, LONG)])
def test_tokens_equal_those_of_transformers(hub: Path, encoder: Path, value: str | Pair, monkeypatch: Any) -> None:
    texts = (value,) if isinstance(value, str) else tuple(value)
    wanted = BertTokenizerFast.from_pretrained(hub)(*texts, truncation=True, max_length=LIMIT)
    with load_session(encoder, truncate=True) as session:
        runner: Any = session.runner()
        monkeypatch.setattr(type(runner), "takes_pairs", True)
        item = runner.read(value, 1)
    assert (item.ids, list(item.types)) == (wanted["input_ids"], wanted["token_type_ids"])


def test_prompts_lose_their_first_tokens(exported_model: Exported, zoo: Zoo) -> None:
    """As in the pipeline of transformers with handle_long_generation="hole"."""
    gpt = exported_model("gpt-tiny")
    text = "".join(map(chr, range(48, 48 + POSITIONS + 8)))
    options = ("--max-new-tokens", "6", "--json")
    zoo("run", gpt, text).failed(3, f"{len(text)} tokens exceed the model's {POSITIONS} positions")
    cut = zoo("run", gpt, text, *options, "--truncate")
    wanted = zoo("run", gpt, text[-(POSITIONS - 6) :], *options)
    same = ("tokens", "generated_ids")
    assert [cut.json["results"][0][key] for key in same] == [wanted.json["results"][0][key] for key in same]
    assert cut.err == f"warning: 1 text truncated to {POSITIONS - 6} tokens: {gpt}\n"
    assert wanted.err == ""
    zoo("run", gpt, text, "--max-new-tokens", POSITIONS, "--truncate").failed(2, "32 new tokens leave no room")
    with load_session(gpt, truncate=True) as session:
        with pytest.warns(ZooWarning, match=f"1 text truncated to {POSITIONS - 6} tokens"):
            pieces = session.stream(text, max_new_tokens=6)
        assert "".join(pieces) == cut.json["results"][0]["generated"]


def test_model_without_a_length(tmp_path: Path) -> None:
    spec = SimpleNamespace(task="fill-mask", config=object())
    unlimited = SimpleNamespace(path=tmp_path, files={}, spec=spec, origin=Origin())
    assert text_limit(cast(Any, unlimited), None) is None
    with pytest.raises(UsageError, match="the model has no maximum length to truncate to"):
        text_limit(cast(Any, unlimited), True)


def test_room_for_special_tokens(encoder: Path, monkeypatch: Any, zoo: Zoo) -> None:
    monkeypatch.setattr(TextRunner, "text_limit", lambda self: 1)
    zoo("run", encoder, "a").failed(3, "special tokens leave no room for a text of 1 tokens: input 1", "--no-special")
