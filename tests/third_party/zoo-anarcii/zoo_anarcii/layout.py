"""Checkpoint layout of ANARCII: a state dict, with its sizes in a JSON file of the same name."""

import math
from pathlib import Path

import torch
from torch import nn

import zoo
from zoo.checkpoints import Layout, Rule

ATTENTIONS = {
    "encoder.*.attention": "encoder.layers.*.self_attention.multihead_attn",
    "decoder.*.attention": "decoder.layers.*.self_attention.multihead_attn",
    "decoder.*.cross": "decoder.layers.*.encoder_attention.multihead_attn",
}
NAMES = {
    "encoder.*.mlp.up": "encoder.layers.*.positionwise_feedforward.fc_1",
    "encoder.*.mlp.down": "encoder.layers.*.positionwise_feedforward.fc_2",
    "encoder.*.residual_1.norm": "encoder.layers.*.self_attn_layer_norm",
    "encoder.*.residual_2.norm": "encoder.layers.*.ff_layer_norm",
    "decoder.*.mlp.up": "decoder.layers.*.positionwise_feedforward.fc_1",
    "decoder.*.mlp.down": "decoder.layers.*.positionwise_feedforward.fc_2",
    "decoder.*.residual_1.norm": "decoder.layers.*.self_attn_layer_norm",
    "decoder.*.residual_2.norm": "decoder.layers.*.enc_attn_layer_norm",
    "decoder.*.residual_3.norm": "decoder.layers.*.ff_layer_norm",
    "encoder_embedding.token": "encoder.tok_embedding",
    "encoder_embedding.position": "encoder.pos_embedding",
    "decoder_embedding.token": "decoder.tok_embedding",
    "decoder_embedding.position": "decoder.pos_embedding",
    "head": "decoder.fc_out",
}


def sizes(checkpoint):
    """Read the JSON file beside the weights."""
    name = f"{Path(checkpoint.file or '').stem}.json"
    found = checkpoint.json(name) if checkpoint.file else {}
    if not found:
        raise zoo.UsageError("the JSON file with its sizes is missing", checkpoint.where, f"put {name} beside it")
    return found


def derive(checkpoint, values):
    said = sizes(checkpoint)
    return {
        "vocab_size": said["INPUT_DIM"],
        "target_vocab_size": said["OUTPUT_DIM"],
        "hidden_size": said["HID_DIM"],
        "num_layers": said["LAYERS"],
        "num_heads": said["HEADS"],
        "dropout": said["DROPOUT"],
        "max_seq_len": checkpoint.tensors["encoder.pos_embedding.weight"].shape[0],
        "positions": "learned",
        "attention_bias": True,
        "tie_embeddings": False,
        "head_bias": True,
        "decoder_start_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": said["SRC_PAD_IDX"],
    }


class Original(nn.Module):
    """ANARCII's own model with zoo's names of inputs and outputs."""

    def __init__(self, checkpoint, config):
        from anarcii.inference.model import S2S, Decoder, Encoder

        super().__init__()
        rest = (config.hidden_size, config.num_layers, config.num_heads, config.intermediate_size, 0.0, "cpu")
        encoder = Encoder(config.vocab_size, *rest, config.max_seq_len)
        decoder = Decoder(config.target_vocab_size, *rest, config.max_seq_len)
        self.model = S2S(encoder, decoder, config.pad_token_id, config.pad_token_id, "cpu")
        self.model.load_state_dict({name: tensor.read() for name, tensor in checkpoint.tensors.items()})
        for part in (encoder, decoder):
            part.scale = math.sqrt(config.hidden_size)  # originally a float32 tensor, even in a float64 model

    def forward(self, input_ids, attention_mask, decoder_input_ids, decoder_attention_mask):
        length = decoder_input_ids.shape[1]
        later = torch.ones(length, length, dtype=torch.bool).triu(1)
        source, target = attention_mask == 0, decoder_attention_mask == 0
        encoded = self.model.encoder(input_ids, source)
        return {"logits": self.model.decoder(decoder_input_ids, encoded, target, later, source)[0]}


ANARCII = Layout(
    classes={"S2S": "text2text-generation"},
    fields=(),
    rules=(
        *(Rule(ours, theirs) for ours, theirs in NAMES.items()),
        *(Rule(f"{ours}.output", f"{theirs}.out_proj") for ours, theirs in ATTENTIONS.items()),
        *(
            Rule(tuple(f"{ours}.{part}.{kind}" for part in ("query", "key", "value")), f"{theirs}.in_proj_{kind}")
            for ours, theirs in ATTENTIONS.items()
            for kind in ("weight", "bias")
        ),
    ),
    read_extra=derive,
    original=Original,
)
"""``--model-type anarcii``."""
