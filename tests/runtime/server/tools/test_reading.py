"""Calls in the texts of models: the published forms, and what only looks like one of them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, get_args

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from zoo_runtime.server.config import ToolFormatName
from zoo_runtime.server.tools.formats import FORMATS
from zoo_runtime.server.tools.reading import CallPart, CallReader

NAMES = ("get_weather", "add", "f-1")
MARKS = sorted(
    {text for form in FORMATS.values() for text in (*form.texts, form.begin, form.end, form.separator) if text}
)


def read(form: str, pieces: Sequence[str], *, certain: bool = False) -> tuple[str, list[tuple[str, str]]]:
    """Return the content and the calls of a text that comes in pieces."""
    reader = CallReader(FORMATS[form], NAMES, certain=certain)
    content = ""
    calls: list[tuple[str, str]] = []
    for part in [*(part for piece in pieces for part in reader.feed(piece)), *reader.end()]:
        if isinstance(part, str):
            assert part
            content += part
        elif part.name is not None:
            assert part == CallPart(len(calls), part.name)
            calls.append((part.name, ""))
        else:
            assert part.index == len(calls) - 1
            calls[-1] = calls[-1][0], calls[-1][1] + part.arguments
    assert reader.count == len(calls)
    return content, calls


CASES: list[tuple[str, str, str, list[tuple[str, str]]]] = [
    # as Qwen and Hermes write it
    ("hermes", '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>', "", [("add", '{"a": 1}')]),
    ("hermes", 'I ask.\n<tool_call>{"arguments":{"name":"add"},"name":"f-1"}</tool_call> \n', "I ask.",
     [("f-1", '{"name":"add"}')]),
    ("hermes", '<tool_call>\n{"name": "add", "arguments": {}}\n</tool_call>\n<tool_call>\n{"name": "add", "arguments": '
     '{"b": [1, "</tool_call>"]}}', "", [("add", "{}"), ("add", '{"b": [1, "</tool_call>"]}')]),
    ("hermes", '<tool_call>{"name": "add", "arguments": "{\\"a\\": 1}"}</tool_call>', "", [("add", '{"a": 1}')]),
    ("hermes", '<tool_call>{"name": "add", "arguments": {}}</tool_call>\nDone.\n', "\nDone.\n", [("add", "{}")]),
    ("hermes", "plain < text <tool_ca", "plain < text <tool_ca", []),
    # what looks like a call, and is none
    *(("hermes", text, text, []) for text in (
        '<tool_call>{"name": "add", "arguments": {"a": 1}', '<tool_call>{"name": "other", "arguments": {}}</tool_call>',
        '<tool_call>{"name": "add", "arguments": {a: 1}}</tool_call>', '<tool_call>{"name": "add"}</tool_call>',
        '<tool_call>{"name": "add", "arguments": "hello"}</tool_call>', "<tool_call>add</tool_call>", "<tool_call>",
        '<tool_call>{"name": "add", "arguments": [1]}</tool_call>', '<tool_call>["name"]</tool_call>',
        '<tool_call>{"name": "add", "name": "f-1", "arguments": {}}</tool_call>',
        '<tool_call>{"name": "add", "arguments": {"a": NaN}}</tool_call>',
        '<tool_call>{"name": ["add"], "arguments": {}}</tool_call>', '  {"name": "add", "arguments": {}}\n',
        '<tool_call>{"name": "add", "arguments": ' + '{"a":' * 3000 + "1" + "}" * 3001 + "</tool_call>",
    )),
    ("hermes", '<tool_call>{broken <tool_call>{"name": "add", "arguments": {}}</tool_call>', "<tool_call>{broken",
     [("add", "{}")]),
    # as Llama 3.1 and 3.2 write it
    ("llama", '{"name": "add", "parameters": {"a": "b"}}', "", [("add", '{"a": "b"}')]),
    ("llama", '<|python_tag|>{"type": "function", "name": "add", "parameters": {}}', "", [("add", "{}")]),
    ("llama", '{"name": "add", "arguments": {}}; {"name": "f-1", "parameters": {"x": {}}};\n', "",
     [("add", "{}"), ("f-1", '{"x": {}}')]),
    ("llama", 'Here: {"name": "add", "parameters": {}} Would you like {more}?', "Here: Would you like {more}?",
     [("add", "{}")]),
    ("llama", '<|python_tag|>print("x")', '<|python_tag|>print("x")', []),
    ("llama", '{"name": "add"}', '{"name": "add"}', []),
    ("llama", '{"a": {"name": "add", "parameters": {}}}', '{"a": {"name": "add", "parameters": {}}}', []),
    ("json", '{"name": "add", "arguments": {}}\n{"name": "add", "arguments": {"a": 1}}', "",
     [("add", "{}"), ("add", '{"a": 1}')]),
    # as Mistral writes it, before and since its tokenizer v11
    ("mistral", '[TOOL_CALLS] [{"name": "add", "arguments": {"a": 3.5}}]', "", [("add", '{"a": 3.5}')]),
    ("mistral", 'Hello[TOOL_CALLS][{"arguments": {"name": "J"}, "name": "add", "id": "123456789"}, '
     '{"name": "f-1", "arguments": {}}]', "Hello", [("add", '{"name": "J"}'), ("f-1", "{}")]),
    ("mistral", '[TOOL_CALLS] [{"name": "add", "arguments": {}}, {"name": "other", "arguments": {}}]',
     '[TOOL_CALLS] [{"name": "add", "arguments": {}}, {"name": "other", "arguments": {}}]', []),
    ("mistral", "[TOOL_CALLS] []", "[TOOL_CALLS] []", []),
    ("mistral-named", '[TOOL_CALLS]add[ARGS]{"a": 1}[TOOL_CALLS]f-1[ARGS]{}', "", [("add", '{"a": 1}'), ("f-1", "{}")]),
    ("mistral-named", '[TOOL_CALLS]add[CALL_ID]a1B2c3D4e[ARGS]{"a": "}"}', "", [("add", '{"a": "}"}')]),
    ("mistral-named", '[TOOL_CALLS]add{"a": 1}', "", [("add", '{"a": 1}')]),
    ("mistral-named", "[TOOL_CALLS]add, then {}", "[TOOL_CALLS]add, then {}", []),
    # as FunctionGemma and Gemma 4 write it
    ("functiongemma", "<start_function_call>call:get_weather{city:<escape>New York, {NY}<escape>,days:3}"
     "<end_function_call>", "", [("get_weather", '{"city": "New York, {NY}", "days": 3}')]),
    ("functiongemma", "<start_function_call>call:add{a:-1.5e3,b:[true,<escape>é<escape>,{c:null}],d:{}}"
     "<end_function_call><start_function_call>call:f-1{}<end_function_call>", "",
     [("add", '{"a": -1500.0, "b": [true, "é", {"c": null}], "d": {}}'), ("f-1", "{}")]),
    ("functiongemma", "<start_function_call>call:add{a:maybe}<end_function_call>",
     "<start_function_call>call:add{a:maybe}<end_function_call>", []),
    ("functiongemma", DEEP := "<start_function_call>call:add{a:" + "[" * 5000, DEEP, []),
    ("gemma4", '<|tool_call>call:add{x:<|"|>a<b<|"|>}<tool_call|>', "", [("add", '{"x": "a<b"}')]),
]  # fmt: skip


@pytest.mark.parametrize(("form", "text", "content", "calls"), CASES)
def test_published_forms(form: str, text: str, content: str, calls: list[tuple[str, str]]) -> None:
    assert read(form, [text]) == (content, calls)
    for _, arguments in calls:
        json.loads(arguments)
    assert read(form, [*text][:3000]) == read(form, [text[:3000]])


@pytest.mark.parametrize(
    ("form", "text", "content", "calls"),
    [
        case
        for case in CASES
        if case[3] and not case[2] and '"{' not in case[1] and "arguments" not in case[1].partition("name")[0]
    ],
)
def test_certain_texts_come_as_they_are_written(form: str, text: str, content: str, calls: Any) -> None:
    """Of a text that is known to be valid, the parts of arguments come before the call is complete."""
    assert read(form, [*text], certain=True) == (content, calls)
    cut = text[: text.rindex("}") - 1]
    shorter, begun = read(form, [*cut], certain=True)
    assert not shorter
    for (name, arguments), (whole_name, whole) in zip(begun, calls, strict=False):
        assert name == whole_name
        assert whole.startswith(arguments)


TEXTS = st.lists(
    st.sampled_from(MARKS)
    | st.sampled_from(["{", "}", '"', "[", "]", ",", ":", ";", " ", "\n", "\\", "é", "1", "true", "add", "call:add"])
    | st.sampled_from(['{"name": "add", "arguments": {}}', '{"name": "f-1", "parameters": {"a": 1}}', "call:add{a:1}"])
    | st.text(max_size=3),
    max_size=14,
).map("".join)


@given(form=st.sampled_from([*FORMATS]), text=TEXTS, cuts=st.lists(st.integers(0, 200), max_size=12))
@example(form="llama", text='{"name": "add", "arguments": {}} a;{"name": "add", "arguments": {}}', cuts=[])
def test_pieces_change_nothing(form: str, text: str, cuts: list[int]) -> None:
    places = sorted({0, len(text), *(cut for cut in cuts if cut < len(text))})
    pieces = [text[start:end] for start, end in pairwise(places)]
    assert read(form, pieces) == read(form, [text]) == read(form, [*text])


@given(form=st.sampled_from([*FORMATS]), text=TEXTS)
def test_content_is_never_lost_or_invented(form: str, text: str) -> None:
    """Without calls, the content is the text; with calls, it is made of parts of the text, in their order."""
    content, calls = read(form, [text])
    if not calls:
        assert content == text
    rest = iter(text)
    assert all(letter in rest for letter in content)
    for name, arguments in calls:
        assert name in NAMES
        assert name in text
        assert isinstance(json.loads(arguments), dict)


def test_names_of_formats() -> None:
    assert get_args(ToolFormatName) == tuple(FORMATS)
