"""Samples of comparisons that are truncated, malformed or hostile are refused in one line."""

from __future__ import annotations

import gzip
import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load, save

from tests.export.parity.test_recorded import FILE, Exported, Seal, Zoo, put


def rebuilt(content: bytes, change: Callable[[dict[str, Any], dict[str, Any]], object]) -> bytes:
    """Change the tensors and the index of a sample."""
    tensors = {name: value.copy() for name, value in load(gzip.decompress(content)).items()}
    index = json.loads(tensors["index"].tobytes())
    change(tensors, index)
    tensors["index"] = np.frombuffer(json.dumps(index).encode(), np.uint8)
    return gzip.compress(save(tensors))


def first(index: dict[str, Any]) -> dict[str, Any]:
    return index["calls"][0]  # type: ignore[no-any-return]


CHANGES: dict[str, Callable[[dict[str, Any], dict[str, Any]], object]] = {
    "a limit that is NaN": lambda tensors, index: tensors["allowed"].__setitem__(0, np.nan),
    "a limit that is infinite": lambda tensors, index: tensors["allowed"].__setitem__(0, np.inf),
    "a negative limit": lambda tensors, index: tensors["allowed"].__setitem__(0, -1),
    "a value that is NaN": lambda tensors, index: tensors["values"].__setitem__(0, np.nan),
    "values in float32": lambda tensors, index: tensors.update(values=tensors["values"].astype(np.float32)),
    "no limits": lambda tensors, index: tensors.pop("allowed"),
    "one value less": lambda tensors, index: tensors.update(values=tensors["values"][1:]),
    "one place less": lambda tensors, index: tensors.update(places=tensors["places"][1:]),
    "a place outside": lambda tensors, index: tensors["places"].__setitem__(0, 2**40),
    "a negative place": lambda tensors, index: tensors["places"].__setitem__(0, -1),
    "no calls": lambda tensors, index: index.update(calls=[]),
    "calls that are text": lambda tensors, index: index.update(calls="calls"),
    "no point": lambda tensors, index: first(index).pop("point"),
    "a huge batch": lambda tensors, index: first(index)["point"].update(batch=2**30),
    "a batch of half a row": lambda tensors, index: first(index)["point"].update(batch=0.5),
    "another batch": lambda tensors, index: first(index)["point"].update(batch=4),
    "another length": lambda tensors, index: first(index)["point"].update(length=9),
    "another padding": lambda tensors, index: first(index)["point"].update(padding="above"),
    "no input": lambda tensors, index: first(index).update(inputs=[]),
    "an input in vectors": lambda tensors, index: tensors.update(
        {"inputs.0.input_ids": tensors["inputs.0.input_ids"][0]}
    ),
    "ids beyond the vocabulary": lambda tensors, index: tensors["inputs.0.input_ids"].fill(10**6),
    "ids in float": lambda tensors, index: tensors.update(
        {"inputs.0.input_ids": tensors["inputs.0.input_ids"].astype(np.float32)}
    ),
    "a huge shape": lambda tensors, index: first(index)["outputs"][0].update(shape=[2**31, 2**31, 2**31]),
    "an unknown output": lambda tensors, index: first(index)["outputs"][0].update(name="nothing"),
    "more numbers than there are": lambda tensors, index: first(index)["outputs"][0].update(numbers=2**30),
    "fewer numbers than there are": lambda tensors, index: first(index)["outputs"][0].update(numbers=1),
    "another schema": lambda tensors, index: index.update(schema=2),
    "an index of one number": lambda tensors, index: index.clear(),
}


@pytest.mark.parametrize("name", CHANGES)
def test_malformed_sample_is_refused(exported_copy: Exported, zoo: Zoo, seal: Seal, name: str) -> None:
    folder = exported_copy("gpt-tiny")
    put(folder, rebuilt((folder / FILE).read_bytes(), CHANGES[name]), seal)
    zoo("verify", folder, "--recorded").failed(3, "not a recorded comparison", FILE)


class Malicious:
    def __reduce__(self) -> tuple[Any, ...]:
        return (Path.touch, (Path("executed"),))


CONTENTS: dict[str, Callable[[bytes], bytes]] = {
    "nothing": lambda content: b"",
    "half": lambda content: content[: len(content) // 2],
    "more": lambda content: content + content,
    "not compressed": lambda content: gzip.decompress(content),
    "a pickle": lambda content: pickle.dumps(Malicious()),
    "a compressed pickle": lambda content: gzip.compress(pickle.dumps(Malicious())),
    "no tensors": lambda content: gzip.compress(b"{}"),
    "zeros beyond the limit": lambda content: gzip.compress(bytes(2**25)),
    "a huge declared shape": lambda content: gzip.compress(
        len(header := b'{"index":{"dtype":"U8","shape":[4000000000000],"data_offsets":[0,4000000000000]}}').to_bytes(
            8, "little"
        )
        + header
    ),
    "deep JSON": lambda content: gzip.compress(save({"index": np.frombuffer(b"[" * 10**6, np.uint8)})),
}


@pytest.mark.parametrize("name", CONTENTS)
def test_hostile_file_is_refused(exported_copy: Exported, zoo: Zoo, seal: Seal, name: str) -> None:
    folder = exported_copy("gpt-tiny")
    put(folder, CONTENTS[name]((folder / FILE).read_bytes()), seal)
    zoo("verify", folder, "--recorded").failed(3, "not a recorded comparison", FILE, "export again")
    assert not Path("executed").exists()
