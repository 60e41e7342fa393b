"""lm-eval measures a served model as it measures the checkpoint in transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.runtime.server.conftest import POSITIONS, serving
from zoo.checkpoints.exporting import export_checkpoint

QUESTIONS = [
    {"q": "The sky is", "choices": [" blue", " green"], "a": 0, "text": "The sky is blue, and the sea is green"},
    {"q": "Grass is", "choices": [" blue", " green"], "a": 1, "text": "Grass is green in spring " * 6},
    {"q": "Snow is", "choices": [" white", " black as é"], "a": 0, "text": "Snow"},
]
TASKS: dict[str, dict[str, Any]] = {
    "tiny_choice": {
        "output_type": "multiple_choice", "doc_to_text": "{{q}}", "doc_to_choice": "{{choices}}", "doc_to_target": "a",
        "metric_list": [{"metric": "acc"}, {"metric": "acc_norm"}],
    },
    "tiny_perplexity": {
        "output_type": "loglikelihood_rolling", "doc_to_text": "", "doc_to_target": "{{text}}",
        "metric_list": [{"metric": "bits_per_byte"}],
    },
    "tiny_answer": {
        "output_type": "generate_until", "doc_to_text": "{{q}}", "doc_to_target": "{{text}}",
        "generation_kwargs": {"until": ["\n"], "max_gen_toks": 12, "do_sample": False},
        "metric_list": [{"metric": "exact_match"}],
    },
}  # fmt: skip


@pytest.mark.slow
def test_measures_equal_those_of_the_checkpoint(writer: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lm_eval = pytest.importorskip("lm_eval")
    pytest.importorskip("accelerate")
    tasks = pytest.importorskip("lm_eval.tasks")
    for name in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE"):
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "cache"))
    export_checkpoint(writer, tmp_path / "hub")
    (tmp_path / "q.jsonl").write_text("".join(json.dumps(question) + "\n" for question in QUESTIONS))
    data = {"dataset_path": "json", "dataset_kwargs": {"data_files": {"test": str(tmp_path / "q.jsonl")}}}
    for name, task in TASKS.items():
        (tmp_path / f"{name}.yaml").write_text(json.dumps({"task": name, "test_split": "test", **data, **task}))
    known = tasks.TaskManager(include_path=str(tmp_path), include_defaults=False)

    def measure(model: str, arguments: str) -> Any:
        found = lm_eval.simple_evaluate(model=model, model_args=arguments, tasks=list(TASKS), task_manager=known)
        return {
            (name, sample["doc_id"]): sample["filtered_resps"]
            for name, samples in found["samples"].items()
            for sample in samples
        }

    # lm-eval leaves positions free for a new token, and cuts long texts into shorter windows for servers
    local = f"dtype=float32,device=cpu,max_length={POSITIONS - 2}"
    wanted = measure("hf", f"pretrained={tmp_path / 'hub'},add_bos_token=True,{local}")
    with serving(writer, "--unverified") as server:
        served = f"model=writer,base_url={server.url}/v1/completions,tokenizer={tmp_path / 'hub'},num_concurrent=4"
        found = measure("local-completions", f"{served},add_bos_token=True,max_length={POSITIONS}")
    assert found.keys() == wanted.keys()
    for key, responses in wanted.items():
        if key[0] == "tiny_answer":
            assert found[key] == responses
        for one, other in zip(responses, found[key], strict=True):
            if key[0] == "tiny_choice":
                assert other[0] == pytest.approx(one[0], abs=1e-4)
                assert other[1] == one[1]
            elif key[0] == "tiny_perplexity":
                assert other == pytest.approx(one, abs=1e-3)  # the sum of some 150 tokens
