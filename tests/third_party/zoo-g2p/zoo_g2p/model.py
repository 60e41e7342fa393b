"""The model of g2p-en: two GRUs (Cho et al. 2014), an encoder of letters and a decoder that starts from its last state.

B batch, S letters, T phonemes of this call, E hidden size, V size of the phoneme vocabulary.
"""

from torch import Tensor, nn

from zoo_g2p.config import G2PConfig


class G2P(nn.Module):
    def __init__(self, c: G2PConfig) -> None:
        super().__init__()
        self.config = c
        self.letters = nn.Embedding(len(c.letters), c.embedding_size)
        self.encoder = nn.GRU(c.embedding_size, c.hidden_size, batch_first=True)
        self.phonemes = nn.Embedding(len(c.phonemes), c.embedding_size)
        self.decoder = nn.GRU(c.embedding_size, c.hidden_size, batch_first=True)
        self.head = nn.Linear(c.hidden_size, len(c.phonemes))

    def encode(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """Return the state after the last letter of each word: (B, S) and (B, S) -> (B, E). Padding is on the right."""
        states, _ = self.encoder(self.letters(input_ids))  # (B, S, E)
        last = (attention_mask.sum(1) - 1).clamp(min=0)  # (B,); an empty word gets the state after one letter
        return states.gather(1, last[:, None, None].expand(-1, 1, states.shape[2])).squeeze(1)

    def decode(self, decoder_input_ids: Tensor, state: Tensor) -> dict[str, Tensor]:
        """Return the logits of the phoneme after each one, (B, T, V), and the state after the last, (B, E)."""
        states, last = self.decoder(self.phonemes(decoder_input_ids), state[None])
        return {"logits": self.head(states), "next_state": last[0]}

    def forward(self, input_ids: Tensor, attention_mask: Tensor, decoder_input_ids: Tensor) -> Tensor:
        """Return the logits (B, T, V) for words (B, S) and phoneme prefixes (B, T), as in training."""
        return self.decode(decoder_input_ids, self.encode(input_ids, attention_mask))["logits"]
