"""Languages of mBART and prefixes of T5: sources and targets equal those of transformers' tokenizers and models."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from tokenizers.processors import TemplateProcessing
from transformers import (
    MBart50Tokenizer,
    MBartConfig,
    MBartForConditionalGeneration,
    MBartTokenizer,
    T5Config,
    T5ForConditionalGeneration,
)

from tests.exported import sign_export
from zoo.checkpoints import export_checkpoint, import_checkpoint
from zoo.errors import UsageError
from zoo_runtime import load_session
from zoo_runtime.running.session import Session

VOCABULARY = [(piece, -3.0) for piece in ("<s>", "<pad>", "</s>", "<unk>", "▁", *"abcdefghijklmnopqrstuvwxyz")]
KINDS = {"mbart-50": MBart50Tokenizer, "mbart": MBartTokenizer}
SIZES = {
    "d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2,
    "decoder_attention_heads": 2, "encoder_ffn_dim": 24, "decoder_ffn_dim": 24, "max_position_embeddings": 32,
}  # fmt: skip
TEXTS = ["a bc", "xyz"]


@pytest.fixture(scope="module", params=KINDS)
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Save a small random model with its tokenizer, whose source language is English."""
    folder = tmp_path_factory.mktemp("languages")
    tokenizer = KINDS[request.param](vocab=VOCABULARY, src_lang="en_XX", tgt_lang="ro_RO")
    start = 2 if request.param == "mbart-50" else None
    model = MBartForConditionalGeneration(
        MBartConfig(vocab_size=len(tokenizer) + 1, decoder_start_token_id=start, **SIZES)
    )
    generator = torch.Generator().manual_seed(0)
    for parameter in model.requires_grad_(False).parameters():
        parameter.copy_(0.5 * torch.randn(parameter.shape, generator=generator))
    model.generation_config.forced_eos_token_id = None
    model.save_pretrained(folder / "hub")
    tokenizer.save_pretrained(folder / "hub")
    import_checkpoint(folder / "hub", folder / "ours")
    sign_export(folder / "ours")
    return folder


@pytest.fixture(scope="module")
def session(checkpoint: Path) -> Iterator[Session]:
    with load_session(checkpoint / "ours") as session:
        yield session


@pytest.mark.slow
@pytest.mark.parametrize(("source", "target"), [("en_XX", "ro_RO"), ("de_DE", "en_XX")])
def test_languages_equal_transformers(checkpoint: Path, session: Session, source: str, target: str) -> None:
    """The tokens of the source and of the target are those of transformers."""
    tokenizer: Any = next(kind for kind in KINDS.values() if _is(checkpoint, kind)).from_pretrained(checkpoint / "hub")
    model = MBartForConditionalGeneration.from_pretrained(checkpoint / "hub").eval()
    tokenizer.src_lang = source
    language = tokenizer.convert_tokens_to_ids(target)
    kind = "forced_bos_token_id" if model.config.decoder_start_token_id is not None else "decoder_start_token_id"
    runner = session.runner(source=source, target=target, max_new_tokens=6)
    for number, text in enumerate(TEXTS, 1):
        given = tokenizer(text, return_tensors="pt")
        assert runner.read(text, number).ids == given["input_ids"][0].tolist()
        wanted = model.generate(**given, **{kind: language}, max_new_tokens=6, num_beams=1, do_sample=False)[0, 1:]
        (found,) = session.run([text], source=source, target=target, max_new_tokens=6)
        assert found["generated_ids"] == wanted.tolist()


def _is(checkpoint: Path, kind: type) -> bool:
    return json.loads((checkpoint / "hub/tokenizer_config.json").read_text())["tokenizer_class"] == kind.__name__


@pytest.mark.slow
def test_truncated_sources_keep_their_language(checkpoint: Path) -> None:
    """Of a source that is longer than the model, as many tokens are kept as transformers' tokenizer keeps."""
    tokenizer: Any = next(kind for kind in KINDS.values() if _is(checkpoint, kind)).from_pretrained(checkpoint / "hub")
    tokenizer.src_lang = "de_DE"
    with load_session(checkpoint / "ours", truncate=32) as session:
        read = session.runner(source="de_DE", target="en_XX").read("a" * 60, 1).ids
    assert read == tokenizer("a" * 60, truncation=True, max_length=32)["input_ids"]


@pytest.mark.slow
def test_unknown_languages_are_refused(session: Session) -> None:
    with pytest.raises(UsageError, match=r"the tokenizer has no language 'ro_R0': .*did you mean 'ro_RO'"):
        session.run(TEXTS, target="ro_R0")
    with pytest.raises(UsageError, match="the tokenizer has no language 'abc'"):
        session.run(TEXTS, source="abc", target="ro_RO")


@pytest.mark.slow
def test_tokenizers_without_a_language_around_texts(checkpoint: Path, tmp_path: Path) -> None:
    """Tokens such as __en__ of M2M100 are put before the source, or after its end in the first mBART."""
    tokens = ["__en__", "__ro__", "</s>", "<unk>", "a", "bc"]
    made = Tokenizer(WordLevel({token: number for number, token in enumerate(tokens)}, unk_token="<unk>"))
    made.pre_tokenizer = Whitespace()
    made.add_special_tokens(tokens[:3])
    made.post_processor = TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 2)])
    made.save(str(tmp_path / "tokenizer.json"))
    with load_session(checkpoint / "ours", tokenizer=tmp_path / "tokenizer.json") as session:
        runner = session.runner(source="en", target="__ro__")
        assert runner.read("a bc", 1).ids == ([0, 4, 5, 2] if _is(checkpoint, MBart50Tokenizer) else [4, 5, 2, 0])
        assert runner.read([4, 5], 1).ids == [4, 5]
    with load_session(checkpoint / "ours", tokenizer=tmp_path / "tokenizer.json", truncate=4) as session:
        runner = session.runner(source="en", target="__ro__")
        read = runner.read("a bc a bc a bc", 1).ids
        assert read == ([0, 4, 5, 2] if _is(checkpoint, MBart50Tokenizer) else [4, 5, 2, 0])
        assert runner.truncated == "1 text truncated to 3 tokens"


@pytest.mark.slow
def test_prefixes_of_tasks(tmp_path: Path) -> None:
    """A prefix is part of the checkpoint; a named one equals the same text before the source."""
    tokenizer = MBart50Tokenizer(vocab=[*VOCABULARY, (":", -3.0)], src_lang="en_XX", tgt_lang="ro_RO")
    tokenizer.save_pretrained(tmp_path / "hub")
    config = T5Config(vocab_size=100, d_model=16, d_kv=8, d_ff=24, num_layers=1, num_heads=2, decoder_start_token_id=0)
    theirs = T5ForConditionalGeneration(config)
    theirs.save_pretrained(tmp_path / "hub")
    file = tmp_path / "hub/config.json"
    tasks = {"summarization": {"prefix": "summarize: ", "num_beams": 4}, "other": {"max_length": 9}}
    file.write_text(json.dumps(json.loads(file.read_text()) | {"task_specific_params": tasks}))
    import_checkpoint(tmp_path / "hub", tmp_path / "ours", verify=False)
    assert json.loads((tmp_path / "ours/task_prefixes.json").read_text()) == {"summarization": "summarize: "}
    sign_export(tmp_path / "ours")
    with load_session(tmp_path / "ours") as session:
        plain = session.run(["summarize: abc"], max_new_tokens=3)
        assert session.run(["abc"], task_prefix="summarization", max_new_tokens=3) == plain
        assert session.run(["abc"], prefix="summarize: ", max_new_tokens=3) == plain
        assert session.run(["abc"], max_new_tokens=3) != plain
        with pytest.raises(UsageError, match=r"no prefix for the task 'summary': .*did you mean 'summarization'"):
            session.run(["abc"], task_prefix="summary")
        with pytest.raises(UsageError, match="exclude each other"):
            session.run(["abc"], task_prefix="summarization", prefix="x")
    export_checkpoint(tmp_path / "ours", tmp_path / "back", verify=False)
    import_checkpoint(tmp_path / "back", tmp_path / "again", verify=False)
    assert (tmp_path / "again/task_prefixes.json").exists()
