"""Checkpoints of encoders akin to BERT: random transformers models are imported, exported to ONNX, and written back."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file
from torch import Tensor
from torch.testing import assert_close

import zoo as library
from tests.checkpoints.test_encoders import (
    COMMON,
    HEADS,
    LABELS,
    ROWS,
    SIZES,
    TYPES,
    Family,
    batch,
    edit,
    labelled,
    rewrite,
)
from zoo.checkpoints import Checkpoint, Exact, export_checkpoint, import_checkpoint
from zoo.checkpoints.configuration import find_layout
from zoo.config import Config
from zoo.errors import UsageError
from zoo.models.count import parameter_count
from zoo.registry import registry
from zoo_export.export import export_model
from zoo_plugins.deberta.config import DeBERTaConfig

Zoo = Callable[..., Any]

FAMILIES = {
    "mpnet": Family(
        "MPNet",
        sizes={**{key: value for key, value in SIZES.items() if key != "type_vocab_size"}, "pad_token_id": 1},
        ours={
            "type_vocab_size": 0, "norm_eps": 1e-3, "skip_padding": True, "max_seq_len": ROWS - 2, "pad_token_id": 1,
            "relative_buckets": 32, "head_activation": "gelu", "pooler_activation": "tanh",
        },
        pooler=True,
    ),
    "nomic_bert": Family(
        "NomicBert",
        sizes={**SIZES, "rope_parameters": {"rope_type": "default", "rope_theta": 50.0}},
        ours={
            "type_vocab_size": TYPES, "norm_eps": 1e-3, "max_seq_len": ROWS, "positions": "rotary", "rope_theta": 50.0,
            "gated": True, "attention_bias": False, "mlp_bias": False, "pooler_activation": "tanh",
        },
    ),
    "roformer": Family(
        "RoFormer",
        sizes={**SIZES, "embedding_size": 18},
        ours={
            "type_vocab_size": TYPES, "norm_eps": 1e-3, "max_seq_len": ROWS, "positions": "rotary", "rope_table": True,
            "embedding_size": 18, "head_activation": "silu", "pooler_activation": "silu",
        },
    ),
    "esm": Family(
        "Esm",
        sizes={
            **{key: value for key, value in SIZES.items() if key not in ("type_vocab_size", "hidden_act")},
            "pad_token_id": 1, "mask_token_id": 9, "token_dropout": True, "position_embedding_type": "rotary",
            "rope_theta": 50.0, "emb_layer_norm_before": False,
        },
        ours={
            "activation": None, "norm_eps": 1e-3, "max_seq_len": ROWS, "positions": "rotary", "rope_theta": 50.0,
            "rope_float16": False, "embedding_norm": False, "dropped_token_id": 9, "pad_token_id": 1,
        },
        pooler=True,
    ),
    "deberta-v2": Family(
        "DebertaV2",
        sizes={
            **SIZES, "relative_attention": True, "pos_att_type": ["c2p", "p2c"], "max_relative_positions": 17,
            "position_buckets": 8, "share_att_key": True, "norm_rel_ebd": "layer_norm", "position_biased_input": False,
            "embedding_size": 18, "pooler_hidden_act": "relu",
        },
        ours={
            "type_vocab_size": TYPES, "norm_eps": 1e-3, "max_seq_len": ROWS, "position_terms": ("c2p", "p2c"),
            "max_distance": 17, "distance_buckets": 8, "share_projections": True, "distance_norm": True,
            "absolute_positions": False, "embedding_size": 18, "pooler_activation": "relu",
        },
    ),
}  # fmt: skip
LEFT_OUT = {"roformer": ("embed_positions.weight",), "esm": ("regression.weight", "regression.bias")}
"""Tensors that are computed, not learned, and those of a head that zoo's models lack."""
CASES = [
    pytest.param(name, kind, task, id=f"{name}, {task}")
    for name, family in FAMILIES.items()
    for kind, task in {**HEADS, **family.heads}.items()
    if hasattr(transformers, family.prefix + kind)
]


def make(family: Family, kind: str, **options: Any) -> transformers.PreTrainedModel:
    """Build a small model with random tensors, except for tables of sinusoids."""
    model = family.make(kind, **options)
    for module in model.modules():
        if hasattr(module, "create_weight"):
            module.weight.copy_(module.create_weight())
    return model


def outputs(model: torch.nn.Module, feeds: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Compute outputs in float64, excluding padding. Originals do not round to float32, except for rotary angles."""
    model = model.double()
    exact = Exact(model) if isinstance(model, transformers.PreTrainedModel) else nullcontext()
    with torch.inference_mode(), exact:
        found = model(**feeds)
    kept = feeds["attention_mask"].bool()
    return {
        name: value[kept] if value.shape[:2] == kept.shape else value
        for name, value in found.items()
        if value is not None
    }


def feeds_of(config: Config) -> dict[str, Tensor]:
    """Draw rows with left, right and no padding, which consists of the padding token.

    Classifiers of DeBERTa get none on the left.
    """
    types = getattr(config, "type_vocab_size", 0)
    feeds = batch(SimpleNamespace(max_seq_len=config.max_seq_len, type_vocab_size=types))
    if isinstance(config, DeBERTaConfig) and config.task == "text-classification":
        feeds["attention_mask"][3] = 1  # the original's padding, whose state classifiers read, sees all tokens
    ids, padding = feeds["input_ids"] % config.vocab_size, feeds["attention_mask"] == 0
    return {**feeds, "input_ids": ids.masked_fill(padding, config.pad_token_id or 0)}


def tensors_of(folder: Path) -> dict[str, Tensor]:
    """Read the tensors of a checkpoint. transformers 5 gives those of ESM the names of old norms, and an asterisk."""
    renamed = {".gamma": ".weight", ".beta": ".bias", "encoder.layer.*.attention.self.rotary": "rotary"}
    tensors = load_file(folder / "model.safetensors")
    for old, new in renamed.items():
        tensors = {name.replace(old, new): tensor for name, tensor in tensors.items()}
    return tensors


def same(folder: Path, theirs: torch.nn.Module) -> None:
    """Assert that every output of a model directory equals the original's in float64."""
    ours = library.load(folder)
    feeds = feeds_of(ours.config)
    found, wanted = outputs(ours, feeds), outputs(theirs, feeds)
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        assert_close(found[name], value, rtol=0, atol=1e-12 * max(1.0, float(value.abs().max())))
        assert value.std() > 1e-4


@pytest.mark.slow_after(3)
@pytest.mark.parametrize(("name", "kind", "task"), CASES)
def test_import_and_round_trip(tmp_path: Path, name: str, kind: str, task: str) -> None:
    """The imported model computes the same, and transformers loads the checkpoint written back."""
    family = FAMILIES[name]
    theirs = make(family, kind, **labelled(task))
    theirs.save_pretrained(tmp_path / "hub")
    imported = import_checkpoint(tmp_path / "hub", tmp_path / "ours", verify=True)
    assert imported.comparison.exact < 1e-12
    config = imported.spec.config
    wanted = {**COMMON, **family.ours, "task": task}
    assert {key: getattr(config, key, None) for key in wanted} == wanted
    assert config.labels == (LABELS if labelled(task) else ())
    if hasattr(config, "pooler"):
        assert config.pooler == (task == "text-classification" or (family.pooler and kind == "Model"))
    same(tmp_path / "ours", theirs)

    exported = export_checkpoint(tmp_path / "ours", tmp_path / "back", verify=True)
    assert exported.model_type == name
    again = type(theirs).from_pretrained(tmp_path / "back", attn_implementation="eager").eval()
    feeds = feeds_of(config)
    for output, value in outputs(again, feeds).items():
        assert value.equal(outputs(theirs, feeds)[output])
    tensors, written = (tensors_of(tmp_path / place) for place in ("hub", "back"))
    learned = {key for key in tensors if not key.endswith(LEFT_OUT.get(name, ()))}
    assert learned == written.keys()
    assert all(written[key].equal(tensors[key]) for key in learned)
    unsaid = {
        "_name_or_path", "transformers_version", "dtype", "attention_probs_dropout_prob", "classifier_dropout",
        "bos_token_id", "eos_token_id", "label2id", "problem_type",
    }  # fmt: skip
    before, after = (type(theirs.config).from_pretrained(tmp_path / place).to_dict() for place in ("hub", "back"))
    said = before.keys() - unsaid
    assert {key: before[key] for key in said} == {key: after[key] for key in said}


@pytest.mark.parametrize("name", FAMILIES)
def test_missing_keys_have_the_defaults_of_the_original(name: str) -> None:
    """A config.json without keys is the same model as one with all of the original's."""
    required = {"vocab_size": 33, "pad_token_id": 1} if name == "esm" else {}
    full = getattr(transformers, f"{FAMILIES[name].prefix}Config")(**required).to_dict()
    _, architecture, layout = find_layout(name, "config.json")
    config_class, read = registry().resolve(architecture.rpartition(":")[2] + "-tiny").config.__class__, []
    for config in ({"model_type": name, **required}, full):
        Path("config.json").write_text(json.dumps(config))
        read.append(config_class(**{"pad_token_id": 1, **layout.read_config(Checkpoint(Path(), planned={}))}))
    assert read[0] == read[1]


def drawn_sizes(name: str, seed: int) -> dict[str, Any]:
    """Draw the sizes and settings of a family."""
    draw = random.Random(seed)
    heads = draw.choice((1, 2, 3, 5))
    hidden = heads * draw.choice((2, 6, 8))
    sizes = {
        "vocab_size": draw.randint(30, 90), "max_position_embeddings": draw.randint(12, 40), "hidden_size": hidden,
        "num_hidden_layers": draw.randint(1, 4), "num_attention_heads": heads, "intermediate_size": draw.randint(5, 60),
        "hidden_act": draw.choice(("gelu", "relu", "silu", "gelu_new")), "pad_token_id": draw.randint(0, 4),
        "layer_norm_eps": draw.choice((1e-12, 1e-5, 1e-2)), "tie_word_embeddings": draw.random() < 0.7,
    }  # fmt: skip
    types = {"type_vocab_size": draw.randint(1, 3)}
    theta = draw.choice((100.0, 1000.0, 10000.0))
    own: dict[str, dict[str, Any]] = {
        "mpnet": {"pad_token_id": 1},
        "nomic_bert": {**types, "rope_parameters": {"rope_type": "default", "rope_theta": theta}},
        "esm": {
            "pad_token_id": 1,
            "mask_token_id": draw.choice((7, 9)),
            "token_dropout": draw.random() < 0.5,
            "emb_layer_norm_before": draw.choice((None, False, True)),
            "rope_theta": theta,
            "position_embedding_type": draw.choice(("rotary", "absolute")),
        },
        "roformer": {**types, "embedding_size": draw.choice((None, 8, hidden))},
    }
    own["deberta-v2"] = drawn_distances(draw, hidden, max_distance=sizes["max_position_embeddings"])
    if name == "esm":  # whose activation and padding are fixed
        sizes.pop("hidden_act")
    return sizes | own[name]


def drawn_distances(draw: random.Random, hidden: int, *, max_distance: int) -> dict[str, Any]:
    """Draw what DeBERTa-v2 has in place of positions alone: terms of scores, distances, buckets and heads."""
    terms = draw.choice((["c2p", "p2c"], ["p2c", "c2p"], ["c2p"], ["p2c"], "p2c|c2p", []))
    buckets = draw.choice((-1, 4, 8, 16))
    legacy = draw.random() < 0.6
    return {
        "relative_attention": bool(terms), "pos_att_type": terms, "position_buckets": buckets,
        "max_relative_positions": draw.choice((-1, max(buckets // 2 + 2, 3), max_distance // 2 + 4)),
        "share_att_key": draw.random() < 0.5, "norm_rel_ebd": draw.choice(("none", "layer_norm")),
        "position_biased_input": draw.random() < 0.5, "type_vocab_size": draw.choice((0, 3)), "legacy": legacy,
        "pooler_hidden_act": draw.choice(("gelu", "relu")),
        "embedding_size": draw.choice((8, hidden)) if legacy else hidden,
    }  # fmt: skip


def check_drawn(name: str, seed: int, folder: Path) -> None:
    """Import a random model of a random class and configuration, and compare it with the original."""
    kinds = [kind for kind in HEADS if hasattr(transformers, FAMILIES[name].prefix + kind)]
    kind = random.Random(seed).choice(kinds)
    drawn = Family(FAMILIES[name].prefix, sizes=drawn_sizes(name, seed))
    theirs = make(drawn, kind, **labelled(HEADS[kind]))
    theirs.save_pretrained(folder / "hub")
    assert import_checkpoint(folder / "hub", folder / "ours", verify=True).comparison.exact < 1e-12
    same(folder / "ours", theirs)


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("name", FAMILIES)
def test_random_configurations(tmp_path: Path, name: str, seed: int) -> None:
    check_drawn(name, seed, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["Model", "ForMaskedLM", "ForTokenClassification"])
@pytest.mark.parametrize("name", FAMILIES)
def test_imported_model_is_exported_to_onnx(tmp_path: Path, name: str, kind: str) -> None:
    make(FAMILIES[name], kind).save_pretrained(tmp_path / "hub")
    import_checkpoint(tmp_path / "hub", tmp_path / "ours")
    assert export_model(tmp_path / "ours").passed


REFUSED = {
    "other buckets": ("mpnet", {"relative_attention_num_buckets": 16}, ("relative_attention_num_buckets 16 is not",)),
    "another padding token": ("mpnet", {"pad_token_id": 4}, ("pad_token_id 4 is not supported, only 1",)),
    "multiple choice": ("mpnet", {"architectures": ["MPNetForMultipleChoice"]}, ("MPNetForMultipleChoice",)),
    "scaled frequencies": (
        "nomic_bert",
        {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 50.0}},
        ("rope_parameters", "are not supported", "known: rope_type default"),
    ),
    "wide heads": ("nomic_bert", {"head_dim": 8}, ("head_dim 8 is not supported",)),
    "experts": ("nomic_bert", {"num_experts": 8}, ("num_experts 8 is not supported",)),
    "norms before": ("nomic_bert", {"prenorm": True}, ("prenorm True is not supported",)),
    "rotated values": ("roformer", {"rotary_value": True}, ("rotary_value True is not supported, only False",)),
    "a decoder": ("roformer", {"is_decoder": True}, ("is_decoder True is not supported",)),
    "a decoder of proteins": ("esm", {"is_decoder": True}, ("is_decoder True is not supported",)),
    "a folding model": ("esm", {"is_folding_model": True}, ("is_folding_model True is not supported",)),
    "padding as the token to drop": (
        "esm",
        {"mask_token_id": 1},
        ("mask_token_id and pad_token_id are both 1, which token_dropout tells apart",),
    ),
    "no token to drop": ("esm", {"mask_token_id": None}, ("token_dropout needs a mask_token_id",)),
    "other frequencies": ("esm", {"rope_theta": 60.0}, ("rotary_embeddings.inv_freq is not supported",)),
    "positions without padding": (
        "esm",
        {"position_embedding_type": "absolute", "pad_token_id": None},
        ("pad_token_id is missing, which positions skip",),
    ),
    "relative positions": (
        "esm",
        {"position_embedding_type": "relative_key"},
        ("position_embedding_type 'relative_key' is not supported",),
    ),
    "a convolution": ("deberta-v2", {"conv_kernel_size": 3}, ("conv_kernel_size 3 is not supported, only 0",)),
    "another term": ("deberta-v2", {"pos_att_type": "p2p|c2p"}, ("pos_att_type 'p2p|c2p' is not supported",)),
    "terms without distances": (
        "deberta-v2",
        {"relative_attention": False},
        ("relative_attention False with pos_att_type ['c2p', 'p2c'] is not supported",),
    ),
    "distances without terms": ("deberta-v2", {"pos_att_type": []}, ("relative_attention True with pos_att_type []",)),
    "another norm": ("deberta-v2", {"norm_rel_ebd": "rms"}, ("norm_rel_ebd 'rms' is not supported",)),
    "odd buckets": ("deberta-v2", {"position_buckets": 7}, ("distance_buckets must be even and at least 4",)),
    "too many buckets": ("deberta-v2", {"position_buckets": 32}, ("max_distance 17 and distance_buckets 32",)),
    "a wide pooler": ("deberta-v2", {"pooler_hidden_size": 60}, ("pooler_hidden_size 60 is not supported, only 30",)),
    "heads of their own size": ("deberta-v2", {"attention_head_size": 8}, ("attention_head_size 8 is not supported",)),
    "odd heads": ("roformer", {"num_attention_heads": 2}, ("rotary positions need heads of even width",)),
}


@pytest.mark.parametrize(("name", "changes", "fragments"), REFUSED.values(), ids=REFUSED)
def test_unsupported_configuration_is_rejected(
    tmp_path: Path, zoo: Zoo, name: str, changes: dict[str, Any], fragments: tuple[str, ...]
) -> None:
    make(FAMILIES[name], "Model").save_pretrained(tmp_path / "hub")
    edit(tmp_path / "hub", **changes)
    zoo("import", tmp_path / "hub", "-o", tmp_path / "ours").failed(2, *fragments)
    assert not (tmp_path / "ours").exists()


# Specifics of each family.


def test_mpnet_at_distances_beyond_the_last_bucket(tmp_path: Path) -> None:
    """The last bucket begins at a distance of 128."""
    theirs = make(FAMILIES["mpnet"], "Model", max_position_embeddings=302, num_hidden_layers=1)
    theirs.save_pretrained(tmp_path / "hub")
    import_checkpoint(tmp_path / "hub", tmp_path / "ours", verify=False)
    same(tmp_path / "ours", theirs)


def test_published_mpnet_with_an_unused_pooler(tmp_path: Path) -> None:
    """A file that names MPNetForMaskedLM, as that of all-mpnet-base-v2 does, also has the pooler of the base model."""
    theirs = make(FAMILIES["mpnet"], "ForMaskedLM")
    theirs.save_pretrained(tmp_path / "hub")
    pooler = {f"mpnet.pooler.dense.{name}": torch.ones(shape) for name, shape in (("weight", (30, 30)), ("bias", 30))}
    rewrite(tmp_path / "hub", lambda tensors: {**tensors, **pooler})
    import_checkpoint(tmp_path / "hub", tmp_path / "ours", settings=["pooler=false"])
    same(tmp_path / "ours", theirs)


@pytest.mark.parametrize("name", FAMILIES)
def test_sentence_encoder(tmp_path: Path, name: str) -> None:
    """Vectors are normalised means over tokens, and prompts are kept."""
    theirs, hub = make(FAMILIES[name], "Model"), tmp_path / "hub"
    theirs.save_pretrained(hub)
    kinds = ("Transformer", "Pooling", "Normalize")
    modules = [{"path": "", "type": f"sentence_transformers.models.{kind}"} for kind in kinds]
    modules[1]["path"] = "1_Pooling"
    (hub / "modules.json").write_text(json.dumps(modules))
    (hub / "1_Pooling").mkdir()
    (hub / "1_Pooling" / "config.json").write_text(json.dumps({"pooling_mode_mean_tokens": True}))
    prompts = {"query": "search_query: ", "document": "search_document: "}
    (hub / "config_sentence_transformers.json").write_text(json.dumps({"prompts": prompts}))
    config = import_checkpoint(hub, tmp_path / "ours", verify=True).spec.config
    assert (config.task, config.pooling, config.normalize) == ("sentence-embedding", "mean", True)
    feeds = feeds_of(config)
    found = outputs(library.load(tmp_path / "ours"), feeds)["sentence_embedding"]
    with torch.inference_mode(), Exact(theirs.double()):
        states = theirs(**feeds).last_hidden_state
    mask = feeds["attention_mask"].unsqueeze(-1)
    means = (states * mask).sum(1) / mask.sum(1)
    assert_close(found, means / means.norm(dim=-1, keepdim=True), rtol=0, atol=1e-12)
    assert export_checkpoint(tmp_path / "ours", tmp_path / "back").model_type == name
    said = json.loads((tmp_path / "back" / "config_sentence_transformers.json").read_text())
    assert said["prompts"] == prompts
    assert import_checkpoint(tmp_path / "back", tmp_path / "again", verify=False).spec.config == config


def test_either_names_of_nomic_bert(tmp_path: Path) -> None:
    """Nomic's own code has other keys than the file that transformers writes, and transformers' class other tensors."""
    theirs = make(FAMILIES["nomic_bert"], "Model")
    theirs.save_pretrained(tmp_path / "hub")
    tensors = {name: tensor.clone() for name, tensor in theirs.state_dict().items()}
    assert any("self_attn.q_proj" in name for name in tensors)
    rewrite(tmp_path / "hub", lambda _: tensors)
    old = {
        "hidden_size": "n_embd", "num_attention_heads": "n_head", "intermediate_size": "n_inner",
        "num_hidden_layers": "n_layer", "max_position_embeddings": "max_trained_positions",
        "layer_norm_eps": "layer_norm_epsilon", "hidden_dropout_prob": "resid_pdrop",
    }  # fmt: skip
    said = json.loads((tmp_path / "hub" / "config.json").read_text())
    edit(tmp_path / "hub", **dict.fromkeys((*old, "rope_parameters", "head_dim")))
    edit(
        tmp_path / "hub", **{theirs: said[ours] for ours, theirs in old.items()}, rotary_emb_base=50,
        activation_function="swiglu", n_positions=8192, prenorm=False, qkv_proj_bias=False, rotary_emb_fraction=1.0,
    )  # fmt: skip
    config = import_checkpoint(tmp_path / "hub", tmp_path / "ours", verify=False).spec.config
    wanted = {**COMMON, **FAMILIES["nomic_bert"].ours}
    assert {key: getattr(config, key) for key in wanted} == wanted
    same(tmp_path / "ours", theirs)


@pytest.mark.parametrize("half", [True, False])
def test_frequencies_of_old_files_of_esm(tmp_path: Path, half: bool) -> None:
    """Each layer has a table, which may be rounded to float16; the original uses it as it is, and so does the copy."""
    theirs = make(FAMILIES["esm"], "Model")
    exact = theirs.rotary_embeddings.inv_freq.clone()
    if half:
        theirs.rotary_embeddings.inv_freq.copy_(exact.half().float())
        assert not theirs.rotary_embeddings.inv_freq.equal(exact)
    theirs.save_pretrained(tmp_path / "hub")

    def old(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        name = "encoder.layer.{}.attention.self.rotary_embeddings.inv_freq"
        table = tensors.pop(name.format("*"))
        unused = {"embeddings.position_embeddings.weight": torch.ones(ROWS, 30)}
        return {**tensors, **unused, **{name.format(layer): table.clone() for layer in range(3)}}

    rewrite(tmp_path / "hub", old)
    imported = import_checkpoint(tmp_path / "hub", tmp_path / "ours")
    assert imported.spec.config.rope_float16 == half
    same(tmp_path / "ours", theirs)
    export_checkpoint(tmp_path / "ours", tmp_path / "back")
    written = load_file(tmp_path / "back" / "model.safetensors")["rotary_embeddings.inv_freq"]
    assert written.equal(theirs.rotary_embeddings.inv_freq.float())


def test_either_head_of_deberta(tmp_path: Path) -> None:
    """With ``legacy`` false the head has other names, and always shares the embedding. The legacy names are written."""
    family = FAMILIES["deberta-v2"]
    theirs = make(family, "ForMaskedLM", legacy=False, embedding_size=30, tie_word_embeddings=False)
    theirs.save_pretrained(tmp_path / "hub")
    assert "lm_predictions.lm_head.bias" in load_file(tmp_path / "hub" / "model.safetensors")
    assert import_checkpoint(tmp_path / "hub", tmp_path / "ours", verify=True).spec.config.tie_embeddings
    same(tmp_path / "ours", theirs)
    export_checkpoint(tmp_path / "ours", tmp_path / "back", verify=True)
    assert "cls.predictions.bias" in load_file(tmp_path / "back" / "model.safetensors")
    again = transformers.DebertaV2ForMaskedLM.from_pretrained(tmp_path / "back").eval()
    feeds = feeds_of(library.load(tmp_path / "ours").config)
    assert_close(outputs(again, feeds)["logits"], outputs(theirs, feeds)["logits"], rtol=0, atol=1e-12)


def test_published_deberta_with_heads_of_pretraining(tmp_path: Path) -> None:
    """deberta-v3-base names no class and has the heads of its generator, and a table of positions that it lacks."""
    theirs = make(FAMILIES["deberta-v2"], "ForMaskedLM", legacy=False, embedding_size=30)
    theirs.save_pretrained(tmp_path / "hub")
    unread = {"mask_predictions.dense.weight": (30, 30), "deberta.embeddings.position_embeddings.weight": (ROWS, 30)}
    rewrite(tmp_path / "hub", lambda tensors: {**tensors, **{name: torch.ones(size) for name, size in unread.items()}})
    edit(tmp_path / "hub", architectures=None, legacy=None)
    imported = import_checkpoint(tmp_path / "hub", tmp_path / "ours", verify=True)
    assert imported.spec.config.task == "feature-extraction"
    assert imported.head.dropped == ("lm_predictions.*", "mask_predictions.*")
    same(tmp_path / "ours", theirs.deberta)
    edit(tmp_path / "hub", architectures=["DebertaV2ForMaskedLM"])
    with pytest.raises(UsageError, match=r"is the head of models with legacy false.*set it to false"):
        import_checkpoint(tmp_path / "hub", tmp_path / "again")


@pytest.mark.parametrize("buckets", [-1, 8, 256])
def test_deberta_at_distances_beyond_the_last(tmp_path: Path, buckets: int) -> None:
    """Texts longer than ``max_relative_positions``; 256 buckets and 512 positions are the published sizes."""
    sizes = {"max_relative_positions": 512 if buckets == 256 else 40, "max_position_embeddings": 530}
    theirs = make(FAMILIES["deberta-v2"], "Model", position_buckets=buckets, num_hidden_layers=1, **sizes)
    theirs.save_pretrained(tmp_path / "hub")
    import_checkpoint(tmp_path / "hub", tmp_path / "ours", verify=False)
    same(tmp_path / "ours", theirs)


DEBERTA_SIZES = {
    "hidden_size": 768, "num_attention_heads": 12, "intermediate_size": 3072, "relative_attention": True,
    "pos_att_type": ["p2c", "c2p"], "position_buckets": 256, "norm_rel_ebd": "layer_norm", "share_att_key": True,
    "position_biased_input": False,
}  # fmt: skip
ESM_SIZES = {
    "vocab_size": 33, "num_attention_heads": 20, "position_embedding_type": "rotary", "pad_token_id": 1,
    "layer_norm_eps": 1e-5, "mask_token_id": 32, "token_dropout": True,
}  # fmt: skip


@pytest.mark.parametrize(
    ("preset", "model_class", "sizes"),
    [
        ("all-mpnet-base", "MPNetModel", {"max_position_embeddings": 514, "layer_norm_eps": 1e-5}),
        ("nomic-embed-text", "NomicBertModel", {}),
        ("roformer-base", "RoFormerModel", {}),
        ("deberta-v3-base", "DebertaV2Model", {**DEBERTA_SIZES, "num_hidden_layers": 12}),
        ("deberta-v3-small", "DebertaV2ForMaskedLM", {**DEBERTA_SIZES, "num_hidden_layers": 6}),
        ("esm2-8m", "EsmForMaskedLM", {**ESM_SIZES, "hidden_size": 320, "num_hidden_layers": 6}),
        ("esm2-650m", "EsmForMaskedLM", {**ESM_SIZES, "hidden_size": 1280, "num_hidden_layers": 33}),
    ],
)
def test_presets_have_the_parameters_of_the_original(preset: str, model_class: str, sizes: dict[str, Any]) -> None:
    """A preset has as many learned parameters as the original class at its sizes, apart from ESM's contact head."""
    original = getattr(transformers, model_class)
    if model_class.startswith("Esm"):
        sizes = {**sizes, "intermediate_size": 4 * sizes["hidden_size"]}
    with torch.device("meta"):
        theirs = original(original.config_class(**sizes))
    parts = {name: part for name, part in theirs.named_parameters() if part.requires_grad and "contact" not in name}
    settings = ["task=fill-mask"] if model_class.endswith("MaskedLM") else []
    assert parameter_count(registry().resolve(preset, settings)) == sum(part.numel() for part in parts.values())
