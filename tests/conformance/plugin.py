"""A small valid plugin, a causal decoder with a cache and a mask, and for each check an edit that fails only it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from zoo.testing import all_checks

ENTRY = """
from pathlib import Path
import zoo

ZOO_API = 1


@zoo.hookimpl
def zoo_architectures():
    return [
        zoo.Architecture(
            name="{module}",
            tasks=("text-generation",),
            config="{module}_config:Settings",
            model="{module}_model:Model",
            reference="A test",
        )
    ]


@zoo.hookimpl
def zoo_presets():
    return [Path(__file__).with_name("presets.toml")]
"""
PRESETS = """
schema = 1

[models.{module}-tiny]
arch = "{module}"
config = { dropout = 0.125 }

[models.{module}-large]
base = "{module}-tiny"
config = { hidden_size = 1024 }
"""
CONFIG = '''
from dataclasses import dataclass
from typing import Literal

import zoo
from zoo import cost


@dataclass(frozen=True, kw_only=True)
class Settings(zoo.Config):
    """A decoder of one block."""

    task: Literal["text-generation"] = "text-generation"
    """Next-token prediction."""
    vocab_size: int = 19
    """Size of the vocabulary."""
    max_seq_len: int = 24
    """Longest text."""
    hidden_size: int = 16
    """Width."""
    num_heads: int = 2
    """Heads."""
    dropout: float = 0.0
    """Dropout on embeddings, during training."""

    def graphs(self):
        head_dim = self.hidden_size // self.num_heads
        return (
            zoo.Graph(
                inputs=(
                    zoo.token_ids("input_ids", self.vocab_size),
                    zoo.mask("attention_mask", length="past_sequence + sequence"),
                ),
                outputs=(zoo.floats("logits", "batch", "sequence", self.vocab_size),),
                past=zoo.KeyValues(name="past_key_values", num_layers=1, num_heads=self.num_heads, head_dim=head_dim),
                attentions=zoo.attentions(1, self.num_heads, keys="past_sequence + sequence"),
            ),
        )

    def cost(self):
        head_dim = self.hidden_size // self.num_heads
        return (
            cost.embedding(self.vocab_size + self.max_seq_len, self.hidden_size)
            + cost.layer_norm(self.hidden_size)
            + cost.attention(self.hidden_size, self.num_heads, head_dim=head_dim, context=self.max_seq_len)
            + cost.tied_linear(self.hidden_size, self.vocab_size)
        )
'''
MODEL = """
import torch
from torch import nn

from zoo.nn import MultiHeadAttention, build_mask, positions_of, tied_linear


class Model(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.config = c
        self.token = nn.Embedding(c.vocab_size, c.hidden_size)
        self.position = nn.Embedding(c.max_seq_len, c.hidden_size)
        self.dropout = nn.Dropout(c.dropout)
        self.norm = nn.LayerNorm(c.hidden_size)
        self.attention = MultiHeadAttention(c.hidden_size, c.num_heads)
        self.head = tied_linear(self.token)

    def forward(self, input_ids, attention_mask, past_key_values):
        rows, length = input_ids.shape
        past = past_key_values.length
        total = past + length
        places = positions_of(length, total, padding=attention_mask)
        x = self.dropout(self.token(input_ids) + self.position(places))
        mask = build_mask(length, total, padding=attention_mask, causal=True)
        x = x + self.attention(self.norm(x), mask=mask, cache=past_key_values[0])
        return self.head(x)
"""
FILES = {"entry": ENTRY, "presets": PRESETS, "config": CONFIG, "model": MODEL}

Edit = tuple[str, str, str]
"""File, old text, and its replacement."""
RETURN = ("model", "        return self.head(x)\n")

EDITS: dict[str, Sequence[Edit]] = {
    # The configuration of the plugin imports torch.
    "light-import": [("config", "import zoo\n", "import torch\nimport zoo\n")],
    # A hook is not marked.
    "api-version": [("entry", "ZOO_API = 1\n", "ZOO_API = 1\n\n\ndef zoo_tasks():\n    return []\n")],
    # A preset other than the smallest has a misspelt key.
    "presets": [("presets", "{ hidden_size = 1024 }", "{ hiden_size = 1024 }")],
    # A field without effect on outputs is lost in config.json.
    "config-round-trip": [
        (
            "config",
            "    def graphs",
            "    def to_dict(self):\n        return {**super().to_dict(), 'dropout': 0.0}\n\n    def graphs",
        )
    ],
    # The configuration drops unknown keys.
    "unknown-keys": [
        (
            "config",
            "    def graphs",
            "    @classmethod\n    def from_dict(cls, values, where=None):\n"
            "        known = {key: value for key, value in values.items() if key in cls.field_types()}\n"
            "        return super().from_dict(known, where)\n\n    def graphs",
        )
    ],
    "documented": [("config", '    """Width."""\n', "")],
    # The configuration's task is not one of the architecture's.
    "declaration": [("entry", '("text-generation",)', '("text-classification",)')],
    # The cost leaves out the position table.
    "parameter-count": [("config", "self.vocab_size + self.max_seq_len, self", "self.vocab_size, self")],
    # The token that ends a text has another library's name.
    "names": [("config", "    dropout: float", '    eos_id: int = 0\n    """End of a text."""\n    dropout: float')],
    # A tensor has data on the meta device, too.
    "meta-device": [
        (
            "model",
            "        self.head =",
            '        self.register_buffer("steps", torch.zeros(1, device="cpu"))\n        self.head =',
        )
    ],
    # Weights come from numpy's generator, which zoo does not seed.
    "seeded": [
        ("model", "import torch\n", "import numpy as np\nimport torch\n"),
        (
            "model",
            "        self.head =",
            "        with torch.no_grad():\n"
            "            self.position.weight += float(np.random.default_rng().random())\n        self.head =",
        ),
    ],
    # A tensor that is declared positive is not.
    "declared-tensors": [
        (
            "model",
            "class Model(nn.Module):\n",
            'class Model(nn.Module):\n    positive_tensors = {"position.weight": 1.0}\n\n',
        )
    ],
    # A factor is derived from the initial weights, and is not stored.
    "weights-round-trip": [
        (
            "model",
            "        self.head =",
            "        weight = self.token.weight.detach()\n"
            "        self.factor = 1.0 if weight.is_meta else 1 + float(weight.std())\n        self.head =",
        ),
        (*RETURN, "        return self.head(x * self.factor)\n"),
    ],
    # The method accepts arbitrary arguments.
    "signature": [
        ("model", "attention_mask, past_key_values):", "attention_mask, **kwargs):"),
        ("model", "from torch import nn\n\nfrom zoo.nn import", "from torch import nn\n\nfrom zoo.nn import Cache,"),
        (
            "model",
            "        rows, length",
            '        past_key_values = kwargs.get("past_key_values") or Cache.empty(1)\n        rows, length',
        ),
    ],
    # Outputs depend on the clock, by less than the tolerance of other checks.
    "eval-deterministic": [
        ("model", "import torch\n", "import time\n\nimport torch\n"),
        (*RETURN, "        return self.head(x * (1 + 1e-16 * (time.perf_counter_ns() % 10_007)))\n"),
    ],
    # The last token id is replaced in the caller's tensor.
    "inputs-unchanged": [
        (
            "model",
            "        rows, length",
            "        input_ids.clamp_(max=self.token.num_embeddings - 2)\n        rows, length",
        ),
    ],
    # Without a past, there is no residual connection.
    "empty-past": [
        ("model", "from torch import nn\n\nfrom zoo.nn import", "from torch import nn\n\nfrom zoo.nn import Cache,"),
        ("model", "attention_mask, past_key_values):", "attention_mask, past_key_values=None):"),
        (
            "model",
            "        past = past_key_values.length",
            "        first = past_key_values is None\n"
            "        past_key_values = Cache.empty(1) if first else past_key_values\n"
            "        past = past_key_values.length",
        ),
        (*RETURN, "        return self.head(x * (1 + first))\n"),
    ],
    # Outputs depend on the batch size.
    "batch-invariance": [(*RETURN, "        return self.head(x * (1 + rows / 8))\n")],
    # One size, which no other check uses, gives NaN.
    "lengths": [
        (
            *RETURN,
            "        if type(length) is int and (rows, length, past) == (1, 2, 0):\n"
            '            x = x * float("nan")\n        return self.head(x)\n',
        )
    ],
    # Padding on the left counts in positions.
    "padding-invariance": [
        ("model", "positions_of(length, total, padding=attention_mask)", "positions_of(length, total)"),
    ],
    # A causal model is declared as not causal.
    "causality": [("config", "                past=zoo", "                causal=False,\n                past=zoo")],
    # The model loses a position for every five tokens of the past.
    "cache": [
        (
            "model",
            "        x = self.dropout",
            "        places = (places - past // 5).clamp(min=0)\n        x = self.dropout",
        )
    ],
    # Outputs depend on the dtype.
    "dtype-invariance": [
        (*RETURN, "        return self.head(x * (1 + 1e-3 * (x.dtype == torch.float32)))\n"),
    ],
    # Outputs depend on whether weights can be trained.
    "grad-invariance": [
        (*RETURN, "        return self.head(x * (1 + 1e-6 * self.head.weight.requires_grad))\n"),
    ],
    # The model computes fewer attention weights than declared.
    "attention-weights": [("config", "zoo.attentions(1,", "zoo.attentions(2,")],
    # The position embedding gets no gradient.
    "gradients": [("model", "self.position(places))", "self.position(places).detach())")],
    # In training, logits hardly depend on the text.
    "learning": [(*RETURN, "        return self.head(x * 1e-6 if self.training else x)\n")],
    # Noise in training comes from a generator of the model.
    "reproducible-training": [
        ("model", "        self.head =", "        self.random = torch.Generator().manual_seed(0)\n        self.head ="),
        (
            *RETURN,
            "        noise = 0.01 * torch.rand(1, generator=self.random) if self.training else 0\n"
            "        return self.head(x * (1 + noise))\n",
        ),
    ],
    # 1e5 overflows float16.
    "half-precision": [(*RETURN, "        return self.head(x * 1e5 / 1e5)\n")],
    # Importing the model silences all warnings of the process.
    "global-state": [
        ("model", "import torch\n", 'import warnings\n\nimport torch\n\nwarnings.simplefilter("ignore")\n')
    ],
    # Control flow depends on values.
    "onnx-export": [(*RETURN, "        if (x > 1e30).any():\n            x = x * 2\n        return self.head(x)\n")],
    # The exported model differs.
    "onnx-parity": [
        (*RETURN, "        return self.head(x * 1.001 if type(length) is not int else x)\n"),
    ],
    # The exported model differs, except at the batch sizes of the comparison grid.
    "onnx-dynamic": [
        (
            *RETURN,
            "        off = (rows - 1) * (rows - 2) * (rows - 3) * (rows - 4) * (rows - 5) * (rows - 6)\n"
            "        off = off * (rows - 7) * (rows - 9)\n"
            "        return self.head(x * (1 + 0.01 * off) if type(length) is not int else x)\n",
        )
    ],
}


def expecting(failures: Mapping[str, str]) -> Edit:
    """Declare expected failures of the architecture."""
    line = '            reference="A test",\n'
    return "entry", line, f"{line}            expected_failures={dict(failures)},\n"


def install_edited(install: Callable[..., Path], name: str, edits: Sequence[Edit] = ()) -> str:
    """Install the edited plugin as a distribution of that name. Returns the name of its architecture."""
    files = dict(FILES)
    for file, old, new in edits:
        assert files[file].count(old) == 1, (file, old)
        files[file] = files[file].replace(old, new)
    beside = {
        "presets.toml": files["presets"],
        "{module}_config.py": files["config"],
        "{module}_model.py": files["model"],
    }
    install(name, files["entry"], files=beside)
    return name.replace("-", "_")


assert {check.name for check in all_checks()} == set(EDITS)
