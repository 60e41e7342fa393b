"""Each check fails for the fault it targets, and for no other."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from tests.conformance.plugin import EDITS, RETURN, Edit, install_edited
from zoo.testing import all_checks, find_check, find_subject, run_check, run_checks


def test_every_check_has_an_edit_that_breaks_it() -> None:
    """A new check without such an edit fails here."""
    assert [check.name for check in all_checks()] == list(EDITS)


@pytest.mark.slow
def test_valid_plugin_passes_every_check(install: Callable[..., Path]) -> None:
    name = install_edited(install, "zoo-sound")
    assert {result.check: (result.status, result.happened) for result in run_checks(name)} == dict.fromkeys(
        EDITS, ("passed", "")
    )


# Other checks that an edit must fail.
ALSO = {
    "weights-round-trip": ("reproducible-training",),  # a resumed run loads weights
    "batch-invariance": ("onnx-parity",),  # answers on batches differ from those on single texts
    "padding-invariance": ("onnx-parity",),
}


@pytest.mark.slow_after(4)
@pytest.mark.parametrize("check", EDITS)
def test_each_edit_fails_its_check(check: str, install: Callable[..., Path]) -> None:
    """The result says what was expected and what happened, and the check itself raises no other error."""
    name = install_edited(install, f"zoo-no-{check}", EDITS[check])
    result = run_check(find_check(all_checks(), check), find_subject(name))
    assert (result.status, result.traceback) == ("failed", ""), result
    assert result.expected
    assert result.happened


@pytest.mark.slow
@pytest.mark.parametrize("check", EDITS)
def test_each_edit_fails_only_its_check(check: str, install: Callable[..., Path]) -> None:
    name = install_edited(install, f"zoo-only-{check}", EDITS[check])
    failed = {result.check: result.happened for result in run_checks(name) if result.status == "failed"}
    assert list(failed) == [check, *ALSO.get(check, ())], failed


@pytest.mark.slow_after(3)
@pytest.mark.parametrize(
    ("check", "edit", "happened"),
    [
        (
            "seeded",
            ("model", "        self.config = c\n", "        torch.manual_seed(0)\n        self.config = c\n"),
            "all weights are equal",
        ),
        ("documented", ("entry", 'reference="A test"', 'reference=" "'), "it is empty"),
        (
            "declaration",
            ("config", 'zoo.floats("logits", "batch", "sequence"', 'zoo.floats("logits", "batch", "tokens"'),
            "'tokens' of",
        ),
        (
            "declaration",
            ("config", "(zoo.floats(", '(zoo.floats("logits", "batch", 1), zoo.floats('),
            "'logits' twice",
        ),
        (
            "declaration",
            ("config", 'length="past_sequence + sequence"', 'length="past + sequence"'),
            "'past' of attention_mask",
        ),
        (
            "signature",
            ("model", "attention_mask, past_key_values):", "attention_mask, past_key_values, more):"),
            "more",
        ),
        ("signature", ("model", "return self.head(x)", "return self.head(x).float()"), "logits is float32"),
        ("signature", ("config", '"batch", "sequence", self', '"batch", "sequence", 1 + self'), "logits has shape"),
        (
            "lengths",
            ("model", "nn.Embedding(c.max_seq_len", "nn.Embedding(c.max_seq_len - 1"),
            "a length of 24, it raises",
        ),
        (
            "padding-invariance",
            ("model", "build_mask(length, total, padding=attention_mask", "build_mask(length, total"),
            "off by",
        ),
        ("causality", ("model", "causal=True", "causal=False"), "an earlier output changes"),
        ("causality", ("model", "causal=True", "causal=True, window=1"), "none does: tokens are independent"),
        (
            "attention-weights",
            (
                "model",
                "        x = x + self.attention(self.norm(x), mask=mask, cache=past_key_values[0])\n",
                "        from dataclasses import replace\n"
                "        from zoo.nn import record_attention, recorded_scores\n"
                "        with recorded_scores() as kept:\n"
                "            x = x + self.attention(self.norm(x), mask=mask, cache=past_key_values[0])\n"
                "        record_attention(lambda: kept[0].weights, lambda: replace(kept[0], scale=2.0))\n",
            ),
            "those of attention 0 are off by",
        ),
        ("cache", ("model", "length, total, padding=attention_mask)", "length, length)"), "cut after"),
        ("gradients", ("model", "x = x + self.attention(", "x = x + 0 * self.attention("), "is 0 everywhere"),
        ("half-precision", ("model", "return self.head(x)", "return self.head(x).float()"), "logits is float32"),
        (
            "meta-device",
            ("model", "        self.head =", "        float(self.token.weight.sum())\n        self.head ="),
            "cannot build",
        ),
        (
            "declared-tensors",
            ("model", "class Model(nn.Module):\n", 'class Model(nn.Module):\n    fixed_tensors = ("norm.weight",)\n\n'),
            "norm.weight is declared fixed, but is trainable: Model.fixed_tensors: register it as a buffer",
        ),
        (
            "weights-round-trip",
            (
                "model",
                "        self.head =",
                '        self.register_buffer("b", torch.ones(1), persistent=False)\n        self.head =',
            ),
            "cannot be loaded",
        ),
        (
            "global-state",
            ("model", "        rows, length", "        torch.nn.functional.spare = 1\n        rows, length"),
            "adds torch.nn.functional.spare",
        ),
        (
            "global-state",
            ("model", "        rows, length", "        torch.rand(1)\n        rows, length"),
            "running the model changes torch's generator",
        ),
        (
            "global-state",
            ("config", "import zoo\n", 'import os\nimport zoo\nos.environ["SPARE"] = "1"\n'),
            "adds the environment variable SPARE",
        ),
    ],
)
def test_other_faults_are_detected(
    check: str, edit: Edit, happened: str, install: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The result describes the fault."""
    monkeypatch.setenv("SPARE", "0")  # restored afterwards: one of the faults sets it in this process
    name = install_edited(install, "zoo-fault", [edit])
    result = run_check(find_check(all_checks(), check), find_subject(name))
    assert result.status == "failed", result
    assert happened in result.happened, result


@pytest.mark.parametrize(
    "edits",
    [
        # Each token is scaled by one of 64 experts, most of which three rows of six tokens leave out.
        [
            (
                "model",
                "        self.head =",
                "        self.router = nn.Linear(c.hidden_size, 64)\n"
                "        self.experts = nn.ParameterList(torch.ones(c.hidden_size) for _ in range(64))\n"
                "        self.head =",
            ),
            (
                *RETURN,
                "        scores = self.router(x).softmax(-1)\n"
                "        best, chosen = scores.max(-1, keepdim=True)\n"
                "        parts = [(chosen == n) * expert for n, expert in enumerate(self.experts)]\n"
                "        return self.head(x * best * sum(parts))\n",
            ),
        ],
        # A scale is learned in training, and merged into the head for evaluation.
        [
            ("model", "        self.head =", "        self.scale = nn.Parameter(torch.ones(()))\n        self.head ="),
            (*RETURN, "        return self.head(x) * (self.scale if self.training else 1)\n"),
        ],
    ],
    ids=["experts", "scale"],
)
def test_rare_and_late_gradients_are_found(edits: Sequence[Edit], install: Callable[..., Path]) -> None:
    name = install_edited(install, "zoo-honest", edits)
    result = run_check(find_check(all_checks(), "gradients"), find_subject(name))
    assert (result.status, result.happened) == ("passed", "")
