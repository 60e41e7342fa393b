"""The page of ``zoo report``."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from xml.etree.ElementTree import Element

from zoo.artifact import compared_at, loss_of, measured_outputs, worst_of
from zoo.artifact.provenance import Origin
from zoo.cli.report import bytes_text
from zoo.terminal import one_line
from zoo.version import __version__
from zoo_export.report.markup import Cell, Row, definitions, document, element, items, paragraph, table
from zoo_export.report.numbers import NONE, number, plain, share
from zoo_export.report.reading import Directory, Reviewed
from zoo_export.report.sections import MALFORMED, body_of, export_section, rule_texts
from zoo_export.report.terms import FIELDS

__all__ = ["page_of", "verdict_of"]

_NAME = 160
"""Maximum number of characters of the model's name in the title, below which the verdict stands."""
_SHOWN = 12
"""Number of problems that the head of the page lists."""


def page_of(directory: Directory) -> str:
    """Return the page: the verdict, the exports side by side, the model, each export, and the files.

    Evidence that is not what an export writes counts as doubtful from here on.
    """
    name = one_line(str(directory.stored.description["name"]), _NAME)
    bodies = [body_of(export) for export in directory.exports]
    directory.exports = [
        replace(export, doubt=f"not what an export writes: {', '.join(body.malformed)}")
        if export.doubt is None and body.malformed
        else export
        for export, body in zip(directory.exports, bodies, strict=True)
    ]
    exports = [
        export_section(export, body, place)
        for place, (export, body) in enumerate(zip(directory.exports, bodies, strict=True), 1)
    ]
    links = [("#summary", "Summary"), ("#model", "Model"), ("#rule", "Rule")]
    links += [(f"#export-{place}", export.name) for place, export in enumerate(directory.exports, 1)]
    links += [("#files", "Files"), ("#terms", "Terms")]
    body = [
        element("header", element("h1", f"Verification report of {name}"), *_verdict(directory)),
        element("nav", items([element("a", text, href=link) for link, text in links]), aria_label="Sections"),
        element(
            "main", _summary(directory), _model(directory), _rules(directory), *exports, _files(directory), _terms()
        ),
        element("footer", element("p", _FOOTER.format(__version__), class_="quiet")),
    ]
    style = (Path(__file__).parent / "page.css").read_text(encoding="utf-8")
    return document(f"Verification report of {name}", style, body)


_FOOTER = (
    "Written by zoo {} from the files of the model directory. This page loads nothing and runs no code. Digests show "
    "that files belong together, not who made them: whoever can change all files can change the evidence, too. A "
    'signature shows whose files they are, and "zoo verify" makes the comparison again.'
)


def verdict_of(directory: Directory) -> str:
    """Return the verdict on a directory in one line."""
    total = len(directory.exports)
    doubtful = sum(export.doubt is not None for export in directory.exports)
    if not total:
        return "NOT VERIFIED: the directory has no export, so nothing was compared"
    if directory.defects:
        return f"NOT VERIFIED: {len(directory.defects)} of {len(directory.stored.files)} files are altered or missing"
    if doubtful:
        return f"NOT VERIFIED: {doubtful} of {total} exports"
    which = "the export was" if total == 1 else f"{total} exports were"
    return f"Verified: {which} within the limits of the comparison with PyTorch, and no file has changed since"


def _verdict(directory: Directory) -> Iterator[Element]:
    good = directory.failure() is None
    yield element("p", f"{verdict_of(directory)}.", class_="verdict" if good else "verdict bad")
    if problems := directory.problems:
        more = len(problems) - _SHOWN
        yield items([*problems[:_SHOWN], *([f"and {more} more"] if more > 0 else [])], class_="bad")
    if not good and any(export.doubt is None for export in directory.exports):
        sound = ", ".join(export.name for export in directory.exports if export.doubt is None)
        yield element("p", f"The evidence and the files of these exports agree: {sound}.")


def _summary(directory: Directory) -> Element:
    rows = [_summary_row(export) for export in directory.exports]
    head = ("Export", "Verdict", "Compared at", "Worst output", "Error", "Limit", "Error / limit", "Loss of precision")
    return element(
        "section",
        element("h2", "Summary"),
        table("Exports", head, rows, right=(4, 5, 6)) if rows else element("p", "There is no export."),
        *_of_other_weights(directory),
        element("p", "The worst output is the one nearest to its limit, in the comparisons with the strictest limits.",
                class_="quiet"),
        id="summary",
    )  # fmt: skip


def _of_other_weights(directory: Directory) -> Iterator[Element]:
    """Name the exports that were compared before their weights were replaced."""
    if names := [export.name for export in directory.exports if export.is_of_other_weights]:
        yield element(
            "p", f"Compared with other weights than those in this directory: {', '.join(names)}.", class_="bad"
        )


def _summary_row(export: Reviewed) -> Row:
    good = export.doubt is None
    verdict = element("span", "verified" if good else "NOT VERIFIED", class_="good" if good else "bad")
    try:
        return (export.name, verdict, *_result(export), loss_of(export.evidence) or NONE)
    except MALFORMED:
        return (export.name, verdict, "malformed evidence", *[NONE] * 5)


def _result(export: Reviewed) -> tuple[Cell, ...]:
    """Return the cells of the number of inputs, and of the worst output."""
    points = compared_at(export.evidence) or NONE
    worst = worst_of(measured_outputs(export.evidence))
    if worst is None:
        return (points, *[NONE] * 4)
    errors = worst.errors
    where: Cell = (element("code", worst.name), f", {worst.how}") if worst.how else element("code", worst.name)
    return points, where, number(errors["max_abs_error"]), number(errors["limit"]), share(worst.share)


def _model(directory: Directory) -> Element:
    description = directory.stored.description
    owner = description["plugin"]
    pairs: list[tuple[Cell, Cell]] = [
        ("Name", str(description["name"])),
        ("Architecture", f"{description['architecture']} ({directory.reference or 'of a plugin not installed here'})"),
        ("Class", element("code", directory.model_class) if directory.model_class
         else "unknown: the plugin is not installed here"),
        ("Plugin", f"{owner['name']} from {owner['distribution']} {owner['version']}"),
        ("Task", str(description["task"])),
        ("Weights", f"{description['dtype']}, {', '.join(directory.stored.weight_files()) or 'none here'}"),
        *_origin(directory.stored.origin),
        ("Signature", directory.signature),
    ]  # fmt: skip
    settings = [(str(key), plain(value)) for key, value in description["config"].items()]
    return element(
        "section",
        element("h2", "Model"),
        definitions(pairs),
        element("details", element("summary", f"Configuration, {len(settings)} values"),
                table("Configuration", ("Setting", "Value"), settings)),
        id="model",
    )  # fmt: skip


def _origin(origin: Origin) -> Iterator[tuple[Cell, Cell]]:
    """Yield where the weights are from, step by step, with the comparison that an import made."""
    step: Origin | None = origin
    title, compared = "Origin of the weights", "the weights in this directory, by zoo import, before any export"
    while step is not None:
        yield title, str(replace(step, parent=None, comparison=None, answers=None))
        if step.kind == "imported":
            small = element("small", f"of {compared}")
            comparison = step.comparison or "none: the original library was not installed"
            yield ("Comparison with the original", small), comparison
            yield ("Answers of the original", small), step.answers or "not compared"
        step, title = step.parent, "Before that"
        compared = "the imported weights, which are not those in this directory"


def _rules(directory: Directory) -> Element:
    """Return the rules by which outputs are judged, each with its exports if there are several."""
    exports: dict[str, list[str]] = {}
    for export in directory.exports:
        if isinstance(rule := export.evidence.get("rule"), str):
            exports.setdefault(rule, []).append(export.name)
    parts = [element("h2", "Rule")]
    for rule, names in exports.items():
        parts += [element("h3", f"Of {', '.join(names)}")] if len(exports) > 1 else []
        parts += rule_texts(rule)
    if not exports:
        parts.append(element("p", "The evidence has no rule."))
    return element("section", parts, id="rule")


def _files(directory: Directory) -> Element:
    """Return the digests of all files, and by which evidence each is covered."""
    named: dict[str, list[str]] = {}
    for export in directory.exports:
        for name, recorded in export.covered.items():
            same = recorded == directory.stored.files.get(name, {}).get("sha256")
            evidence = export.record.evidence_file
            named.setdefault(str(name), []).append(evidence if same else f"{evidence}: OTHER DIGEST")
    rows: list[Row] = []
    for name in sorted({*directory.stored.files, *named}):
        entry = directory.stored.files.get(name)
        defect = directory.defects.get(name) if entry else "not in the manifest"
        state: Cell = element("span", defect, class_="bad") if defect else "as listed"
        size, digest = (bytes_text(entry["size"]), str(entry["sha256"])) if entry else (NONE, NONE)
        evidence = ", ".join(dict.fromkeys(named.get(name, ()))) or NONE
        rows.append((name, state, size, element("span", digest, class_="hash"), evidence))
    parts = [
        element("h2", "Files"),
        paragraph("""Every file that the manifest lists was read, and its SHA-256 computed, when this page was written.
                  The last column names the evidence that states the same digest."""),
        table("Files", ("File", "State", "Size", "SHA-256 in manifest.json", "Named by"), rows, right=(2,)),
    ]  # fmt: skip
    if directory.unlisted:
        parts.append(element("p", "Not in the manifest, and neither read nor checked:"))
        parts.append(items(directory.unlisted[:100]))
    return element("section", parts, id="files")


def _terms() -> Element:
    pairs = [(element("code", field), meaning) for field, meaning in FIELDS.items()]
    return element(
        "section",
        element("h2", "Terms"),
        element("p", "The fields of parity.json that this page shows."),
        element("details", element("summary", f"{len(pairs)} terms"), definitions(pairs)),
        id="terms",
    )  # fmt: skip
