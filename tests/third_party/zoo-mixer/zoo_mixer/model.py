"""MLP-Mixer: alternating token-mixing and channel-mixing networks (Tolstikhin et al. 2021, figure 1).

B batch, C channels, S image size, P patches, E hidden size, L classes.
"""

from torch import nn

from zoo.nn import FeedForward, initialize


class MixerBlock(nn.Module):
    """Equation 1: one network shared by all columns, then one shared by all rows, of the patches x channels table."""

    def __init__(self, c):
        super().__init__()
        self.norm_1, self.norm_2 = (nn.LayerNorm(c.hidden_size, eps=c.norm_eps) for _ in range(2))
        self.mix_patches = FeedForward(c.num_patches, c.token_intermediate_size, activation=c.activation)
        self.mix_channels = FeedForward(c.hidden_size, c.intermediate_size, activation=c.activation)

    def forward(self, x):  # (B, P, E)
        x = x + self.mix_patches(self.norm_1(x).transpose(1, 2)).transpose(1, 2)
        return x + self.mix_channels(self.norm_2(x))


class Mixer(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.config = c
        self.patch = nn.Conv2d(c.num_channels, c.hidden_size, c.patch_size, stride=c.patch_size)
        self.blocks = nn.ModuleList(MixerBlock(c) for _ in range(c.num_layers))
        self.norm = nn.LayerNorm(c.hidden_size, eps=c.norm_eps)
        self.head = nn.Linear(c.hidden_size, c.num_classes)
        initialize(self, "truncated_normal", std=0.02)

    def forward(self, pixel_values):
        """Return the logits of the classes: (B, C, S, S) -> (B, L)."""
        x = self.patch(pixel_values).flatten(2).transpose(1, 2)  # (B, E, S / size, S / size) -> (B, P, E)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x).mean(1))
