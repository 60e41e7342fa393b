"""The forms of calls against chat templates and against the grammars that constrain texts to them."""

from __future__ import annotations

import json
from typing import Any

import jsonschema
import llguidance
import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from tests.runtime.server.caller import HERMES
from tests.runtime.server.tools.test_reading import read
from zoo import UsageError
from zoo.tokenizers.chat.template import ChatTemplate
from zoo_runtime.server.tools.formats import FORMATS, find_format
from zoo_runtime.server.tools.grammar import call_grammar

LLAMA = """{% for m in messages %}<|start_header_id|>{{ m.role }}<|end_header_id|>

{% if m.tool_calls %}{{ '{"name": "' + m.tool_calls[0].function.name + '", "parameters": ' }}\
{{ m.tool_calls[0].function.arguments | tojson }}}{% endif %}<|eot_id|>{% endfor %}\
{% if builtin_tools is defined %}<|python_tag|>{% endif %}"""
MISTRAL = """{% for m in messages %}{% if m.tool_calls %}[TOOL_CALLS] [{% for c in m.tool_calls %}\
{{ '{"name": "' + c.function.name + '", "arguments": ' }}{{ c.function.arguments | tojson }}\
{% if c.id | length != 9 %}{{ raise_exception('ids have 9 characters') }}{% endif %}{{ ', "id": "' + c.id + '"}' }}\
{% if not loop.last %}, {% endif %}{% endfor %}]{% endif %}{% endfor %}"""
MISTRAL_NAMED = """{% for m in messages %}{% for c in m.tool_calls or [] %}{{ '[TOOL_CALLS]' + c.function.name }}\
{{ '[CALL_ID]' + c.id + '[ARGS]' + c.function.arguments | tojson }}{% endfor %}{% endfor %}"""
FUNCTION_GEMMA = """{% macro shown(value) %}{% if value is string %}\
<escape>{{ value }}<escape>{% elif value is boolean %}\
{{ 'true' if value else 'false' }}{% elif value is mapping %}{{ '{' }}{% for k, v in value | dictsort %}\
{{ k }}:{{ shown(v) }}{% if not loop.last %},{% endif %}{% endfor %}{{ '}' }}{% elif value is iterable %}[\
{% for v in value %}{{ shown(v) }}{% if not loop.last %},{% endif %}{% endfor %}]{% else %}{{ value }}{% endif %}\
{% endmacro %}{% for m in messages %}{% for c in m.tool_calls or [] %}<start_function_call>call:{{ c.function.name }}\
{{ shown(c.function.arguments) }}<end_function_call>{% endfor %}{% endfor %}"""
TEMPLATES = {
    "hermes": HERMES, "llama": LLAMA, "mistral": MISTRAL, "mistral-named": MISTRAL_NAMED,
    "functiongemma": FUNCTION_GEMMA, "gemma4": FUNCTION_GEMMA.replace("<start_function_call>", "<|tool_call>").replace(
        "<end_function_call>", "<tool_call|>").replace("<escape>", '<|"|>'),
}  # fmt: skip
"""Templates that write calls as those of the families do."""
ARGUMENTS: list[dict[str, Any]] = [
    {}, {"city": 'New "York", é\n{x}'}, {"a": 3, "b": -1.5, "c": True, "d": [1, "x", {"e": {}}]},
]  # fmt: skip


@pytest.mark.parametrize("form", TEMPLATES)
def test_written_calls_are_read(form: str) -> None:
    """A template is recognised, and the calls that it writes are those that are read."""
    found = find_format(TEMPLATES[form])
    assert found is FORMATS[form]
    template = ChatTemplate(TEMPLATES[form])
    for arguments in ARGUMENTS:
        call = {"id": "a1B2c3D4e", "type": "function", "function": {"name": "add", "arguments": arguments}}
        message = {"role": "assistant", "tool_calls": [call] if form == "llama" else [call, call]}
        text = template.render([message], add_generation_prompt=False)
        content, calls = read(form, [text.replace("<|im_start|>assistant", "").replace("<|im_end|>", "")])
        assert [(name, json.loads(written)) for name, written in calls] == [("add", arguments)] * len(
            message["tool_calls"]
        )
        assert not content or form == "llama"


@pytest.mark.parametrize(
    "template",
    ["{{ messages }}", HERMES + "<function=", HERMES + "<arg_key>", "<|tool_call_begin|>", '{"name": "arguments"}'],
)
def test_unknown_templates(template: str) -> None:
    assert find_format(template) is None


SCHEMAS: dict[str, Any] = {
    "add": {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}, "required": ["a"]},
    "f-1": {"type": "object", "properties": {"x": {"enum": ["u", "v w"]}, "y": {"type": "boolean"}}},
}
MARKS = [text for form in FORMATS.values() for text in form.texts]


def tokenizer(added: list[str], *, special: bool) -> Tokenizer:
    """Return a tokenizer of bytes with tokens of its own."""
    letters = {letter: place for place, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    made = Tokenizer(models.BPE(vocab=letters, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens([AddedToken("<|end|>", special=True)])
    made.add_tokens([AddedToken(text, special=special, normalized=False) for text in added])
    return made


def accepts(backend: Tokenizer, grammar: str, text: str) -> tuple[bool, bool]:
    """Return whether a grammar allows a text, and whether the text may end."""
    table = llguidance.LLTokenizer(backend.to_str(), eos_token=[backend.token_to_id("<|end|>")])
    matcher = llguidance.LLMatcher(table, llguidance.LLMatcher.grammar_from_lark(grammar), log_level=0)
    assert not matcher.get_error()
    ids = backend.encode(text, add_special_tokens=False).ids
    return matcher.try_consume_tokens(ids) == len(ids), bool(matcher.is_accepting())


WRITTEN = {
    "hermes": '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>',
    "llama": '{"name": "add", "parameters": {"a": 1, "b": 2}}',
    "json": '{"name": "add", "arguments": {"a": 1, "b": 2}}',
    "mistral": '[TOOL_CALLS] [{"name": "add", "arguments": {"a": 1, "b": 2}}]',
    "mistral-named": '[TOOL_CALLS]add[ARGS]{"a": 1, "b": 2}',
    "functiongemma": "<start_function_call>call:add{a:1,b:2}<end_function_call>",
    "gemma4": "<|tool_call>call:add{a:1,b:2}<tool_call|>",
}


@pytest.mark.parametrize("marks", ["text", "added", "special"])
@pytest.mark.parametrize("form", FORMATS)
def test_grammars(form: str, marks: str) -> None:
    """A grammar allows the calls of its form, with marks that are tokens or not, and no other text."""
    backend = tokenizer([] if marks == "text" else MARKS, special=marks == "special")
    tokens = {text: backend.token_to_id(text) for text in MARKS if marks != "text"}
    text = WRITTEN[form]
    one = call_grammar(FORMATS[form], SCHEMAS, tokens, several=False)
    many = call_grammar(FORMATS[form], SCHEMAS, tokens, several=True)
    assert read(form, [text])[1][0][0] == "add"
    assert accepts(backend, one, text) == accepts(backend, many, text) == (True, True)
    for wrong in ("hello", text.replace("add", "sub"), text.replace("1", '"x"')):
        assert accepts(backend, one, wrong)[0] is False
    found = FORMATS[form]
    twice = text + found.gap + text
    if found.separator:
        twice = text.removesuffix(found.end) + found.separator + text.removeprefix(found.begin)
    assert len(read(form, [twice])[1]) == 2
    assert accepts(backend, many, twice) == (True, True)
    assert accepts(backend, one, twice)[0] is False
    free = call_grammar(FORMATS[form], SCHEMAS, tokens, several=True, free=[])
    assert accepts(backend, free, "hello") == accepts(backend, free, text) == (True, True)
    assert accepts(backend, free, text[:-1])[1] is False
    assert accepts(backend, free, text.replace("add", "sub"))[0] is False
    beside = call_grammar(FORMATS[form], SCHEMAS, tokens, several=True, answer={"enum": [7]})
    assert accepts(backend, beside, text) == accepts(backend, beside, "7") == (True, True)
    assert accepts(backend, beside, "8")[0] is False


VALUES = [
    ({"properties": {"a": {"type": "string"}, "b": {"type": ["number", "null"]}}, "required": ["b"]},
     [{"a": "x,{y}", "b": 1.5}, {"b": None}], [{"a": "x"}]),
    ({"properties": {"a": {"type": "array", "items": {"type": "object", "properties": {"c": {"type": "boolean"}}}}}},
     [{}, {"a": []}, {"a": [{"c": True}, {}]}], [{"a": [{"c": 1}]}]),
    ({"properties": {"a": {"anyOf": [{"enum": ["u", 1, ""]}, {"const": False}]}, "b": {"type": "integer"}}},
     [{"a": "u"}, {"a": ""}, {"a": False, "b": -3}, {"b": 0}], [{"a": "v"}]),
]  # fmt: skip


@pytest.mark.parametrize(("schema", "good", "bad"), VALUES)
def test_notation_follows_the_schema(schema: dict[str, Any], good: list[Any], bad: list[Any]) -> None:
    """The grammar allows the values for which jsonschema finds no error, in the order of the properties."""
    backend = tokenizer([], special=False)
    template = ChatTemplate(FUNCTION_GEMMA)
    grammar = call_grammar(FORMATS["functiongemma"], {"f": {"type": "object", **schema}}, {}, several=False)
    for value in [*good, *bad]:
        ordered = dict(sorted(value.items(), key=lambda item: item[0] not in schema.get("required", [])))
        parts = []
        for name, content in ordered.items():
            call = {"function": {"name": "f", "arguments": {name: content}}}
            text = template.render([{"role": "assistant", "tool_calls": [call]}], add_generation_prompt=False)
            parts.append(text.removeprefix("<start_function_call>call:f{").removesuffix("}<end_function_call>"))
        text = "<start_function_call>call:f{" + ",".join(parts) + "}<end_function_call>"
        text = text.replace("None", "null")
        fits = jsonschema.Draft202012Validator(schema).is_valid(value)
        assert fits == (value in good)
        assert (accepts(backend, grammar, text) == (True, True)) is fits


@pytest.mark.parametrize(
    "schema", [{"type": "string", "pattern": "a"}, {"$ref": "#/x"}, {"type": "array", "minItems": 1}, {}, 3]
)
def test_schemas_without_a_notation(schema: Any) -> None:
    wanted = {"type": "object", "properties": {"a": schema}}
    with pytest.raises(UsageError):
        call_grammar(FORMATS["gemma4"], {"f": wanted}, {}, several=False)
