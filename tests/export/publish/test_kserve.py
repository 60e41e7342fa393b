"""The InferenceService of KServe, checked against the classes of its SDK where that is installed."""

from __future__ import annotations

import importlib
import importlib.util
import re
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from zoo_export.publish.kserve import _label

Exported = Callable[..., Path]
Zoo = Callable[..., Any]
LAYOUT = ("--layout", "kserve", "--storage-uri")


def test_service_runs_the_repository(exported_model: Exported, zoo: Zoo) -> None:
    source = exported_model("gpt-tiny")
    made = zoo("publish", source, "out", *LAYOUT, "pvc://models/gpt", "--json").json
    assert (made["service"], made["models"]) == ("gpt-tiny", ["gpt-tiny"])
    service = yaml.safe_load(Path("out/inference-service.yaml").read_text())
    assert service["metadata"]["name"] == "gpt-tiny"
    model = service["spec"]["predictor"]["model"]
    assert (model["modelFormat"], model["storageUri"]) == ({"name": "triton"}, "pvc://models/gpt")
    assert zoo("publish", source, "triton", "--layout", "triton").status == 0
    for name in ("gpt-tiny/config.pbtxt", "gpt-tiny/1/model.onnx", "parity.json"):
        assert Path("out/models", name).read_bytes() == Path("triton", name).read_bytes()
    zoo("publish", source, "out", *LAYOUT, "pvc://models/gpt").failed(2, "already exists")
    assert zoo("publish", source, "out", *LAYOUT, "s3://bucket/gpt", "--force").status == 0
    assert "s3://bucket/gpt" in Path("out/inference-service.yaml").read_text()


def test_fields_are_those_of_the_sdk(exported_model: Exported, zoo: Zoo, monkeypatch: pytest.MonkeyPatch) -> None:
    """The SDK's package imports a server; its descriptions of resources do not need it."""
    found = importlib.util.find_spec("kserve")
    if found is None or not found.submodule_search_locations:
        pytest.skip("needs pip install --no-deps kserve six")
    package = types.ModuleType("kserve")
    package.__path__ = list(found.submodule_search_locations)
    models = types.ModuleType("kserve.models")
    models.__path__ = [f"{path}/models" for path in package.__path__]
    for module in (package, models):
        monkeypatch.setitem(sys.modules, module.__name__, module)

    def check(value: Any, kind: str) -> None:
        if kind == "V1ObjectMeta":  # of Kubernetes
            return
        if not kind.startswith("V1"):
            assert isinstance(value, {"str": str}[kind]), (value, kind)
            return
        name = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", kind).lower()
        described = getattr(importlib.import_module(f"kserve.models.{name}"), kind)
        names = {key: attribute for attribute, key in described.attribute_map.items()}
        for key, item in value.items():
            assert key in names, f"{kind} has no {key}"
            check(item, described.openapi_types[names[key]])

    assert zoo("publish", exported_model("gpt-tiny"), "out", *LAYOUT, "pvc://models/gpt").status == 0
    service = yaml.safe_load(Path("out/inference-service.yaml").read_text())
    check(service, "V1beta1InferenceService")
    with pytest.raises(AssertionError, match="V1beta1ModelSpec has no storageURL"):
        check({"spec": {"predictor": {"model": {"storageURL": "x"}}}}, "V1beta1InferenceService")


@pytest.mark.parametrize("name", ["gpt-tiny", "GPT_2.small", "7b", "-", "x" * 80, "ein-Modell_für.alles"])
def test_names_are_labels(name: str) -> None:
    assert re.fullmatch(r"[a-z]([-a-z0-9]{0,61}[a-z0-9])?", _label(name))


def test_errors(exported_model: Exported, zoo: Zoo) -> None:
    source = exported_model("gpt-tiny")
    zoo("publish", source, "out", "--layout", "kserve").failed(2, "needs --storage-uri", "pvc://CLAIM/PATH")
    zoo("publish", source, "out", *LAYOUT, "/models").failed(2, "KServe cannot read '/models'", "--storage-uri")
    zoo("publish", source, "out", "--layout", "triton", "--storage-uri", "pvc://a").failed(2, "--layout kserve")
    assert not Path("out").exists()
