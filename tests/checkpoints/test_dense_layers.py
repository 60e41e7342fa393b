"""Directories of sentence-transformers with dense layers: their tensors, order, activations and prompts."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor, nn
from torch.testing import assert_close

import zoo as library
from tests.exported import sign_export
from zoo.checkpoints import export_checkpoint, import_checkpoint
from zoo.checkpoints.exact import Exact
from zoo_runtime import load_session

Zoo = Callable[..., Any]

ORDERS: dict[str, tuple[list[str], dict[str, Any]]] = {
    "LaBSE": (["Dense", "Normalize"], {"sizes": [(30, 30)]}),
    "distiluse": (["Dense"], {"sizes": [(30, 17)]}),
    "sentence-t5": (["Dense", "Normalize"], {"sizes": [(30, 11)], "activation": nn.Identity, "bias": False}),
    "embeddinggemma": (["Dense", "Dense", "Normalize"], {"sizes": [(30, 50), (50, 30)], "activation": nn.Identity}),
    "normalised first": (["Normalize", "Dense", "Normalize"], {"sizes": [(30, 8)], "activation": nn.GELU}),
    "normalised first only": (["Normalize", "Dense"], {"sizes": [(30, 8)], "activation": nn.ReLU}),
}
"""The modules after the pooling, as published models have them, and their dense layers."""


def make(family: str) -> transformers.PreTrainedModel:
    """Make transformers' model with random weights."""
    sizes: dict[str, Any] = {"hidden_size": 30, "num_hidden_layers": 2, "num_attention_heads": 5, "vocab_size": 61}
    mlp = {"intermediate_size": 37, "max_position_embeddings": 40}
    torch.manual_seed(0)
    match family:
        case "bert":
            config: Any = transformers.BertConfig(**sizes, **mlp)
            return transformers.BertModel(config, add_pooling_layer=False).eval()
        case "xlm-roberta":
            return transformers.XLMRobertaModel(transformers.XLMRobertaConfig(**sizes, **mlp)).eval()
        case "distilbert":
            config = transformers.DistilBertConfig(
                dim=30, n_layers=2, n_heads=5, hidden_dim=37, vocab_size=61, max_position_embeddings=40
            )
            return transformers.DistilBertModel(config).eval()
        case "modernbert":
            config = transformers.ModernBertConfig(**sizes | {"num_attention_heads": 3}, **mlp, pad_token_id=0)
            return transformers.ModernBertModel(config).eval()
        case "t5":
            config = transformers.T5Config(
                vocab_size=61, d_model=30, d_kv=6, d_ff=37, num_layers=2, num_heads=5, architectures=["T5EncoderModel"]
            )
            return transformers.T5EncoderModel(config).eval()
        case "gpt2":
            config = transformers.GPT2Config(vocab_size=61, n_positions=40, n_embd=30, n_layer=2, n_head=5)
            return transformers.GPT2Model(config).eval()
    config = transformers.Gemma3TextConfig(**sizes, **mlp, num_key_value_heads=5, head_dim=6, sliding_window=4)
    return transformers.Gemma3TextModel(config).eval()


def write(
    folder: Path, family: str, order: str, **pooling: Any
) -> tuple[transformers.PreTrainedModel, list[nn.Module]]:
    """Write a directory as sentence-transformers does; return the model, and the modules after the pooling."""
    theirs = make(family)
    theirs.save_pretrained(folder)
    after, dense = ORDERS[order]
    sizes, layers = iter(dense["sizes"]), list[nn.Module]()
    listed = [("", "Transformer"), ("1_Pooling", "Pooling")]
    for number, kind in enumerate(after, start=2):
        path = folder / f"{number}_{kind}"
        path.mkdir()
        listed.append((path.name, kind))
        if kind == "Normalize":
            layers.append(Normalize())
            continue
        linear = nn.Linear(*next(sizes), bias=dense.get("bias", True))
        activation = dense.get("activation", nn.Tanh)()
        layers.append(nn.Sequential(linear, activation))
        tensors = {f"linear.{name}": value.detach().clone() for name, value in linear.named_parameters()}
        if order == "distiluse":  # an old file
            torch.save(tensors, path / "pytorch_model.bin")
        else:
            save_file(tensors, path / "model.safetensors")
        kind_of = type(activation)
        described = {
            "in_features": linear.in_features, "out_features": linear.out_features, "bias": dense.get("bias", True),
            "activation_function": f"{kind_of.__module__}.{kind_of.__name__}",
        }  # fmt: skip
        (path / "config.json").write_text(json.dumps(described))
    modules = [
        {"idx": number, "name": str(number), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for number, (path, kind) in enumerate(listed)
    ]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_Pooling").mkdir()
    stated = {"word_embedding_dimension": 30, "pooling_mode_mean_tokens": True, "include_prompt": True}
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(stated | pooling))
    return theirs, layers


class Normalize(nn.Module):
    """Division by the length."""

    def forward(self, x: Tensor) -> Tensor:
        return x / x.square().sum(-1, keepdim=True).sqrt()


@pytest.mark.slow_after(4)
@pytest.mark.parametrize(
    ("family", "order"),
    [
        *(("bert", order) for order in ORDERS),
        ("xlm-roberta", "LaBSE"),
        ("distilbert", "distiluse"),
        ("modernbert", "LaBSE"),
        ("t5", "sentence-t5"),
        ("gpt2", "LaBSE"),
        ("gemma3_text", "embeddinggemma"),
    ],
)
def test_vectors_and_files(tmp_path: Path, family: str, order: str) -> None:
    """Vectors equal the modules' own computation in float64, and the directory is written back bit for bit."""
    theirs, layers = write(tmp_path / "hub", family, order)
    imported = import_checkpoint(tmp_path / "hub", tmp_path / "ours", verify=True)
    ids = torch.randint(3, 61, (3, 12), generator=torch.Generator().manual_seed(1))
    mask = (torch.arange(12) < torch.tensor([[12], [7], [1]])).long()
    ids = ids.masked_fill(mask == 0, getattr(imported.spec.config, "pad_token_id", 0) or 0)
    with torch.inference_mode():
        with Exact(theirs):
            states = theirs.double()(input_ids=ids, attention_mask=mask).last_hidden_state
        vectors = torch.stack([row[: int(kept.sum())].mean(0) for row, kept in zip(states, mask, strict=True)])
        for layer in layers:
            vectors = layer.double()(vectors)
        ours = library.load(tmp_path / "ours").double()
        found = (ours.encode if family == "t5" else ours)(ids, mask)["sentence_embedding"]
    assert_close(found, vectors, rtol=0, atol=1e-10)
    assert imported.spec.config.cost().parameters == sum(item.numel() for item in ours.parameters())

    export_checkpoint(tmp_path / "ours", tmp_path / "back", model_type=family)
    assert json.loads((tmp_path / "back/modules.json").read_text()) == json.loads(
        (tmp_path / "hub/modules.json").read_text()
    )
    for path in sorted((tmp_path / "hub").glob("*_Dense/*")):
        back = tmp_path / "back" / path.relative_to(tmp_path / "hub")
        if path.name == "config.json":
            assert json.loads(back.read_text()) == json.loads(path.read_text())
        elif path.suffix == ".safetensors":
            assert_close(load_file(back), load_file(path), rtol=0, atol=0)
    again = import_checkpoint(tmp_path / "back", tmp_path / "again").spec.config
    assert again == imported.spec.config


def test_another_task_drops_the_dense_layers(tmp_path: Path) -> None:
    write(tmp_path / "hub", "bert", "LaBSE")
    moved = import_checkpoint(tmp_path / "hub", tmp_path / "ours", task="feature-extraction")
    assert moved.head.dropped == ("Dense.0.linear.weight", "Dense.0.linear.bias")
    assert moved.spec.config.projection_sizes == ()
    library.adapt(tmp_path / "ours", tmp_path / "again", task="sentence-embedding", projection_sizes=[9])
    assert library.load(tmp_path / "again").config.vector_size(30) == 9


@pytest.mark.parametrize(
    ("file", "values", "fragments"),
    [
        ("2_Dense", {"activation_function": "my.Snake"}, ("activation_function 'my.Snake' is not supported", "known")),
        ("2_Dense", {"use_residual": True}, ("use_residual true is not supported",)),
        ("2_Dense", {"module_input_name": "token_embeddings"}, ("'token_embeddings' is not supported",)),
        ("2_Dense", {"out_features": "x"}, ("projection_sizes", "'x'")),
        ("2_Dense", {"bias": False}, ("dense layers that differ in bias are not supported: False, True",)),
        ("4_Normalize", {"module_input_name": "token_embeddings"}, ("'token_embeddings' is not supported",)),
        ("1_Pooling", {"include_prompt": False}, ("include_prompt false is not supported",)),
        ("1_Pooling", {"pooling_mode": ["mean", "cls"]}, ("pooling_mode ['mean', 'cls'] is not supported",)),
    ],
)
def test_unsupported_settings_are_rejected(
    tmp_path: Path, zoo: Zoo, file: str, values: dict[str, Any], fragments: tuple[str, ...]
) -> None:
    write(tmp_path / "hub", "bert", "embeddinggemma")
    path = tmp_path / "hub" / file / "config.json"
    path.write_text(json.dumps({**(json.loads(path.read_text()) if path.exists() else {}), **values}))
    zoo("import", tmp_path / "hub", "-o", tmp_path / "ours").failed(2, *fragments)
    assert not (tmp_path / "ours").exists()


def test_missing_dense_tensors_are_named(tmp_path: Path, zoo: Zoo) -> None:
    write(tmp_path / "hub", "bert", "LaBSE")
    save_file(
        {"linear.weight": torch.zeros(30, 29), "other": torch.zeros(1)}, tmp_path / "hub/2_Dense/model.safetensors"
    )
    zoo("import", tmp_path / "hub", "-o", tmp_path / "ours").failed(
        3, "missing Dense.0.linear.bias", "Dense.0.linear.weight has shape (30, 29)", "unexpected Dense.0.other"
    )


def test_recent_pooling_config(tmp_path: Path) -> None:
    """Recent versions write one ``pooling_mode`` instead of a flag for each."""
    pooling = {"pooling_mode_mean_tokens": False, "pooling_mode": "lasttoken", "embedding_dimension": 30}
    write(tmp_path / "hub", "bert", "LaBSE", **pooling)
    assert import_checkpoint(tmp_path / "hub", tmp_path / "ours").spec.config.pooling == "last"


@pytest.mark.slow
def test_prompts(tmp_path: Path, zoo: Zoo) -> None:
    """A prompt is put before each text; the default one if none is chosen."""
    write(tmp_path / "hub", "bert", "LaBSE")
    prompts = {"query": "q: ", "passage": "p "}
    stated = {"prompts": prompts, "default_prompt_name": "passage", "similarity_fn_name": "cosine"}
    (tmp_path / "hub/config_sentence_transformers.json").write_text(json.dumps(stated))
    vocabulary = {token: number for number, token in enumerate(["[PAD]", "[UNK]", *"abcdefghijklmnopqrstuvwxyz: "])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.save(str(tmp_path / "hub/tokenizer.json"))
    as_it_is = {"tokenizer_class": "PreTrainedTokenizerFast", "pad_token": "[PAD]", "unk_token": "[UNK]"}
    (tmp_path / "hub/tokenizer_config.json").write_text(json.dumps(as_it_is))
    ours = tmp_path / "ours"
    import_checkpoint(tmp_path / "hub", ours)
    sign_export(ours)
    with load_session(ours) as session:

        def vector(text: str, **options: Any) -> Any:
            return session.run([text], **options)[0]["embedding"]

        plain = {text: vector(text, prefix="") for text in ("abc", "q: abc", "p abc", "x abc")}
        assert (vector("abc") == plain["p abc"]).all()
        assert (vector("abc", task_prefix="query") == plain["q: abc"]).all()
        assert (vector("abc", prefix="x ") == plain["x abc"]).all()
        assert not (plain["abc"] == plain["p abc"]).all()
    zoo("run", ours, "abc", "--option", "task_prefix=querry").failed(2, "no prefix for the task 'querry'", "'query'")
    export_checkpoint(ours, tmp_path / "back")
    assert json.loads((tmp_path / "back/config_sentence_transformers.json").read_text()) == stated
