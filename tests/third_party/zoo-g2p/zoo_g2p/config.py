"""Configuration of the encoder-decoder, with its two alphabets."""

from dataclasses import dataclass
from typing import Literal

import zoo

UNKNOWN, START, END = "<unk>", "<s>", "</s>"
LETTERS = ("<pad>", UNKNOWN, END, *"abcdefghijklmnopqrstuvwxyz")
PHONEMES = (
    "<pad>", UNKNOWN, START, END,
    "AA0", "AA1", "AA2", "AE0", "AE1", "AE2", "AH0", "AH1", "AH2", "AO0", "AO1", "AO2", "AW0", "AW1", "AW2",
    "AY0", "AY1", "AY2", "B", "CH", "D", "DH", "EH0", "EH1", "EH2", "ER0", "ER1", "ER2", "EY0", "EY1", "EY2",
    "F", "G", "HH", "IH0", "IH1", "IH2", "IY0", "IY1", "IY2", "JH", "K", "L", "M", "N", "NG",
    "OW0", "OW1", "OW2", "OY0", "OY1", "OY2", "P", "R", "S", "SH", "T", "TH", "UH0", "UH1", "UH2",
    "UW", "UW0", "UW1", "UW2", "V", "W", "Y", "Z", "ZH",
)  # fmt: skip
"""ARPAbet as in the CMU dictionary, with digits for the stress of a vowel, in the order of g2p-en."""


@dataclass(frozen=True, kw_only=True)
class G2PConfig(zoo.Config):
    """Configuration of the encoder-decoder. The defaults are those of g2p-en."""

    task: Literal["grapheme-to-phoneme"] = "grapheme-to-phoneme"
    """Pronunciation of a word."""
    letters: tuple[str, ...] = LETTERS
    """Input symbols in the order of their ids. ``<unk>`` stands for any other letter, ``</s>`` ends a word."""
    phonemes: tuple[str, ...] = PHONEMES
    """Output symbols in the order of their ids. ``<s>`` precedes the first phoneme, ``</s>`` follows the last."""
    embedding_size: int = 256
    """Width of a letter and of a phoneme."""
    hidden_size: int = 256
    """Width of the state."""

    def __post_init__(self) -> None:
        self.require_positive("embedding_size", "hidden_size")
        for name, needed in (("letters", (UNKNOWN, END)), ("phonemes", (START, END))):
            symbols = getattr(self, name)
            if len(set(symbols)) < len(symbols):
                raise ValueError(f"{name} has a duplicate symbol")
            for symbol in needed:
                if symbol not in symbols:
                    raise ValueError(f"{name} has no {symbol}")

    def graphs(self) -> tuple[zoo.Graph, ...]:
        """An encoder, run once, and a decoder, which accepts any number of phonemes per call."""
        encoder = zoo.Graph(
            name="encoder",
            method="encode",
            inputs=(
                zoo.token_ids("input_ids", len(self.letters), length="encoder_sequence"),
                zoo.mask("attention_mask", length="encoder_sequence", padding="right"),
            ),
            outputs=(zoo.floats("state", "batch", self.hidden_size),),
        )
        decoder = zoo.Graph(
            name="decoder",
            method="decode",
            inputs=(
                zoo.token_ids("decoder_input_ids", len(self.phonemes)),
                zoo.floats("state", "batch", self.hidden_size),
            ),
            outputs=(
                zoo.floats("logits", "batch", "sequence", len(self.phonemes)),
                zoo.floats("next_state", "batch", self.hidden_size),
            ),
            causal=True,
        )
        return encoder, decoder
