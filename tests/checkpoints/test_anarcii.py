"""Third-party checkpoints imported by a plugin that consists of a Layout.

If the environment variable ZOO_ANARCII names a folder with ANARCII 2.0.8 and its dependencies, created by
``pip install --target FOLDER anarcii==2.0.8``, results are compared with its own pipeline.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zoo as library
from tests.conftest import THIRD_PARTY
from zoo import plugins
from zoo.checkpoints import import_checkpoint
from zoo.errors import UsageError
from zoo.nn import Cache
from zoo_export.export import export_model
from zoo_runtime import load_session

DISTRIBUTION = THIRD_PARTY / "zoo-anarcii"
FILES = {
    "antibody": ("antibody_4_1_128_512", "antibody_4_2_128_512"),
    "tcr": ("tcr_4_1_128_512", "tcr_4_2_128_512"),
    "shark": ("shark_4_2_128_512",),
}
END = 2
SIZES = {"HEADS": 2, "DROPOUT": 0.25, "SRC_PAD_IDX": 0, "TRG_PAD_IDX": 0, "INPUT_DIM": 9, "OUTPUT_DIM": 11,
         "HID_DIM": 8, "LAYERS": 1}  # fmt: skip
SEQUENCES = {
    "heavy": (
        "QVQLVQSGAEVKKPGASVKVSCKASGYTFTSYDINWVRQATGQGLEWMGWMNPNSGNTGY"
        "AQKFQGRVTMTRNTSISTAYMELSSLRSEDTAVYYCARGRGYSSSWYDAFDIWGQGTMVT"
        "VSS"
    ),
    "kappa": (
        "DIQMTQSPSSLSASVGDRVTITCRASQSISSYLNWYQQKPGKAPKLLIYAASSLQSGVPSRFSGSGSGTDFTLTISSLQPEDFATYYCQQSYSTPLTFGGGTKVEIK"
    ),
    "lambda": (
        "QSVLTQPPSASGTPGQRVTISCSGSSSNIGSNTVNWYQQLPGTAPKLLIYSNNQRPSGVPDRFSGSKSGTSASLAISGLQSEDEADYYCAAWDDSLNGWVFGGGTKLTVL"
    ),
    "none of it": ("MKTAYIAKQRQISFVKSHFSRQLEERLGLIEVQAPILSRVGDGTQDNLSGAEKAVQVKVKALPDAQFEVVHSLAKWKR"),
}


@pytest.fixture(autouse=True)
def installed(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Put the plugin's distribution on the path, as in an editable installation."""
    info = tmp_path_factory.mktemp("site") / "zoo_anarcii-0.1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: zoo-anarcii\nVersion: 0.1.0\n")
    (info / "entry_points.txt").write_text("[zoo.plugins]\nanarcii = zoo_anarcii\n")
    monkeypatch.syspath_prepend(info.parent)
    monkeypatch.syspath_prepend(DISTRIBUTION)
    importlib.invalidate_caches()
    plugins.select(plugins.Selection())
    yield
    for name in ("zoo_anarcii", "zoo_anarcii.layout"):
        sys.modules.pop(name, None)


@pytest.fixture
def anarcii(monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the folder of ANARCII's models, with its package on the path."""
    folder = os.environ.get("ZOO_ANARCII")
    if not folder:
        pytest.skip("ZOO_ANARCII names no folder with ANARCII 2.0.8")
    monkeypatch.syspath_prepend(folder)
    return Path(folder) / "anarcii" / "models"


def random_file(folder: Path) -> Path:
    """Write a random checkpoint with ANARCII's names and shapes, and its file of sizes."""
    attention = {"in_proj_weight": (24, 8), "in_proj_bias": (24,), "out_proj.weight": (8, 8), "out_proj.bias": (8,)}
    norm = {"weight": (8,), "bias": (8,)}
    mlp = {"fc_1.weight": (32, 8), "fc_1.bias": (32,), "fc_2.weight": (8, 32), "fc_2.bias": (8,)}
    parts = {
        "encoder.layers.0.": {
            "self_attention.multihead_attn.": attention, "self_attn_layer_norm.": norm, "ff_layer_norm.": norm,
            "positionwise_feedforward.": mlp,
        },
        "decoder.layers.0.": {
            "self_attention.multihead_attn.": attention, "encoder_attention.multihead_attn.": attention,
            "self_attn_layer_norm.": norm, "enc_attn_layer_norm.": norm, "ff_layer_norm.": norm,
            "positionwise_feedforward.": mlp,
        },
        "": {
            "encoder.tok_embedding.": {"weight": (9, 8)}, "decoder.tok_embedding.": {"weight": (11, 8)},
            "encoder.pos_embedding.": {"weight": (21, 8)}, "decoder.pos_embedding.": {"weight": (21, 8)},
            "decoder.fc_out.": {"weight": (11, 8), "bias": (11,)},
        },
    }  # fmt: skip
    state = {
        layer + module + name: torch.randn(shape)
        for layer, modules in parts.items()
        for module, names in modules.items()
        for name, shape in names.items()
    }
    folder.mkdir(exist_ok=True)
    torch.save(state, folder / "small.pt")
    (folder / "small.json").write_text(json.dumps(SIZES))
    return folder / "small.pt"


def test_random_file_is_imported(tmp_path: Path) -> None:
    imported = import_checkpoint(
        random_file(tmp_path / "theirs"), tmp_path / "ours", model_type="anarcii", verify=False
    )
    config = imported.spec.config.to_dict()
    assert (config["vocab_size"], config["target_vocab_size"], config["max_seq_len"]) == (9, 11, 21)
    state = torch.load(tmp_path / "theirs/small.pt", weights_only=True)
    ours = library.load(tmp_path / "ours").state_dict()
    cross = "decoder.layers.0.encoder_attention.multihead_attn.in_proj_weight"
    assert ours["decoder.0.cross.key.weight"].equal(state[cross][8:16])
    assert ours["decoder.0.residual_2.norm.bias"].equal(state["decoder.layers.0.enc_attn_layer_norm.bias"])


def test_missing_sizes_are_reported(tmp_path: Path) -> None:
    path = random_file(tmp_path / "theirs")
    path.with_suffix(".json").unlink()
    with pytest.raises(UsageError, match=r"with its sizes is missing: .*small\.pt: put small\.json beside it"):
        import_checkpoint(path, tmp_path / "ours", model_type="anarcii")


@pytest.mark.parametrize(("group", "name"), [(group, name) for group, names in FILES.items() for name in names])
def test_imported_models_equal_the_originals(anarcii: Path, group: str, name: str, tmp_path: Path) -> None:
    """Outputs equal those of ANARCII's own code in float64."""
    source = anarcii / group / f"{name}.pt"
    comparison = import_checkpoint(source, tmp_path / name, model_type="anarcii", verify=True).comparison
    assert comparison.reason is None
    assert comparison.exact < 1e-10


class Ours(nn.Module):
    """Adapter that runs our model in ANARCII's pipeline."""

    def __init__(self, model: nn.Module, theirs: Any) -> None:
        super().__init__()
        self.model, self.make_src_mask, self.make_trg_mask = model, theirs.make_src_mask, theirs.make_trg_mask

    def encoder(self, source: Tensor, padding: Tensor) -> Any:
        return self.model.encode(source, (~padding).long())["cross_key_values"]

    def decoder(self, ids: Tensor, cross: Any, padding: Tensor, _: Tensor, source: Tensor, cache: Any) -> Any:
        cache = Cache.empty(len(self.model.decoder)) if cache is None else cache
        return self.model.decode(ids, cross, (~padding).long(), (~source).long(), cache), cache


def greedy(model: Any, source: Sequence[int]) -> list[int]:
    """Decode greedily with ANARCII's model, without a cache, up to and including the end token."""
    ids = torch.tensor([source])
    padding, target = model.make_src_mask(ids), ids[:, :1]
    encoded = model.encoder(ids, padding)
    while target.shape[1] <= len(source) and target[0, -1] != END:
        logits = model.decoder(target, encoded, *model.make_trg_mask(target), padding)[0]
        target = torch.cat((target, logits[:, -1:].argmax(-1)), dim=1)
    return target[0, 1:].tolist()


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["speed", "accuracy"])
def test_pipeline_numbers_the_same_residues(
    anarcii: Path, mode: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The pipeline gives the same numbering with our model, and our runtime generates the same tokens."""
    name = f"antibody_4_{1 if mode == 'speed' else 2}_128_512"
    import_checkpoint(anarcii / "antibody" / f"{name}.pt", tmp_path / name, model_type="anarcii")
    pipeline = importlib.import_module("anarcii").Anarcii(seq_type="antibody", mode=mode, cpu=True, ncpu=1)
    running = importlib.import_module("anarcii.inference.model_runner")
    wanted, loader, used = pipeline.number(dict(SEQUENCES)), running.Loader, []

    def load_ours(*arguments: Any) -> SimpleNamespace:
        used.append(Ours(library.load(tmp_path / name), loader(*arguments).model))
        return SimpleNamespace(model=used[-1])

    monkeypatch.setattr(running, "Loader", load_ours)
    found = pipeline.number(dict(SEQUENCES))
    assert used
    assert [result["chain_type"] for result in found.values()] == ["H", "K", "L", "F"]
    for sequence, result in wanted.items():
        assert found[sequence]["numbering"] == result["numbering"]
        assert found[sequence]["score"] == pytest.approx(result["score"], rel=1e-5)

    export_model(tmp_path / name)
    words = running.NumberingTokeniser("protein_antibody")
    inputs = [words.encode(["<SOS>", *text, "<EOS>"]).tolist() for text in SEQUENCES.values()]
    with torch.no_grad():
        tokens = [greedy(loader("antibody", mode, "cpu").model, ids) for ids in inputs]
    with load_session(tmp_path / name, threads=1) as session:
        for ids, expected in zip(inputs, tokens, strict=True):
            assert session.run(ids, max_new_tokens=len(ids))["generated_ids"] == expected
    assert all(ids[-1] == END for ids in tokens[:3])
