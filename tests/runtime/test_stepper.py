"""The public stepping interface, directly and in a plugin's decoding task, for every kind of past."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import zoo as library
from tests.conftest import text_generator
from tests.exported import LIVELY
from tests.runtime.test_decoder import EMBEDDED
from zoo.arrays import Array
from zoo.errors import ArtifactError, UsageError
from zoo.nn import Cache
from zoo_export.export import export_graphs_only
from zoo_export.trace.make import Options
from zoo_runtime import Session, Stepper, load_session

Built = Callable[[str, str], Path]
SOURCE = list(b"time flies")
PASTS = {
    "keys and values": ("gpt-tiny", ""),
    "in place": ("gpt-tiny", "cpu"),
    "states": ("mamba2-tiny", ""),
    "states, profile cpu": ("mamba2-tiny", "cpu"),
    "encoder-decoder": ("t5-tiny", ""),
    "encoder-decoder, in place": ("transformer-tiny", "cpu"),
    "rows of their own": ("gpt-tiny", "serving"),
    "rows of their own, states": ("mamba2-tiny", "serving"),
    "rows of their own, encoder-decoder": ("t5-tiny", "serving"),
}
CASES = [pytest.param(*case, id=name) for name, case in PASTS.items()]


@pytest.fixture(scope="module")
def opened(exported_build: Callable[..., Path]) -> Any:
    """Open a session on a tiny decoder, whose graphs are not compared: tests do that."""
    made: dict[tuple[str, str], Session] = {}

    def make(name: str, profile: str) -> Session:
        if (name, profile) not in made:
            folder = exported_build(name, "max_seq_len=48", **LIVELY.get(name, {"noise": True, "gain": 3.0}))
            export_graphs_only(folder, options=Options(profile=profile or "portable"))
            made[name, profile] = load_session(folder, variant=profile, unverified=True, threads=1)
        return made[name, profile]

    yield make
    for session in made.values():
        session.close()


def start(session: Session, rows: int = 1) -> Stepper:
    source = np.array([SOURCE] * rows)
    feeds = {"input_ids": source, "attention_mask": np.ones_like(source)} if len(session.graphs) > 1 else {}
    return session.stepper(feeds, rows=rows)


class Whole:
    """Full passes of the model in torch, in float64."""

    def __init__(self, session: Session) -> None:
        self.model = library.load(session.path).double()
        self.encodes = len(session.graphs) > 1

    def __call__(self, ids: list[list[int]] | Array) -> Array:
        """Return the logits after every token, (B, T, V)."""
        tokens = torch.tensor(np.array(ids))
        with torch.inference_mode():
            if self.encodes:
                source = torch.tensor([SOURCE] * len(ids))
                return np.asarray(self.model(source, tokens))
            return np.asarray(self.model(tokens, torch.ones_like(tokens)))


@pytest.mark.slow_after(2)
@pytest.mark.parametrize(("name", "profile"), CASES)
def test_steps_undone_and_saved_equal_full_passes(opened: Any, name: str, profile: str) -> None:
    """Random steps, reorderings, roll-backs and restored pasts; all logits equal those of full passes."""
    session = opened(name, profile)
    whole, rng = Whole(session), np.random.default_rng(len(name))
    stepper = start(session, 2)
    ids, saved = np.zeros((2, 0), np.int64), [(stepper.save(), np.zeros((2, 0), np.int64))]
    undone = 0
    for turn in range(24):
        new = rng.integers(0, 256, (len(ids), rng.integers(1, 4)))
        if stepper.room is not None and new.shape[1] > stepper.room:
            break
        every = bool(turn % 2)
        found = stepper.step(new, every=every)
        ids = np.concatenate((ids, new), 1)
        wanted = whole(ids)[:, ids.shape[1] - new.shape[1] :]
        np.testing.assert_allclose(found, wanted if every else wanted[:, -1], rtol=0, atol=2e-3)
        assert (stepper.rows, stepper.length, stepper.room) == (*ids.shape, 48 - ids.shape[1])
        match rng.integers(5):
            case 0:
                order = rng.integers(0, len(ids), rng.integers(1, 4))
                stepper.take(order)
                ids = ids[order]
            case 1:
                saved.append((stepper.save(), ids))
            case 2:
                past, ids = saved[rng.integers(len(saved))]
                stepper.restore(past)
                undone += 1
            case 3 if stepper.can_roll_back:
                count = int(rng.integers(0, ids.shape[1]))
                stepper.roll_back(count)
                ids = ids[:, : ids.shape[1] - count]
                undone += 1
    assert undone > 2


@pytest.mark.slow
def test_states_cannot_be_rolled_back(opened: Any) -> None:
    with start(opened("mamba2-tiny", "")) as stepper:
        stepper.step(np.array([[1, 2, 3]]))
        assert not stepper.can_roll_back
        stepper.roll_back(0)
        with pytest.raises(UsageError, match=r"the past holds states, .*: save the past before"):
            stepper.roll_back(1)


def test_wrong_use_is_one_line(opened: Any) -> None:
    session = opened("gpt-tiny", "")
    with session.stepper(rows=2) as stepper:
        assert stepper.can_roll_back
        with pytest.raises(UsageError, match=r"input_ids must be token ids \(rows, tokens\) of 2 rows, got \(1, 3\)"):
            stepper.step(np.array([[1, 2, 3]]))
        with pytest.raises(UsageError, match=r"the mask must be \(2, 1\) like the tokens, got \(2, 2\)"):
            stepper.step(np.array([[1], [2]]), np.ones((2, 2), np.int64))
        with pytest.raises(UsageError, match="49 tokens do not fit in the 48 positions left of 48"):
            stepper.step(np.ones((2, 49), np.int64))
        with pytest.raises(UsageError, match="cannot roll back 1 of 0 positions"):
            stepper.roll_back(1)
    with pytest.raises(UsageError, match="the stepper is closed: graph model: open another"):
        stepper.step(np.array([[1], [2]]))
    with pytest.raises(UsageError, match="input_ids has 1 rows instead of 2"):
        session.stepper({"input_ids": np.ones((1, 1))}, rows=2)


@pytest.mark.parametrize("profile", ["", "serving"])
def test_wrong_arguments_are_refused(opened: Any, profile: str) -> None:
    """Values that numpy or ONNX Runtime would read in another way: -1 as the last token, booleans as rows."""
    session = opened("gpt-tiny", profile)
    for rows in (0, -1, 2.5, True):
        with pytest.raises(UsageError, match="the number of rows must be an integer of at least 1"):
            session.stepper(rows=rows)
    with session.stepper(rows=2) as stepper, session.stepper(rows=2) as other:
        for tokens in ([1, 2], None, [[1, 2], [3]], [["a"], ["b"]], [[1.5], [2]], [[True], [False]]):
            with pytest.raises(UsageError, match=r"input_ids must be|rows of equal length"):
                stepper.step(tokens)
        for token in (-1, 260, 2**40):
            with pytest.raises(ArtifactError, match=f"token {token} is not in the vocabulary of 260: row 1"):
                stepper.step([[1], [token]])
        for mask in ([[2], [1]], [[0.5], [1]]):
            with pytest.raises(UsageError, match="the mask must be 1 for tokens and 0 for padding"):
                stepper.step([[1], [2]], mask)
        for wrong in ([0, 2], [-1], [], [[0]], [0.5], [True, False]):
            with pytest.raises(UsageError, match=r"there is no row|rows must be a list of one or more"):
                stepper.take(wrong)
        with pytest.raises(UsageError, match="roll back must be at least 0, got -1"):
            stepper.roll_back(-1)
        with pytest.raises(UsageError, match=r"roll back must be an integer, got 1\.5"):
            stepper.roll_back(1.5)
        for saved in (7, other.save()):
            with pytest.raises(UsageError, match="not a past that this stepper has saved"):
                stepper.restore(saved)
        assert stepper.step([[1], [2]]).shape == (2, 260)
    for use in (stepper.save, lambda: stepper.take([0]), lambda: stepper.roll_back(0)):
        with pytest.raises(UsageError, match="the stepper is closed"):
            use()


@pytest.mark.slow
def test_late_padding_is_refused_where_the_model_cannot_read_it(opened: Any) -> None:
    """The states of Mamba-2 support padding before the first token alone."""
    padded = np.array([[0, 0, 1], [1, 1, 1]])
    with opened("mamba2-tiny", "").stepper(rows=2) as stepper:
        found = stepper.step(np.array([[9, 9, 5], [6, 7, 8]]), padded)
        with opened("mamba2-tiny", "").stepper() as alone:
            np.testing.assert_allclose(found[0], alone.step(np.array([[5]]))[0], atol=1e-5)
        with pytest.raises(UsageError, match="row 0 has padding after its first token"):
            stepper.step(np.array([[9, 9, 5], [6, 7, 8]]), padded)


@pytest.mark.slow
def test_missing_source_and_given_encoder_outputs(opened: Any) -> None:
    session = opened("t5-tiny", "")
    with pytest.raises(UsageError, match="missing input input_ids: graph encoder"):
        session.stepper(rows=1)
    source = np.array([SOURCE])
    feeds = {"input_ids": source, "attention_mask": np.ones_like(source)}
    computed = session.execute(session.graphs[0], feeds)
    one, other = session.stepper(feeds), session.stepper({"attention_mask": feeds["attention_mask"], **computed})
    np.testing.assert_array_equal(one.step(np.array([[256, 5]])), other.step(np.array([[256, 5]])))


@pytest.mark.slow
def test_model_without_a_past_is_refused(exported_model: Callable[..., Path]) -> None:
    with (
        load_session(exported_model("bert-tiny"), threads=1) as session,
        pytest.raises(UsageError, match="graph model cannot be stepped through: it needs logits and a past"),
    ):
        session.stepper()


@pytest.mark.slow
def test_embeddings_are_steps_too(install: Any, tmp_path: Path) -> None:
    install("zoo-embedded", text_generator("embedded"), files=EMBEDDED)
    model = library.create_model("embedded")
    folder = library.save(model, tmp_path / "embedded")
    export_graphs_only(folder)
    rng = np.random.default_rng(0)
    vectors = rng.standard_normal((2, 4, 8))
    with load_session(folder, unverified=True, threads=1) as session, session.stepper(rows=2) as stepper:
        found = [stepper.step(vectors[:, :2], every=True), stepper.step(vectors[:, 2:], every=True)]
        with pytest.raises(UsageError, match=r"inputs_embeds must be embeddings \(rows, tokens, width\) of 2 rows"):
            stepper.step(np.ones((2, 1), np.int64))
    double = model.double().eval()
    with torch.inference_mode():
        wanted = double(torch.tensor(vectors), torch.ones(2, 4, dtype=torch.int64), Cache.empty(1))
    np.testing.assert_allclose(np.concatenate(found, 1), wanted, atol=1e-5)


# A plugin's task.


def log_softmax(logits: Array) -> Array:
    return np.asarray(torch.log_softmax(torch.tensor(np.asarray(logits, np.float64)), -1))


def drawn(logits: Array, random: np.random.Generator, candidates: int) -> tuple[int, float]:
    scores = log_softmax(logits)
    best = np.argsort(-scores, kind="stable")[:candidates]
    chances = np.exp(scores[best])
    token = int(random.choice(best, p=chances / chances.sum()))
    return token, float(scores[token])


def expected(whole: Whole, prompt: list[int], number: int, options: dict[str, Any]) -> list[int]:
    """Decode by full passes, without a past."""
    random, ids = np.random.default_rng((options["seed"], number)), list[int]()
    while len(ids) < options["tokens"]:
        text = [*prompt, *ids]
        if options["strategy"] == "sample":
            ids.append(drawn(whole([text])[0, -1], random, 4)[0])
        elif options["strategy"] == "lookahead":
            scores = log_softmax(whole([text])[0, -1])
            tokens = np.argsort(-scores, kind="stable")[:4]
            totals = [scores[token] + log_softmax(whole([[*text, token]])[0, -1]).max() for token in tokens]
            ids.append(int(tokens[int(np.argmax(totals))]))
        else:
            drafts = []
            for _ in range(3):
                draft, total = list[int](), 0.0
                while len(draft) < min(4, options["tokens"] - len(ids)):
                    token, score = drawn(whole([[*text, *draft]])[0, -1], random, 4)
                    draft, total = [*draft, token], total + score
                drafts.append((total / len(draft), draft))
            ids += max(drafts, key=lambda pair: pair[0])[1]
    return ids


@pytest.mark.slow_after(2)
@pytest.mark.parametrize("strategy", ["drafts", "sample", "lookahead"])
@pytest.mark.parametrize(("name", "profile"), CASES)
def test_task_of_a_plugin_decodes_by_itself(
    third_party: Callable[[str], None], opened: Any, name: str, profile: str, strategy: str
) -> None:
    """A batch of prompts of several lengths, and streamed, against full passes."""
    third_party("decoding")
    session = opened(name, profile)
    whole = Whole(session)
    encodes = len(session.graphs) > 1
    prompts = [SOURCE] * 2 if encodes else [SOURCE, list(b"x"), list(b"an arrow")]
    options = {"strategy": strategy, "tokens": 9, "seed": 3}
    found = session.run(prompts, task="decode", **options)
    firsts = [[session.option("decoder_start_token_id")]] * 2 if encodes else prompts
    wanted = [expected(whole, first, number, options) for number, first in enumerate(firsts, 1)]
    assert [result["generated_ids"] for result in found] == wanted
    assert encodes or len({token for ids in wanted for token in ids}) > 5
    pieces = list(session.stream(prompts[0], task="decode", **options))
    assert "".join(pieces) == "".join(session.tokenizer.target.stream(wanted[0], firsts[0]))
