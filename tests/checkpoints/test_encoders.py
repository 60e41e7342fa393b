"""Checkpoints of the BERT family: random transformers models are imported, exported to ONNX, and written back."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from torch import Tensor
from torch.testing import assert_close

import zoo as library
from zoo.artifact import ModelDirectory
from zoo.checkpoints import export_checkpoint, import_checkpoint
from zoo.config import Config
from zoo.errors import ArtifactError, UsageError
from zoo_export.export import export_model

Zoo = Callable[..., Any]

VOCABULARY, TYPES, ROWS, PAD = 61, 3, 23, 4
SIZES = {
    "vocab_size": VOCABULARY,
    "type_vocab_size": TYPES,
    "max_position_embeddings": ROWS,
    "hidden_size": 30,
    "num_hidden_layers": 3,
    "num_attention_heads": 5,
    "intermediate_size": 37,
    "hidden_act": "silu",
    "layer_norm_eps": 1e-3,
    "hidden_dropout_prob": 0.2,
    "pad_token_id": PAD,
}
DISTIL_SIZES = {
    "vocab_size": VOCABULARY,
    "max_position_embeddings": ROWS,
    "dim": 30,
    "n_layers": 3,
    "n_heads": 5,
    "hidden_dim": 37,
    "activation": "silu",
    "dropout": 0.2,
    "pad_token_id": PAD,
}
COMMON = {
    "vocab_size": VOCABULARY,
    "hidden_size": 30,
    "num_layers": 3,
    "num_heads": 5,
    "intermediate_size": 37,
    "activation": "silu",
    "dropout": 0.2,
    "pad_token_id": PAD,
}
"""Our names for SIZES."""
NAMES = {3: "good", 0: "bad", 1: "so so", 2: "fair", 4: "best"}
LABELS = ("bad", "so so", "fair", "good", "best")


@dataclass(frozen=True)
class Family:
    """A family of transformers models, and its differences."""

    prefix: str
    """Prefix of its class names."""
    sizes: Mapping[str, Any] = field(default_factory=lambda: SIZES)
    ours: Mapping[str, Any] = field(default_factory=dict)
    """Values of our configuration in addition to COMMON."""
    heads: Mapping[str, str] = field(default_factory=dict)
    """Classes specific to this family, and our tasks for them."""
    pooler: bool = False
    """Whether the base model has a pooler."""

    def make(self, kind: str, **options: Any) -> transformers.PreTrainedModel:
        """Build a small model with random tensors; tied ones stay tied."""
        config = getattr(transformers, f"{self.prefix}Config")(
            **{**self.sizes, "attn_implementation": "eager", **options}
        )
        torch.manual_seed(0)
        model = getattr(transformers, self.prefix + kind)(config).eval().requires_grad_(False)
        generator = torch.Generator().manual_seed(0)
        for parameter in model.parameters():
            parameter.copy_(0.4 * torch.randn(parameter.shape, generator=generator))
        return model


ROBERTA = {
    "type_vocab_size": TYPES, "norm_eps": 1e-3, "skip_padding": True, "max_seq_len": ROWS - PAD - 1,
    "head_activation": "gelu", "pooler_activation": "tanh",
}  # fmt: skip
ALBERT = {
    "type_vocab_size": TYPES, "norm_eps": 1e-3, "max_seq_len": ROWS, "share_layers": True, "project_embeddings": True,
    "skip_padding": False, "head_activation": "silu", "pooler_activation": "tanh",
}  # fmt: skip
ELECTRA = {
    "type_vocab_size": TYPES, "norm_eps": 1e-3, "max_seq_len": ROWS, "share_layers": False, "skip_padding": False,
    "head_activation": "gelu", "pooler_activation": "gelu",
}  # fmt: skip
FAMILIES = {
    "bert": Family("Bert", ours={"type_vocab_size": TYPES, "norm_eps": 1e-3, "max_seq_len": ROWS}, pooler=True),
    "roberta": Family("Roberta", ours=ROBERTA, pooler=True),
    "xlm-roberta": Family("XLMRoberta", ours=ROBERTA, pooler=True),
    "camembert": Family("Camembert", ours=ROBERTA, pooler=True),
    "distilbert": Family(
        "DistilBert",
        sizes=DISTIL_SIZES,
        ours={"type_vocab_size": 0, "norm_eps": 1e-12, "max_seq_len": ROWS, "pooler_activation": "relu"},
    ),
    "albert": Family(
        "Albert",
        sizes={**SIZES, "embedding_size": 18},
        ours={**ALBERT, "embedding_size": 18},
        heads={"ForPreTraining": "pretraining"},
        pooler=True,
    ),
    "electra": Family(
        "Electra",
        sizes={**SIZES, "embedding_size": 18},
        ours={**ELECTRA, "embedding_size": 18, "project_embeddings": True},
        heads={"ForPreTraining": "replaced-token-detection"},
    ),
}
HEADS = {
    "Model": "feature-extraction",
    "ForMaskedLM": "fill-mask",
    "ForSequenceClassification": "text-classification",
    "ForTokenClassification": "token-classification",
    "ForQuestionAnswering": "question-answering",
}
TWINS = ("xlm-roberta", "camembert")
"""Other names for RoBERTa."""
CASES = [
    pytest.param(name, kind, task, id=f"{name}, {task}", marks=[pytest.mark.slow] if name in TWINS else [])
    for name, family in FAMILIES.items()
    for kind, task in {**HEADS, **family.heads}.items()
]


def labelled(task: str) -> dict[str, Any]:
    """Return the configuration of five named classes, if the task has classes."""
    return {"id2label": NAMES} if task.endswith("classification") else {}


def batch(config: Config) -> dict[str, Tensor]:
    """Draw rows with left, right and no padding, and mixed token types."""
    longest = config.max_seq_len
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(PAD + 1, VOCABULARY, (4, longest), generator=generator)
    mask = torch.ones_like(ids)
    mask[1, longest - 5 :] = 0
    mask[2, 1:] = 0
    mask[3, :7] = 0
    feeds = {"input_ids": ids.masked_fill(mask == 0, PAD), "attention_mask": mask}
    if config.type_vocab_size:
        feeds["token_type_ids"] = torch.randint(config.type_vocab_size, ids.shape, generator=generator)
    return feeds


def outputs(model: torch.nn.Module, feeds: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Compute outputs in float64, excluding padding."""
    with torch.inference_mode():
        found = model.double()(**feeds)
    names = {"prediction_logits": "logits", "sop_logits": "next_sentence_logits",
             "seq_relationship_logits": "next_sentence_logits"}  # fmt: skip
    kept = feeds["attention_mask"].bool()
    return {
        names.get(name, name): value[kept] if value.shape[:2] == kept.shape else value
        for name, value in found.items()
        if value is not None
    }


def same(folder: Path, theirs: torch.nn.Module) -> None:
    """Assert that every output of a model directory equals the original's in float64."""
    ours = library.load(folder)
    feeds = batch(ours.config)
    found, wanted = outputs(ours, feeds), outputs(theirs, feeds)
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        assert_close(found[name], value, rtol=0, atol=1e-10)
        assert value.std() > 1e-4


def edit(folder: Path, **changes: Any) -> None:
    """Change values in a checkpoint's config.json; None removes a key."""
    path = folder / "config.json"
    values = {**json.loads(path.read_text()), **changes}
    path.write_text(json.dumps({key: value for key, value in values.items() if value is not None}))


def rewrite(folder: Path, change: Callable[[dict[str, Tensor]], Mapping[str, Tensor]]) -> None:
    """Change the tensors of a checkpoint."""
    path = folder / "model.safetensors"
    tensors = change(load_file(path))
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path, {"format": "pt"})


@pytest.mark.slow_after(3)
@pytest.mark.parametrize(("name", "kind", "task"), CASES)
def test_import_and_round_trip(tmp_path: Path, name: str, kind: str, task: str) -> None:
    """The imported model computes the same, and transformers loads the checkpoint written back."""
    family = FAMILIES[name]
    theirs = family.make(kind, **labelled(task))
    theirs.save_pretrained(tmp_path / "hub")
    imported = import_checkpoint(tmp_path / "hub", tmp_path / "ours", verify=True)
    assert imported.comparison.exact < 1e-11
    config = ModelDirectory.open(tmp_path / "ours").spec.config
    assert config == imported.spec.config
    wanted = {**COMMON, **family.ours, "task": task}
    assert {key: getattr(config, key) for key in wanted} == wanted
    assert config.labels == (LABELS if labelled(task) else ())
    assert config.pooler == (task in ("text-classification", "pretraining") or (family.pooler and kind == "Model"))
    same(tmp_path / "ours", theirs)

    kind_of_file = name if name in TWINS else None  # RoBERTa can represent it too
    exported = export_checkpoint(tmp_path / "ours", tmp_path / "back", model_type=kind_of_file, verify=True)
    assert exported.model_type == name
    again = type(theirs).from_pretrained(tmp_path / "back", attn_implementation="eager").eval()
    feeds = batch(config)
    for output, value in outputs(again, feeds).items():
        assert value.equal(outputs(theirs, feeds)[output])
    before, after = (json.loads((tmp_path / place / "config.json").read_text()) for place in ("hub", "back"))
    trained = {key for key in before if "drop" in key} - {"hidden_dropout_prob", "dropout"}
    left_out = trained | {key for key in before if key.startswith("summary")} | {
        "bos_token_id", "eos_token_id", "initializer_range", "use_cache", "sinusoidal_pos_embds",
        "transformers_version",
        *(() if labelled(task) else ("id2label", "label2id")),
    }  # fmt: skip
    assert {key: value for key, value in before.items() if key not in left_out and value is not None}.items() <= {
        **after, "output_hidden_states": False, "return_dict": True,
    }.items()  # fmt: skip
    tensors, written = (load_file(tmp_path / place / "model.safetensors") for place in ("hub", "back"))
    assert tensors.keys() == written.keys()
    assert all(written[key].equal(tensor) for key, tensor in tensors.items())


@pytest.mark.parametrize("name", [name for name in FAMILIES if name not in TWINS])
def test_features_of_selected_layers(tmp_path: Path, name: str) -> None:
    """Layers, selected during import because config.json has no key for them, equal the original's hidden states."""
    theirs = FAMILIES[name].make("Model")
    theirs.save_pretrained(tmp_path / "hub")
    layers = (0, -3, 2, -1)
    settings = ["feature_layers=[0, -3, 2, -1]"]
    imported = import_checkpoint(tmp_path / "hub", tmp_path / "ours", settings=settings, verify=True)
    assert imported.spec.config.feature_layers == layers
    ours = library.load(tmp_path / "ours").double()
    feeds = batch(imported.spec.config)
    with torch.inference_mode():
        states = theirs.double()(**feeds, output_hidden_states=True).hidden_states
        found = ours(**feeds)["features"]
    kept = feeds["attention_mask"].bool()
    wanted = torch.cat([states[layer] for layer in layers], dim=-1)
    assert_close(found[kept], wanted[kept], rtol=0, atol=1e-10)
    with pytest.raises(UsageError, match=rf"{name}: cannot represent feature_layers \(0, -3, 2, -1\)"):
        export_checkpoint(tmp_path / "ours", tmp_path / "back")


@pytest.mark.parametrize("name", ["roberta", "distilbert", "albert", "electra"])
def test_untied_language_model(tmp_path: Path, name: str) -> None:
    theirs = FAMILIES[name].make("ForMaskedLM", tie_word_embeddings=False)
    theirs.save_pretrained(tmp_path / "hub")
    imported = import_checkpoint(tmp_path / "hub", tmp_path / "ours", verify=True)
    assert not imported.spec.config.tie_embeddings
    same(tmp_path / "ours", theirs)
    export_checkpoint(tmp_path / "ours", tmp_path / "back", verify=True)


ONNX = [
    ("roberta", "ForMaskedLM"),
    ("distilbert", "ForSequenceClassification"),
    ("albert", "ForPreTraining"),
    ("electra", "ForPreTraining"),
    *(pytest.param(name, "Model", marks=pytest.mark.slow) for name in ("roberta", "distilbert", "albert", "electra")),
    *(pytest.param(name, "ForTokenClassification", marks=pytest.mark.slow) for name in ("bert", "roberta", "electra")),
    *(pytest.param(name, "ForQuestionAnswering", marks=pytest.mark.slow) for name in ("bert", "distilbert", "albert")),
    *(pytest.param(name, "ForMaskedLM", marks=pytest.mark.slow) for name in ("distilbert", "albert", "electra")),
]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "kind"), ONNX)
def test_imported_model_is_exported_to_onnx(tmp_path: Path, name: str, kind: str) -> None:
    FAMILIES[name].make(kind).save_pretrained(tmp_path / "hub")
    import_checkpoint(tmp_path / "hub", tmp_path / "ours")
    assert export_model(tmp_path / "ours").passed


# Specifics of each family.


def test_albert_always_projects_embeddings(tmp_path: Path) -> None:
    theirs = FAMILIES["albert"].make("Model", embedding_size=30)
    theirs.save_pretrained(tmp_path / "hub")
    imported = import_checkpoint(tmp_path / "hub", tmp_path / "ours")
    assert imported.spec.config.project_embeddings
    same(tmp_path / "ours", theirs)


def test_electra_of_equal_widths_does_not_project_embeddings(tmp_path: Path) -> None:
    theirs = FAMILIES["electra"].make("Model", embedding_size=30)
    theirs.save_pretrained(tmp_path / "hub")
    imported = import_checkpoint(tmp_path / "hub", tmp_path / "ours")
    assert not imported.spec.config.project_embeddings
    same(tmp_path / "ours", theirs)


def test_unused_pooler_of_old_classifiers_is_ignored(tmp_path: Path) -> None:
    theirs = FAMILIES["roberta"].make("ForSequenceClassification", **labelled("text-classification"))
    theirs.save_pretrained(tmp_path / "hub")
    unread = {f"roberta.pooler.dense.{name}": torch.ones(shape) for name, shape in (("weight", (30, 30)), ("bias", 30))}
    rewrite(tmp_path / "hub", lambda tensors: {**tensors, **unread})
    import_checkpoint(tmp_path / "hub", tmp_path / "ours")
    same(tmp_path / "ours", theirs)


@pytest.mark.parametrize(("name", "base"), [("roberta", "roberta"), ("albert", "albert"), ("electra", "electra")])
def test_old_names_and_buffers_are_read(tmp_path: Path, name: str, base: str) -> None:
    """Norms with gamma and beta, positions in a buffer, and a tied head's bias under both names."""
    theirs = FAMILIES[name].make("ForMaskedLM")
    theirs.save_pretrained(tmp_path / "hub")
    heads = {"roberta": "lm_head", "albert": "predictions"}

    def old(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        renamed = {
            key.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta"): tensor
            for key, tensor in tensors.items()
        }
        renamed[f"{base}.embeddings.position_ids"] = torch.arange(ROWS)[None]
        if name in heads:
            renamed[f"{heads[name]}.decoder.bias"] = tensors[f"{heads[name]}.bias"].clone()
        return renamed

    rewrite(tmp_path / "hub", old)
    import_checkpoint(tmp_path / "hub", tmp_path / "ours", verify=False)
    same(tmp_path / "ours", theirs)


def test_missing_keys_have_the_family_defaults(tmp_path: Path) -> None:
    """ALBERT's default activation is not BERT's, and RoBERTa's default padding token is 1."""
    albert = FAMILIES["albert"].make("Model", hidden_act="gelu_new", layer_norm_eps=1e-12, hidden_dropout_prob=0.0)
    albert.save_pretrained(tmp_path / "albert")
    edit(tmp_path / "albert", hidden_act=None, layer_norm_eps=None, hidden_dropout_prob=None)
    config = import_checkpoint(tmp_path / "albert", tmp_path / "ours").spec.config
    assert (config.activation, config.norm_eps, config.dropout) == ("gelu_tanh", 1e-12, 0.0)
    same(tmp_path / "ours", albert)
    roberta = FAMILIES["roberta"].make("Model", pad_token_id=1)
    roberta.save_pretrained(tmp_path / "roberta")
    edit(tmp_path / "roberta", pad_token_id=None)
    config = import_checkpoint(tmp_path / "roberta", tmp_path / "other").spec.config
    assert (config.pad_token_id, config.max_seq_len) == (1, ROWS - 2)
    same(tmp_path / "other", roberta)


@pytest.mark.parametrize(
    ("said", "mask"), [({}, 3), ({"mask_token": "<other>"}, 4), ({"mask_token": {"content": "<other>"}}, 4),
                       ({"mask_token": None}, None)],
)  # fmt: skip
def test_the_mask_token(tmp_path: Path, said: dict[str, Any], mask: int | None) -> None:
    """Its name is taken from the tokenizer's files, or else is RoBERTa's."""
    hub = write_masked(tmp_path, said)
    imported = import_checkpoint(hub, tmp_path / "ours", verify=False)  # transformers would add special tokens
    assert imported.spec.config.mask_token_id == mask


@pytest.mark.parametrize("token", [5, ["<mask>"], {"content": 5}])
def test_mask_token_that_is_not_text(tmp_path: Path, token: object) -> None:
    hub = write_masked(tmp_path, {"mask_token": token})
    with pytest.raises(ArtifactError, match=r"mask_token .* is not text: "):
        import_checkpoint(hub, tmp_path / "ours", verify=False)


def write_masked(folder: Path, settings: dict[str, Any]) -> Path:
    """Write a RoBERTa with a tokenizer that has two mask tokens."""
    hub = folder / "hub"
    FAMILIES["roberta"].make("ForMaskedLM").save_pretrained(hub)
    words = {"<s>": 0, "</s>": 1, "<unk>": 2, "<mask>": 3, "<other>": 4}
    Tokenizer(WordLevel(words, unk_token="<unk>")).save(str(hub / "tokenizer.json"))
    (hub / "tokenizer_config.json").write_text(json.dumps({"model_max_length": 18, **settings}))
    return hub


def test_more_classes_than_names(tmp_path: Path) -> None:
    """Old files kept the names of two classes for any num_labels."""
    theirs = FAMILIES["electra"].make("ForSequenceClassification", num_labels=5)
    theirs.save_pretrained(tmp_path / "hub")
    names = {"0": "LABEL_0", "1": "LABEL_1"}
    edit(tmp_path / "hub", id2label=names, label2id=None, num_labels=5, pruned_heads={}, eos_token_ids=0)
    config = import_checkpoint(tmp_path / "hub", tmp_path / "ours", verify=False).spec.config
    assert (config.num_classes, config.labels) == (5, tuple(f"LABEL_{number}" for number in range(5)))
    same(tmp_path / "ours", theirs)


@pytest.mark.parametrize(("name", "kind"), [("bert", "ForPreTraining"), ("albert", "ForPreTraining")])
def test_pretraining_heads_are_read_for_any_class(tmp_path: Path, name: str, kind: str) -> None:
    """Published BERT files name BertForMaskedLM but have both heads; the class with both is the reference."""
    theirs = FAMILIES[name].make(kind)
    theirs.save_pretrained(tmp_path / "hub")
    edit(tmp_path / "hub", architectures=[f"{FAMILIES[name].prefix}ForMaskedLM"])
    imported = import_checkpoint(tmp_path / "hub", tmp_path / "ours", verify=True)
    assert imported.spec.config.task == "pretraining"
    assert imported.comparison.against == f"{type(theirs).__name__} of transformers"
    same(tmp_path / "ours", theirs)
    edit(tmp_path / "hub", architectures=None)
    again = import_checkpoint(tmp_path / "hub", tmp_path / "again", settings=["task=pretraining"], verify=True)
    assert again.spec.config == imported.spec.config


REFUSED = {
    "pruned heads": ("bert", {"pruned_heads": {"0": [1]}}, ("pruned_heads {'0': [1]} is not supported, only {}",)),
    "several groups of layers": ("albert", {"num_hidden_groups": 2}, ("num_hidden_groups 2 is not supported, only 1",)),
    "several inner layers": ("albert", {"inner_group_num": 2}, ("inner_group_num 2 is not supported, only 1",)),
    "another head": ("electra", {"architectures": ["ElectraForMultipleChoice"]}, ("ElectraForMultipleChoice",)),
    "a decoder": ("roberta", {"is_decoder": True}, ("is_decoder True is not supported",)),
    "no types": ("roberta", {"type_vocab_size": 0}, ("type_vocab_size 0 is not supported",)),
    "padding after all positions": ("roberta", {"pad_token_id": ROWS}, (f"{ROWS} leaves no position", str(ROWS))),
    "a strange activation": ("distilbert", {"activation": "mish"}, ("activation 'mish' is not supported",)),
    "a strange key": ("distilbert", {"use_flux": 1}, ("not understood: use_flux", "--allow-key use_flux")),
}


@pytest.mark.parametrize(("name", "changes", "fragments"), REFUSED.values(), ids=REFUSED)
def test_unsupported_configuration_is_rejected(
    tmp_path: Path, zoo: Zoo, name: str, changes: dict[str, Any], fragments: Any
) -> None:
    FAMILIES[name].make("Model").save_pretrained(tmp_path / "hub")
    edit(tmp_path / "hub", **changes)
    zoo("import", tmp_path / "hub", "-o", tmp_path / "ours").failed(2, *fragments)
    assert not (tmp_path / "ours").exists()


def test_families_are_not_confused(tmp_path: Path) -> None:
    """RoBERTa cannot represent ALBERT's shared block, and no family can represent a mixture of both."""
    FAMILIES["albert"].make("Model").save_pretrained(tmp_path / "hub")
    import_checkpoint(tmp_path / "hub", tmp_path / "ours")
    with pytest.raises(UsageError, match=r"roberta: no rule for tensor embeddings\.projection"):
        export_checkpoint(tmp_path / "ours", tmp_path / "back", model_type="roberta")
    mixed = library.create_model("bert-tiny", share_layers=True, skip_padding=True, pad_token_id=3)
    library.save(mixed, tmp_path / "mixed")
    with pytest.raises(UsageError, match=r"no checkpoint layout .*bert: cannot represent .*; roberta: .*; albert: "):
        export_checkpoint(tmp_path / "mixed", tmp_path / "back")
    assert not (tmp_path / "back").exists()


def test_classifier_without_a_pooler_has_no_layout(tmp_path: Path) -> None:
    """The original classes all have one, with weights that this model lacks."""
    ours = library.create_model("bert-tiny", task="text-classification", pooler=False, pooling="cls")
    library.save(ours, tmp_path / "ours", tokenizer="bytes")
    with pytest.raises(UsageError, match=r"bert: cannot represent pooling 'cls', pooler False"):
        export_checkpoint(tmp_path / "ours", tmp_path / "hub")


PRESETS = {
    "bert-tiny": "bert", "roberta-base": "roberta", "distilbert-base": "distilbert", "albert-base": "albert",
    "electra-small": "electra",
}  # fmt: skip


@pytest.mark.slow_after(3)
@pytest.mark.parametrize(("preset", "kind"), PRESETS.items())
@pytest.mark.parametrize("task", ["feature-extraction", "fill-mask", "text-classification"])
def test_preset_is_written_as_its_family(tmp_path: Path, preset: str, kind: str, task: str) -> None:
    small = {"hidden_size": 32, "intermediate_size": 48, "num_layers": 2, "num_heads": 4, "vocab_size": 300}
    pooler = {"pooler": True} if task == "text-classification" else {}
    tokens = {} if preset == "bert-tiny" else {"mask_token_id": None}  # no tokenizer defines it
    ours = library.create_model(preset, task=task, **({} if preset == "bert-tiny" else small), **pooler, **tokens)
    library.save(ours, tmp_path / "ours", tokenizer="bytes" if preset == "bert-tiny" else None)
    assert export_checkpoint(tmp_path / "ours", tmp_path / "hub", verify=True).model_type == kind


# Sentence encoders.

MODES = {
    "cls_token": "cls", "mean_tokens": "mean", "max_tokens": "max", "mean_sqrt_len_tokens": "mean_sqrt_len",
    "weightedmean_tokens": "weighted_mean", "lasttoken": "last",
}  # fmt: skip
"""zoo's names of the poolings of sentence-transformers."""
POOLED: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "cls": lambda row, kept: row[0],
    "mean": lambda row, kept: row[kept].mean(0),
    "max": lambda row, kept: row[kept].max(0).values,
    "mean_sqrt_len": lambda row, kept: row[kept].sum(0) / len(kept) ** 0.5,
    "weighted_mean": lambda row, kept: (kept + 1).double() @ row[kept] / (kept + 1).sum(),
    "last": lambda row, kept: row[kept[-1]],
}
"""The vector of a text, given its hidden states (T, E) and the places that are not padding."""


@pytest.mark.slow_after(2)
@pytest.mark.parametrize("name", ["roberta", "distilbert", "electra"])
@pytest.mark.parametrize("pooling", ["mean", "cls", "max", "mean_sqrt_len", "weighted_mean", "last"])
@pytest.mark.parametrize("normalize", [True, False])
def test_sentence_encoder(tmp_path: Path, name: str, pooling: str, normalize: bool) -> None:
    theirs = FAMILIES[name].make("Model")
    hub = tmp_path / "hub"
    theirs.save_pretrained(hub)
    modules = ["Transformer", "Pooling", *(["Normalize"] if normalize else [])]
    (hub / "modules.json").write_text(json.dumps([{"type": f"sentence_transformers.models.{m}"} for m in modules]))
    (hub / "1_Pooling").mkdir()
    modes = {f"pooling_mode_{mode}": pooling == ours for mode, ours in MODES.items()}
    (hub / "1_Pooling" / "config.json").write_text(json.dumps({"word_embedding_dimension": 30, **modes}))
    config = import_checkpoint(hub, tmp_path / "ours", verify=True).spec.config
    assert (config.task, config.pooling, config.normalize) == ("sentence-embedding", pooling, normalize)
    feeds = batch(config)
    with torch.inference_mode():
        hidden = theirs.double()(**feeds).last_hidden_state
        found = library.load(tmp_path / "ours").double()(**feeds)["sentence_embedding"]
    places = [kept.nonzero()[:, 0] for kept in feeds["attention_mask"]]
    wanted = torch.stack([POOLED[pooling](row, kept) for row, kept in zip(hidden, places, strict=True)])
    assert_close(found, wanted / wanted.norm(dim=-1, keepdim=True) if normalize else wanted, rtol=0, atol=1e-10)

    assert export_checkpoint(tmp_path / "ours", tmp_path / "back").model_type == name
    listed = json.loads((tmp_path / "back" / "modules.json").read_text())
    assert [(entry["type"].rpartition(".")[2], entry["path"]) for entry in listed] == [
        (module, path) for module, path in zip(modules, ("", "1_Pooling", "2_Normalize"), strict=False)
    ]
    again = import_checkpoint(tmp_path / "back", tmp_path / "again").spec.config
    assert again == config


@pytest.mark.parametrize(
    ("modules", "stated", "status", "fragments"),
    [
        ([{"type": "sentence_transformers.models.CNN"}], {}, 2, ("the module CNN is not supported", "modules.json")),
        (
            [
                {"type": "sentence_transformers.models.Dense", "path": "2_Dense"},
                {"type": "sentence_transformers.models.Pooling"},
            ],
            {},
            2,
            ("the order of the modules Dense, Pooling is not supported",),
        ),
        (
            [{"type": "sentence_transformers.models.Dense", "path": "../x"}],
            {},
            3,
            ("'../x' is not a folder of the checkpoint",),
        ),
        ({"type": "Pooling"}, {}, 3, ("not a list of modules", "modules.json")),
        (None, {}, 3, ("not a list of modules", "modules.json")),
        (
            [{"type": "sentence_transformers.models.Pooling"}],
            {"prompts": {"query": "query: "}, "default_prompt_name": "passage"},
            3,
            ("default_prompt_name 'passage' is not one of the prompts", "config_sentence_transformers.json"),
        ),
        (
            [{"type": "sentence_transformers.models.Pooling"}],
            {"prompts": {"query": 3}},
            3,
            ("prompts do not map names to texts", "config_sentence_transformers.json"),
        ),
    ],
)
def test_unsupported_sentence_encoders_are_rejected(
    tmp_path: Path, zoo: Zoo, modules: object, stated: object, status: int, fragments: tuple[str, ...]
) -> None:
    hub = tmp_path / "hub"
    FAMILIES["distilbert"].make("Model").save_pretrained(hub)
    if modules is not None:
        (hub / "modules.json").write_text(json.dumps(modules))
    (hub / "1_Pooling").mkdir()
    (hub / "1_Pooling" / "config.json").write_text(json.dumps({"pooling_mode_mean_tokens": True}))
    (hub / "config_sentence_transformers.json").write_text(json.dumps(stated))
    zoo("import", hub, "-o", tmp_path / "ours").failed(status, *fragments)
