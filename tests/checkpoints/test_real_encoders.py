"""Real weights from MIT-licensed packages on PyPI, against the results that their authors published.

``ZOO_ENCODERS`` names a directory with the unpacked wheels of rxnfp 0.1.0, rxnmapper 0.4.3 and antiberty 0.1.3::

    pip download --no-deps rxnfp==0.1.0 rxnmapper==0.4.3 antiberty==0.1.3
    for wheel in *.whl; do unzip -q $wheel -d $ZOO_ENCODERS; done
"""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

import zoo as library
from tests.exported import run_model, sign_export
from zoo.checkpoints import export_checkpoint, import_checkpoint
from zoo.models.count import parameter_count
from zoo_export.export import export_model
from zoo_runtime import Pair, load_session

pytestmark = pytest.mark.slow

REACTION = (
    "Nc1cccc2cnccc12.O=C(O)c1cc([N+](=O)[O-])c(Sc2c(Cl)cncc2Cl)s1"
    ">>O=C(Nc1cccc2cnccc12)c1cc([N+](=O)[O-])c(Sc2c(Cl)cncc2Cl)s1"
)
"""Example in the README of rxnfp."""
SMILES = re.compile(
    r"\%\([0-9]{3}\)|\[[^\]]+]|Br?|Cl?|N|O|S|P|F|I|b|c|n|o|s|p|\||\(|\)|\.|=|#|-|\+|\\|\/|:|~|@|\?|>>?|\*|\$|\%[0-9]{2}|[0-9]"
)
"""The tokenization of reactions in these models."""
FINGERPRINT = [-2.0174953937530518, 1.7602033615112305, -1.3323537111282349, -1.1095019578933716, 1.2254549264907837]
"""The first elements of its fingerprint in the README."""
ANTIBODY = (
    "EVQLVQSGPEVKKPGTSVKVSCKASGFTFMSSAVQWVRQARGQRLEWIGWIVIGSGNTNYAQKFQERVTITRDMSTSTAYMELSSLRSEDTAVYYCAAPYCSS"
    "ISCNDGFDIWGQGTMVTVS"
)
"""Example in the README of antiberty."""


@pytest.fixture(scope="module")
def folder() -> Path:
    named = os.environ.get("ZOO_ENCODERS")
    if not named:
        pytest.skip("ZOO_ENCODERS does not name the unpacked wheels of rxnfp, rxnmapper and antiberty")
    return Path(named)


def tokens(vocabulary: Path, parts: list[str]) -> tuple[list[int], int]:
    """Return the ids of a text with special tokens, and the id of the mask."""
    known = {word: number for number, word in enumerate(vocabulary.read_text().split("\n"))}
    return [known["[CLS]"], *(known[part] for part in parts), known["[SEP]"]], known["[MASK]"]


def masked(ids: list[int], mask: int) -> list[list[int]]:
    """Mask each token between the first and the last, one at a time."""
    return [[*ids[:place], mask, *ids[place + 1 :]] for place in range(1, len(ids) - 1)]


def recovered(model: Path, ids: list[int], mask: int) -> int:
    """Count the masked tokens that the exported graph recovers."""
    with load_session(model) as session:
        results = session.run(masked(ids, mask), task="fill-mask", top_k=1)
    found = [result["masks"][0][0]["token"] for result in results]
    return sum(token == true for token, true in zip(found, ids[1:-1], strict=True))


def recovered_by(model: torch.nn.Module, ids: list[int], mask: int) -> int:
    """Count the masked tokens that a torch model recovers."""
    rows = masked(ids, mask)
    with torch.inference_mode():
        found = model(torch.tensor(rows))["logits"][range(len(rows)), range(1, len(rows) + 1)].argmax(-1)
    return int((found == torch.tensor(ids[1:-1])).sum())


def test_rxnfp_reproduces_the_fingerprint_of_its_readme(folder: Path, tmp_path: Path) -> None:
    source = folder / "rxnfp/models/transformers/bert_ft"
    imported = import_checkpoint(source, tmp_path / "ours", model_type="bert", verify=True)
    assert parameter_count(imported.spec) == 6_674_432
    assert export_model(tmp_path / "ours").passed
    ids, _ = tokens(source / "vocab.txt", SMILES.findall(REACTION))
    _, (result,) = run_model(tmp_path / "ours", ids=[ids], task="feature-extraction")
    np.testing.assert_allclose(result["last_hidden_state"][0][:5], FINGERPRINT, rtol=0, atol=2e-5)
    assert export_checkpoint(tmp_path / "ours", tmp_path / "hub", verify=True).model_type == "bert"


def test_rxnfp_recovers_masked_tokens(folder: Path, tmp_path: Path) -> None:
    """98 of 103."""
    source = folder / "rxnfp/models/transformers/bert_pretrained"
    settings = ["task=pretraining", "mask_token_id=14"]
    import_checkpoint(source, tmp_path / "ours", model_type="bert", settings=settings, verify=True)
    sign_export(tmp_path / "ours")
    ids, mask = tokens(source / "vocab.txt", SMILES.findall(REACTION))
    assert (recovered(tmp_path / "ours", ids, mask), len(ids) - 2) == (98, 103)


def test_rxnfp_next_sentence_equals_transformers(folder: Path, tmp_path: Path) -> None:
    """Reactants and products in both orders give the same probabilities as transformers."""
    from transformers import BertForNextSentencePrediction

    source = folder / "rxnfp/models/transformers/bert_pretrained"
    settings = ["task=pretraining", "mask_token_id=14"]
    import_checkpoint(source, tmp_path / "ours", model_type="bert", settings=settings, verify=True)
    sign_export(tmp_path / "ours")
    sides = [tokens(source / "vocab.txt", SMILES.findall(side))[0] for side in REACTION.split(">>")]
    pairs = [Pair(first, second[1:]) for first, second in (sides, sides[::-1])]
    with load_session(tmp_path / "ours") as session:
        found = [result["follows"] for result in session.run(pairs, task="next-sentence")]
    theirs = BertForNextSentencePrediction.from_pretrained(source, attn_implementation="eager").eval()
    for (first, second), chance in zip(pairs, found, strict=True):
        types = torch.tensor([[0] * len(first) + [1] * len(second)])
        with torch.inference_mode():
            wanted = theirs(torch.tensor([[*first, *second]]), token_type_ids=types).logits.softmax(-1)[0, 0]
        np.testing.assert_allclose(chance, float(wanted), rtol=1e-3)


def test_rxnfp_augments_reactions(folder: Path, tmp_path: Path) -> None:
    """Replacements differ from the original tokens, and are often likelier than a random token."""
    source = folder / "rxnfp/models/transformers/bert_pretrained"
    settings = ["task=pretraining", "mask_token_id=14"]
    import_checkpoint(source, tmp_path / "ours", model_type="bert", settings=settings, verify=True)
    sign_export(tmp_path / "ours")
    ids, _ = tokens(source / "vocab.txt", SMILES.findall(REACTION))
    with load_session(tmp_path / "ours") as session:
        result = session.run(ids, task="augment", num_variants=3, temperature=0)
    chances = []
    for variant in result["variants"]:
        changed = [place for place, (old, new) in enumerate(zip(ids, variant["ids"], strict=True)) if old != new]
        assert len(changed) == round(0.15 * (len(ids) - 2)) == 15
        assert not {0, 11, 12, 13, 14} & {variant["ids"][place] for place in changed}
        assert {0, len(ids) - 1}.isdisjoint(changed)
        chances += [change["probability"] for change in variant["changes"]]
    assert np.mean(chances) > 10 / 591


def test_rxnfp_classifies_reactions(folder: Path, tmp_path: Path) -> None:
    """Its configuration has num_labels 50, but the names of two classes."""
    source = folder / "rxnfp/models/transformers/bert_ft_10k_25s"
    config = import_checkpoint(source, tmp_path / "ours", verify=True).spec.config
    assert (config.task, config.num_classes, config.labels) == ("text-classification", 50, ())


def test_rxnmapper_recovers_masked_tokens(folder: Path, tmp_path: Path) -> None:
    """An ALBERT, which recovers the same tokens as in transformers."""
    (source,) = (folder / "rxnmapper/models/transformers").iterdir()
    spec = import_checkpoint(source, tmp_path / "ours", verify=True).spec
    assert parameter_count(spec) == 735_567 + 256 * 256 + 256  # includes the pooler, unused by the language model
    sign_export(tmp_path / "ours")
    ids, mask = tokens(source / "vocab.txt", SMILES.findall(REACTION))
    from transformers import AlbertForMaskedLM

    count = recovered_by(AlbertForMaskedLM.from_pretrained(source, attn_implementation="eager").eval(), ids, mask)
    assert count > 0.5 * len(ids)
    assert recovered(tmp_path / "ours", ids, mask) == count
    assert export_checkpoint(tmp_path / "ours", tmp_path / "hub", verify=True).model_type == "albert"


def test_antiberty_recovers_masked_residues(folder: Path, tmp_path: Path) -> None:
    """Without its own class and three of its heads, it is a BertForMaskedLM."""
    models = folder / "antiberty/trained_models"
    (source,) = (path for path in models.iterdir() if path.is_dir())
    config = {**json.loads((source / "config.json").read_text()), "architectures": ["BertForMaskedLM"]}
    weights = torch.load(source / "pytorch_model.bin", map_location="cpu", weights_only=True)
    own = re.compile(r"cls\.(species|chain|graft)\.")
    (tmp_path / "hub").mkdir()
    (tmp_path / "hub/config.json").write_text(json.dumps(config))
    kept = {name: tensor.clone() for name, tensor in weights.items() if not own.match(name)}
    assert len(kept) == len(weights) - 6
    save_file(kept, tmp_path / "hub/model.safetensors", {"format": "pt"})
    settings = ["mask_token_id=4"]
    config = import_checkpoint(tmp_path / "hub", tmp_path / "ours", settings=settings, verify=True).spec.config
    assert (config.task, config.num_layers, config.hidden_size) == ("fill-mask", 8, 512)
    from transformers import BertForMaskedLM

    ids, mask = tokens(models / "vocab.txt", list(ANTIBODY))
    count = recovered_by(
        BertForMaskedLM.from_pretrained(tmp_path / "hub", attn_implementation="eager").eval(), ids, mask
    )
    assert count > 0.9 * len(ids)
    assert recovered_by(library.load(tmp_path / "ours"), ids, mask) == count
