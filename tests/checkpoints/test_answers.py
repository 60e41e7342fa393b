"""An import is compared with the original from text to answer: planted differences are status 4."""

from __future__ import annotations

import importlib.util
import json
import re
import resource
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from tests.checkpoints.test_sentence_transformers import change, write_bert, write_encoder
from tests.exported import CHAT_TEMPLATE
from zoo.artifact import ModelDirectory
from zoo.checkpoints import common, companions, import_checkpoint
from zoo.checkpoints.answers import ComparedAnswers, tokens
from zoo.checkpoints.tokens import CheckpointTokenizer
from zoo.errors import ParityError
from zoo.tokenizers.chat import rendering
from zoo_plugins.bert import hub

Zoo = Callable[..., Any]
Plant = Callable[[pytest.MonkeyPatch], None]


def write_llama(folder: Path, added: int = 3) -> Path:
    """Write a small random Llama with a byte-level tokenizer, added tokens and a chat template."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = {letter: number for number, letter in enumerate(letters)}
    words["he"] = len(words)
    backend = Tokenizer(models.BPE(vocab=words, merges=[("h", "e")]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    names = ["<s>", "<|end|>", *(f"<tool {number}>" for number in range(added - 2))]
    backend.add_special_tokens(names)
    backend.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A $B", special_tokens=[("<s>", backend.token_to_id("<s>"))]
    )
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="<|end|>")
    tokenizer.chat_template = CHAT_TEMPLATE
    tokenizer.save_pretrained(folder)
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=len(words) + added, hidden_size=16, intermediate_size=24, num_hidden_layers=1,
        num_attention_heads=2, num_key_value_heads=2, max_position_embeddings=64,
    )  # fmt: skip
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def write_classifier(folder: Path, task: str = "Sequence") -> Path:
    """Write a BERT that classifies texts or tokens by three labels."""
    write_bert(folder, classes=3)
    if task == "Token":
        config = transformers.BertConfig.from_pretrained(folder)
        transformers.BertForTokenClassification(config).save_pretrained(folder)
    change(folder / "config.json", id2label={"0": "bad", "1": "fair", "2": "good"})
    return folder


def rewritten(edit: Callable[[Tokenizer], None]) -> Plant:
    """Return a fault in the tokenizer that an import writes."""

    def plant(patch: pytest.MonkeyPatch) -> None:
        right = CheckpointTokenizer.write

        def wrong(self: CheckpointTokenizer, target: Path, size: int | None, **options: Any) -> None:
            right(self, target, size, **options)
            tokenizer = Tokenizer.from_file(str(target))
            edit(tokenizer)
            tokenizer.save(str(target))

        patch.setattr(CheckpointTokenizer, "write", wrong)

    return plant


def lose_token(patch: pytest.MonkeyPatch) -> None:
    """An added token is left out."""
    right = CheckpointTokenizer.write

    def wrong(self: CheckpointTokenizer, target: Path, size: int | None, **options: Any) -> None:
        right(self, target, size, **options)
        content = json.loads(target.read_text())
        content["added_tokens"] = [item for item in content["added_tokens"] if item["content"] != "<tool 0>"]
        target.write_text(json.dumps(content))

    patch.setattr(CheckpointTokenizer, "write", wrong)


def copied(name: str, edit: Callable[[str], str]) -> Plant:
    """Return a fault in a file that an import copies."""

    def plant(patch: pytest.MonkeyPatch) -> None:
        right = companions.read_bytes

        def wrong(path: Path) -> bytes:
            content = right(path)
            return edit(content.decode()).encode() if path.name == name else content

        patch.setattr(companions, "read_bytes", wrong)

    return plant


def encoded(**values: Any) -> Plant:
    """Return a fault in the configuration of a sentence encoder."""

    def plant(patch: pytest.MonkeyPatch) -> None:
        right = hub.sentence_encoder
        patch.setattr(hub, "sentence_encoder", lambda checkpoint: right(checkpoint) | values)

    return plant


def swap_labels(patch: pytest.MonkeyPatch) -> None:
    right = common._labels
    patch.setattr(common, "_labels", lambda *args: right(*args)[::-1])


def ignore_activation(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(common, "_problem_type", lambda *args, **kwargs: "single_label_classification")


def assign(name: str, value: Any) -> Callable[[Tokenizer], None]:
    return lambda tokenizer: setattr(tokenizer, name, value)


LLAMA: dict[str, tuple[Plant, str]] = {
    "added token": (lose_token, r"token ids of '<tool 0>' are \[.+\], those of the original \[257, 259\]"),
    "special tokens": (rewritten(assign("post_processor", processors.ByteLevel())), "token ids of ''"),
    "normalizer": (rewritten(assign("normalizer", normalizers.NFC())), r"token ids of .* are \[.+\], those of"),
    "decoder": (rewritten(assign("decoder", decoders.Fuse())), r"token ids \[\d+\] decode to '.*' with"),
    "chat template": (copied("chat_template.jinja", lambda text: text.replace("| trim", "")), "the prompt of the chat"),
}
BERT: dict[str, tuple[Plant, str]] = {
    "labels": (swap_labels, "the classes of 'The rain has stopped by now.' are .*, those of the original "),
    "lower case": (rewritten(assign("normalizer", normalizers.BertNormalizer(lowercase=False))), "token ids of"),
}
ENCODER: dict[str, tuple[Plant, str]] = {
    "pooling": (encoded(pooling="max"), "the vector of .* that of the original"),
    "norm": (encoded(normalize=False), "the vector of .* that of the original"),
    "prompt": (
        copied("config_sentence_transformers.json", lambda text: text.replace("find", "seek")),
        "the vector",
    ),
    "length": (copied("sentence_bert_config.json", lambda text: text.replace("30", "31")), "truncated to 31 tokens"),
}


@pytest.mark.parametrize("fault", [None, *LLAMA])
def test_decoders(tmp_path: Path, zoo: Zoo, fault: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Token ids, decoded texts and prompts of chats."""
    check(zoo, write_llama(tmp_path / "hub"), None if fault is None else LLAMA[fault], monkeypatch)
    if fault is None:
        found = ModelDirectory.open("ours").origin.answers or ""
        assert " texts to token ids, " in found and " token lists to texts, 10 chats to prompts" in found
        assert found in Path("ours/README.md").read_text()


@pytest.mark.parametrize("fault", [None, *BERT])
@pytest.mark.parametrize("task", ["Sequence", "Token"])
def test_classifiers(tmp_path: Path, zoo: Zoo, task: str, fault: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Labels and probabilities of texts, of pairs and of tokens are those of transformers' pipelines."""
    check(zoo, write_classifier(tmp_path / "hub", task), None if fault is None else BERT[fault], monkeypatch)


@pytest.mark.slow_after(2)
@pytest.mark.parametrize("fault", [None, *ENCODER])
def test_sentence_encoders(tmp_path: Path, zoo: Zoo, fault: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pooling, norm, prompts and the maximum length give the vectors of ``SentenceTransformer.encode``."""
    write_encoder(tmp_path, prompts={"query": "find: ", "other": "see: "}, default_prompt_name="query")
    change(tmp_path / "hub/sentence_bert_config.json", max_seq_length=30)
    check(zoo, tmp_path / "hub", None if fault is None else ENCODER[fault], monkeypatch)


@pytest.mark.parametrize("faulty", [False, True])
def test_cross_encoders(tmp_path: Path, zoo: Zoo, faulty: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The activation gives the scores of ``CrossEncoder.predict``."""
    library = pytest.importorskip("sentence_transformers", minversion="6")
    bert = write_bert(tmp_path / "bert", classes=3)
    library.CrossEncoder(str(bert), activation_fn=torch.nn.Sigmoid(), device="cpu").save(str(tmp_path / "hub"))
    check(zoo, tmp_path / "hub", (ignore_activation, "the scores of .* original") if faulty else None, monkeypatch)


def check(zoo: Zoo, source: Path, fault: tuple[Plant, str] | None, patch: pytest.MonkeyPatch) -> None:
    """Import a checkpoint, which must be refused with status 4 and this message if a fault is planted."""
    if fault is None:
        done = zoo("import", source, "-o", "ours", "--verify")
        assert done.status == 0, done.err
        assert "\nanswers equal those of transformers" in done.out
        assert "not compared" not in done.out
        return
    fault[0](patch)
    done = zoo("import", source, "-o", "ours")
    assert done.status == 4, done.err
    with pytest.raises(ParityError, match=fault[1]):
        import_checkpoint(source, "ours")
    assert not Path("ours").exists()


def test_added_tokens_beyond_a_sample_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokens, "MAX_TOKENS", 4)
    found = import_checkpoint(write_llama(tmp_path / "hub", added=12), tmp_path / "ours", verify=True).answers
    assert found.reasons == {"added tokens": "8 of 12, beyond a sample"}
    plain = import_checkpoint(write_llama(tmp_path / "hub", added=4), tmp_path / "other", verify=True).answers
    assert found.counts == plain.counts


@pytest.mark.parametrize(
    "loop",
    [
        "{% for a in range(99999) %}{% for b in range(99999) %}{{ range(9999) | list }}{% endfor %}{% endfor %}",
        "{{ 'a' * 3000000000 }}",
        "{{ 'a' * (messages | length * 3000000000) }}",
        "{{ 5 | round(-10**9) }}",
    ],
)  # fmt: skip
@pytest.mark.parametrize("seen_by", ["both", "the original"])
def test_templates_that_take_the_machine(
    tmp_path: Path, loop: str, seen_by: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither zoo nor transformers renders them without limits: the import says so and goes on."""
    monkeypatch.setattr(rendering, "_SECONDS", 0.5)  # of 5, to be quick
    source = write_llama(tmp_path / "hub")
    if seen_by == "both":
        (source / "chat_template.jinja").write_text(loop)
    else:
        original = tokens.render_original
        monkeypatch.setattr(tokens, "render_original", lambda _, *args, **kwargs: original(loop, *args, **kwargs))
    start = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    (reason,) = import_checkpoint(source, tmp_path / "ours", verify=True).answers.reasons.values()
    assert re.search(r"takes more than (0\.5 s of processor time|512 MiB of memory)", reason), reason
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - start < 10**6  # kilobytes


def test_what_cannot_be_compared_is_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Disabled, without a tokenizer, and without the library."""
    source = write_llama(tmp_path / "hub")
    assert import_checkpoint(source, tmp_path / "a", verify=False).answers.reasons == {"answers": "disabled"}
    (find, known) = importlib.util.find_spec, ComparedAnswers
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "transformers" else find(name))
    found = import_checkpoint(source, tmp_path / "b").answers
    assert found == known(reasons={"texts to token ids": "transformers is not installed"})
    recorded = ModelDirectory.open(tmp_path / "b").origin.answers
    assert recorded == "not compared: texts to token ids (transformers is not installed)"
    monkeypatch.undo()
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        (source / name).unlink()
    assert import_checkpoint(source, tmp_path / "c").answers.reasons == {"answers": "the model has no tokenizer"}
