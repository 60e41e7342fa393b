"""A small model that is trained to call functions, and its chats."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from zoo.tokenizers.chat.template import ChatTemplate

__all__ = ["CHATS", "HERMES", "TOOLS", "train_caller"]

HERMES = r"""
{%- if tools %}{{- '<|im_start|>system\nTools:' }}
{%- for tool in tools %}{{- ' ' + tool.function.name }}{%- endfor %}
{{- '\nCall with <tool_call>\n{"name": ..., "arguments": ...}\n</tool_call><|im_end|>\n' }}{%- endif %}
{%- for message in messages %}
{{- '<|im_start|>' + message.role }}
{%- if message.content %}{{- '\n' + message.content }}{%- endif %}
{%- for call in message.tool_calls or [] %}
{{- '\n<tool_call>\n{"name": "' + call.function.name + '", "arguments": ' }}
{{- (call.function.arguments | tojson) + '}\n</tool_call>' }}
{%- endfor %}
{{- '<|im_end|>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"""
"""A chat template with the calls of Hermes and Qwen. It writes the names of tools alone, so that prompts are short."""
MARKS = ("<tool_call>", "</tool_call>")


def function(name: str, **properties: Any) -> dict[str, Any]:
    """Return a tool all of whose arguments are needed."""
    parameters = {"type": "object", "properties": properties, "required": [*properties], "additionalProperties": False}
    return {"type": "function", "function": {"name": name, "description": f"The {name}.", "parameters": parameters}}


WEATHER = function("get_weather", city={"type": "string", "maxLength": 8})
ADD = function("add", a={"type": "integer"}, b={"type": "integer"})
TOOLS = [WEATHER, ADD]


def called(name: str, identifier: str = "call_1", **arguments: Any) -> dict[str, Any]:
    """Return a call of a function as messages have it."""
    return {"id": identifier, "type": "function", "function": {"name": name, "arguments": json.dumps(arguments)}}


def _asks(question: str, answer: Mapping[str, Any], *more: Mapping[str, Any]) -> list[dict[str, Any]]:
    return [{"role": "user", "content": question}, {"role": "assistant", **answer}, *map(dict, more)]


CITIES = ("Paris", "Rome", "Oslo")
CHATS = [
    *(_asks(f"weather in {city}?", {"tool_calls": [called("get_weather", city=city)]},
            {"role": "tool", "tool_call_id": "call_1", "content": "sunny"},
            {"role": "assistant", "content": f"It is sunny in {city}."}) for city in CITIES),
    _asks("add 2 and 3", {"content": "Let me see.", "tool_calls": [called("add", a=2, b=3)]}),
    _asks("weather in Paris and Rome?", {"tool_calls": [called("get_weather", city=city) for city in CITIES[:2]]}),
    _asks("hello", {"content": "Hello! How are you?"}),
]  # fmt: skip
"""What the model is trained on: it answers a chat that begins like one of these as this does."""


def _plain(chat: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return a chat with the arguments of calls as objects."""
    found = json.loads(json.dumps(chat))
    for message in found:
        for call in message.get("tool_calls", ()):
            call["function"]["arguments"] = json.loads(call["function"]["arguments"])
    return list(found)


def train_caller(folder: Path, *, template: str = HERMES, marks: Sequence[str] = MARKS, special: bool = False) -> Path:
    """Write a checkpoint of a model that has learned the chats by heart.

    Args:
        folder: where to write it.
        template: its chat template.
        marks: texts that are tokens of their own.
        special: whether these tokens are special.
    """
    tokens = {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>"}
    written = ChatTemplate(template, tokens)
    texts = [written.render(_plain(chat), add_generation_prompt=False, tools=TOOLS) for chat in CHATS]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    names = list(tokens.values())
    tokenizer.train_from_iterator(
        texts, trainers.BpeTrainer(vocab_size=512, special_tokens=names, initial_alphabet=alphabet, show_progress=False)
    )
    tokenizer.add_tokens([AddedToken(mark, special=special, normalized=False) for mark in marks])
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=tokenizer.get_vocab_size(), hidden_size=64, intermediate_size=128, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=1024, bos_token_id=0, eos_token_id=1,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    rows = [tokenizer.encode(text, add_special_tokens=False).ids for text in texts]
    longest = max(map(len, rows))
    ids = torch.tensor([[*row, *[1] * (longest - len(row))] for row in rows])
    starts = [len(tokenizer.encode(text[: text.index("assistant")], add_special_tokens=False).ids) for text in texts]
    kept = [[-100] * start + row[start:] for row, start in zip(rows, starts, strict=True)]
    labels = torch.tensor([[*row, *[-100] * (longest - len(row))] for row in kept])
    mask = torch.tensor([[1] * len(row) + [0] * (longest - len(row)) for row in rows])
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for step in range(400):
        loss = model(input_ids=ids, attention_mask=mask, labels=labels).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 10 == 0 and loss.item() < 0.006:
            break
    model.save_pretrained(folder)
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **tokens).save_pretrained(folder)
    (folder / "chat_template.jinja").write_text(template)
    return folder
