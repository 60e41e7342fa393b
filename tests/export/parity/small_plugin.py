"""A small honest distribution with four architectures, in whose source bugs are planted.

B batch, T tokens of this call, S tokens including the past, N tokens of all rows, E hidden size, H heads.
"""

from __future__ import annotations

__all__ = ["DISTRIBUTION", "PLUGIN", "PRESETS", "source"]

DISTRIBUTION = "zoo-small"
PLUGIN = """
import zoo

ZOO_API = 1
TASKS = {"Decoder": "text-generation", "Encoder": "feature-extraction", "Image": "image-classification",
         "Sound": "feature-extraction"}

@zoo.hookimpl
def zoo_architectures():
    return [
        zoo.Architecture(
            name=name.lower(), tasks=(task,), config=f"{module}_config:{name}Config", model=f"{module}_model:{name}",
            reference="A test",
        )
        for name, task in TASKS.items()
    ]
"""
CONFIG = """
from dataclasses import dataclass

import zoo


@dataclass(frozen=True, kw_only=True)
class Sizes(zoo.Config):
    hidden_size: int = 16
    num_layers: int = 2
    num_heads: int = 2


@dataclass(frozen=True, kw_only=True)
class DecoderConfig(Sizes):
    task = "text-generation"
    vocab_size: int = 100
    max_seq_len: int = 96

    def graphs(self):
        return (
            zoo.causal_graph(
                vocab_size=self.vocab_size, num_layers=self.num_layers, num_kv_heads=self.num_heads,
                head_dim=self.hidden_size // self.num_heads,
            ),
        )


@dataclass(frozen=True, kw_only=True)
class EncoderConfig(Sizes):
    task = "feature-extraction"
    vocab_size: int = 30000
    max_seq_len: int = 128
    end_token: int = 2

    def graphs(self):
        hidden = zoo.floats("last_hidden_state", "batch", "sequence", self.hidden_size)
        vectors = (zoo.floats(name, "batch", self.hidden_size) for name in ("mean_vector", "end_vector"))
        inputs = (zoo.token_ids("input_ids", self.vocab_size), zoo.mask("attention_mask", padding="right"))
        return (zoo.Graph(inputs=inputs, outputs=(hidden, *vectors)),)


@dataclass(frozen=True, kw_only=True)
class ImageConfig(zoo.Config):
    task = "image-classification"
    hidden_size: int = 16
    num_classes: int = 10

    def graphs(self):
        pixels = zoo.floats("pixel_values", "batch", 3, "height", "width")
        return (zoo.Graph(inputs=(pixels,), outputs=(zoo.floats("logits", "batch", self.num_classes),)),)


@dataclass(frozen=True, kw_only=True)
class SoundConfig(zoo.Config):
    task = "feature-extraction"
    hidden_size: int = 16
    num_mels: int = 8

    def graphs(self):
        mels = zoo.floats("mels", "batch", "frames", self.num_mels)
        hidden = zoo.floats("last_hidden_state", "batch", "frames", self.hidden_size)
        return (zoo.Graph(inputs=(mels,), outputs=(hidden,)),)
"""
MODEL = """
import torch
import torch.nn.functional as F
from torch import nn

from zoo.nn import Cache, RotaryPositions, apply_rotary, build_mask, positions_of


class Attention(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.num_heads = c.num_heads
        self.query, self.key, self.value, self.output = (nn.Linear(c.hidden_size, c.hidden_size) for _ in range(4))

    def forward(self, x, mask, rotation=None, bias=0.0, cache=None):
        query, key, value = (self.split(part(x)) for part in (self.query, self.key, self.value))
        if rotation is not None:
            query, key = apply_rotary(query, rotation), apply_rotary(key, rotation)
        if cache is not None:
            key, value = cache.extend(key, value)
        scores = query @ key.transpose(-2, -1) * query.shape[-1] ** -0.5 + bias  # (B, H, T, S)
        weights = scores.masked_fill(~mask, torch.finfo(scores.dtype).min).softmax(-1)
        return self.output((weights @ value).transpose(1, 2).flatten(2))

    def split(self, x):
        return x.unflatten(-1, (self.num_heads, -1)).transpose(1, 2)  # (B, T, E) -> (B, H, T, E / H)


class MLP(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.up = nn.Linear(c.hidden_size, 2 * c.hidden_size)
        self.down = nn.Linear(2 * c.hidden_size, c.hidden_size)

    def forward(self, x):
        return self.down(F.gelu(self.up(x)))


class Block(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.norm_1, self.norm_2 = nn.LayerNorm(c.hidden_size), nn.LayerNorm(c.hidden_size)
        self.attention = Attention(c)
        self.mlp = MLP(c)

    def forward(self, x, mask, **options):  # (B, T, E)
        x = x + self.attention(self.norm_1(x), mask, **options)
        return x + self.mlp(self.norm_2(x))


class Decoder(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.config = c
        self.embedding = nn.Embedding(c.vocab_size, c.hidden_size)
        self.rotary = RotaryPositions(c.hidden_size // c.num_heads)
        self.blocks = nn.ModuleList(Block(c) for _ in range(c.num_layers))
        self.norm = nn.LayerNorm(c.hidden_size)
        self.head = nn.Linear(c.hidden_size, c.vocab_size, bias=False)

    def forward(self, input_ids, attention_mask=None, past_key_values=None):
        batch, length = input_ids.shape
        past = past_key_values.length if past_key_values is not None else 0
        total = past + length
        mask = build_mask(length, total, padding=attention_mask, causal=True)  # (B, 1, T, S)
        positions = positions_of(length, total, padding=attention_mask)
        x = self.embedding(input_ids)
        rotation = self.rotary(positions, x.dtype)
        for layer, block in enumerate(self.blocks):
            cache = past_key_values[layer] if past_key_values is not None else None
            x = block(x, mask, rotation=rotation, cache=cache)
        return self.head(self.norm(x))


class Encoder(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.config = c
        self.embedding = nn.Embedding(c.vocab_size, c.hidden_size)
        self.distances = nn.Embedding(201, c.num_heads)
        self.blocks = nn.ModuleList(Block(c) for _ in range(c.num_layers))
        self.norm = nn.LayerNorm(c.hidden_size)

    def forward(self, input_ids, attention_mask):
        batch, length = input_ids.shape
        places = torch.arange(length, device=input_ids.device)
        distances = (places - places.unsqueeze(1)).clamp(-100, 100)  # (T, T)
        bias = self.distances(distances + 100).permute(2, 0, 1)  # (H, T, T)
        mask = build_mask(length, length, padding=attention_mask)
        x = self.embedding(input_ids)
        for block in self.blocks:
            x = block(x, mask, bias=bias)
        x = self.norm(x)
        tokens = attention_mask.unsqueeze(-1).to(x.dtype)
        mean = (x * tokens).sum(1) / tokens.sum(1).clamp(min=1)
        ends = (input_ids == self.config.end_token) & attention_mask.bool()
        end = ends.int().argmax(1)  # the first end token, or token 0 without one
        return {"last_hidden_state": x, "mean_vector": mean, "end_vector": x[torch.arange(batch), end]}


class Image(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.config = c
        self.first = nn.Conv2d(5, c.hidden_size, 3, padding=1)
        self.second = nn.Conv2d(c.hidden_size, c.hidden_size, 3, padding=1)
        self.head = nn.Linear(c.hidden_size, c.num_classes)

    def forward(self, pixel_values):  # (B, 3, height, width)
        batch, _, height, width = pixel_values.shape
        rows = torch.arange(height).to(pixel_values.dtype) / height
        columns = torch.arange(width).to(pixel_values.dtype) / width
        place = torch.stack((rows.unsqueeze(1).expand(-1, width), columns.unsqueeze(0).expand(height, -1)))
        x = torch.cat((pixel_values, place.unsqueeze(0).expand(batch, -1, -1, -1)), 1)
        return self.head(F.gelu(self.second(F.gelu(self.first(x)))).mean((2, 3)))


class Sound(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.config = c
        self.first = nn.Conv1d(c.num_mels, c.hidden_size, 3, padding=1)
        self.second = nn.Conv1d(c.hidden_size, c.hidden_size, 3, padding=1)
        self.norm = nn.LayerNorm(c.hidden_size)

    def forward(self, mels):  # (B, frames, mels)
        x = F.gelu(self.first(mels.transpose(1, 2)))
        return self.norm(F.gelu(self.second(x)).transpose(1, 2))
"""
PRESETS = "schema = 1\n" + "".join(
    f'[models.{name}-small]\narch = "{name}"\n' for name in ("decoder", "encoder", "image", "sound")
)
"""The content of zoo.toml."""


def source(*edits: tuple[str, str]) -> dict[str, str]:
    """Return the plugin's other files, with texts replaced, each of which must occur once."""
    files = {"{module}_config.py": CONFIG, "{module}_model.py": MODEL}
    for old, new in edits:
        (name,) = (name for name, text in files.items() if old in text)
        assert files[name].count(old) == 1, old
        files[name] = files[name].replace(old, new)
    return files
