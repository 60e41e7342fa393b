"""The examples and pages in the help of commands."""

from __future__ import annotations

import json
import shlex
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import click
import pytest

from tests.artifact.test_signature import write_certificates
from tests.conftest import ROOT, Result
from tests.rows import each_row
from zoo.cli import entry
from zoo.cli.options import DocumentedCommand
from zoo.version import DOCUMENTATION


def commands(group: click.Group, context: click.Context) -> Iterator[tuple[str, click.Command]]:
    """Return each command with the words that call it."""
    yield context.command_path, group
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        assert command is not None
        inner = click.Context(command, info_name=name, parent=context)
        if isinstance(command, click.Group):
            yield from commands(command, inner)
        else:
            yield inner.command_path, command


ROOT_CONTEXT = click.Context(entry.cli, info_name="zoo", **entry.cli.context_settings)  # commands cache their options
COMMANDS = dict(commands(entry.cli, ROOT_CONTEXT))


def examples_of(command: click.Command) -> tuple[str, ...]:
    """Return its examples. Every command of zoo has some."""
    assert isinstance(command, DocumentedCommand)
    return command.examples


def parse(line: str) -> str:
    """Parse a command line without running it. Return the words that name its command."""
    words = shlex.split(line)
    path = max((path for path in COMMANDS if path.split() == words[: len(path.split())]), key=len, default="nothing")
    command, rest = COMMANDS[path], words[len(path.split()) :]
    assert not isinstance(command, click.Group), line
    command.make_context(path, rest, parent=ROOT_CONTEXT)
    return path


@each_row(("path", "command"), COMMANDS.items())
def test_help_ends_with_two_examples_and_a_page(path: str, command: click.Command, zoo) -> None:
    examples = examples_of(command)
    assert len(set(examples)) == 2
    assert isinstance(command, DocumentedCommand)
    assert (ROOT / DOCUMENTATION / command.page).is_file()
    done = zoo(*path.split()[1:], "--help")
    assert (done.status, done.err) == (0, "")
    shown = "".join(f"  {example}\n" for example in examples)
    assert done.out.endswith(f"\n\nExamples:\n{shown}\nDocumentation: {DOCUMENTATION}{command.page}\n")


@each_row(("path", "command"), COMMANDS.items())
def test_examples_call_the_command_with_options_that_exist(path: str, command: click.Command) -> None:
    for example in examples_of(command):
        called = parse(example)
        assert called == path or (isinstance(command, click.Group) and called.startswith(f"{path} ")), example


@each_row(
    ("line", "error"),
    [
        ("zoo run gpt-tiny hello --max-tokens 8", click.NoSuchOption),
        ("zoo build gpt-tiny --dtype int9", click.BadParameter),
        ("zoo build", click.MissingParameter),
        ("zoo list gpt bert", click.UsageError),
        ("zoo plugins renew", AssertionError),
        ("zu list", KeyError),
    ],
)
def test_lines_that_cannot_be_parsed_are_found(line: str, error: type[Exception]) -> None:
    with pytest.raises(error):
        parse(line)


CHEAP = """
zoo list --task text-generation --max-params 1B
zoo list "gpt-*" --json
zoo show gpt-small
zoo show gpt-small --figure modules.svg
zoo why gpt-medium
zoo why --recipe copy-task
zoo build gpt-tiny
zoo build gpt-tiny --set num_layers=4 -o deeper
zoo sign gpt-tiny --key signing.key
zoo tokenizer train corpus.txt --vocab-size 270
zoo tokenizer train corpus.txt --kind wordpiece --vocab-size 120 --lowercase -o words.json
zoo tokenizer encode tokenizer.json "the model"
zoo tokenizer encode gpt-tiny "hello" "time flies" --json
zoo tokenizer decode tokenizer.json 76,78,67
zoo tokenizer decode gpt-tiny 104,105 --json
zoo plugins list
zoo plugins list --json
zoo plugins new zebra
zoo plugins new zebra -o plugins/zebra
zoo plugins check --explain padding-invariance
zoo doctor
zoo doctor --json
zoo cost layers
zoo cost layers --lengths 64..4096 --hidden 512
zoo cost layers --kernel 7 --neighbours 64 --json
"""
"""Examples that take less than a second, in an order in which they make each other's files."""
SLOW = """
zoo build gpt-tiny --set max_seq_len=32
zoo export gpt-tiny --onnx
zoo export gpt-tiny --onnx --profile serving
zoo run gpt-tiny "hello" --max-new-tokens 8
zoo verify gpt-tiny
zoo diff gpt-tiny
zoo diff gpt-tiny --all --figure modules.svg
zoo quantize gpt-tiny --dtype int8
zoo quantize gpt-tiny --max-kl 0.01
zoo report gpt-tiny -o report.html
zoo report gpt-tiny -o report.html --check --force
zoo publish gpt-tiny checkpoint --layout hub
zoo publish gpt-tiny theirs --layout standalone
zoo audit theirs/onnx/model.onnx --against gpt-tiny
zoo relink gpt-tiny
zoo relink gpt-tiny --json
zoo sign gpt-tiny --key signing.key
zoo verify gpt-tiny --recorded --signed-by signing.pub
zoo train gpt-tiny --data notes.txt -o notes --max-steps 30
zoo train notes --data notes.txt -o adapter --max-steps 2 --lora rank=2
zoo adapt notes --merge adapter -o tuned
zoo train bert-tiny --task text-classification --data reviews.jsonl --tokenizer bytes -o judge --max-steps 2
zoo export judge --onnx
zoo evaluate judge --data reviews.jsonl
zoo run judge --input reviews.jsonl -o answers.jsonl
zoo publish judge bert-checkpoint --layout hub
zoo import bert-checkpoint -o classifier --task text-classification
zoo build vit-tiny
zoo adapt vit-tiny --set image_size=12 -o larger
zoo adapt gpt-tiny --task sentence-embedding -o encoder
zoo export encoder --onnx
zoo run encoder --input reviews.jsonl -o vectors.parquet
zoo search vectors.parquet "fruit flies" --model encoder
zoo search vectors.parquet "fruit flies" --model encoder --top-k 1 --json
zoo build gpt-tiny --force
zoo sign gpt-tiny --key leaf.key --certificate fullchain.pem
zoo plugins check gpt
"""
"""Others, with the commands that make their files."""
PARSED = {
    "zoo get bert-base": "downloads",
    "zoo get clip-vit-base-patch32 -o clip": "downloads",
    "zoo import Qwen/Qwen3-0.6B -o qwen": "downloads",
    "zoo train transformer-tiny --recipe copy-task -o copier": "takes minutes",
    "zoo evaluate copier --recipe copy-task --variant torch": "needs the model of the line above",
    "zoo publish gpt-tiny page --layout web": "needs a browser and onnxruntime-web",
    "zoo bench gpt-tiny --lengths 16,32,64 --figure speed.svg": "compiles with torch for minutes",
    "zoo bench --lengths 128..16384 --figure curves.svg": "takes minutes",
    "zoo audit encoder_model.onnx decoder_model.onnx --against checkpoint -o report": "needs graphs of another tool",
    "zoo serve gpt-tiny --port 8765": "runs until it is stopped",
    "zoo serve gpt-tiny judge --api-key-file keys.txt": "runs until it is stopped",
}
"""Examples that are only parsed, and why."""


def test_every_example_is_run_or_has_a_reason_not_to_be() -> None:
    run = {*CHEAP.strip().splitlines(), *SLOW.strip().splitlines()}
    examples = {example for command in COMMANDS.values() for example in examples_of(command)}
    assert examples - run == PARSED.keys()


@pytest.mark.parametrize("lines", [CHEAP, pytest.param(SLOW, marks=pytest.mark.slow)], ids=["cheap", "slow"])
def test_examples_run(lines: str, zoo: Callable[..., Result]) -> None:
    write_certificates()
    for name, kept in {"signing.key": "leaf.key", "signing.pub": "leaf.pub"}.items():
        shutil.copy(kept, name)
    Path("fullchain.pem").write_bytes(b"".join(Path(f"{name}.pem").read_bytes() for name in ("leaf", "middle")))
    Path("corpus.txt").write_text("zoo writes the graph only if it equals the model\n")
    Path("notes.txt").write_text("".join(f"time {number} flies like an arrow\n" for number in range(40)))
    reviews = [{"text": f"{word} and funny", "label": label} for word, label in (("warm", "good"), ("dull", "bad"))]
    Path("reviews.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in reviews * 8))
    for line in lines.strip().splitlines():
        done = zoo(*shlex.split(line)[1:])
        assert done.status == 0, f"{line}: {done.err}"
