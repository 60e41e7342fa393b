"""Assemble the attention page: facts as JSON, weights as compressed bytes, style and scripts, in one file.

A weight is an integer from 0 to ``levels`` times a scale per head and query. Scales and integers of a layer are
compressed together and written in base64. Blocks of queries and keys follow (:mod:`zoo.figures.page.vectors`). The
page's content security policy allows its own script, by digest, and no request.

H heads, T queries, S keys.
"""

from __future__ import annotations

import base64
import hashlib
import html
import json
import re
import struct
import zlib
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

from zoo.arrays import Array
from zoo.artifact import Export, ModelDirectory
from zoo.errors import UsageError
from zoo.figures.attention import AttentionAxis, AttentionMap, AttentionRecord
from zoo.figures.page.vectors import FORMATS, store_vectors

__all__ = ["build_page", "quantise", "rollout"]


LEVELS = (255, 63, 15)
"""Largest stored integer, from the finest on; coarser ones compress better."""
SCRIPTS = ("data.js", "draw.js", "views.js", "sound.js", "neurons.js", "app.js")
_SLOT = re.compile(r"\{\{(\w+)\}\}")
_TITLES = {
    "attentions": "Self-attention",
    "cross_attentions": "Cross-attention",
    "encoder.attentions": "Encoder self-attention",
    "decoder.attentions": "Decoder self-attention",
    "decoder.cross_attentions": "Cross-attention",
    "image.attentions": "Image self-attention",
    "image.cross_attentions": "Attention pooling of the image",
    "text.attentions": "Text self-attention",
}
"""Names of the usual groups of maps; others keep the name of their outputs."""


def build_page(
    stored: ModelDirectory, export: Export, record: AttentionRecord, max_bytes: int
) -> tuple[str, dict[str, Any]]:
    """Return the HTML of a page, and the facts that it states.

    Raises :class:`UsageError` if even the coarsest numbers do not fit into ``max_bytes``.
    """
    names = list(dict.fromkeys(item.group for item in record.maps))
    rollouts = [_rollouts(name, record) for name in names]
    stacks = [item.weights for item in record.maps] + [item for item in rollouts if item is not None]
    has_vectors = any(item.vectors is not None for item in record.maps)
    formats = FORMATS if has_vectors else FORMATS[-1:]
    for levels, form in (*product(LEVELS[:1], formats), *product(LEVELS[1:], formats[-1:])):
        packed, errors = zip(*(_pack(weights, levels) for weights in stacks), strict=True)
        facts = _facts(stored, export, record, levels, errors)
        following = iter(range(len(record.maps), len(packed)))
        facts["groups"] = [
            {"name": name, "title": _TITLES.get(name, name), "rollout": None}
            | ({} if item is None else {"rollout": {"block": (block := next(following)), "error": errors[block]}})
            for name, item in zip(names, rollouts, strict=True)
        ]
        blocks = list(packed)
        _add_vectors(facts, store_vectors(record.maps, form, partial(_append, blocks)))
        text = _assemble(facts, blocks)
        if len(text.encode()) <= max_bytes:
            return text, facts
    size = f"{len(text.encode()):,} bytes"
    remedy = "choose fewer layers or heads" + (", or leave out queries and keys" if has_vectors else "")
    raise UsageError(f"the page needs {size}, more than {max_bytes:,}", stored.path, remedy)


def _append(blocks: list[str], block: str) -> int:
    """Add a block; return its number."""
    blocks.append(block)
    return len(blocks) - 1


def _add_vectors(facts: dict[str, Any], vectors: Sequence[dict[str, Any] | None]) -> None:
    """Add the facts about queries and keys to those of maps, and their largest errors to those of the page."""
    for item, vector in zip(facts["maps"], vectors, strict=True):
        item["vectors"] = vector
    facts["vectors"] = None
    if present := [vector for vector in vectors if vector is not None]:
        errors = {name: max(vector[name] for vector in present) for name in ("error", "weight_error")}
        facts["vectors"] = {"kind": present[0]["queries"]["kind"], **errors}


def quantise(weights: Array, levels: int) -> tuple[Array, Array]:
    """Return integers from 0 to ``levels``, (H, T, S), and their scales, (H, T), float32."""
    scales = (weights.max(-1, initial=0) / levels).astype(np.float32)
    steps = np.divide(
        weights, scales[..., None], out=np.zeros(weights.shape), where=scales[..., None] > 0, dtype=np.float64
    )
    return np.rint(steps).clip(0, levels).astype(np.uint8), scales


def rollout(maps: Sequence[Array]) -> Array:
    """Return the attention rollout up to each layer, (layers, T, T), of weights (H, T, T) from the first layer on.

    The attention of a layer is the mean over its heads; half of it and half of the residual connection, normalised, is
    multiplied by the rollout of the layers below (Abnar & Zuidema 2020, section 3).
    """
    results = []
    below = np.eye(maps[0].shape[-1])
    for weights in maps:
        mixed = weights.mean(0, dtype=np.float64) / 2 + np.eye(len(below)) / 2
        below = mixed / mixed.sum(-1, keepdims=True) @ below
        results.append(below)
    return np.stack(results)


def _pack(weights: Array, levels: int) -> tuple[str, float]:
    """Return a layer's weights in base64, and the largest error of one."""
    integers, scales = quantise(weights, levels)
    restored = integers * scales[..., None].astype(np.float64)  # as the page computes it
    error = float(np.abs(restored - weights).max(initial=0))
    packed = zlib.compress(scales.astype("<f4").tobytes() + integers.tobytes(), 6)
    return base64.b64encode(packed).decode(), error


def _facts(
    stored: ModelDirectory, export: Export, record: AttentionRecord, levels: int, errors: Sequence[float]
) -> dict[str, Any]:
    axes = list(dict.fromkeys(axis for item in record.maps for axis in (item.queries, item.keys)))
    names = list(dict.fromkeys(item.group for item in record.maps))
    return {
        "title": f"Attention of {stored.path.resolve().name}",
        "model": stored.spec.name,
        "architecture": stored.spec.architecture.name,
        "axes": [_axis(axis) for axis in axes],
        "maps": [
            {
                "name": item.name,
                "group": names.index(item.group),
                "layer": item.layer,
                "heads": list(item.heads),
                "queries": axes.index(item.queries),
                "keys": axes.index(item.keys),
                "error": error,
            }
            for item, error in zip(record.maps, errors, strict=False)  # those of rollouts follow
        ],
        "levels": levels,
        "error": max(errors[: len(record.maps)]),
        "evidence": _evidence(stored, export),
    }


def _axis(axis: AttentionAxis) -> dict[str, Any]:
    return {
        "labels": list(axis.labels),
        "parts": list(axis.parts),
        "part_names": list(axis.part_names),
        "grid": axis.grid,
        "image": None if axis.image is None else f"data:image/png;base64,{base64.b64encode(png(axis.image)).decode()}",
        "seconds": axis.seconds,
        "peaks": None if axis.peaks is None else np.rint(axis.peaks * 100).astype(int).tolist(),
        "steps": [
            {"query": step.query, "token": step.token, "candidates": [list(item) for item in step.candidates]}
            for step in axis.steps
        ],
    }


def _rollouts(name: str, record: AttentionRecord) -> Array | None:
    """Return the rollout of the maps of one kind, None if it is not defined."""
    maps = [item for item in record.maps if item.group == name]
    return rollout([item.weights for item in maps]) if record.rollout and _is_stack(maps) else None


def _is_stack(maps: Sequence[AttentionMap]) -> bool:
    """Whether these are layers from the first on, each between the same positions."""
    alike = all(item.queries is item.keys is maps[0].keys for item in maps)
    return alike and [item.layer for item in maps] == list(range(len(maps)))


def _evidence(stored: ModelDirectory, export: Export) -> dict[str, Any]:
    """Summarise the evidence for the export: state, largest error of the attention weights, digests, versions."""
    evidence, doubt = export.evidence, export.doubt()
    compared = [
        (level["max_abs_error"], level.get("limit"), f"{graph.name} {tensor.name}")
        for graph in export.graphs
        for tensor in graph.recorded()
        for level in evidence.get("graphs", {}).get(graph.name, {}).get("outputs", {}).get(tensor.name, {}).values()
        if isinstance(level, Mapping) and "max_abs_error" in level
    ]
    worst = max(compared, default=None, key=lambda item: item[0])
    return {
        "verified": doubt is None,
        "reason": doubt,
        "file": export.evidence_file,
        "provider": evidence.get("provider"),
        "dtype": evidence.get("dtype"),
        "points": len(evidence.get("grid", {}).get("points", ())),
        "worst": worst and {"error": worst[0], "limit": worst[1], "output": worst[2]},
        "digests": {
            name: stored.files[name]["sha256"]
            for name in (*export.graph_files.values(), export.evidence_file, *stored.weight_files(), "config.json")
            if name in stored.files
        },
        "versions": dict(evidence.get("versions", {})),
    }


def _assemble(facts: Mapping[str, Any], blocks: Sequence[str]) -> str:
    """Fill the template. Text from outside is escaped: the title as HTML, the facts as JSON without ``<``."""
    folder = Path(__file__).parent
    script = "\n".join((folder / name).read_text(encoding="utf-8") for name in SCRIPTS)
    style = (folder / "page.css").read_text(encoding="utf-8")
    filled = {
        "title": html.escape(str(facts["title"])),
        "digest": base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
        "style": style,
        "script": script,
        "facts": json.dumps(facts).replace("<", "\\u003c"),
        "weights": "\n".join(
            f'<script type="text/plain" id="block-{number}">{block}</script>' for number, block in enumerate(blocks)
        ),
    }
    template = (folder / "page.html").read_text(encoding="utf-8")
    return _SLOT.sub(lambda slot: filled[slot[1]], template)


def png(image: Array) -> bytes:
    """Encode an image of uint8, (height, width) or (height, width, 3), as PNG (ISO/IEC 15948)."""
    height, width = image.shape[:2]
    colour = 2 if image.ndim == 3 else 0
    lines = np.concatenate([np.zeros((height, 1), np.uint8), image.reshape(height, -1)], axis=1)  # no filter
    header = struct.pack(">IIBBBBB", width, height, 8, colour, 0, 0, 0)
    chunks = [(b"IHDR", header), (b"IDAT", zlib.compress(lines.tobytes(), 9)), (b"IEND", b"")]
    framed = (struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
              for kind, data in chunks)  # fmt: skip
    return b"\x89PNG\r\n\x1a\n" + b"".join(framed)
