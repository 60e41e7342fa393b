"""Text models of transformers from checkpoint to answer: exports answer as the pipelines of the same files."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import transformers
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

from tests.architectures.originals import AMINO_ACIDS, save_random
from zoo.checkpoints import export_checkpoint, import_checkpoint
from zoo_export.export import export_model
from zoo_runtime import Session, load_session

SPECIAL = ("<s>", "<pad>", "</s>", "<unk>", "<mask>")
SIZES: dict[str, Any] = {
    "hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 40,
    "max_position_embeddings": 200, "pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 2,
}  # fmt: skip
TEXTS = (
    "The rain has stopped by now.", "We go out without umbrellas.", "tea", "a green leaf, two stones and a river",
)  # fmt: skip
TEMPLATE = (
    "{% for message in messages %}<s>{{ message['role'] }}: {{ message['content'] }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<s>assistant:{% endif %}"
)


def save(folder: Path, model_class: str, model_type: str, *, ends: str = "", **options: Any) -> None:
    """Save a random model and a tokenizer of bytes, which puts tokens around a text."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=[*SPECIAL],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(TEXTS, trainer)
    if ends:
        numbers = [(token, SPECIAL.index(token)) for token in ("<s>", "</s>")]
        tokenizer.post_processor = processors.TemplateProcessing(f"<s> {ends}", "<s> $A </s> $B:1 </s>:1", numbers)
    size = tokenizer.get_vocab_size()
    names = dict(zip(("bos_token", "pad_token", "eos_token", "unk_token", "mask_token"), SPECIAL, strict=True))
    fast = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, cls_token="<s>", sep_token="</s>", clean_up_tokenization_spaces=False, **names
    )
    if not ends:
        fast.chat_template = TEMPLATE
    config = transformers.AutoConfig.for_model(model_type, **{**SIZES, "vocab_size": size, **options})
    save_random(model_class, config, folder)
    fast.save_pretrained(folder)


def exported(folder: Path, *, chat: bool = False, via: str | None = None) -> Session:
    """Import and export the checkpoint ``hub`` of a folder, and open it. ``via`` is the importer, if not its own."""
    imported = import_checkpoint(folder / "hub", folder / "ours", model_type=via, verify=True)
    assert "texts to token ids" in imported.answers.counts
    assert export_model(folder / "ours").passed
    return load_session(folder / "ours", chat=chat)


def pipeline_of(task: str, folder: Path) -> Callable[..., Any]:
    return transformers.pipeline(task, model=str(folder), device="cpu")  # type: ignore[call-overload,no-any-return]


def close(rows: Mapping[str, float]) -> dict[str, Any]:
    return {name: pytest.approx(score, abs=1e-5) for name, score in rows.items()}


@pytest.mark.slow
def test_tokens_in_the_place_of_a_mask_of_esm(tmp_path: Path) -> None:
    save(
        tmp_path / "hub", "EsmForMaskedLM", "esm", ends="$A </s>", position_embedding_type="rotary",
        mask_token_id=SPECIAL.index("<mask>"),
    )  # fmt: skip
    texts = ["The rain has <mask>.", "<mask> tea", "a green leaf, two <mask> and a river"]
    ask = pipeline_of("fill-mask", tmp_path / "hub")
    with exported(tmp_path) as session:
        for text, answer in zip(texts, session.run(texts), strict=True):
            wanted = {row["token"]: row["score"] for row in ask(text, top_k=5)}
            (mask,) = answer["masks"]
            assert {row["token"]: row["probability"] for row in mask} == close(wanted)


def save_esm_2(folder: Path) -> Any:
    """Save a random model as ESM-2 is published, with a vocabulary of amino acids; return its tokenizer."""
    config = transformers.EsmConfig(
        **SIZES, vocab_size=33, mask_token_id=32, position_embedding_type="rotary", token_dropout=True
    )
    save_random("EsmForMaskedLM", config, folder)
    (folder / "vocab.txt").write_text("\n".join(AMINO_ACIDS), encoding="utf-8")
    tokenizer = transformers.EsmTokenizer(str(folder / "vocab.txt"))
    tokenizer.save_pretrained(str(folder))
    return tokenizer


@pytest.mark.slow
def test_masked_amino_acids_of_esm_2(tmp_path: Path) -> None:
    """As published: a vocabulary without tokenizer.json, and embeddings scaled by the share of unmasked tokens."""
    save_esm_2(tmp_path / "hub")
    ask = pipeline_of("fill-mask", tmp_path / "hub")
    proteins = ["MKT<mask>LA", "M K <mask> L", "MKTAYIAKQR<mask>ISFVKSHFSRQ", "<mask>", "ACDEFGHIKLMN<mask>"]
    with exported(tmp_path) as session:
        for protein, answer in zip(proteins, session.run(proteins), strict=True):
            wanted = {row["token"]: row["score"] for row in ask(protein, top_k=5)}
            (mask,) = answer["masks"]
            assert {row["token"]: row["probability"] for row in mask} == close(wanted)


def test_published_vocabulary_of_esm_2(tmp_path: Path) -> None:
    """Its class reads vocab.txt, not tokenizer.json."""
    tokenizer = save_esm_2(tmp_path / "hub")
    import_checkpoint(tmp_path / "hub", tmp_path / "ours", verify=False)
    export_checkpoint(tmp_path / "ours", tmp_path / "back", verify=False)
    again = transformers.AutoTokenizer.from_pretrained(tmp_path / "back")
    assert type(again) is transformers.EsmTokenizer
    assert again.get_vocab() == tokenizer.get_vocab()
    assert again("M K<mask>LB").input_ids == tokenizer("M K<mask>LB").input_ids


@pytest.mark.slow
def test_vectors_of_mpnet(tmp_path: Path) -> None:
    sentence_transformers: Any = pytest.importorskip("sentence_transformers")
    save(tmp_path / "hub", "MPNetModel", "mpnet", ends="$A </s>")
    original = sentence_transformers.SentenceTransformer(str(tmp_path / "hub"), device="cpu")  # with means of tokens
    original.max_seq_length = 64
    original.save_pretrained(str(tmp_path / "sentences"))
    (tmp_path / "hub").rename(tmp_path / "plain")
    (tmp_path / "sentences").rename(tmp_path / "hub")
    with exported(tmp_path) as session:
        found = [answer["embedding"] for answer in session.run([*TEXTS])]
    for vector, wanted in zip(found, original.encode([*TEXTS]), strict=True):
        assert vector == pytest.approx(wanted, abs=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model_class", "model_type", "options"),
    [
        ("GPTNeoXForCausalLM", "gpt_neox", {}),
        ("OPTForCausalLM", "opt", {"ffn_dim": 40, "word_embed_proj_dim": 24}),
    ],
)
def test_chats(tmp_path: Path, model_class: str, model_type: str, options: dict[str, Any]) -> None:
    save(tmp_path / "hub", model_class, model_type, **options)
    chats = [
        [{"role": "user", "content": "tea?"}],
        [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "Is the rain over?"},
            {"role": "assistant", "content": "By now."},
            {"role": "user", "content": "two stones"},
        ],
    ]
    ask = pipeline_of("text-generation", tmp_path / "hub")
    with exported(tmp_path, chat=True, via="transformers") as session:
        for chat, answer in zip(chats, session.run(chats, max_new_tokens=12), strict=True):
            (wanted,) = ask(chat, max_new_tokens=12, do_sample=False, return_full_text=False)
            assert answer["generated"] == wanted["generated_text"], json.dumps(chat)
