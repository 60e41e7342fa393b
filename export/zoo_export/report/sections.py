"""The section of one export: how it was compared, and with which result."""

from __future__ import annotations

import base64
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any
from xml.etree.ElementTree import Element

from zoo.artifact import LEVEL_NAMES, OPENVINO, Measured, loss_of, measured_outputs
from zoo.cli.report import bytes_text
from zoo.errors import ArtifactError, UsageError
from zoo.probe.errors import FACTOR, FLOOR_ULPS, LOCAL_FACTOR, LOCAL_FLOOR_ULPS
from zoo_export.parity.rule import RULE
from zoo_export.report.markup import Cell, Row, definitions, element, items, paragraph, table
from zoo_export.report.numbers import NONE, count, number, plain, point_text, share, shares, worst_by_level
from zoo_export.report.reading import Reviewed
from zoo_export.report.terms import FIELDS, LEVELS

__all__ = ["MALFORMED", "Body", "body_of", "export_section", "rule_texts"]

MALFORMED = (
    ArithmeticError,
    AttributeError,
    KeyError,
    IndexError,
    RecursionError,
    TypeError,
    ValueError,
    ArtifactError,
)
"""Exceptions for evidence that is not what an export writes."""
_FACTS = (
    "reference", "yardstick", "provider", "dtype", "precision", "properties", "discontinuous", "weights_in_memory",
    "unused_tensors", "not_perturbed", "options", "sizes", "versions",
)  # fmt: skip
"""The fields of an export that are shown as they are."""
_TIMES = "\N{MULTIPLICATION SIGN}"
_PADDINGS = {"none": "No padding", "left": "Left", "right": "Right", "empty row": "A row of padding alone"}


@dataclass(frozen=True)
class Body:
    """The numbers of an export, as elements of the page."""

    elements: list[Element]
    malformed: list[str]
    """Parts of the evidence that are not what an export writes."""


def body_of(export: Reviewed) -> Body:
    """Return the numbers of an export."""
    body = Body([], [])
    for part in (_facts, _outputs, _tokens, _loop, _inputs, _coverage, _loss, _answers, _figures):
        try:
            body.elements.extend(part(export.name, export.evidence))
        except MALFORMED:
            body.malformed.append(part.__name__.strip("_"))
    return body


def export_section(export: Reviewed, body: Body, place: int) -> Element:
    """Return the section of an export, the ``place``-th of the page."""
    good = export.doubt is None
    head = [
        element("h2", f"Export {export.name}"),
        element("p", "Verified" if good else f"NOT VERIFIED: {export.doubt}", class_="good" if good else "bad"),
        element("p", "Files: ", element("code", ", ".join(export.files) or NONE), ". Evidence: ",
                element("code", export.record.evidence_file), "."),
    ]  # fmt: skip
    if export.is_of_other_weights:
        head.append(
            element("p", "The comparisons below are of other weights than those in this directory.", class_="bad")
        )
    if export.replayed is not None:
        head.append(element("p", f"Repeated for this report: {export.replayed}."))
    return element("section", head, body.elements, id=f"export-{place}")


def _facts(name: str, evidence: Mapping[str, Any]) -> Iterator[Element]:
    """Yield what was compared with what, by which rule, and where."""
    yield element("h3", "What was compared")
    pairs: list[tuple[Cell, Cell]] = []
    for key in _FACTS:
        value = evidence.get(key)
        if key in evidence and value != []:
            pairs.append(((key.replace("_", " "), element("small", FIELDS[key])), plain(value)))
    placement = {graph: part["placement"] for graph, part in evidence.get("graphs", {}).items() if "placement" in part}
    if placement:
        small = element("small", "nodes of each graph by the execution provider that runs them")
        pairs.append((("placement", small), plain(placement)))
    yield definitions(pairs)


def rule_texts(rule: Any) -> Iterator[Element]:
    """Yield a rule in plain words, as formulas, and as it is recorded; an unknown one as it is recorded."""
    if rule == RULE:
        yield paragraph(
            """An output passes if all its numbers are finite and its largest error, over all inputs, is at most twice
            that of PyTorch in the same precision, plus a few units in the last place. The same must hold relative
            to the largest value of each row and channel, so that one large number does not hide errors of the
            others."""
        )
        formulas = (
            f"error ≤ limit = {FACTOR:g} {_TIMES} PyTorch's error + {FLOOR_ULPS:g} {_TIMES} ε {_TIMES} max |y|",
            f"local error ≤ local limit = {LOCAL_FACTOR:g} {_TIMES} PyTorch's local error "
            f"+ {LOCAL_FLOOR_ULPS:g} {_TIMES} ε",
        )
        yield from (element("p", formula, class_="formula") for formula in formulas)
        yield paragraph(
            """Errors are absolute differences from the reference y, the model in float64, and ε is the machine
            epsilon of the precision. Where a graph exceeds the limit because the model is sensitive to rounding,
            PyTorch's error is the largest of several runs with the last bits of its weights changed.""",
            class_="quiet",
        )
    yield element("p", "As recorded: ", element("code", plain(rule)))


def _outputs(name: str, evidence: Mapping[str, Any]) -> Iterator[Element]:
    """Yield the worst output of each graph at each level, and all of them."""
    outputs = measured_outputs(evidence)
    if not outputs:
        if "comparisons" not in evidence:
            yield element("h3", "Outputs")
            yield element("p", "The evidence has no errors of outputs.")
        return
    yield element("h3", "Errors of outputs")
    total = len({(item.graph, item.output) for item in outputs})
    yield paragraph(
        f"""{total} outputs, each at several levels, ways to run its graph. For each level, the table has the output
        that is nearest to one of its limits."""
    )
    if evidence.get("provider") == OPENVINO and evidence.get("precision") == "bfloat16":
        yield paragraph(
            """In bfloat16, PyTorch's error and the limit are those of the precision: errors near half of the limit are
            expected. The same graphs computed in float32 have limits of float32, and could fail."""
        )
    elif "precision" in evidence and evidence.get("provider") != OPENVINO:
        yield paragraph(
            """Where the products are integers, PyTorch rounds activations as the graph does, so its error and the
            limit are those of the precision: errors near half of the limit are expected. The levels with products
            in float32 have limits of float32, and could fail."""
        )
    elif any(item.in_float32 for item in outputs):
        yield paragraph(
            """PyTorch's error in half precision makes limits loose. The levels computed in float32, with the same
            weights, have limits of float32, and could fail."""
        )
    head = ("Graph", "Level", "Worst output", "Error", "Limit", "Error / limit", "Ratio", "Local error / limit", "At")
    worst = worst_by_level(outputs)
    rows = [(item.graph, _level(item), element("code", item.output), *_numbers(item), _where(item)) for item in worst]
    yield table(f"Worst outputs of {name}", head, rows, right=range(3, 8))
    yield _level_terms(worst)
    every = [
        (item.graph, element("code", item.output), _level(item), *_numbers(item), _where(item)) for item in outputs
    ]
    head = ("Graph", "Output", "Level", *head[3:])
    yield element("details", element("summary", f"All {len(outputs):,} comparisons of outputs"),
                  table(f"All outputs of {name}", head, every, right=range(3, 8)))  # fmt: skip


def _level(item: Measured) -> str:
    return LEVEL_NAMES.get(item.level, item.level) + (", computed in float32" if item.in_float32 else "")


def _level_terms(outputs: list[Measured]) -> Element:
    seen = dict.fromkeys(item.level for item in outputs if item.level in LEVELS)
    pairs = [((LEVEL_NAMES[level], " (", element("code", level), ")"), LEVELS[level]) for level in seen]
    return element("details", element("summary", "Levels"), definitions(pairs))


def _numbers(item: Measured) -> tuple[Cell, ...]:
    """Return the cells of an output's numbers."""
    errors = item.errors
    part, local = shares(item)
    text: Cell = share(part)
    if errors["passed"] is not True:
        text = element("strong", f"{text} FAILED")
    ratio = errors.get("ratio")
    return (
        number(errors["max_abs_error"]), number(errors["limit"]), text,
        NONE if ratio is None else f"{ratio:.2f}", share(local),
    )  # fmt: skip


def _where(item: Measured) -> str:
    point = item.errors.get("worst_point")
    return NONE if point is None else point_text(point)


def _tokens(name: str, evidence: Mapping[str, Any]) -> Iterator[Element]:
    """Yield the comparison of next-token distributions."""
    logits, greedy = evidence.get("logits") or {}, evidence.get("greedy_decoding") or {}
    if not logits:
        return
    yield element("h3", "Tokens")
    rows: list[Row] = []
    for level, item in logits.items():
        text = greedy.get(level)
        agreed = f"{count(text['agreed'])} of {count(text['tokens'])} in {count(text['rows'])} rows" if text else NONE
        rows.append((
            LEVEL_NAMES.get(level, level), count(item["rows"]), number(item["max_kl_divergence"]),
            number(item["torch_max_kl_divergence"]), f"{item['min_top_10_overlap']:.0%}",
            count(item["argmax_disagreements"]), count(item["argmax_near_ties"]), agreed,
        ))  # fmt: skip
    head = ("Level", "Rows", "Max KL divergence", "PyTorch's", "Min top-10 overlap", "Other likeliest token",
            "Near-ties", "Greedy tokens agreed")  # fmt: skip
    yield table(f"Next-token distributions of {name}", head, rows, right=range(1, 8))
    yield paragraph(
        """Divergences are in nats, from the reference. Another likeliest token fails unless two logits are nearer than
        their errors, a near-tie.""",
        class_="quiet",
    )


def _loop(name: str, evidence: Mapping[str, Any]) -> Iterator[Element]:
    """Yield the comparison of generation as one graph."""
    if "comparisons" not in evidence:
        return
    yield element("h3", "Generated tokens")
    cases, new = evidence["cases"], count(evidence["new_tokens"])
    yield paragraph(
        f"""{len(cases)} prompts, {new} new tokens each; each token must be the one that the rule of generation chooses
        from the logits of the reference."""
    )
    rows = [
        (weights, LEVEL_NAMES.get(level, level), number(part["reach"]),
         *(count(found[key]) for key in ("tokens", "near_ties", "agreed_with_python_loop", "distinct")))
        for weights, part in evidence["comparisons"].items()
        for level, found in part["levels"].items()
    ]  # fmt: skip
    head = ("Weights", "Level", "Reach of a logit", "Tokens", "Near-ties", "Agreed with the Python loop", "Distinct")
    yield table(f"Tokens of {name}", head, rows, right=range(2, 7))
    prompts = [(str(n), count(case["batch"]), count(case["length"]), str(case["padding"]),
                plain(case["temperature"]), plain(case["top_k"]), plain(case["shared_noise"]))
               for n, case in enumerate(cases, 1)]  # fmt: skip
    head = ("Prompt", "Rows", "Tokens", "Padding", "Temperature", "Top k", "Shared random numbers")
    yield table(f"Prompts of {name}", head, prompts, right=(1, 2, 4, 5))


def _inputs(name: str, evidence: Mapping[str, Any]) -> Iterator[Element]:
    """Yield the inputs at which the graphs were compared."""
    grid = evidence.get("grid")
    if not grid:
        return
    points, left_out = grid["points"], int(grid["left_out"])
    graphs = list(evidence["graphs"])
    yield element("h3", "Inputs")
    which = "The graph" if len(graphs) == 1 else f"All graphs ({', '.join(map(str, graphs))}), one after the other,"
    rest = (
        f"{count(left_out)} of the full grid were left out for their cost"
        if left_out
        else "no point of the full grid was left out"
    )
    yield paragraph(
        f"""{which} ran at {len(points)} inputs; {rest}. Inputs are random, from the seed {plain(grid["seed"])}."""
    )
    groups: dict[tuple[int, int, str], dict[str, list[int]]] = {}
    known = {"batch", "length", "past", "padding"}
    for point in points:
        sizes = plain({key: value for key, value in point.items() if key not in known})
        key = int(point["length"]), int(point["past"]), "" if sizes == "none" else sizes
        groups.setdefault(key, {}).setdefault(str(point["padding"]), []).append(int(point["batch"]))
    paddings = [*_PADDINGS, *sorted({padding for group in groups.values() for padding in group} - _PADDINGS.keys())]
    paddings = [padding for padding in paddings if any(padding in group for group in groups.values())]
    has_sizes = any(sizes for _, _, sizes in groups)
    rows = [
        (f"{length:,}", f"{past:,}" if past else NONE, *((sizes or NONE,) if has_sizes else ()),
         *(", ".join(map(str, sorted(group[padding]))) if padding in group else NONE for padding in paddings))
        for (length, past, sizes), group in sorted(groups.items())
    ]  # fmt: skip
    head = ("Tokens of the call", "Tokens before it (cache)", *(("Further sizes",) if has_sizes else ()),
            *(_PADDINGS.get(padding, padding) for padding in paddings))  # fmt: skip
    yield table(f"Inputs of {name}: rows of the batch, by length, past and padding", head, rows)
    if reduced := grid.get("reduced"):
        yield element("p", f"Reduced: {FIELDS['grid.reduced']}.")
        head = ("Input", "Levels", "Positions compared")
        yield table(f"Reduced inputs of {name}", head, [_reduced(point) for point in reduced])
    if magnitudes := grid.get("magnitudes"):
        rows = [(f"mean {plain(item['mean'])}, deviation {plain(item['deviation'])}",
                 plain({key: share(value) for key, value in item["error_of_limit"].items()}), plain(item["left_out"]))
                for item in magnitudes]  # fmt: skip
        yield table(
            f"Other magnitudes of {name}", ("Floating-point inputs", "Error / limit by level", "Left out"), rows
        )
    for kind, item in (grid.get("non_finite") or {}).items():
        result = "the graph equals the model" if item["equal"] else f"refused: {item['reason']}"
        yield element("p", f"Inputs with {kind}: {result}.")


def _reduced(point: Mapping[str, Any]) -> Row:
    """Return the row of an input at which less was compared."""
    size = {key: value for key, value in point.items() if key not in ("levels", "positions")}
    levels = [LEVEL_NAMES.get(level, level) for level in point["levels"]] if "levels" in point else "all"
    return point_text(size), plain(levels), plain(point.get("positions", "all"))


def _coverage(name: str, evidence: Mapping[str, Any]) -> Iterator[Element]:
    """Yield how many outcomes of conditions occurred."""
    coverage = (evidence.get("grid") or {}).get("coverage")
    if not coverage:
        return
    yield element("h3", "Coverage of conditions")
    yield paragraph(
        """A condition is a node of the graph that decides, such as a comparison or the bound of a Clip; a comparison
        shows nothing about an outcome that no input has."""
    )
    rows: list[Row] = []
    for graph, part in coverage.items():
        outcomes, unseen = int(part["outcomes"]), list(part["unseen"])
        seen = f"{count(outcomes - len(unseen))} of {count(outcomes)}"
        rows.append((graph, count(part["conditions"]), seen, count(part["impossible"]), plain(unseen)))
    head = ("Graph", "Conditions", "Outcomes seen", "Impossible", "Not seen")
    yield table(f"Conditions of {name}", head, rows, right=(1, 2, 3))


def _loss(name: str, evidence: Mapping[str, Any]) -> Iterator[Element]:
    """Yield what the precision costs."""
    certificate = evidence.get("certificate")
    if not certificate:
        return
    yield element("h3", "Loss of precision")
    sample = certificate["sample"]
    amount = f"{count(sample['tokens'])} tokens" if sample.get("tokens") else f"{count(sample['windows'])} inputs"
    text = "the built-in text" if sample["text"] == "built-in" else str(sample["text"])
    yield paragraph(f"""{loss_of(evidence)}. Measured on {amount} of {text}, against {certificate["reference"]}.""")
    rows = [
        (element("code", output), key.replace("_", " "), plain(value))
        for output, errors in certificate["outputs"].items()
        for key, value in errors.items()
    ]
    yield table(f"Loss of {name}", ("Output", "Measure", "Value"), rows, right=(2,))
    if "bytes" in certificate:
        sizes = f"{bytes_text(certificate['bytes'])} of weights instead of {bytes_text(certificate['float32_bytes'])}"
        yield element("p", f"{sizes}.")
    if kept := certificate.get("kept_float32"):
        yield element("p", "Kept in float32:")
        yield items(f"{tensor}: {reason}" for tensor, reason in kept.items())
    for size, sizes in (certificate.get("past_bytes") or {}).items():
        stored = ", ".join(f"{bytes_text(value)} in {dtype}" for dtype, value in sizes.items())
        yield element("p", f"A past of {size} tokens: {stored}.")


def _answers(name: str, evidence: Mapping[str, Any]) -> Iterator[Element]:
    """Yield the comparison of tasks, and the laws of the model."""
    answers = evidence.get("answers") or {}
    rows: list[Row] = []
    for task, part in answers.items():
        if not part["compared"]:
            rows.append((task, f"not compared: {part['reason']}", *[NONE] * 4))
        for answer, item in (part.get("answers") or {}).items():
            limit = item["limit"]
            rows.append((task, answer, count(part["inputs"]), number(item["max_abs_error"]), number(limit),
                         share(item["max_abs_error"] / limit if limit else None)))  # fmt: skip
    if rows:
        yield element("h3", "Answers")
        yield paragraph(
            """Results of tasks, from text or image to answer, compared with the formula of the model in float64."""
        )
        head = ("Task", "Answer", "Inputs", "Error", "Limit", "Error / limit")
        yield table(f"Answers of {name}", head, rows, right=range(2, 6))
    if laws := evidence.get("laws"):
        yield element("h3", "Laws of the model")
        yield element("p", "Checks of the PyTorch model itself, without which no graph could equal it.")
        yield table(f"Laws of {name}", ("Law", "Result"), [(law, plain(result)) for law, result in laws.items()])


def _figures(name: str, evidence: Mapping[str, Any]) -> Iterator[Element]:
    """Yield the figures of errors and inputs, if matplotlib is installed."""
    if find_spec("matplotlib") is None or not evidence.get("graphs"):
        return
    from zoo.plots.evidence import draw_coverage, draw_parity

    for draw, table_name in ((draw_parity, "Worst outputs"), (draw_coverage, "Inputs")):
        try:
            plot = draw(evidence, name)
        except UsageError:
            continue
        data = base64.b64encode(plot.svg()).decode()
        caption = f'{plot.title}. The numbers are in the table "{table_name} of {name}".'
        yield element("figure", element("img", src=f"data:image/svg+xml;base64,{data}", alt=plot.title),
                      element("figcaption", caption), tabindex="0", role="group", aria_label=plot.title)  # fmt: skip
