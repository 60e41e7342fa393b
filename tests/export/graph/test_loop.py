"""Generation as one graph, against the Python loop, transformers and numpy; its verification, with seeded faults."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
import torch

import zoo as library
from tests.architectures.test_gpt import transformers_twin
from tests.exported import LIVELY, run_model
from zoo.artifact import EVIDENCE_KEY, Export, ModelDirectory
from zoo.contract import floats, mask, token_ids
from zoo.errors import ArtifactError, UsageError
from zoo.registry import ModelSpec
from zoo_export.graph.file import parse
from zoo_export.graph.file import serialize as to_bytes
from zoo_export.graph.links import link, pointers
from zoo_export.trace.graph import trace_graph
from zoo_export.trace.make import make_graphs
from zoo_export.variants.loop.comparison import compare_loop
from zoo_export.variants.loop.graph import make_loop
from zoo_runtime.generation.loop import plan_loop, run_loop
from zoo_runtime.onnx_runtime.providers import open_session

Exported = Callable[..., Path]
Array = np.ndarray[Any, Any]

POSITIONS = 32
NEW = 9
NO_END = -1
TEXTS = ["time flies", "an arrow", "x"]
PROMPTS = [list(text.encode()) for text in TEXTS]
MODELS = ["gpt-tiny", "llama-tiny", pytest.param("transformer-tiny", marks=pytest.mark.slow)]


@pytest.fixture(scope="module")
def lively(exported_with: Exported) -> Callable[[str], Path]:
    """Export a preset with lively weights."""
    return lambda name: exported_with(name, **LIVELY[name])


@pytest.fixture(scope="module")
def loops(lively: Callable[[str], Path]) -> Callable[..., tuple[ModelDirectory, dict[str, bytes], bytes]]:
    """Load a lively preset's graphs and its loop from the exported files."""
    made: dict[str, Any] = {}

    def make(name: str) -> tuple[ModelDirectory, dict[str, bytes], bytes]:
        if name not in made:
            stored = ModelDirectory.open(lively(name))
            files = Export(stored).read()
            made[name] = stored, files, serialize(make_loop(stored.spec, read(stored)))
        return made[name]

    return make


@pytest.fixture(scope="module")
def generate(loops: Callable[..., Any]) -> Callable[..., Array]:
    """Run the loop of a lively preset on padded prompts, by default without an end token."""
    sessions: dict[str, Any] = {}

    def run(name: str, prompts: Sequence[Sequence[int]], new: int, side: str = "left", **options: Any) -> Array:
        stored, _, loop = loops(name)
        if name not in sessions:
            sessions[name] = open_session(loop, weights=stored.path, spin=False)
        return run_loop(sessions[name], padded(prompts, side), new, **{"eos_token_id": NO_END, **options})

    return run


def read(stored: ModelDirectory) -> dict[str, ir.Model]:
    return models_of(Export(stored).read())


def models_of(graphs: dict[str, bytes]) -> dict[str, ir.Model]:
    return {name: ir.from_proto(parse(data)) for name, data in graphs.items()}


def serialize(model: ir.Model) -> bytes:
    return to_bytes(ir.to_proto(model))


def padded(prompts: Sequence[Sequence[int]], side: str = "left", width: int = 0) -> dict[str, Array]:
    """Build a batch of prompts with padding on one side, or around and between the tokens."""
    width = max(width, 2 * max(map(len, prompts)) if side == "within" else max(map(len, prompts)))
    ids, kept = np.full((len(prompts), width), 7), np.zeros((len(prompts), width), np.int64)
    for row, tokens in enumerate(prompts):
        places = {
            "left": range(width - len(tokens), width),
            "right": range(len(tokens)),
            "within": range(1, 2 * len(tokens), 2),
        }[side]
        ids[row, places], kept[row, places] = tokens, 1
    return {"input_ids": ids, "attention_mask": kept}


def ended(tokens: Sequence[int], end: int, width: int) -> list[int]:
    """Cut a row after its end token, and fill it up."""
    tokens = list(tokens)
    kept = tokens[: tokens.index(end) + 1] if end in tokens else tokens
    return (kept + [end] * width)[:width]


# Greedy.


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("name", MODELS)
def test_equals_the_python_loop(lively: Callable[[str], Path], generate: Callable[..., Array], name: str) -> None:
    """Token for token, for a ragged batch and for its prompts singly."""
    for texts in (TEXTS, *([text] for text in TEXTS), TEXTS + TEXTS[:2]):
        _, results = run_model(lively(name), texts, max_new_tokens=NEW, unverified=True)
        wanted = [result["generated_ids"] for result in results]
        assert generate(name, [list(text.encode()) for text in texts], NEW).tolist() == wanted
    assert len({tuple(tokens) for tokens in wanted}) == len(TEXTS)


def test_equals_transformers(lively: Callable[[str], Path], generate: Callable[..., Array]) -> None:
    """transformers' generation with the same weights in float64, with an early end and padded rows."""
    twin = transformers_twin(library.load(lively("gpt-tiny")).double())
    batch = padded(PROMPTS)

    def theirs(end: int | None) -> list[list[int]]:
        tokens = twin.generate(
            input_ids=torch.tensor(batch["input_ids"]), attention_mask=torch.tensor(batch["attention_mask"]),
            max_new_tokens=NEW, do_sample=False, eos_token_id=end, pad_token_id=end or 0,
        )  # fmt: skip
        return tokens[:, batch["input_ids"].shape[1] :].tolist()

    free = theirs(None)
    assert generate("gpt-tiny", PROMPTS, NEW).tolist() == free
    for end in {row[3] for row in free}:
        assert generate("gpt-tiny", PROMPTS, NEW, eos_token_id=end).tolist() == theirs(end)


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("side", ["left", "right", "within"])
def test_row_does_not_depend_on_its_batch(generate: Callable[..., Array], name: str, side: str) -> None:
    """For padding anywhere."""
    alone = [generate(name, [prompt], 5).tolist()[0] for prompt in PROMPTS]
    assert generate(name, PROMPTS, 5, side).tolist() == alone


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_number_of_tokens(generate: Callable[..., Array], name: str) -> None:
    """Including 0, for which the output still has all rows."""
    free = generate(name, PROMPTS, 5)
    for new in (-1, 0, 1, 2, 5):
        found = generate(name, PROMPTS, new)
        assert found.dtype == np.int64
        assert found.shape == (len(PROMPTS), max(new, 0))
        assert (found == free[:, : max(new, 0)]).all()


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("temperature", [0.0, 5.0])
def test_generation_ends_early(generate: Callable[..., Array], name: str, temperature: float) -> None:
    """Rows that have ended are filled, and generation stops when all have ended."""
    noise = np.random.default_rng(0).random((len(PROMPTS), NEW))
    options = {"temperature": temperature, "noise": noise}
    free = generate(name, PROMPTS, NEW, **options).tolist()
    widths = set()
    for end in sorted({token for row in free for token in row}):
        width = max(row.index(end) + 1 if end in row else NEW for row in free)
        assert generate(name, PROMPTS, NEW, **options, eos_token_id=end).tolist() == [
            ended(row, end, width) for row in free
        ]
        options_alone = {**options, "noise": noise[:1]}
        (alone,) = generate(name, PROMPTS[:1], NEW, **options_alone, eos_token_id=end).tolist()
        stop = free[0].index(end) + 1 if end in free[0] else NEW
        assert alone == free[0][:stop]
        widths.add(stop)
    assert len(widths) > (5 if temperature else 1)


def test_configured_end_token_is_the_default(loops: Callable[..., Any], generate: Callable[..., Array]) -> None:
    stored, _, _ = loops("gpt-tiny")
    free = generate("gpt-tiny", PROMPTS, NEW).tolist()
    end = free[0][4]
    batch = padded(PROMPTS[:1])
    for value, wanted in ((end, free[0][: free[0].index(end) + 1]), (None, free[0])):
        config = dataclasses.replace(stored.spec.config, eos_token_id=value)
        spec = ModelSpec("other", stored.spec.plugin, stored.spec.architecture, config)
        session = open_session(serialize(make_loop(spec, read(stored))), weights=stored.path)
        assert run_loop(session, batch, NEW).tolist() == [wanted]


def test_any_of_several_end_tokens_ends_a_row(loops: Callable[..., Any], generate: Callable[..., Array]) -> None:
    """By default and when given; rows are filled with the first of them."""
    stored, _, _ = loops("gpt-tiny")
    free = generate("gpt-tiny", PROMPTS, NEW).tolist()
    ends = free[0][4], free[1][2]
    assert ends[0] != ends[1]
    stops = [1 + next((place for place, token in enumerate(row) if token in ends), NEW - 1) for row in free]
    assert min(stops) < max(stops)
    wanted = [row[:stop] + [ends[0]] * (max(stops) - stop) for row, stop in zip(free, stops, strict=True)]
    for default, given in ((ends, None), ((3, 4), ends)):
        config = dataclasses.replace(stored.spec.config, eos_token_id=default)
        spec = ModelSpec("other", stored.spec.plugin, stored.spec.architecture, config)
        session = open_session(serialize(make_loop(spec, read(stored))), weights=stored.path)
        assert run_loop(session, padded(PROMPTS), NEW, eos_token_id=given).tolist() == wanted
        assert run_loop(session, padded(PROMPTS), NEW, eos_token_id=NO_END).tolist() == free


@pytest.mark.parametrize("length", [1, POSITIONS - 3, POSITIONS - 1, POSITIONS])
def test_generation_ends_at_the_last_position(
    lively: Callable[[str], Path], generate: Callable[..., Array], length: int
) -> None:
    """Like the Python loop."""
    prompt = "time flies like an arrow and more text"[:length]
    _, (result,) = run_model(lively("gpt-tiny"), [prompt], max_new_tokens=99, unverified=True)
    found = generate("gpt-tiny", [list(prompt.encode())], 99)
    assert found.shape == (1, POSITIONS - length)
    assert found.tolist()[0] == result["generated_ids"]


@pytest.mark.slow
def test_start_token_uses_a_position(generate: Callable[..., Array]) -> None:
    assert generate("transformer-tiny", PROMPTS, 99).shape == (len(PROMPTS), POSITIONS - 1)


# Sampling.


@pytest.mark.parametrize("top_k", [0, 1, 4])
def test_samples_follow_the_distribution(
    lively: Callable[[str], Path], generate: Callable[..., Array], top_k: int
) -> None:
    """Evenly spaced noise gives each token in proportion to its probability, to within one count."""
    rows, temperature = 1500, 7.0
    noise = ((np.arange(rows) + 0.5) / rows)[:, None]
    found = generate("gpt-tiny", PROMPTS[:1] * rows, 1, temperature=temperature, top_k=top_k, noise=noise)
    with torch.inference_mode():
        logits = library.load(lively("gpt-tiny")).double()(torch.tensor(PROMPTS[:1]))[0, -1] / temperature
    logits = logits.clone()
    if top_k:
        logits[logits < logits.topk(top_k).values[-1]] = -torch.inf
    wanted = logits.softmax(-1).numpy() * rows
    assert np.abs(np.bincount(found[:, 0], minlength=len(wanted)) - wanted).max() <= 1.01
    assert (np.diff(found[:, 0]) >= 0).all()
    assert len(set(found[:, 0].tolist())) == top_k or top_k == 0


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("name", MODELS)
def test_noise_determines_the_tokens(generate: Callable[..., Array], name: str) -> None:
    """Equal noise gives equal tokens, other noise others; each row reads its own noise, or all share one row."""
    rng = np.random.default_rng(0)
    noise = rng.random((len(PROMPTS), NEW), np.float32)
    options: dict[str, Any] = {"temperature": 5.0, "top_k": 50}
    first = generate(name, PROMPTS, NEW, noise=noise, **options)
    assert (first == generate(name, PROMPTS, NEW, noise=noise, **options)).all()
    assert (first != generate(name, PROMPTS, NEW, noise=np.roll(noise, 1, axis=0), **options)).any(1).all()
    late = noise.copy()
    late[:, 5:] = 1 - late[:, 5:]
    changed = generate(name, PROMPTS, NEW, noise=late, **options)
    assert (changed[:, :5] == first[:, :5]).all()
    assert (changed != first).any(1).all()
    shared = generate(name, PROMPTS, NEW, noise=noise[:1], **options)
    assert (shared[0] == first[0]).all()
    assert (shared == generate(name, PROMPTS, NEW, noise=noise[[0, 0, 0]], **options)).all()
    alone = generate(name, PROMPTS[1:2], NEW, noise=noise[1:2], **options)
    assert (alone[0] == first[1]).all()


def test_extreme_settings(generate: Callable[..., Array]) -> None:
    """A temperature near 0 or a single candidate is greedy; noise out of range selects the first or last candidate."""
    free = generate("gpt-tiny", PROMPTS, 5)
    noise = np.full((1, 5), 0.5)
    assert (generate("gpt-tiny", PROMPTS, 5, temperature=1e-30, noise=noise) == free).all()
    assert (generate("gpt-tiny", PROMPTS, 5, temperature=3.0, top_k=1, noise=noise) == free).all()
    many = generate("gpt-tiny", PROMPTS, 5, temperature=9.0, top_k=10**6, noise=noise)
    assert (many == generate("gpt-tiny", PROMPTS, 5, temperature=9.0, noise=noise)).all()
    for outside, inside in ((1.0, 1 - 2.0**-24), (7.0, 1 - 2.0**-24), (-3.0, 0.0)):
        settings: dict[str, Any] = {"temperature": 9.0, "top_k": 3}
        found, wanted = (
            generate("gpt-tiny", PROMPTS, 5, noise=np.full((1, 5), value), **settings) for value in (outside, inside)
        )
        assert (found == wanted).all()


@pytest.mark.parametrize("noise", [None, np.zeros((1, 2)), np.zeros((2, 3)), np.zeros((4, 3))])
def test_sampling_without_enough_noise_fails(generate: Callable[..., Array], noise: Array | None) -> None:
    with pytest.raises(ArtifactError, match="the generation loop failed"):
        generate("gpt-tiny", PROMPTS, 3, temperature=1.0, noise=noise)


# The file.


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("name", MODELS)
def test_loop_file(loops: Callable[..., Any], name: str, tmp_path: Path) -> None:
    """Standard operators, each stored tensor once, only small constants inside, and no evidence of the graphs."""
    stored, files, loop = loops(name)
    assert len(loop) < sum(map(len, files.values())) + 12_000
    path = tmp_path / "generate.onnx"
    path.write_bytes(loop)
    for weights in stored.path.glob("*.safetensors"):
        (tmp_path / weights.name).write_bytes(weights.read_bytes())
    onnx.checker.check_model(str(path), full_check=True)
    proto = onnx.load_model_from_string(loop)
    assert {(item.domain or "ai.onnx", item.version) for item in proto.opset_import if item.version != 1} == {
        ("ai.onnx", 23)
    }
    functions = {function.domain for function in proto.functions}
    model = ir.from_proto(proto)
    assert {node.domain for node in model.graph.all_nodes()} <= {"", *functions}
    assert [node.op_type for node in model.graph].count("Loop") == 1
    places = list(pointers(loop).values())
    assert len(places) == len(set(places))
    assert {*places} == {place for file in files.values() for place in pointers(file).values()}
    inside = [
        value for value in model.graph.initializers.values() if not isinstance(value.const_value, ir.ExternalTensor)
    ]
    assert all(value.const_value is not None and value.const_value.size <= 32 for value in inside)
    assert EVIDENCE_KEY not in model.metadata_props
    assert model.metadata_props["zoo.task"] == stored.spec.task
    assert all(value.doc_string for value in [*model.graph.inputs[-5:], *model.graph.outputs])


@pytest.mark.parametrize("name", MODELS)
def test_names_are_unique_in_every_scope(loops: Callable[..., Any], name: str) -> None:
    """Some runtimes look up names in enclosing graphs, too."""
    graph = onnx.load_model_from_string(loops(name)[2]).graph

    def defined(graph: onnx.GraphProto) -> list[str]:
        names = [value.name for value in graph.input] + [output for node in graph.node for output in node.output]
        inner = [attribute.g for node in graph.node for attribute in node.attribute if attribute.HasField("g")]
        return names + [name for part in inner for name in defined(part)]

    names = defined(graph) + [item.name for item in graph.initializer if item.name not in {i.name for i in graph.input}]
    assert len(names) == len(set(names))
    assert "" not in names


@pytest.fixture(scope="module")
def untied(exported_build: Exported) -> tuple[ModelDirectory, dict[str, ir.Model]]:
    """Build a float16 model with an untied head, and trace its graphs."""
    settings = ("num_layers=1", "tie_embeddings=false")
    stored = ModelDirectory.open(exported_build("gpt-tiny", *settings, dtype="float16", seed=3, gain=12.0))
    return stored, models_of(make_graphs(stored))


@pytest.mark.slow
def test_loop_is_deterministic_and_keeps_its_inputs(untied: Any, tmp_path: Path) -> None:
    """For traced graphs, and graphs read from files."""
    stored, graphs = untied
    before = {file: serialize(graph) for file, graph in graphs.items()}
    loop = serialize(make_loop(stored.spec, graphs))
    assert serialize(make_loop(stored.spec, graphs)) == loop
    assert {file: serialize(graph) for file, graph in graphs.items()} == before
    for file, data in before.items():
        (tmp_path / f"{file}.onnx").write_bytes(data)
    again = {file: ir.load(tmp_path / f"{file}.onnx") for file in graphs}
    assert serialize(make_loop(stored.spec, again)) == loop


@pytest.mark.slow
def test_untied_head_and_half_precision(untied: Any) -> None:
    stored, graphs = untied
    loop = serialize(make_loop(stored.spec, graphs))
    assert "head.weight" in pointers(loop)
    report = compare_loop(stored, {file: serialize(graph) for file, graph in graphs.items()}, loop)
    assert report.passed, report.failures


def test_only_the_last_logits_of_a_prompt_are_computed(loops: Callable[..., Any]) -> None:
    """The head occurs once, and reads a matrix with one row per prompt."""
    model = ir.from_proto(onnx.load_model_from_string(loops("gpt-tiny")[2]))
    users = model.graph.initializers["token_embedding.weight"].consumers()
    assert sorted(user.op_type for user in users) == ["Gather", "Gemm"]
    (head,) = [user for user in users if user.op_type == "Gemm"]
    assert head.inputs[0] is not None
    assert own(body(model), "Gemm") == [head]
    assert own(body(model), "Gather") == [head.inputs[0].producer()]


def test_logits_other_than_a_dense_layer_are_supported(
    loops: Callable[..., Any], generate: Callable[..., Array]
) -> None:
    """All logits are computed, and the last row is used."""
    stored, _, _ = loops("gpt-tiny")
    graphs = read(stored)
    graph = graphs["model"].graph
    (logits,) = [value for value in graph.outputs if value.name == "logits"]
    again = ir.node("Mul", [logits, constant(graph, 2.0, np.float32)])
    again.outputs[0].type, again.outputs[0].shape = logits.type, logits.shape
    graph.append(again)
    graph.outputs[list(graph.outputs).index(logits)] = again.outputs[0]
    logits.name, again.outputs[0].name = "half", "logits"
    session = open_session(serialize(make_loop(stored.spec, graphs)), weights=stored.path)
    found = run_loop(session, padded(PROMPTS, "right"), 5, eos_token_id=NO_END)
    assert (found == generate("gpt-tiny", PROMPTS, 5)).all()
    noise = np.random.default_rng(0).random((3, 5))
    found = run_loop(session, padded(PROMPTS), 5, temperature=10.0, noise=noise, eos_token_id=NO_END)
    assert (found == generate("gpt-tiny", PROMPTS, 5, temperature=5.0, noise=noise)).all()


@pytest.mark.slow
def test_decoder_without_a_mask_is_supported(loops: Callable[..., Any], generate: Callable[..., Array]) -> None:
    """The loop has no mask either."""
    stored, _, _ = loops("gpt-tiny")
    spec = changed_spec(stored.spec, inputs=stored.spec.graphs[0].inputs[:1])
    traced = ir.to_proto(trace_graph(spec, spec.graphs[0], stored.dtype, opset=23))
    link(traced, stored.layout)
    loop = make_loop(spec, {"model": ir.from_proto(traced)})
    session = open_session(serialize(loop), weights=stored.path)
    assert plan_loop(spec).mask is None
    prompts = [prompt[:1] for prompt in PROMPTS]
    found = run_loop(session, {"input_ids": np.array(prompts)}, 5, eos_token_id=NO_END)
    assert (found == generate("gpt-tiny", prompts, 5)).all()


@pytest.mark.slow
def test_functions_of_the_same_name(loops: Callable[..., Any], generate: Callable[..., Array]) -> None:
    """Different functions of the same name in two graphs are kept apart."""
    stored, _, _ = loops("transformer-tiny")
    graphs = read(stored)
    decoder = graphs["decoder"]
    (encoder_key,) = [key for key in graphs["encoder"].functions if key[1] == "EncoderBlock"]
    (key,) = [key for key in decoder.functions if key[1] == "DecoderBlock"]
    function = decoder.functions.pop(key)
    function.name = "EncoderBlock"
    assert function.identifier() == encoder_key
    decoder.functions[encoder_key] = function
    for node in decoder.graph.all_nodes():
        if node.op_identifier() == key:
            node.op_type = "EncoderBlock"
    session = open_session(serialize(make_loop(stored.spec, graphs)), weights=stored.path)
    found = run_loop(session, padded(PROMPTS), 5, eos_token_id=NO_END)
    assert (found == generate("transformer-tiny", PROMPTS, 5)).all()


# Models without a loop.


def changed_spec(spec: ModelSpec, **changes: Any) -> ModelSpec:
    """Return a model with a changed declaration of its last graph."""
    *earlier, decoder = spec.graphs
    declared = (*earlier, dataclasses.replace(decoder, **changes))

    class Config(type(spec.config)):  # type: ignore[misc]
        def graphs(self) -> Any:
            return declared

    return ModelSpec(spec.name, spec.plugin, spec.architecture, Config(**dataclasses.asdict(spec.config)))


def test_models_that_do_not_generate_are_rejected(loops: Callable[..., Any]) -> None:
    stored, _, _ = loops("gpt-tiny")
    spec, (decoder,) = stored.spec, stored.spec.graphs
    assert plan_loop(changed_spec(spec)).ids == "input_ids"
    refused = {
        "cannot generate": [
            {"past": None},
            {"outputs": (floats("last_hidden_state", "batch", "sequence", 8),)},
        ],
        "do not have the dimensions": [{"outputs": (floats("logits", "batch", 260),)}],
        "does not read token ids": [{"inputs": (floats("embeddings", "batch", "sequence", 8),)}],
        "cannot extend the input 'token_type_ids'": [{"inputs": (*decoder.inputs, token_ids("token_type_ids", 2))}],
        "cannot extend the input 'attention_mask'": [{"inputs": (decoder.inputs[0], mask("attention_mask"))}],
        "the input 'noise'": [{"inputs": (*decoder.inputs, floats("noise", "batch", 3))}],
    }
    for message, declarations in refused.items():
        for declaration in declarations:
            with pytest.raises(UsageError, match=message):
                make_loop(changed_spec(spec, **declaration), read(stored))


def test_encoder_is_rejected(exported_build: Exported) -> None:
    with pytest.raises(UsageError, match="bert-tiny cannot generate"):
        plan_loop(ModelDirectory.open(exported_build("bert-tiny")).spec)


# The gate.


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("name", MODELS)
def test_correct_loop_passes(loops: Callable[..., Any], name: str) -> None:
    """With lively and stored weights, at both optimisation levels, with few near-ties."""
    report = compare_loop(*loops(name))
    assert report.passed, report.failures
    assert report.evidence["verified"] is True
    assert report.evidence["positions"] == POSITIONS
    for weights in ("stored", "lively"):
        for level in ("off", "all"):
            found = report.evidence["comparisons"][weights]["levels"][level]
            assert found["tokens"] == 8 * 18
            assert found["near_ties"] <= 8
            assert found["agreed_with_python_loop"] >= 40


def body(model: ir.Model) -> ir.Graph:
    (node,) = [node for node in model.graph if node.op_type == "Loop"]
    return node.attributes["body"].as_graph()


def branch(model: ir.Model, name: str) -> ir.Graph:
    (node,) = [node for node in body(model) if node.op_type == "If"]
    return node.attributes[name].as_graph()


def own(graph: ir.Graph, operator: str) -> list[ir.Node]:
    """Return the loop's own nodes of an operator, without those of the model's graphs."""
    return [node for node in graph if node.op_type == operator and (node.name or "").startswith("loop/")]


def constant(graph: ir.Graph, value: Any, dtype: Any = np.int64, before: ir.Node | None = None) -> ir.Value:
    node = ir.node("Constant", [], {"value": ir.tensor(np.array(value, dtype))})
    node.outputs[0].name = f"fault_{len(graph)}"
    graph.insert_before(before or graph[0], node)
    return node.outputs[0]


def set_default(model: ir.Model, name: str, value: Any) -> None:
    found = model.graph.initializers[name]
    assert found.const_value is not None
    found.const_value = ir.tensor(np.array(value, found.const_value.numpy().dtype), name=name)


def ended_rows_go_on(model: ir.Model) -> None:
    (where,) = own(body(model), "Where")
    where.replace_input_with(1, where.inputs[2])


def never_ends(model: ir.Model) -> None:
    graph = body(model)
    (negation,) = own(graph, "Not")
    negation.replace_input_with(0, constant(graph, False, np.bool_))


def ends_at_the_first_row(model: ir.Model) -> None:
    (reduce,) = own(body(model), "ReduceMin")
    reduce.op_type = "ReduceMax"


def new_tokens_are_padding(model: ir.Model) -> None:
    graph = body(model)
    (expand,) = own(graph, "Expand")
    expand.replace_input_with(0, constant(graph, 0))


def layers_swap_their_past(model: ir.Model) -> None:
    outputs = body(model).outputs
    outputs[-1], outputs[-3] = outputs[-3], outputs[-1]


def past_is_not_extended(model: ir.Model) -> None:
    """Keep the length of the cache, but replace its newest entry with that of the previous token."""
    graph = body(model)
    present = graph.outputs[-1]
    length = ir.node("Shape", [present], {"start": 2, "end": 3})
    one, zero = constant(graph, 1), constant(graph, 0)
    end = ir.node("Squeeze", [length.outputs[0]])
    places = ir.node("Range", [zero, end.outputs[0], one])
    late = ir.node("Max", [ir.node("Sub", [places.outputs[0], one]).outputs[0], zero])
    shifted = ir.node("Gather", [present, late.outputs[0]], {"axis": 2})
    sub = late.inputs[0]
    assert sub is not None
    graph.extend([length, end, places, sub.producer(), late, shifted])
    graph.outputs[-1] = shifted.outputs[0]
    shifted.outputs[0].type, shifted.outputs[0].shape = present.type, present.shape


def prompts_are_not_packed(model: ir.Model) -> None:
    for node in own(model.graph, "GatherElements"):
        value = node.inputs[0]
        assert value is not None
        node.outputs[0].replace_all_uses_with(value)


def prompts_are_packed_to_the_left(model: ir.Model) -> None:
    (sort,) = own(model.graph, "TopK")
    sort.attributes["largest"] = ir.AttrInt64("largest", 1)


def reads_the_first_position(model: ir.Model) -> None:
    graph = body(model)
    (gather,) = own(graph, "Gather")
    gather.replace_input_with(1, constant(graph, 0))


def noise_is_ignored(model: ir.Model) -> None:
    graph = branch(model, "then_branch")
    gather = next(node for node in own(graph, "Gather") if node.inputs[0].name == "noise")  # type: ignore[union-attr]
    gather.outputs[0].replace_all_uses_with(constant(graph, [[0.5]], np.float32))


def noise_is_always_the_first(model: ir.Model) -> None:
    graph = branch(model, "then_branch")
    gather = next(node for node in own(graph, "Gather") if node.inputs[0].name == "noise")  # type: ignore[union-attr]
    gather.replace_input_with(1, constant(graph, [0]))


def temperature_is_ignored(model: ir.Model) -> None:
    graph = branch(model, "then_branch")
    (division,) = own(graph, "Div")
    division.replace_input_with(1, constant(graph, 1, np.float64))


def top_k_is_one_more(model: ir.Model) -> None:
    graph = branch(model, "then_branch")
    (smallest,) = own(graph, "Min")
    more = ir.node("Add", [smallest.inputs[0], constant(graph, 1)])
    graph.insert_before(smallest, more)
    smallest.replace_input_with(0, more.outputs[0])


def sampling_takes_the_next_token(model: ir.Model) -> None:
    (comparison,) = own(branch(model, "then_branch"), "LessOrEqual")
    comparison.op_type = "Less"
    (exponential,) = own(branch(model, "then_branch"), "Exp")
    exponential.op_type = "Sigmoid"


def greedy_takes_the_unlikeliest(model: ir.Model) -> None:
    (choice,) = own(branch(model, "else_branch"), "ArgMax")
    choice.op_type = "ArgMin"


def one_position_less(model: ir.Model) -> None:
    (difference,) = own(model.graph, "Sub")
    difference.replace_input_with(0, constant(model.graph, POSITIONS - 1))


def starts_otherwise(model: ir.Model) -> None:
    start = next(
        node for node in own(model.graph, "Constant") if node.attributes["value"].as_tensor().numpy().tolist() == 257
    )
    start.attributes["value"] = ir.AttrTensor("value", ir.tensor(np.array(256)))


def weights_are_swapped(model: ir.Model) -> None:
    query, key = (model.graph.initializers[f"blocks.0.attention.{name}.weight"] for name in ("query", "key"))
    query.const_value, key.const_value = key.const_value, query.const_value


def a_weight_is_there_twice(model: ir.Model) -> None:
    value = model.graph.initializers["token_embedding.weight"]
    again = ir.Value(name="again", type=value.type, shape=value.shape, const_value=value.const_value)
    user, index = next(iter(value.uses()))
    model.graph.initializers["again"] = again
    user.replace_input_with(index, again)


FAULTS: dict[str, tuple[Callable[[ir.Model], None], str]] = {
    "wrong end": (lambda model: set_default(model, "eos_token_id", 7), "eos_token_id is 7 by default"),
    "no end": (lambda model: set_default(model, "eos_token_id", -1), "eos_token_id is -1 by default"),
    "samples by default": (lambda model: set_default(model, "temperature", 1), "temperature is 1"),
    "noise by default": (lambda model: set_default(model, "noise", [[0.5] * 99]), "sampling goes on without noise"),
    "rows that have ended go on": (ended_rows_go_on, "eos_token_id"),
    "it never ends": (never_ends, "eos_token_id"),
    "it ends with the first row": (ends_at_the_first_row, "eos_token_id"),
    "new tokens are padding": (new_tokens_are_padding, "does not choose"),
    "layers swap their past": (layers_swap_their_past, "does not choose"),
    "the newest token is forgotten": (past_is_not_extended, "does not choose"),
    "prompts are not packed": (prompts_are_not_packed, "does not choose"),
    "prompts are packed to the left": (prompts_are_packed_to_the_left, "does not choose"),
    "the first position is read": (reads_the_first_position, "does not choose"),
    "noise is ignored": (noise_is_ignored, "does not choose"),
    "noise is always the first": (noise_is_always_the_first, "does not choose"),
    "temperature is ignored": (temperature_is_ignored, "does not choose"),
    "top_k is one more": (top_k_is_one_more, "does not choose"),
    "other weights than exp": (sampling_takes_the_next_token, "does not choose"),
    "the unlikeliest token": (greedy_takes_the_unlikeliest, "Python loop"),
    "a position less": (one_position_less, "positions"),
    "weights are swapped": (weights_are_swapped, "does not choose"),
    "the start is another token": (starts_otherwise, "does not choose"),
    "a weight is there twice": (a_weight_is_there_twice, "more than one initialiser"),
}


ALSO_WITH_AN_ENCODER = (
    "it never ends", "new tokens are padding", "layers swap their past", "the newest token is forgotten",
    "noise is ignored", "the start is another token",
)  # fmt: skip


@pytest.mark.slow_after(2)
@pytest.mark.parametrize(
    ("name", "fault"),
    [("gpt-tiny", fault) for fault in FAULTS if fault != "the start is another token"]
    + [pytest.param("transformer-tiny", fault, marks=pytest.mark.slow) for fault in ALSO_WITH_AN_ENCODER],
)
def test_seeded_loop_faults_are_caught(loops: Callable[..., Any], name: str, fault: str) -> None:
    """Each fault loads and runs, and is reported."""
    stored, files, loop = loops(name)
    spoil, message = FAULTS[fault]
    model = ir.from_proto(onnx.load_model_from_string(loop))
    spoil(model)
    report = compare_loop(stored, files, serialize(model))
    assert not report.passed
    assert report.evidence["verified"] is False
    assert any(message in line for line in report.failures), report.failures


def test_failing_loop_is_reported(loops: Callable[..., Any]) -> None:
    """A graph that the runtime rejects, or that fails while running."""
    stored, files, loop = loops("gpt-tiny")
    model = ir.from_proto(onnx.load_model_from_string(loop))
    graph = body(model)
    (column,) = own(graph, "Unsqueeze")
    column.replace_input_with(1, constant(graph, [5]))
    report = compare_loop(stored, files, serialize(model))
    assert not report.passed
    assert any("the generation loop failed" in line or "cannot load" in line for line in report.failures), (
        report.failures
    )
    assert "stored weights: nothing could be compared" in report.failures


# From the command line.


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt-tiny", "transformer-tiny"])
def test_command_writes_runs_and_verifies_a_loop(
    exported_copy: Exported, zoo: Callable[..., Any], seal: Callable[[Path], None], name: str
) -> None:
    folder = exported_copy(name)
    result = zoo("export", folder, "--onnx", "--generate")
    assert result.status == 0, result.err
    assert "generate.onnx verified on cpu" in result.out
    zoo("export", folder, "--onnx", "--generate").failed(2, "generate.onnx", "--force")
    assert json.loads((folder / "parity.generate.json").read_text())["verified"] is True
    assert zoo("verify", folder, "--variant", "generate").status == 0
    texts = ("a prompt", "another, longer prompt")
    plain = zoo("run", folder, *texts, "--max-new-tokens", "6", "--json").json["results"]
    assert (
        zoo("run", folder, *texts, "--max-new-tokens", "6", "--variant", "generate", "--json").json["results"] == plain
    )
    (folder / "generation_config.json").write_text('{"num_beams": 3, "no_repeat_ngram_size": 2, "max_new_tokens": 6}')
    seal(folder)
    result = zoo("run", folder, *texts, "--variant", "generate", "--json")
    (warning,) = result.warnings
    assert "no_repeat_ngram_size, num_beams: " in warning
    assert result.json["results"] == plain
    refused = zoo("run", folder, "x", "--variant", "generate", "--num-beams", "3")
    assert refused.status == 2
    assert "this variant only decodes greedily" in refused.err


def test_model_that_does_not_generate_has_no_loop(exported_copy: Exported, zoo: Callable[..., Any]) -> None:
    zoo("export", exported_copy("bert-tiny"), "--onnx", "--generate").failed(2, "cannot generate", "--generate")


def test_loop_that_differs_is_not_written(
    exported_copy: Exported, zoo: Callable[..., Any], snapshot: Callable[[], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = exported_copy("gpt-tiny")
    before = snapshot()
    made = make_loop

    def wrong(spec: Any, graphs: Any) -> ir.Model:
        model = made(spec, graphs)
        (node,) = [node for node in model.graph.all_nodes() if node.op_type == "ArgMax"]
        node.op_type = "ArgMin"
        return model

    monkeypatch.setattr("zoo_export.variants.loop.recipe.make_loop", wrong)
    zoo("export", folder, "--onnx", "--generate").failed(4, "token", "nothing was written")
    assert snapshot() == before
