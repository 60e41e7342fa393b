"""The translator of the guide computes what torch.nn.Transformer computes with the same weights."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from tests.conftest import ROOT

PAGE = ROOT / "docs" / "howto" / "translator.md"
HEADS, HIDDEN, LAYERS, VOCAB = 4, 32, 2, 50
NAMES = {
    "mlp.up": "linear1",
    "mlp.down": "linear2",
    "norm_1": "norm1",
    "norm_2": "norm2",
    "norm_3": "norm3",
    "self_attention.output": "self_attn.out_proj",
    "cross_attention.output": "multihead_attn.out_proj",
}


@pytest.fixture
def page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The module translator.py of the page."""
    (block,) = re.findall(r"^```python\n# file: translator\.py\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    (tmp_path / "translator.py").write_text(block, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    yield import_module("translator")
    del sys.modules["translator"]


def torch_state(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return the weights of the encoder and the decoder under the names of torch.nn.Transformer."""
    state, stacked = {}, {}
    for name, tensor in model.state_dict().items():
        owner, _, leaf = name.rpartition(".")
        if owner.startswith(("encoder.", "decoder.")):
            owner, kind = re.sub(r"\.(self_attention|cross_attention)\.(query|key|value)$", r".\1", owner), owner
            if owner != kind:
                stacked.setdefault((owner, leaf), []).append(tensor)  # query, key and value, in this order
                continue
            for ours, theirs in NAMES.items():
                owner = re.sub(rf"\.{re.escape(ours)}$", f".{theirs}", owner)
            state[f"{owner}.{leaf}"] = tensor
    for (owner, leaf), parts in stacked.items():
        owner = owner.replace("self_attention", "self_attn").replace("cross_attention", "multihead_attn")
        state[f"{owner}.in_proj_{leaf}"] = torch.cat(parts)
    return state


@pytest.mark.filterwarnings("ignore:enable_nested_tensor")  # of torch, about norms before each branch
def test_outputs_are_those_of_torch(page: Any) -> None:
    torch.manual_seed(0)
    model = page.Translator(VOCAB, HIDDEN, HEADS, LAYERS).double().eval()
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3)
    theirs = (
        nn.Transformer(HIDDEN, HEADS, LAYERS, LAYERS, 4 * HIDDEN, batch_first=True, norm_first=True).double().eval()
    )
    theirs.load_state_dict(torch_state(model))
    source, target = torch.randint(4, VOCAB, (3, 7)), torch.randint(4, VOCAB, (3, 5))
    mask = torch.tensor([[1] * 7, [1] * 4 + [0] * 3, [1] * 2 + [0] * 5])
    with torch.no_grad():
        found = model(source, mask, target)
        states = theirs(
            model.embed(source),
            model.embed(target),
            tgt_mask=nn.Transformer.generate_square_subsequent_mask(5, dtype=torch.float64),
            src_key_padding_mask=mask == 0,
            memory_key_padding_mask=mask == 0,
        )
    assert_close(found, states @ model.embedding.weight.T, atol=1e-10, rtol=1e-10)


def test_translations_end_at_the_end_token(page: Any) -> None:
    """Greedy search, one sentence at a time, gives what a batch with padding gives."""
    torch.manual_seed(0)
    model = page.Translator(VOCAB, HIDDEN, HEADS, LAYERS).double().eval()
    nn.init.normal_(model.embedding.weight)
    source = torch.randint(4, VOCAB, (6, 7))
    mask = (torch.arange(7) < torch.arange(2, 8).unsqueeze(1)).long()
    found = model.translate(source, mask, max_length=9)
    for row, tokens in enumerate(found):
        kept = source[row : row + 1, : row + 2]
        assert model.translate(kept, torch.ones_like(kept), max_length=9) == [tokens]
        assert page.END not in tokens
        assert len(tokens) <= 8
