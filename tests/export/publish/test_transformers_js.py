"""The layout of transformers.js, loaded by transformers.js in Node.js where that is installed."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
import pytest

from zoo_export.publish import copies, graphs
from zoo_export.variants.quantized.make import portable_model
from zoo_runtime import load_session

Exported = Callable[..., Path]
Zoo = Callable[..., Any]

MODULES = "ZOO_NODE_MODULES"
"""Environment variable: the folder of npm packages; that of the repository by default."""
SCRIPT = """
import { pathToFileURL } from 'node:url';
const [modules, folder, task, dtypes, text, options] = process.argv.slice(2);
const library = await import(pathToFileURL(`${modules}/@huggingface/transformers/dist/transformers.node.mjs`));
library.env.allowRemoteModels = false;
const answers = {};
for (const dtype of dtypes.split(',')) {
  const pipeline = await library.pipeline(task, folder, { dtype, device: 'cpu' });
  if (task.endsWith('generation')) {
    const { input_ids, attention_mask } = pipeline.tokenizer(text);
    const ids = await pipeline.model.generate({ input_ids, attention_mask, ...JSON.parse(options) });
    const start = task === 'text-generation' ? input_ids.dims[1] : 1;
    answers[dtype] = ids.tolist()[0].slice(start).map(Number);
  } else {
    const answer = await pipeline(text, JSON.parse(options));
    answers[dtype] = answer.tolist ? answer.tolist() : answer;
  }
}
console.log(JSON.stringify(answers));
"""


@pytest.fixture
def ask(tmp_path: Path) -> Callable[..., Any]:
    """Run a pipeline of transformers.js on a published model, and return its answers by dtype."""
    modules = Path(os.environ.get(MODULES, Path(__file__).parents[3] / "node_modules"))
    if shutil.which("node") is None or not (modules / "@huggingface/transformers").is_dir():
        pytest.skip(f"needs Node.js and npm install @huggingface/transformers, see {MODULES}")
    script = tmp_path / "ask.mjs"
    script.write_text(SCRIPT)

    def answers(folder: Path, task: str, dtypes: str, text: str, **options: Any) -> Any:
        command = ["node", script, modules, folder.absolute(), task, dtypes, text, json.dumps(options)]
        result = subprocess.run(command, capture_output=True, text=True, timeout=300)
        assert result.returncode == 0, result.stderr
        return json.loads(result.stdout.splitlines()[-1])

    return answers


@pytest.mark.slow
def test_decoder_generates_what_zoo_does(exported_model: Exported, zoo: Zoo, ask: Callable[..., Any]) -> None:
    model = shutil.copytree(exported_model("gpt-tiny", seed=1, gain=12.0), "model")
    for precision in ("int8", "int4", "float16"):
        result = zoo("quantize", model, "--dtype", precision)
        assert result.status == 0, result.err
    published = zoo("publish", model, "js", "--layout", "transformers-js", "--json").json
    assert (published["model_type"], published["dtypes"]) == ("gpt2", ["fp32", "fp16", "q8", "q4"])
    assert json.loads(Path("js/parity.int8.json").read_text())["verified"]
    answers = ask(Path("js"), "text-generation", "fp32,fp16,q8,q4", "Once", max_new_tokens=20, do_sample=False)
    for dtype, variant in zip(published["dtypes"], ("", "float16", "int8", "int4"), strict=True):
        with load_session(model, variant=variant) as session:
            assert answers[dtype] == session.run("Once", max_new_tokens=20)["generated_ids"]
    assert len(set(answers["fp32"])) > 3


@pytest.mark.slow
def test_encoder_computes_what_zoo_does(exported_model: Exported, zoo: Zoo, ask: Callable[..., Any]) -> None:
    model = shutil.copytree(exported_model("bert-tiny", "task=feature-extraction", noise=True), "model")
    assert zoo("quantize", model, "--dtype", "int8").status == 0
    assert zoo("publish", model, "js", "--layout", "transformers-js").status == 0
    answers = ask(Path("js"), "feature-extraction", "fp32,q8", "a text to read")
    for dtype, variant in (("fp32", ""), ("q8", "int8")):
        with load_session(model, variant=variant) as session:
            wanted = np.array(session.run("a text to read")["last_hidden_state"])
        np.testing.assert_allclose(answers[dtype][0], wanted, atol=1e-5)


@pytest.mark.slow
def test_encoder_decoder_generates_what_zoo_does(exported_model: Exported, zoo: Zoo, ask: Callable[..., Any]) -> None:
    model = exported_model("t5-tiny", noise=True)
    assert zoo("publish", model, "js", "--layout", "transformers-js").status == 0
    answers = ask(Path("js"), "text2text-generation", "fp32", "Once", max_new_tokens=10, do_sample=False)
    with load_session(model) as session:
        assert answers["fp32"] == session.run("Once", max_new_tokens=10)["generated_ids"]


def test_weights_may_lie_in_separate_files(exported_model: Exported, zoo: Zoo, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copies, "_LARGEST", 1000)
    result = zoo("publish", exported_model("gpt-tiny"), "js", "--layout", "transformers-js")
    assert result.status == 0, result.err
    settings = json.loads(Path("js/config.json").read_text())["transformers.js_config"]
    assert settings == {"use_external_data_format": {"model.onnx": 1}}
    inputs = {item.name for item in ort.InferenceSession("js/onnx/model.onnx").get_inputs()}
    assert {"input_ids", "attention_mask", "past_key_values.0.key"} <= inputs


@pytest.mark.slow
def test_wrong_graph_of_a_precision_is_refused(
    exported_copy: Exported, zoo: Zoo, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Graphs for transformers.js are not those that were verified before."""
    model = exported_copy("gpt-tiny")
    assert zoo("quantize", model, "--dtype", "int8").status == 0

    def wrong(*arguments: Any) -> Any:
        variant = portable_model(*arguments)
        (node,) = [node for node in variant.graphs["model"].graph if node.op_type in ("Gelu", "Tanh")][:1]
        node.op_type = "Relu"
        node.attributes.clear()
        return variant

    monkeypatch.setattr(graphs, "portable_model", wrong)
    zoo("publish", model, "js", "--layout", "transformers-js").failed(
        4, "not equal to the model", "nothing was written"
    )
    assert not Path("js").exists()


def test_models_that_do_not_fit_are_refused(exported_model: Exported, zoo: Zoo) -> None:
    layout = ("js", "--layout", "transformers-js")
    zoo("publish", exported_model("transformer-tiny"), *layout).failed(2, "encoder, decoder", "--layout standalone")
    zoo("publish", exported_model("vit-tiny"), *layout).failed(2, "images as RGB, but the model has 1 channel(s)")
    zoo("publish", exported_model("gpt-tiny"), *layout, "--max-shard-size", "1MB").failed(2, "--layout hub")
    assert zoo("build", "gpt-tiny", "-o", "model").status == 0
    zoo("publish", "model", *layout).failed(3, "not exported yet")
    assert zoo("export", "model", "--onnx", "--graph-only").status == 0
    zoo("publish", "model", *layout).failed(4, "not verified")
    assert not Path("js").exists()
