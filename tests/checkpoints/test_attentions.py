"""Attention weights against those of transformers with the same weights, in float64."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor
from torch.testing import assert_close
from transformers.models.llama import modeling_llama

from zoo.artifact import ModelDirectory
from zoo.checkpoints.exact import Exact
from zoo.checkpoints.exporting import export_checkpoint
from zoo.models import persist
from zoo.nn import call_graph, recorded_scores

BART = ("positions=learned", "position_offset=2", "embedding_norm=true", "attention_bias=true")
PERCEIVER = ("decoder_num_heads=8", "decoder_head_dim=none")


@pytest.fixture
def both(built: Callable[..., Path], tmp_path: Path) -> Callable[..., tuple[Any, Any]]:
    """Build our model of a preset and transformers' model with the same random weights."""

    def make(preset: str, settings: Sequence[str], auto: str) -> tuple[Any, Any]:
        folder = built(preset, *(part for setting in settings for part in ("--set", setting)))
        export_checkpoint(folder, tmp_path / "theirs", verify=False)
        ours = persist.load_directory(ModelDirectory.open(folder)).double()
        options = {"attn_implementation": "eager", "dtype": torch.float64}
        return ours, getattr(transformers, auto).from_pretrained(tmp_path / "theirs", **options).eval()

    return make


def texts(length: int, seed: int) -> tuple[Tensor, Tensor]:
    """Draw token ids and a mask with padding at the end of the second row."""
    ids = torch.randint(5, 250, (2, length), generator=torch.Generator().manual_seed(seed))
    mask = torch.ones_like(ids)
    mask[1, -3:] = 0
    return ids, mask


def check(found: Mapping[str, Tensor], theirs: Sequence[Tensor], name: str, counts: Tensor | None = None) -> None:
    """Compare the weights of every layer at queries that are not padding, (B, T)."""
    assert f"{name}.{len(theirs)}" not in found
    for layer, wanted in enumerate(theirs):
        pair = (weights.transpose(1, 2) for weights in (found[f"{name}.{layer}"], wanted))  # (B, T, H, S)
        assert_close(*(rows if counts is None else rows[counts] for rows in pair), atol=1e-10, rtol=0)


@pytest.mark.parametrize(
    ("preset", "settings", "auto"),
    [
        ("bert-tiny", (), "AutoModel"),
        ("bert-tiny", ("share_layers=true", "embedding_size=24"), "AutoModel"),
        ("gpt-tiny", (), "AutoModelForCausalLM"),
        ("llama-tiny", (), "AutoModelForCausalLM"),
        ("t5-tiny", ("task=feature-extraction",), "T5EncoderModel"),
    ],
)
def test_attentions_of_single_graphs(
    both: Callable[..., tuple[Any, Any]], preset: str, settings: Sequence[str], auto: str
) -> None:
    ours, theirs = both(preset, settings, auto)
    (graph,) = ours.config.graphs()
    ids, mask = texts(7, 0)
    feeds = {"input_ids": ids, "attention_mask": mask, "token_type_ids": torch.zeros_like(ids)}
    if graph.past:
        feeds |= {
            tensor.name: torch.zeros(tensor.shape({"batch": 2, "past_sequence": 0}), dtype=torch.float64)
            for tensor in graph.past.tensors()
        }
    found = call_graph(ours, graph.with_attentions(), feeds)
    with Exact(theirs):
        wanted = theirs(input_ids=ids, attention_mask=mask, output_attentions=True).attentions
    assert len(wanted) == ours.config.num_layers
    check(found, wanted, "attentions", mask.bool())


def test_attentions_of_images(both: Callable[..., tuple[Any, Any]]) -> None:
    ours, theirs = both("vit-tiny", (), "AutoModelForImageClassification")
    (graph,) = ours.config.graphs()
    pixels = torch.randn(2, 1, 8, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    found = call_graph(ours, graph.with_attentions(), {"pixel_values": pixels})
    with Exact(theirs):
        wanted = theirs(pixel_values=pixels, output_attentions=True)
    check(found, wanted.attentions, "attentions")


@pytest.mark.parametrize(
    ("preset", "settings"), [("clip-tiny", ("text_pooling=end", "end_token_id=3")), ("siglip-tiny", ())]
)
def test_attentions_of_images_and_texts(
    both: Callable[..., tuple[Any, Any]], preset: str, settings: Sequence[str]
) -> None:
    ours, theirs = both(preset, settings, "AutoModel")
    c = ours.config
    ids, mask = texts(c.max_seq_len if c.pad_texts else 7, 0)
    feeds = {"input_ids": ids} if c.pad_texts else {"input_ids": ids, "attention_mask": mask}
    pixels = torch.randn(
        2, 3, c.image_size, c.image_size, generator=torch.Generator().manual_seed(0), dtype=torch.float64
    )
    text, image, _ = (graph.with_attentions() for graph in c.graphs())
    pooled: list[Tensor] = []
    if c.image_pooling == "attention":
        head = theirs.vision_model.head.attention  # returns the mean of its heads, (N, 1, P)
        head.register_forward_hook(lambda module, given, outputs: pooled.append(outputs[1]))
    with Exact(theirs):
        wanted = theirs(**feeds, pixel_values=pixels, output_attentions=True)
    counts = None if c.pad_texts else mask.bool()
    check(call_graph(ours, text, feeds), wanted.text_model_output.attentions, "attentions", counts)
    found = call_graph(ours, image, {"pixel_values": pixels})
    check(found, wanted.vision_model_output.attentions, "attentions")
    means = {name: weights.mean(1, keepdim=True) for name, weights in found.items() if weights.ndim == 4}
    check(means, [weights[:, None] for weights in pooled], "cross_attentions")


@pytest.mark.parametrize(("preset", "settings"), [("t5-tiny", ()), ("transformer-tiny", BART)])
def test_attentions_of_encoder_decoders(
    both: Callable[..., tuple[Any, Any]], preset: str, settings: Sequence[str]
) -> None:
    ours, theirs = both(preset, settings, "AutoModelForSeq2SeqLM")
    encoder, decoder = ours.config.graphs()
    ids, mask = texts(7, 0)
    target, target_mask = texts(5, 1)
    given = {"input_ids": ids, "attention_mask": mask}
    also = {"decoder_input_ids": target, "decoder_attention_mask": target_mask}
    read = call_graph(ours, encoder.with_attentions(), given)
    past = {
        tensor.name: torch.zeros(tensor.shape({"batch": 2, "past_sequence": 0}), dtype=torch.float64)
        for tensor in decoder.past.tensors()
    }
    written = call_graph(ours, decoder.with_attentions(), {**read, **given, **also, **past})
    with Exact(theirs):
        wanted = theirs(**given, **also, output_attentions=True)
    check(read, wanted.encoder_attentions, "attentions", mask.bool())
    check(written, wanted.decoder_attentions, "attentions", target_mask.bool())
    check(written, wanted.cross_attentions, "cross_attentions", target_mask.bool())


def test_queries_and_keys_after_rotation(both: Callable[..., tuple[Any, Any]], monkeypatch: pytest.MonkeyPatch) -> None:
    """Compare with the arguments of transformers' product, with fewer heads of keys than of queries."""
    ours, theirs = both("llama-tiny", ("num_kv_heads=2",), "AutoModelForCausalLM")
    rotate, rotated = modeling_llama.apply_rotary_pos_emb, []

    def noting(*arguments: Any, **named: Any) -> Any:
        rotated.append(rotate(*arguments, **named))
        return rotated[-1]

    monkeypatch.setattr(modeling_llama, "apply_rotary_pos_emb", noting)
    ids, mask = texts(7, 0)
    with torch.no_grad(), Exact(theirs), recorded_scores() as scores:
        ours(ids, attention_mask=mask)
        theirs(input_ids=ids, attention_mask=mask)
    assert len(scores) == len(rotated) == ours.config.num_layers
    for found, (query, key) in zip(scores, rotated, strict=True):
        for own, wanted in ((found.query, query), (found.key, key)):
            assert own is not None
            pair = (vectors.transpose(1, 2)[mask.bool()] for vectors in (own, wanted))  # (tokens, heads, D)
            assert_close(*pair, atol=1e-12, rtol=0)
        assert (found.bias, found.scale) == (None, query.shape[-1] ** -0.5)
        assert found.seen is not None
        visible = torch.ones(7, 7).tril() * mask[:, None, None]
        assert_close(found.seen[mask.bool()[:, None]], visible.to(found.seen)[mask.bool()[:, None]])


def test_biases_of_relative_positions(both: Callable[..., tuple[Any, Any]]) -> None:
    ours, theirs = both("t5-tiny", ("task=feature-extraction",), "T5EncoderModel")
    ids, mask = texts(7, 0)
    with torch.no_grad(), recorded_scores() as scores:
        ours(ids, attention_mask=mask)
    with torch.no_grad():
        wanted = theirs.encoder.block[0].layer[0].SelfAttention.compute_bias(7, 7)  # (1, H, T, S)
    assert len(scores) == ours.config.num_layers
    for found in scores:
        assert found.bias is not None
        assert found.seen is not None
        assert (found.scale, found.softcap) == (1.0, None)
        assert_close(found.bias, (wanted * mask[:, None, None]).to(found.bias), atol=1e-12, rtol=0)
        assert_close(found.seen, mask[:, None, None].expand_as(found.seen).to(found.seen))


def test_attentions_of_perceiver(both: Callable[..., tuple[Any, Any]]) -> None:
    """Cross-attention to the text, self-attention of the latents, and cross-attention of the output queries."""
    ours, theirs = both("perceiver-tiny", PERCEIVER, "PerceiverForMaskedLM")
    (graph,) = ours.config.graphs()
    ids, mask = texts(ours.config.max_seq_len, 0)
    found = call_graph(ours, graph.with_attentions(), {"input_ids": ids, "attention_mask": mask})
    with Exact(theirs):
        wanted = theirs(inputs=ids, attention_mask=mask, output_attentions=True)
    check(found, wanted.attentions, "attentions")
    check(found, wanted.cross_attentions, "cross_attentions")
