"""Reader of adapters that PEFT or zoo wrote. Importing this module imports torch.

Beside the low-rank factors of dense layers and embeddings, PEFT writes whole tensors (``modules_to_save``), rows of
embeddings (``trainable_token_indices``), and copies of the base model's embeddings and head if one of them has factors.
Its ``PeftModel`` puts the copies into the model; here they must equal the model's tensors, and change nothing.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from zoo.artifact import ADAPTER, ADAPTER_CONFIG
from zoo.artifact.weights import load_json
from zoo.checkpoints.peft import PREFIX, AdapterChanges, AdapterNames, Update
from zoo.checkpoints.rules import TensorPlace
from zoo.errors import ArtifactError, UsageError

__all__ = ["read_adapter"]

T = TypeVar("T")
_WEIGHT = ".weight"
_FACTOR = re.compile(r"(.+)\.lora_(A|B)\.weight")
_EMBEDDING_FACTOR = re.compile(r"(.+)\.lora_embedding_(A|B)")
_ROWS = re.compile(r"(.+)\.token_adapter\.trainable_tokens_delta")
_COPY = re.compile(r"(.+?)(?:\.token_adapter)?\.(?:base_layer|original_module)\.(weight|bias)")
_SAVED = re.compile(r"(.+)\.modules_to_save\.(.+)")
_USED = ("alpha_pattern", "lora_alpha", "peft_type", "r", "trainable_token_indices", "use_rslora")
_INERT = (
    "auto_mapping", "base_model_name_or_path", "corda_config", "ensure_weight_tying", "eva_config", "exclude_modules",
    "fan_in_fan_out", "inference_mode", "layers_pattern", "layers_to_transform", "loftq_config", "lora_dropout",
    "megatron_config", "megatron_core", "modules_to_save", "peft_version", "qalora_group_size", "rank_pattern",
    "revision", "target_modules", "task_type",
)  # fmt: skip
"""Keys that do not affect what the tensors in the file add to a model."""
_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "bias": ("none",), "init_lora_weights": (True, False, "gaussian", "orthogonal", "eva"),
}  # fmt: skip
"""Values of other keys that are supported, beside empty ones. Other initialisations change the base model."""


@dataclass
class _AdapterTensors:
    """The tensors of an adapter by their role and their names in the base model's files."""

    factors: dict[str, dict[str, Tensor]] = field(default_factory=dict)
    """Factors A (rank, inputs) and B (outputs, rank) of the weight of each module."""
    embeddings: set[str] = field(default_factory=set)
    """Modules whose factors are those of an embedding."""
    whole: list[tuple[str, Tensor]] = field(default_factory=list)
    """Tensors that replace those of the model."""
    copies: list[tuple[str, str, Tensor]] = field(default_factory=list)
    """Copies of tensors of the base model, each with its name in the adapter."""
    rows: dict[str, Tensor] = field(default_factory=dict)
    """New rows of the embedding in each module."""
    problems: list[str] = field(default_factory=list)

    @classmethod
    def sort(cls, tensors: Mapping[str, Tensor]) -> _AdapterTensors:
        contents = cls()
        for key, value in tensors.items():
            name = key.removeprefix(PREFIX)
            if (match := _FACTOR.fullmatch(name)) and value.ndim == 2:
                contents.factors.setdefault(match[1], {})[match[2]] = value
            elif (match := _EMBEDDING_FACTOR.fullmatch(name)) and value.ndim == 2:  # delta (V, E) = (B A)^T = A^T B^T
                contents.factors.setdefault(match[1], {})["B" if match[2] == "A" else "A"] = value.T
                contents.embeddings.add(match[1])
            elif "lora_" in name:
                contents.problems.append(f"{key} is not supported")
            elif match := _ROWS.fullmatch(name):
                contents.rows[match[1]] = value
            elif match := _COPY.fullmatch(name):
                contents.copies.append((f"{match[1]}.{match[2]}", key, value))
            else:
                contents.whole.append((f"{match[1]}.{match[2]}" if (match := _SAVED.fullmatch(name)) else name, value))
        return contents


def read_adapter(directory: Path, names: AdapterNames) -> AdapterChanges:
    """Read an adapter that PEFT or :func:`zoo.checkpoints.peft.write_adapter` wrote, for a model.

    Args:
        directory: its directory.
        names: the names of the model's tensors, which have values.

    Raises:
        ArtifactError: a file is missing or damaged, the tensors are not those of an adapter of this model, or its
            copies of the model's tensors differ from them.
        UsageError: the adapter is of a kind that zoo does not read.
    """
    config = _read_config(directory / ADAPTER_CONFIG)
    contents = _AdapterTensors.sort(_read_tensors(directory / ADAPTER))
    problems = contents.problems
    places = names.find(
        [
            *(module + _WEIGHT for module in (*contents.factors, *contents.rows)),
            *(name for name, _ in contents.whole),
            *(name for name, *_ in contents.copies),
        ]
    )
    equal: dict[str, None] = {}
    for name, key, value in contents.copies:
        update = _whole(name, value, places[name], names, problems)
        equal |= dict.fromkeys(map(names.first.__getitem__, update))
        if not all(_equals(part, names.values[names.first[ours]]) for ours, part in update.items()):
            problems.append(f"{key} differs from the model's {name}: the adapter belongs to other weights")
    updates: dict[str, Update] = {}
    for module, pair in contents.factors.items():
        place = places[module + _WEIGHT]
        problem = _problem(module, pair, place, names, embedding=module in contents.embeddings)
        if place is None or problem is not None:
            problems.append(str(problem))
            continue
        parts = place.rule.split(pair["B"], [names.shapes[name][0] for name in place.group])
        scale = _scale(config, module, len(pair["A"]))
        for name, b in zip(place.group, parts, strict=True):
            if name in updates:
                problems.append(f"{module} is an update of {name}, which has another one")
            updates[name] = Update(pair["A"], b, scale)
    replaced: dict[str, Tensor] = {}
    for name, value in contents.whole:
        for ours, part in _whole(name, value, places[name], names, problems).items():
            if not _same(replaced.setdefault(ours, part), part):
                problems.append(f"two tensors for {name} differ")
    rows = _rows(contents.rows, places, config, names, problems)
    for name in replaced.keys() & rows.keys():
        problems.append(f"{name} has both new rows and another tensor")
    replaced |= rows
    unchanged = {name for name, value in replaced.items() if _equals(value, names.values[names.first[name]])}
    equal |= dict.fromkeys(names.first[name] for name in replaced if name in unchanged)
    replaced = {name: value for name, value in replaced.items() if name not in unchanged}
    # PEFT gives new rows of the input embedding to all layers that share it.
    tied = {alias: rows[first] for alias, first in names.first.items() if first in rows and first in replaced}
    weights, shared = _by_tensor(updates, names, _same_update)
    whole, also = _by_tensor({**tied, **replaced}, names, _same)
    for name in weights.keys() & whole.keys():
        problems.append(f"{name} has both an update and another tensor")
    if problems:
        raise ArtifactError(f"not an adapter of this model ({'; '.join(problems)})", directory)
    return AdapterChanges(weights, whole, frozenset(shared | also), tuple(equal))


def _by_tensor(
    changes: Mapping[str, T], names: AdapterNames, same: Callable[[T, T], bool]
) -> tuple[dict[str, T], set[str]]:
    """Return changes by the first name of the tensor, and the names of those that are equal for all its layers."""
    groups: dict[str, dict[str, T]] = {}
    for name, value in changes.items():
        groups.setdefault(names.first[name], {})[name] = value
    firsts = {first: next(iter(group.values())) for first, group in groups.items()}
    shared = {
        first
        for first, group in groups.items()
        if names.are_all(group) and all(same(firsts[first], value) for value in group.values())
    }
    return firsts, shared


def _same_update(one: Update, other: Update) -> bool:
    return one.scale == other.scale and _same(one.a, other.a) and _same(one.b, other.b)


def _same(one: Tensor, other: Tensor) -> bool:
    return torch.equal(one.double(), other.double())  # float8 cannot be compared


def _equals(value: Tensor, mine: Tensor) -> bool:
    """Return whether two tensors are equal after rounding one of them to the dtype of the other."""
    return _same(value.to(mine.dtype), mine) or _same(value, mine.to(value.dtype))


def _whole(
    name: str, value: Tensor, place: TensorPlace | None, names: AdapterNames, problems: list[str]
) -> dict[str, Tensor]:
    """Return a whole tensor by zoo's names; empty, with a further problem, if it does not fit the model."""
    if place is None:
        problems.append(f"the model has no {name}")
        return {}
    shapes = [names.shapes[item] for item in place.group]
    if tuple(value.shape) != place.rule.shape(shapes):
        problems.append(f"{name} has shape {tuple(value.shape)}, not {place.rule.shape(shapes)}")
        return {}
    values = place.rule.to_ours(value, [shape[0] for shape in shapes] if len(shapes) > 1 else [1])
    return dict(zip(place.group, values, strict=True))


def _rows(
    new_rows: Mapping[str, Tensor],
    places: Mapping[str, TensorPlace | None],
    config: Mapping[str, Any],
    names: AdapterNames,
    problems: list[str],
) -> dict[str, Tensor]:
    """Return embeddings with new rows, of the tokens in ``trainable_token_indices``, by zoo's names."""
    whole = {}
    for module, value in new_rows.items():
        place = places[module + _WEIGHT]
        if place is None or len(place.group) != 1:
            problems.append(f"the model has no {module}")
            continue
        mine = names.values[names.first[place.group[0]]]
        numbers = _tokens(config["trainable_token_indices"], module)
        if value.shape != (len(numbers), *mine.shape[1:]) or not all(-1 < number < len(mine) for number in numbers):
            fault = f"rows of shape {tuple(value.shape)} for {len(numbers)} tokens of {tuple(mine.shape)}"
            problems.append(f"{module} has {fault}")
            continue
        whole[place.group[0]] = mine.detach().clone()
        whole[place.group[0]][numbers] = value.to(mine.dtype)
    return whole


def _tokens(listed: Any, module: str) -> list[int]:
    """Return the tokens of a module, given a list for all modules or one for each."""
    if isinstance(listed, list):
        return listed
    return next((tokens for name, tokens in (listed or {}).items() if f".{module}".endswith(f".{name}")), [])


def _problem(
    module: str, pair: Mapping[str, Tensor], place: TensorPlace | None, names: AdapterNames, *, embedding: bool
) -> str | None:
    """Return why the factors of a layer do not fit the model, or None."""
    if place is None:
        return f"the model has no {module}"
    shapes = [names.shapes[name] for name in place.group]
    if any(len(shape) != 2 for shape in shapes) or place.rule.leading_axes:
        return f"{module} is no dense layer"
    if embedding and not all(isinstance(names.owners[name], nn.Embedding) for name in place.group):
        return f"{module} is no embedding, but has lora_embedding_A and lora_embedding_B"
    expected = (sum(shape[0] for shape in shapes), shapes[0][1])
    if pair.keys() != {"A", "B"}:
        return f"{module} has only one of lora_A and lora_B"
    (rank, inputs), (outputs, columns) = pair["A"].shape, pair["B"].shape
    if (outputs, inputs) != expected or rank != columns or not rank:
        return f"{module} has factors of shapes {(outputs, columns)} and {(rank, inputs)} for a weight of {expected}"
    return None


def _read_config(file: Path) -> dict[str, Any]:
    config = load_json(file)
    if config.get("peft_type") != "LORA":
        raise UsageError(f"peft_type {config.get('peft_type')!r} is not supported, only 'LORA'", file)
    for key, value in config.items():
        supported = key in _USED or key in _INERT or not value or value in _NEUTRAL.get(key, ())
        if not supported:
            raise UsageError(f"{key} {value!r} is not supported", file)
    rank, alpha, pattern = config.get("r"), config.get("lora_alpha"), config.get("alpha_pattern") or {}
    numbers = (alpha, *(pattern.values() if isinstance(pattern, dict) else ("",)))
    if type(rank) is not int or rank < 1 or not all(type(item) in (int, float) for item in numbers):
        raise ArtifactError("r must be a positive integer, and lora_alpha and those of alpha_pattern numbers", file)
    try:
        for key in pattern:
            re.compile(key)
    except re.error as error:
        raise ArtifactError(f"alpha_pattern has a key that is no regular expression ({error})", file) from error
    listed = config.setdefault("trainable_token_indices", None)
    lists = list(listed.values()) if isinstance(listed, dict) else [listed or []]
    if not all(isinstance(tokens, list) and all(type(token) is int for token in tokens) for tokens in lists):
        raise ArtifactError("trainable_token_indices must be lists of token ids", file)
    return config


def _read_tensors(file: Path) -> dict[str, Tensor]:
    try:
        with safe_open(file, framework="pt") as reader:
            tensors: dict[str, Tensor] = {name: reader.get_tensor(name) for name in reader.keys()}  # noqa: SIM118
    except FileNotFoundError as error:
        raise ArtifactError("missing", file) from error
    except (OSError, SafetensorError) as error:
        raise ArtifactError(f"not valid safetensors ({error})", file) from error
    for name, value in tensors.items():
        if not value.is_floating_point() or not value.double().isfinite().all():  # float8 has no isfinite
            raise ArtifactError(f"{name} has values that are not finite floating-point numbers", file)
    if not tensors:
        raise ArtifactError("holds no tensors", file)
    return tensors


def _scale(config: Mapping[str, Any], module: str, rank: int) -> float:
    """Return the factor of a layer's update, as PEFT computes it; ``use_rslora`` is that of Kalajdzievski 2023."""
    pattern: Mapping[str, float] = config.get("alpha_pattern") or {}
    matching = (value for key, value in pattern.items() if re.match(rf"(.*\.)?({key})$", module))
    alpha = float(next(matching, config["lora_alpha"]))
    return alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)
