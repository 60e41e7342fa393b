"""The registry: precedence of values, inheritance, and presets that cannot be resolved."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from fnmatch import fnmatchcase
from pathlib import Path

import pytest

from tests.rows import each_row
from zoo import ArtifactError, PluginError, UsageError
from zoo.models.count import parameter_count, within_size
from zoo.plugins.presets import built_in_presets, user_presets
from zoo.registry import PresetSummary, registry

BUILT_IN = tomllib.loads(built_in_presets().read_text(encoding="utf-8"))["models"]
# For each class of error, a user's preset that causes it.
BROKEN = {
    "cycle": ('[models.mine]\nbase = "mine"', UsageError, "mine -> mine"),
    "base": ('[models.mine]\nbase = "gpt-smal"', UsageError, "did you mean 'gpt-small'"),
    "nothing": ("[models.mine]", UsageError, "give it an arch or a base"),
    "key": ('[models.mine]\narch = "gpt"\nconfig = { hiden_size = 8 }', UsageError, "did you mean 'hidden_size'"),
    "type": ('[models.mine]\narch = "gpt"\nconfig = { hidden_size = "8" }', UsageError, "hidden_size must be int"),
    "value": ('[models.mine]\narch = "gpt"\nconfig = { num_heads = 11 }', UsageError, "hidden_size 768 is not div"),
    "architecture": ('[models.mine]\narch = "gtp"', PluginError, "no plugin provides the architecture 'gtp'"),
}


def write_user(text: str) -> Path:
    """Write the user's own presets."""
    path = user_presets()
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"schema = 1\n{text}", encoding="utf-8")
    return path


def write_project(text: str, folder: Path = Path()) -> Path:
    """Write a project's presets."""
    path = folder.absolute() / "zoo.toml"
    path.write_text(f"schema = 1\n{text}", encoding="utf-8")
    return path


@each_row("name", BUILT_IN)
def test_built_in_presets_have_the_values_of_their_file(name: str) -> None:
    """A preset's own table takes precedence over inherited values."""
    spec = registry().resolve(name)
    values = spec.config.to_dict()
    written = BUILT_IN[name].get("config", {})
    assert {key: tuple(v) if isinstance(v, list) else v for key, v in written.items()}.items() <= values.items()
    assert spec.description == BUILT_IN[name]["description"]
    assert spec.origins is not None
    assert {key: origins[-1].value for key, origins in spec.origins.items()} == values
    assert spec.name == name


def test_precedence(zoo) -> None:
    """Default < base < preset < user < project < --set: each value, its source and all values that it replaced."""
    base, preset = (f"built-in registry.toml [models.{name}]" for name in ("gpt-small", "gpt-medium"))
    user_file = write_user(
        "[models.gpt-medium]\nconfig = { num_layers = 10, max_seq_len = 100, dropout = 0.3, vocab_size = 300 }"
    )
    project_file = write_project(
        "[models.gpt-medium]\nconfig = { max_seq_len = 200, dropout = 0.4, intermediate_size = 50 }"
    )
    user, project = (f"{path} [models.gpt-medium]" for path in (user_file, project_file))
    config = zoo("why", "gpt-medium", "--set", "dropout=0.5", "--set", "norm_eps=0.001", "--json").json["config"]
    expected: dict[str, list[tuple[object, str]]] = {
        "activation": [("gelu_tanh", "default")],
        "eos_token_id": [(50256, base)],
        "num_heads": [(12, base), (16, preset)],
        "num_layers": [(12, base), (24, preset), (10, user)],
        "vocab_size": [(300, user)],
        "max_seq_len": [(100, user), (200, project)],
        "intermediate_size": [(50, project)],
        "dropout": [(0.3, user), (0.4, project), (0.5, "--set dropout=0.5")],
        "norm_eps": [(0.001, "--set norm_eps=0.001")],
    }
    for key, origins in expected.items():
        *replaced, (value, source) = origins
        assert config[key] == {
            "value": value,
            "source": source,
            "replaced": [{"value": old, "source": where} for old, where in replaced],
        }


def test_why_shows_the_source_and_replaced_values(zoo) -> None:
    """One line per value."""
    path = write_user("[models.gpt-medium]\nconfig = { num_layers = 10 }")
    lines = [line.split() for line in zoo("why", "gpt-medium").out.splitlines()]
    assert [line[0] for line in lines] == list(registry().resolve("gpt-medium").config.to_dict())
    line = " ".join(next(line for line in lines if line[0] == "num_layers"))
    assert line == (
        f"num_layers 10 {path} [models.gpt-medium] instead of 24 from built-in registry.toml [models.gpt-medium]; "
        "instead of 12 from built-in registry.toml [models.gpt-small]"
    )


def test_overlay_of_a_base_is_inherited() -> None:
    """A user's gpt-small becomes the base of gpt-medium, which keeps its own sizes."""
    write_user("[models.gpt-small]\nconfig = { num_layers = 3, dropout = 0.25 }")
    config = registry().resolve("gpt-medium").config.to_dict()
    assert (config["num_layers"], config["dropout"]) == (24, 0.25)


def test_overlay_may_change_the_base_and_the_text() -> None:
    """Base, description and tokenizer are merged like values."""
    write_user('[models.gpt-medium]\nbase = "gpt-tiny"\ndescription = "Mine"')
    spec = registry().resolve("gpt-medium")
    assert (spec.config.to_dict()["vocab_size"], spec.description, spec.tokenizer) == (260, "Mine", "bytes")


def test_nearest_project_file_applies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only zoo.toml of the nearest directory at or above the current one applies."""
    deep, inner = tmp_path / "a/b/c", tmp_path / "a"
    deep.mkdir(parents=True)
    monkeypatch.chdir(deep)
    assert "mine" not in registry().names()
    write_project('[models.mine]\nbase = "gpt-tiny"\nconfig = { num_layers = 1 }', tmp_path)
    assert registry().resolve("mine").config.to_dict()["num_layers"] == 1
    write_project('[models.other]\nbase = "gpt-tiny"', inner)
    assert "other" in registry().names()
    assert "mine" not in registry().names()
    write_project('[models.own]\nbase = "gpt-tiny"', deep)
    assert "own" in registry().names()
    assert not {"mine", "other"} & set(registry().names())


def test_arguments_and_settings_override_files() -> None:
    """Python arguments override files, settings override arguments, and later settings override earlier ones."""
    spec = registry().resolve(
        "gpt-tiny", ["dropout=0.2", "dropout=0.3"], values={"dropout": 0.1, "max_seq_len": 64}
    )  # fmt: skip
    assert spec.config.to_dict()["dropout"] == 0.3
    assert spec.config.to_dict()["max_seq_len"] == 64
    assert spec.origins is not None
    assert [(item.value, item.source) for item in spec.origins["dropout"]] == [
        (0.1, "argument"),
        (0.2, "--set dropout=0.2"),
        (0.3, "--set dropout=0.3"),
    ]


@pytest.mark.parametrize(
    ("name", "setting", "message"),
    [
        ("gpt-tiny", "dropout", "'dropout' is not key=value: --set"),
        ("gpt-tiny", "n_layer=2", "unknown key 'n_layer' for GPTConfig: --set: did you mean 'num_layers'?"),
        ("gpt-tiny", "num_layers=two", "num_layers must be int, got 'two' (str): --set"),
        (
            "gpt-tiny",
            "task=fill-mask",
            "task must be one of 'text-generation', 'text-classification', 'sentence-embedding', got 'fill-mask' (str)"
            ": --set",
        ),
        (
            "bert-tiny",
            "attention=linfomer",
            "attention must be one of 'full', 'linformer', 'performer', 'longformer', got 'linfomer' (str): --set:"
            " did you mean 'linformer' or 'longformer'?",
        ),
        (
            "gpt-tiny",
            "num_heads=7",
            "hidden_size 64 is not divisible by num_heads 7: gpt-tiny --set num_heads=7",
        ),
    ],
)
def test_bad_setting(name: str, setting: str, message: str) -> None:
    """The message has the expected type and the source of the value."""
    with pytest.raises(UsageError) as caught:
        registry().resolve(name, [setting])
    assert str(caught.value) == message


@pytest.mark.parametrize(
    ("values", "error"),
    [({"num_layers": "2"}, "num_layers must be int"), ({"layers": 2}, "unknown key 'layers'")],
)
def test_bad_argument(values: Mapping[str, object], error: str) -> None:
    """Python arguments are checked in the same way."""
    with pytest.raises(UsageError, match=error):
        registry().resolve("gpt-tiny", values=values)


@pytest.mark.parametrize(
    ("name", "nearest"), [("gpt-smal", "'gpt-small'"), ("bert_base", "'bert-base'"), ("", "known: adaptive-span")]
)
def test_unknown_model_is_rejected_with_a_suggestion(name: str, nearest: str) -> None:
    """The message has the nearest names, or some names if none is near."""
    with pytest.raises(UsageError, match=f"^unknown model {name!r}: .*{nearest}"):
        registry().resolve(name)


def test_path_of_no_model_is_no_preset() -> None:
    with pytest.raises(ArtifactError, match=r"^no such directory: models/gpt$"):
        registry().resolve("models/gpt")


def test_unknown_distribution_is_rejected() -> None:
    """``distribution:name`` never falls back to the name only."""
    with pytest.raises(UsageError, match=r"^unknown model "):
        registry().resolve("nobody:gpt-small")


@pytest.mark.parametrize(
    ("tables", "cycle"),
    [
        ({"a": "a"}, "a -> a"),
        ({"a": "b", "b": "c", "c": "a"}, "a -> b -> c -> a"),
        ({"a": "b", "b": "c", "c": "b"}, "a -> b -> c -> b"),
        ({"gpt-small": "gpt-medium"}, "gpt-small -> gpt-medium -> gpt-small"),
    ],
)
def test_inheritance_cycle_is_shown(tables: Mapping[str, str], cycle: str) -> None:
    """Cycles of any length, also through a built-in preset."""
    path = write_user("\n".join(f'[models.{name}]\nbase = "{base}"' for name, base in tables.items()))
    with pytest.raises(UsageError) as caught:
        registry().resolve(next(iter(tables)))
    repeated = cycle.rpartition(" ")[2]
    assert str(caught.value) == f"presets inherit in a cycle ({cycle}): {path} [models.{repeated}]"


def test_long_chain_is_resolved_or_refused() -> None:
    """Inheritance deeper than Python's stack is not an internal error."""
    links = "\n".join(f'[models.a{n}]\nbase = "a{n + 1}"' for n in range(2000))
    write_user(f'{links}\n[models.a2000]\nbase = "gpt-tiny"\nconfig = {{ num_layers = 5 }}')
    try:
        assert registry().resolve("a0").config.to_dict()["num_layers"] == 5
    except UsageError as error:
        assert "a0" in str(error)


@pytest.mark.parametrize("case", BROKEN)
def test_unresolvable_preset_is_explained(case: str) -> None:
    """A one-line message names the file or the preset."""
    text, kind, message = BROKEN[case]
    write_user(text)
    with pytest.raises(kind) as caught:
        registry().resolve("mine")
    assert message in str(caught.value)
    assert "mine" in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("case", ["nothing", "key", "type", "value", "architecture"])
def test_error_in_a_file_names_the_file(case: str) -> None:
    """It also names the table."""
    text, kind, _ = BROKEN[case]
    path = write_user(text)
    with pytest.raises(kind) as caught:
        registry().resolve("mine")
    assert f"{path} [models.mine]" in str(caught.value)


@pytest.mark.parametrize("case", BROKEN)
def test_listing_includes_unresolvable_presets(case: str, zoo) -> None:
    """It is one row with its reason; other rows are unchanged, and nothing goes to standard error."""
    text, _, message = BROKEN[case]
    healthy = zoo("list").out.splitlines()
    write_user(text)
    listed = zoo("list")
    assert (listed.status, listed.err) == (0, "")
    (line,) = (line for line in listed.out.splitlines() if line.startswith("mine "))
    assert "unavailable: " in line
    assert message in line
    assert [line for line in listed.out.splitlines() if not line.startswith("mine ")] == healthy
    (row,) = (row for row in zoo("list", "--json").json["models"] if not row["available"])
    assert row["name"] == "mine"
    assert message in row["reason"]


@pytest.mark.parametrize("filters", [{"task": "text-generation"}, {"architecture": "gpt"}])
def test_filters_exclude_unresolvable_presets(filters: Mapping[str, object]) -> None:
    """A preset without a resolvable architecture matches only name filters."""
    write_user(BROKEN["architecture"][0])
    assert all(isinstance(item, PresetSummary) for item in registry().search(**filters))
    ((name, error),) = registry().search("min*e")
    assert name == "mine"
    assert isinstance(error, PluginError)


@pytest.mark.parametrize("text", ["models = ", "colour = 1", "[models.a]\nconfig = 3"])
@pytest.mark.parametrize("write", [write_user, write_project])
def test_broken_file_of_the_user_or_project_is_named(write, text: str, zoo) -> None:
    """Its contents are unknown, so every command fails."""
    path = write(text)
    for arguments in (["list"], ["show", "gpt-tiny"], ["why", "gpt-tiny"], ["build", "gpt-tiny"]):
        zoo(*arguments).failed(2, str(path))
    assert not Path("gpt-tiny").exists()


@pytest.mark.parametrize(
    ("pattern", "filters"),
    [
        ("*", {}),
        ("gpt-*", {}),
        ("*-tiny", {}),
        ("gpt-[ml]*", {}),
        ("GPT-*", {}),
        ("bert", {}),
        ("*", {"task": "sentence-embedding"}),
        ("*", {"architecture": "transformer"}),
        ("*", {"min_parameters": 124_439_808}),
        ("*", {"max_parameters": 124_439_808}),
        ("*", {"min_parameters": 124_439_809, "max_parameters": 335_141_888}),
        ("bert-*", {"task": "feature-extraction", "max_parameters": 10**8}),
        ("*", {"task": "no-such-task"}),
    ],
)
def test_search(pattern: str, filters: Mapping[str, object]) -> None:
    """All filters must match; both bounds of the parameter range are inclusive."""
    specs = [registry().resolve(name) for name in BUILT_IN]
    expected = {
        spec.name
        for spec in specs
        if (fnmatchcase(spec.name, pattern) if set(pattern) & set("*[") else pattern in spec.name)
        and filters.get("task", spec.config.task) == spec.config.task
        and filters.get("architecture", spec.architecture.name) == spec.architecture.name
        and filters.get("min_parameters", 0) <= parameter_count(spec) <= filters.get("max_parameters", 10**15)
    }
    chosen = {key: filters[key] for key in ("task", "architecture") if key in filters}
    found = [item for item in registry().search(pattern, **chosen) if isinstance(item, PresetSummary)]
    sized = within_size(registry(), found, filters.get("min_parameters"), filters.get("max_parameters"))
    assert [item.name for item in sized] == sorted(expected)


def test_search_finds_the_published_sizes() -> None:
    """BERT-large, GPT-2 medium and ViT-L/16 have between 300 and 400 million parameters; adjacent sizes do not."""
    known = registry()
    summaries = [item for item in known.search() if isinstance(item, PresetSummary)]
    found = {item.name for item in within_size(known, summaries, 300_000_000, 400_000_000)}
    assert {"bert-large", "gpt-medium", "vit-large"} <= found
    assert not {"bert-base", "gpt-small", "gpt-large", "vit-base", "vit-huge"} & found


def test_long_inheritance_is_refused() -> None:
    """The time for each of many presets grows with its bases."""
    models = ['[models.q0]\nbase = "gpt-tiny"', *(f'[models.q{n}]\nbase = "q{n - 1}"' for n in range(1, 2000))]
    path = write_user("\n".join(models))
    assert registry().resolve("q62").name == "q62"
    with pytest.raises(UsageError) as caught:
        registry().resolve("q1999")
    assert str(caught.value) == f"preset 'q1999' has more than 64 bases: {path} [models.q1999]"
