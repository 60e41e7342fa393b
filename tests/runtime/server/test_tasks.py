"""``/v1/tasks/NAME``: each kind of task answers as the session does."""

from __future__ import annotations

import base64
import io
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from PIL import Image

from tests.runtime.server.conftest import KEPT, SECONDS, serving
from zoo_export.export import export_graphs_only
from zoo_runtime import load_session
from zoo_runtime.files.results import plain
from zoo_runtime.running.inputs import Pair

Exported = Callable[..., Path]


def image(seed: int) -> bytes:
    """Return a PNG file of noise."""
    file = io.BytesIO()
    Image.fromarray(np.random.default_rng(seed).integers(256, size=(9, 9, 3), dtype=np.uint8)).save(file, "PNG")
    return file.getvalue()


TASKS = [
    ("fill-mask", ("bert-tiny", "task=fill-mask", "mask_token_id=259"), ["a <mask> c", "<mask>"], {"top_k": 2}),
    ("image-classification", ("vit-tiny",), [image(0), image(1)], {"top_k": 3}),
    ("text-classification", ("bert-tiny", "task=text-classification", "num_classes=3"),
     ["tea", [5, 6, 7], Pair("tea", "or not")], {}),
    ("token-classification", ("bert-tiny", "task=token-classification", "num_classes=3"), ["tea or not"], {}),
    ("rerank", ("bert-tiny", "task=text-classification", "num_classes=1"), [Pair("tea", ["or", "not", "wet"])], {}),
    ("zero-shot-image-classification", ("clip-tiny",), [image(2)], {"labels": ["cat", "dog"]}),
    ("image-embedding", ("clip-tiny",), [image(3), image(4)], {}),
]  # fmt: skip


def sent(value: Any) -> Any:
    """Return an input as a request has it."""
    if isinstance(value, bytes):
        return {"base64": base64.b64encode(value).decode()}
    return {"pair": list(value)} if isinstance(value, Pair) else value


@pytest.mark.slow_after(2)
@pytest.mark.parametrize(("task", "model", "inputs", "options"), TASKS, ids=[task for task, *_ in TASKS])
def test_results_equal_the_session(
    exported_build: Exported, task: str, model: Sequence[str], inputs: Sequence[Any], options: Mapping[str, Any]
) -> None:
    folder = exported_build(*model, noise=True)
    export_graphs_only(folder)
    with load_session(folder, unverified=True, threads=1) as session:
        wanted = [plain(session.run(value, task=task, **options)) for value in inputs]
    with (
        serving(folder, "--unverified") as server,
        httpx.Client(base_url=server.url, limits=KEPT, timeout=SECONDS) as http,
    ):
        url, body = f"/v1/tasks/{task}", {"inputs": [sent(value) for value in inputs], "options": options}
        found = http.post(url, json=body)
        assert found.status_code == 200, found.text
        assert (found.json()["data"], found.json()["task"]) == (wanted, task)
        wrong = [({"options": {name: 1}}, "options") for name in ("x", "task", "self")]
        wrong += [({"inputs": value}, "inputs[0]") for value in ([{"base64": "?"}], [None])]
        for change, param in (*wrong, ({"inputs": []}, "inputs")):
            refused = http.post(url, json=body | change)
            assert (refused.status_code, refused.json()["error"]["param"]) == (400, param), change
        for name in ("nope", "speech-recognition"):
            refused = http.post(f"/v1/tasks/{name}", json=body)
            assert (refused.status_code, refused.json()["error"]["code"]) == (404, "unknown_task")
            assert name in refused.json()["error"]["message"]
