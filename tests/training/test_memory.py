"""The memory of training does not grow with the corpus."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.training.objectives.common import LENGTH, tokenizer
from zoo import Tokenizer, create_model
from zoo.config import Settings
from zoo.tokenizers.files.load import read_tokenizer
from zoo.training.objectives.causal import CausalLM
from zoo.training.objectives.classification import TextClassification

PROGRAM = """
import re, sys
from pathlib import Path
from zoo.cli.entry import main

status = main(sys.argv[1:])
print(re.search(r"VmHWM:\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1])
sys.exit(status)
"""


def peak(megabytes: int) -> float:
    """Return the peak of resident memory, in MB, of a short training on a corpus of this size."""
    line = b"".join(b"%d is a number, and %d is the next one\n" % (number, number + 1) for number in range(25_000))
    Path("corpus.txt").write_bytes((line * megabytes)[: megabytes * 1_000_000])
    command = ["train", "gpt-tiny", "--data", "corpus.txt", "-o", f"m{megabytes}", "--max-steps", "2", "--quiet"]
    environment = {**os.environ, "ZOO_CACHE": str(Path(f"cache{megabytes}").absolute())}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, *command, "--set", "batch_size=2"],
        env=environment, capture_output=True, text=True, check=True,
    )  # fmt: skip
    written = sum(path.stat().st_size for path in Path(f"cache{megabytes}").rglob("*.values"))
    assert written >= 4_000_000 * megabytes
    return int(done.stdout) / 1000


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="the peak is read from /proc")
def test_peak_does_not_grow_with_the_corpus() -> None:
    """The tokens of 36 MB more take 144 MB on disk."""
    assert peak(40) - peak(4) < 36


@pytest.mark.parametrize("texts", [["a", "", "ab " * 30, "é ü 🙂"]])
@pytest.mark.parametrize("words", [Tokenizer(tokenizer()), Tokenizer(read_tokenizer("bytes"))])
def test_ids_are_those_with_offsets(texts: list[str], words: Tokenizer) -> None:
    """Texts are encoded without offsets where nothing needs these; truncation and errors are the same."""
    config = create_model("bert-tiny", task="text-classification", max_seq_len=LENGTH).config
    causal = CausalLM(create_model("gpt-tiny").config, words, Settings(), LENGTH)
    for criterion in (TextClassification(config, words, Settings(), LENGTH), causal):
        for text in texts:
            try:
                wanted = criterion.encode_text({"text": text})
            except ValueError as error:
                with pytest.raises(ValueError, match=str(error)):
                    criterion.token_ids({"text": text})
                continue
            cut = criterion.truncated
            np.testing.assert_array_equal(criterion.token_ids({"text": text}), wanted.ids)
            assert criterion.truncated - cut == bool(wanted.overflowing)
