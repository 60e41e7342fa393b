"""Checkpoints with other names for the same tensors."""

from zoo.checkpoints import REQUIRED, Field, Layout, Rule

LAYOUT = Layout(
    classes={"Api1Model": "text-generation"},
    fields=(
        Field("width", "hidden_size", default=REQUIRED),
        Field("depth", "num_layers", default=REQUIRED),
        Field("heads", "num_heads", default=REQUIRED),
        Field("kv_heads", "num_kv_heads", default=None),
        Field("vocab_size"),
        Field("max_seq_len"),
        Field("activation", default="gelu"),
        Field("dropout", default=0.0),
    ),
    rules=(
        Rule("embedding", "wte"),
        Rule("blocks.*.norm_1", "h.*.n1"),
        Rule("blocks.*.norm_2", "h.*.n2"),
        Rule(
            ("blocks.*.attention.query", "blocks.*.attention.key", "blocks.*.attention.value"),
            "h.*.qkv",
            transposed=True,
        ),
        Rule("blocks.*.attention.output", "h.*.o"),
        Rule("blocks.*.mlp.up", "h.*.up"),
        Rule("blocks.*.mlp.down", "h.*.down"),
        Rule("norm", "n"),
        Rule("head", "wte"),
    ),
    constant={"model_type": "api1-checkpoint"},
)
