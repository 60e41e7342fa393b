"""The Attention Free Transformer as a decoder (Zhai et al. 2021).

B batch, T tokens of this call, S tokens including those before, E hidden size, V vocabulary.
"""

import math

from torch import nn

from zoo.nn import FeedForward, build_mask, initialize, positions_of, tied_linear


class AFTMixer(nn.Module):
    """Y_t = sigmoid(Q_t) * sum_s exp(K_s + w_ts) * V_s / sum_s exp(K_s + w_ts), over s <= t (section 3).

    Each channel averages the values with its own weights. They are computed as a softmax, which subtracts the largest
    exponent of each query and channel: evaluated literally, exp overflows float16 from 11.1 on. Subtracting one number
    for all queries would turn the sums into a matrix product, but a large later key would make all earlier terms
    underflow. This form needs memory for B x E x T x S numbers.
    """

    def __init__(self, c):
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(c.hidden_size, c.hidden_size) for _ in range(3))
        self.window = c.window if c.variant == "local" else None
        self.has_biases = c.variant != "simple"
        if self.has_biases:
            self.query_bias, self.key_bias = (nn.Embedding(c.max_seq_len, c.bias_size) for _ in range(2))

    def forward(self, x, mask, positions, cache):
        """(B, T, E) -> (B, T, E).

        Args:
            mask: (B or 1, 1, T, S), True for the tokens to average over. The average over no tokens is 0.
            positions: (B or 1, S), of all tokens.
            cache: keys and values of earlier tokens, as one head; those of ``x`` are appended.
        """
        key, value = self.key(x).unsqueeze(1), self.value(x).unsqueeze(1)  # (B, 1, T, E)
        if cache is not None:
            key, value = cache.extend(key, value)
        exponents = key.permute(0, 3, 1, 2)  # (B, 1, S, E) -> (B, E, 1, S)
        if self.has_biases:
            exponents = exponents + self.biases(positions, x.shape[1])  # (B, E, T, S)
        weights = exponents.masked_fill(~mask, -math.inf).softmax(-1).masked_fill(~mask, 0.0)
        mixed = weights @ value.permute(0, 3, 2, 1)  # (B, 1, S, E) -> (B, E, S, 1); (B, E, T, 1)
        return self.query(x).sigmoid() * mixed.squeeze(-1).transpose(1, 2)

    def biases(self, positions, length):
        """Return w between the last ``length`` tokens and all tokens, (B or 1, 1, T, S); 0 outside the window."""
        latest = positions[:, positions.shape[1] - length :]
        w = self.query_bias(latest) @ self.key_bias(positions).transpose(1, 2)
        if self.window is not None:
            distances = (latest.unsqueeze(2) - positions.unsqueeze(1)).abs()  # (B or 1, T, S)
            w = w.masked_fill(distances >= self.window, 0.0)
        return w.unsqueeze(1)


class AFTBlock(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.norm_1, self.norm_2 = (nn.LayerNorm(c.hidden_size, eps=c.norm_eps) for _ in range(2))
        self.mixer = AFTMixer(c)
        self.mlp = FeedForward(c.hidden_size, c.intermediate_size)

    def forward(self, x, mask, positions, cache):  # (B, T, E)
        x = x + self.mixer(self.norm_1(x), mask, positions, cache)
        return x + self.mlp(self.norm_2(x))


class AFT(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.config = c
        self.token_embedding = nn.Embedding(c.vocab_size, c.hidden_size)
        self.position_embedding = nn.Embedding(c.max_seq_len, c.hidden_size)
        self.blocks = nn.ModuleList(AFTBlock(c) for _ in range(c.num_layers))
        self.norm = nn.LayerNorm(c.hidden_size, eps=c.norm_eps)
        self.head = tied_linear(self.token_embedding)
        initialize(self, "normal", std=0.02)

    def forward(self, input_ids, attention_mask=None, past_key_values=None):
        """Return the logits of the next token: (B, T) -> (B, T, V), with a mask (B, S) and a cache of earlier calls."""
        length, device = input_ids.shape[1], input_ids.device
        total = length + (past_key_values.length if past_key_values is not None else 0)
        mask = build_mask(length, total, padding=attention_mask, causal=True, device=device)
        positions = positions_of(total, total, padding=attention_mask, device=device)
        x = self.token_embedding(input_ids) + self.position_embedding(positions[:, total - length :])
        for layer, block in enumerate(self.blocks):
            x = block(x, mask, positions, past_key_values[layer] if past_key_values is not None else None)
        return self.head(self.norm(x))
