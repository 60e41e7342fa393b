"""Chat templates give the prompts of transformers, cannot leave their sandbox, and fail in one line."""

from __future__ import annotations

import json
import re
import resource
import signal
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from zoo.errors import ArtifactError
from zoo.tokenizers.chat import ChatTemplate, read_chat_template, rendering
from zoo.tokenizers.files.load import byte_tokenizer

TEMPLATES = {
    "header for each role": """\
{% for message in messages %}
    {%- if loop.first and message.role != 'system' %}
        {{- '<|im_start|>system\\nYou help.<|im_end|>\\n' }}
    {%- endif %}
    {{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
""",
    "trimmed content": """\
{% set loop_messages = messages %}
{% for message in loop_messages %}
{% set content = '<|' + message['role'] + '|>\n\n' + message['content'] | trim + eos_token %}
{% if loop.index0 == 0 %}
  {% set content = bos_token + content %}
{% endif %}
{{ content }}
{% endfor %}
   {# a comment with its line #}
{% if add_generation_prompt %}<|assistant|>
{% endif %}""",
    "alternating roles": """\
{% if messages[0]['role'] == 'system' %}{% set rest = messages[1:] %}{% set system = messages[0]['content'] %}\
{% else %}{% set rest = messages %}{% set system = false %}{% endif %}{{ bos_token }}\
{% for message in rest %}{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}\
{{ raise_exception('roles must alternate user/assistant/...') }}{% endif %}\
{% if message['role'] == 'user' %}{{ '[INST] ' + (system + '\n\n' if loop.first and system else '') }}\
{{ message['content'].strip() + ' [/INST]' }}{% else %}{{ ' ' + message.content + ' ' + eos_token }}{% endif %}\
{% endfor %}""",
    "no system": """\
{{ bos_token }}{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}
{% for message in messages %}
{% set role = 'model' if message.role == 'assistant' else message.role %}
{{ '<start_of_turn>' ~ role ~ '\n' ~ message['content'] | trim ~ '<end_of_turn>' }}
{% endfor %}
{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}""",
    "functions": """\
{%- macro shown(text, mark='*') -%}{{ mark }}{{ text }}{{ mark }}{%- endmacro -%}
{%- set ns = namespace(count=0, last=none) -%}
{%- set names = dict(user='U', assistant='A') -%}
{%- for message in messages -%}
  {%- if message.role == 'system' -%}{%- continue -%}{%- endif -%}
  {%- set ns.count = ns.count + 1 -%}
  {%- set ns.last = message.role -%}
  {{- names.get(message.role, '?') }} {{ shown(message.content) }} {{ {'n': ns.count, 'é': '<&>'} | tojson }}
  {%- if ns.count == 3 -%}{%- break -%}{%- endif -%}
{%- endfor -%}
{{ ns.last }} {{ messages | length }} {{ messages | map(attribute='role') | join(',') }} {{ tools is none }}
{{ messages | selectattr('role', 'equalto', 'user') | list | tojson(indent=2) }} {{ unknown | default('none') }}
{{ pad_token }}{{ documents }}""",
    "marked for training": """\
{%- for message in messages %}{{ message.role }}: {% if message.role == 'assistant' %}
{% generation %}
{% set inner = 1 %}{{ message.content }}{{ eos_token }}
{% endgeneration %}
{% else %}{{ message.content }}
{% endif %}{{ inner }}{% endfor %}""",
    "time": "{{ strftime_now('%d %b %Y') }}{% for message in messages %}{{ message.content }}{% endfor %}",
    "optional keys": """\
{% for message in messages %}{{ message.role }}{% if 'name' in message %}({{ message.name }}){% endif %}\
{% if message.tool_calls is defined %}{{ message.tool_calls | tojson }}{% endif %}\
{% if message.content is string %}{{ message.content }}{% else %}{% for part in message.content %}\
{% if part.type == 'text' %}{{ part.text }}{% else %}<{{ part.type }}>{% endif %}{% endfor %}{% endif %}{% endfor %}""",
}  # fmt: skip
USER = {"role": "user", "content": "  Was ist <|im_end|> {{ 1 }} 🙂?\n"}
CHATS: dict[str, list[dict[str, Any]]] = {
    "one": [USER],
    "turns": [
        USER,
        {"role": "assistant", "content": "Tea & 'cake'"},
        {"role": "user", "content": "Why?", "name": None},
    ],
    "system": [{"role": "system", "content": "Be brief."}, USER, {"role": "assistant", "content": "x"}],
    "wrong order": [{"role": "assistant", "content": "x"}, USER],
    "tools": [
        USER,
        {"role": "assistant", "content": None, "tool_calls": [{"name": "f", "arguments": {"a": [1, None]}}]},
    ],
    "parts": [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "What?"}], "name": "Ada"}],
}
TOKENS = {"bos_token": "<bos>", "eos_token": "<eos>", "pad_token": "<pad>"}


def save(folder: Path, template: str) -> PreTrainedTokenizerFast:
    """Write the tokenizer of a checkpoint with transformers, which keeps the template in a file of its own."""
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=byte_tokenizer(), chat_template=template, **TOKENS)
    tokenizer.save_pretrained(folder)
    return AutoTokenizer.from_pretrained(folder)


@pytest.mark.parametrize("prompted", [True, False])
@pytest.mark.parametrize("chat", CHATS)
@pytest.mark.parametrize("template", TEMPLATES)
def test_prompts_equal_those_of_transformers(tmp_path: Path, template: str, chat: str, prompted: bool) -> None:
    theirs, ours = save(tmp_path, TEMPLATES[template]), read_chat_template(tmp_path)
    messages = CHATS[chat]
    try:
        wanted = theirs.apply_chat_template(messages, tokenize=False, add_generation_prompt=prompted)
    except Exception as error:
        with pytest.raises(ArtifactError, match=re.escape(" ".join(str(error).split()))):
            ours.render(messages, add_generation_prompt=prompted)
        return
    prompt = ours.render(messages, add_generation_prompt=prompted)
    assert prompt == wanted
    assert prompt
    ids = theirs.apply_chat_template(messages, add_generation_prompt=prompted)["input_ids"]
    assert byte_tokenizer().encode(prompt, add_special_tokens=False).ids == ids


def test_most_prompts_are_compared(tmp_path: Path) -> None:
    """The comparison above is not of errors alone."""
    rendered = 0
    for source in TEMPLATES.values():
        for chat in CHATS.values():
            try:
                rendered += bool(ChatTemplate(source, TOKENS).render(chat))
            except ArtifactError:
                continue
    assert rendered > 0.7 * len(TEMPLATES) * len(CHATS)


def test_variables_equal_those_of_transformers(tmp_path: Path) -> None:
    source = "{{ tools | tojson }}{{ enable_thinking }}{{ bos_token }}{{ messages[0].content }}"
    theirs, ours = save(tmp_path, source), read_chat_template(tmp_path)
    tools = [{"type": "function", "function": {"name": "f", "description": "F.", "parameters": {"type": "object"}}}]
    given: dict[str, Any] = {"tools": tools, "enable_thinking": False, "bos_token": "<s>"}
    assert ours.render([USER], **given) == theirs.apply_chat_template([USER], tokenize=False, **given)


@pytest.mark.parametrize("name", ["reasoning_content", "thinking", "reasoning"])
def test_names_of_reasoning_equal_those_of_transformers(tmp_path: Path, name: str) -> None:
    source = "{% for message in messages %}{{ message | dictsort }}{% endfor %}"
    theirs, ours = save(tmp_path, source), read_chat_template(tmp_path)
    chat = [USER, {"role": "assistant", "content": "4", name: "2 + 2"}, {"role": "assistant", "content": "5", name: ""}]
    assert ours.render(chat) == theirs.apply_chat_template(chat, tokenize=False)


@pytest.mark.parametrize("numbered", [False, True])
def test_tokens_of_templates_equal_those_of_transformers(tmp_path: Path, numbered: bool) -> None:
    """special_tokens_map.json has precedence, unless ``added_tokens_decoder`` is stated; a model may have own roles."""
    source = "{{ bos_token }}{{ eos_token }}{{ pad_token }}{{ sep_token }}{{ image_token }}{{ audio_token }}"
    save(tmp_path, source)
    path = tmp_path / "tokenizer_config.json"
    config = json.loads(path.read_text()) | {"image_token": "<img>", "extra_special_tokens": {"audio_token": "<sound>"}}
    if numbered:
        config["added_tokens_decoder"] = {"257": {"content": "<bos>", "special": True}}
    path.write_text(json.dumps(config))
    named = {"bos_token": {"content": "<eos>"}, "sep_token": "<mask>"}
    (tmp_path / "special_tokens_map.json").write_text(json.dumps(named))
    wanted = AutoTokenizer.from_pretrained(tmp_path).apply_chat_template([USER], tokenize=False)
    assert read_chat_template(tmp_path).render([USER]) == wanted
    assert wanted.startswith("<bos>" if numbered else "<eos>")
    assert wanted.endswith("<img><sound>")


NAMED = [{"name": "tool_use", "template": "tools"}, {"name": "default", "template": "{{ eos_token }}named"}]


@pytest.mark.parametrize("file", [None, "from the file"])
@pytest.mark.parametrize(
    "named",
    [NAMED, [{"name": "default", "template": "first"}, *NAMED], {row["name"]: row["template"] for row in NAMED}],
    ids=["one", "two of a name", "an object"],
)
def test_places_of_templates(tmp_path: Path, named: object, file: str | None) -> None:
    """The file has precedence; of named templates, ``default`` is taken, the last if there are several."""
    theirs = save(tmp_path, "unused")
    (tmp_path / "chat_template.jinja").unlink()
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({**config, "chat_template": named}))
    if file is not None:
        (tmp_path / "chat_template.jinja").write_text(file)
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    wanted = theirs.apply_chat_template([USER], tokenize=False)
    assert read_chat_template(tmp_path).render([USER]) == wanted == (file or "<eos>named")


@pytest.mark.parametrize(
    ("content", "error"),
    [
        (None, "the model has no chat template"),
        ({"chat_template": None}, "the model has no chat template"),
        ({"chat_template": [{"name": "rag", "template": "x"}]}, "the model has no chat template"),
        ({"chat_template": 3}, "chat_template must be a text, got int"),
        ({"chat_template": [1]}, "chat_template must be a text, or a list of objects with name and template"),
        ({"chat_template": [{"name": "default"}]}, "chat_template must be a text, or a list of objects"),
        ({"chat_template": {"default": 1}}, "chat_template must be a text, got int"),
        ({"chat_template": "{{ 1 }}" * 10**5}, "not a chat template .700,000 characters: at most 500,000 are allowed"),
        ({"chat_template": "a\n{% for %}"}, r"not a chat template \(Expected an expression, .* in line 2\)"),
        ({"chat_template": "{{ x | no_such }}"}, "not a chat template .No filter named 'no_such'"),
    ],
)
def test_bad_templates(tmp_path: Path, content: object, error: str) -> None:
    if content is not None:
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(content))
    with pytest.raises(ArtifactError, match=error) as caught:
        read_chat_template(tmp_path)
    assert str(tmp_path) in str(caught.value)


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ raise_exception.__globals__.x }}",
        "{{ namespace.__init__.__globals__ }}",
        "{{ dict.__globals__.x }}",
        "{% set ns = namespace() %}{% set ns.__class__ = 1 %}",
        "{{ namespace(__init__=1) }}",
        "{{ messages.append(1) }}",
        "{% include '/etc/passwd' %}",
        "{{ range(1000000000) | list }}",
        "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
        "{{ 'a' * 10 ** 10 }}",
        "{{ 10 ** 10 * [1] }}",
        "{{ 9 ** (9 ** 9) }}",
        "{{ 1 / 0 }}",
        "{{ messages + 1 }}",
    ],
)
def test_sandbox(source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendering, "_SECONDS", 0.3)  # of 5, to be quick
    with pytest.raises(ArtifactError, match=r"^(not a chat template|the chat template refuses it) \(.*\)(: input 1)?$"):
        ChatTemplate(source).render([USER], where="input 1")


BIG = "{% set big = 'a' * 9999990 %}"
LIST = "{% set big = ['a' * 10**5] * 99 %}"


@pytest.mark.slow_after(3)
@pytest.mark.parametrize(
    "source",
    [
        "{{ ('f' * 10**6) | int(base=16) // (('f' * 10**5) | int(base=16)) > 1 }}",
        "{{ ('ab' * 10**6).strip('x' * 10**6 ~ 'ba') }}",
        "{{ ('ab' * 10**6) | trim('x' * 10**6 ~ 'ba') }}",
        "{{ 'a'.ljust(999999999) }}",
        BIG + "{% for i in range(99999) %}{{ big }}{% endfor %}",
        "{% set ns = namespace(x=[1]) %}{% for i in range(60) %}{% set ns.x = ns.x + ns.x %}{% endfor %}",
        "{{ ('a' * 10**6) | replace('', 'b' * 10**6) }}",
        "{{ 'a' * 2 * 10**7 }}",
        "{% macro m(n) %}{% if n %}{{ m(n-1) }}{{ m(n-1) }}{% endif %}{% endmacro %}{{ m(60) }}",
        "{% macro m(n) %}{% if n %}{% set a = m(n-1) ~ m(n-1) %}{% endif %}{% endmacro %}{{ m(60) }}",
        "{% macro m(n) %}{% if n %}{% call m(n-1) %}{% endcall %}{% call m(n-1) %}{% endcall %}{% endif %}"
        "{{ caller() if caller }}{% endmacro %}{{ m(60) }}",
        "{% for x in [[1, 1]] * 9 recursive %}{{ loop([1]) if loop.depth < 60 }}{{ loop([1]) if loop.depth < 60 }}"
        "{% endfor %}",
        "{{ lipsum(n=100000) }}",
        BIG + "{% set ns = namespace(x=big) %}{% for i in range(40) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}",
        BIG + "{% set ns = namespace(x=big) %}{% for i in range(40) %}{% set ns.x = ns.x + ns.x %}{% endfor %}",
        BIG + "{% for i in range(99999) %}{% set x = big[1:] + 'a' %}{% endfor %}",
        BIG + "{% for i in range(99999) %}{% if big[1:] in big %}{% endif %}{% endfor %}",
        BIG + "{% set x %}{% for i in range(99999) %}{{ big }}{% endfor %}{% endset %}",
        BIG + "{% filter upper %}{% for i in range(99999) %}{{ big }}{% endfor %}{% endfilter %}",
        BIG + "{% macro m() %}{% for i in range(99999) %}{{ big }}{% endfor %}{% endmacro %}{% set x = m() %}",
        "{% set x %}{% for i in range(99999) %}{% for j in range(99999) %}" + "x" * 10**4 + "{% endfor %}{% endfor %}"
        "{% endset %}",
        "{% for i in range(99999) %}{% for j in range(99999) %}{{ i - j }}{% endfor %}{% endfor %}",
        BIG + "{% for i in range(99999) %}{% set x = big[i:] %}{% endfor %}",
        "{% set ns = namespace(x=[1]) %}{% for i in range(60) %}{% set ns.x = [ns.x, ns.x] %}{% endfor %}{{ ns.x }}",
        "{% set ns = namespace(x=(1,)) %}{% for i in range(60) %}{% set ns.x = {1: ns.x, 2: ns.x} %}{% endfor %}"
        "{{ ns.x }}",
        "{% set ns = namespace(x=9) %}{% for i in range(60) %}{% set ns.x = ns.x * ns.x %}{% endfor %}",
        "{% macro m(n) %}{{ m(varargs, varargs, n) }}{% endmacro %}{{ m(1, 2) }}",
        LIST + "{{ ('a' * 10**6).join(big) }}",
        LIST + "{{ big | join('a' * 10**6) }}",
        "{{ range(9999) | map('string') | join('a' * 10**6) }}",
        "{{ ('a' * 10**6).join(range(9999) | map('string')) }}",
        "{{ ('a' * 10**6).replace('a', 'b' * 10**6) }}",
        "{{ ('{0}' * 10**4).format('a' * 10**6) }}",
        "{{ ('{a}' * 10**4).format(a='a' * 10**6) }}",
        "{{ ('{a}' * 10**4).format_map({'a': 'a' * 10**6}) }}",
        "{{ '{:999999999}'.format(1) }}",
        "{{ '{:{}}'.format(1, 999999999) }}",
        "{{ ('%s' * 10**4) % (('a' * 10**6,) * 10**4) }}",
        "{{ ('%(a)s' * 10**4) | format(a='a' * 10**6) }}",
        "{{ '%999999999d' % 1 }}",
        "{{ '%*d' | format(999999999, 1) }}",
        "{{ 'a'.rjust(999999999) }}",
        "{{ 'a'.center(999999999) }}",
        "{{ 'a'.zfill(999999999) }}",
        "{{ ('\\t' * 10**4).expandtabs(999999) }}",
        "{{ ('a' * 10**5).translate({97: 'a' * 10**6}) }}",
        "{{ (1).to_bytes(999999999) }}",
        "{{ 'a' | center(999999999) }}",
        "{{ ('\\na' * 10**4) | indent(999999) }}",
        "{{ ('\\na' * 10**4) | indent('a' * 10**6) }}",
        "{{ ('aa ' * 10**4) | wordwrap(2, wrapstring='a' * 10**6) }}",
        "{{ ('a' * 10**6) | wordwrap(1) }}",
        "{{ [1] | batch(999999999, 0) | list }}",
        "{{ [1] | slice(999999999) | list }}",
        "{{ 1.5 | round(999999999, 'ceil') }}",
        "{{ [[1]] | tojson(indent=999999999) }}",
        "{{ ([1] * 10**4) | tojson(separators=('a' * 10**6, ':')) }}",
        "{{ range(99999) | map('center', 10**6) | list }}",
        "{{ ([['a' * 10**4] * 99] * 9999) | sum(start=[]) }}",
    ],
)  # fmt: skip
def test_templates_that_take_the_machine(source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendering, "_SECONDS", 0.3)  # of 5, to be quick
    start = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    refusal = r"takes more than|is longer than|nested too deeply"
    with pytest.raises(ArtifactError, match=rf"({refusal})"):
        ChatTemplate(source).render([USER], where="input 1")
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - start < 10**6  # kilobytes


def test_one_template_does_not_affect_another(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor does a process that was killed, or an interrupt while a template is rendered."""
    monkeypatch.setattr(rendering, "_SECONDS", 0.3)
    harmless, hostile = ChatTemplate("{{ messages[0].role }}"), ChatTemplate("{{ 'a' * 10**10 }}")
    slow = ChatTemplate("{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}")
    for template, error in ((hostile, "more than 512 MiB of memory"), (slow, "more than 0.3 s of processor time")):
        with pytest.raises(ArtifactError, match=error):
            template.render([USER])
        assert harmless.render([USER]) == "user"
    process = rendering._renderers[rendering._SERVER]._process
    process.kill()
    process.wait()
    assert harmless.render([USER]) == "user"
    monkeypatch.setattr(rendering, "_SECONDS", 60)
    before = signal.signal(signal.SIGALRM, signal.default_int_handler)
    signal.setitimer(signal.ITIMER_REAL, 0.5)
    with pytest.raises(KeyboardInterrupt):
        slow.render([USER])
    signal.signal(signal.SIGALRM, before)
    assert harmless.render([USER]) == "user"


def test_variables_are_plain_data() -> None:
    template = ChatTemplate("{{ tools }}")
    assert template.render([USER], tools=[{"é": None}]) == "[{'é': None}]"
    with pytest.raises(ArtifactError, match=r"refuses it .Object of type object is not JSON serializable"):
        template.render([USER], tools=object())


@pytest.mark.parametrize(
    ("messages", "error"),
    [
        ([], "not a list of messages"),
        ("hello", "not a list of messages"),
        ({"role": "user", "content": "x"}, "not a list of messages"),
        (["hello"], "not a list of messages"),
        ([{"content": "x"}], "message 1 has no role"),
        ([USER, {"role": 3, "content": "x"}], "message 2 has no role"),
        ([{"role": "user"}], "message 1 has no content"),
        ([{"role": "user", "content": 3}], "message 1 has no content"),
        ([{"role": "user", "content": "x", "extra": object()}], "not a list of messages .Object of type object"),
    ],
)
def test_bad_messages(messages: Any, error: str) -> None:
    with pytest.raises(ArtifactError, match=error):
        ChatTemplate("{{ messages }}").render(messages)
