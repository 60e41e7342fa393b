"""Checkpoint layout of g2p-en: checkpoint20.npz, an archive of arrays without a configuration."""

from collections.abc import Mapping
from typing import Any

from zoo.checkpoints import Checkpoint, Field, Layout, Rule
from zoo_g2p.config import LETTERS, PHONEMES


def _derive(checkpoint: Checkpoint, values: dict[str, Any]) -> Mapping[str, Any]:
    """Derive the sizes from the arrays. Missing or malformed arrays are reported later, when they are read."""
    sources = {"embedding_size": "enc_emb", "hidden_size": "enc_w_hh"}
    shapes = {ours: checkpoint.tensors[name].shape for ours, name in sources.items() if name in checkpoint.tensors}
    return {ours: shape[-1] for ours, shape in shapes.items() if shape}


G2P_EN = Layout(
    classes={"G2p": "grapheme-to-phoneme"},
    fields=(Field("letters", default=LETTERS), Field("phonemes", default=PHONEMES)),
    read_extra=_derive,
    rules=(
        Rule("letters.weight", "enc_emb"),
        Rule("encoder.weight_ih_l0", "enc_w_ih"),
        Rule("encoder.weight_hh_l0", "enc_w_hh"),
        Rule("encoder.bias_ih_l0", "enc_b_ih"),
        Rule("encoder.bias_hh_l0", "enc_b_hh"),
        Rule("phonemes.weight", "dec_emb"),
        Rule("decoder.weight_ih_l0", "dec_w_ih"),
        Rule("decoder.weight_hh_l0", "dec_w_hh"),
        Rule("decoder.bias_ih_l0", "dec_b_ih"),
        Rule("decoder.bias_hh_l0", "dec_b_hh"),
        Rule("head.weight", "fc_w"),
        Rule("head.bias", "fc_b"),
    ),
    constant={"model_type": "g2p-en"},
)
"""Its gates are in torch's order: reset, update, new."""
