"""Speech recognition on a random model."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from tests.architectures.test_whisper import CHIRP, wav
from tests.exported import Builder
from zoo.audio import AudioReader
from zoo_runtime import load_session


def test_rows_are_read_and_bad_ones_do_not_harm_others(exported_model: Builder, tmp_path: Path) -> None:
    path = tmp_path / "chirp.wav"
    path.write_bytes(wav(CHIRP[:8000]))
    floats = AudioReader().read(path)
    with load_session(exported_model("whisper-test")) as session:
        answers = list(session.map([str(path), b"", floats, np.zeros(20_000)], max_new_tokens=4))
        assert [answer.error is None for answer in answers] == [True, False, True, False]
        assert "1.2 s of sound exceed the model's 1 s" in str(answers[3].error)
        assert answers[0].result == answers[2].result
        assert answers[0].result["seconds"] == 0.5
        assert "".join(session.stream(str(path), max_new_tokens=4)) == answers[0].result["generated"]
        long = session.run(np.concatenate([np.tile(floats, 2), floats]), max_new_tokens=4, windows=True)
        assert [window["seconds"] for window in long["windows"]] == [1.0, 0.5]
        assert long["windows"][1] == answers[0].result
