"""What shells are told about candidates. click's scripts add a space after ``KEY=``, and bash splits words at ``=``."""

from __future__ import annotations

import os
import re
import shlex
from typing import Any

from click.shell_completion import (
    BashComplete,
    CompletionItem,
    FishComplete,
    ShellComplete,
    ZshComplete,
    add_completion_class,
    split_arg_string,
)

__all__ = ["register"]

_BASH = """\
%(complete_func)s() {
    local type value response
    response=$(env COMP_WORDS="${COMP_WORDS[*]}" COMP_CWORD="$COMP_CWORD" COMP_LINE="$COMP_LINE" \\
        COMP_POINT="$COMP_POINT" COMP_WORDBREAKS="$COMP_WORDBREAKS" %(complete_var)s=bash_complete "$1" 2>/dev/null)
    COMPREPLY=()
    while IFS=, read -r type value; do
        case $type in
            dir) compopt -o dirnames ;;
            file) compopt -o default ;;
            plain)
                COMPREPLY+=("$value")
                [[ $value == *[=/:] ]] && compopt -o nospace
                ;;
        esac
    done <<< "$response"
}

complete -o nosort -F %(complete_func)s %(prog_name)s
"""
_ZSH = """\
#compdef %(prog_name)s

%(complete_func)s() {
    local -a plain open described
    local type value help
    (( ! $+commands[%(prog_name)s] )) && return 1

    for type value help in "${(@f)$(env COMP_WORDS="${words[*]}" COMP_CWORD=$((CURRENT-1)) \\
            %(complete_var)s=zsh_complete %(prog_name)s 2>/dev/null)}"; do
        case $type in
            dir) _path_files -/ ;;
            file) _path_files ;;
            plain)
                if [[ $help != _ ]]; then
                    described+=("$value:$help")
                elif [[ $value == *[=/:] ]]; then
                    open+=("$value")
                else
                    plain+=("$value")
                fi
                ;;
        esac
    done
    (( $#described )) && _describe -V unsorted described -U
    (( $#plain )) && compadd -U -Q -V unsorted -a plain
    (( $#open )) && compadd -U -Q -S '' -V unsorted -a open
    return 0
}

if [[ $zsh_eval_context[-1] == loadautofunc ]]; then
    %(complete_func)s "$@"
else
    compdef %(complete_func)s %(prog_name)s
fi
"""
_SPECIAL = re.compile(r"""[\s"'\\$`&|;<>()*?\[\]{}!#]""")


def _escaped(text: str) -> str:
    """Put a backslash before each character that a shell would not take literally."""
    return _SPECIAL.sub(lambda match: "\\" + match[0], text)


def _has_open_quote(line: str) -> bool:
    try:
        shlex.split(line.rstrip("\\"))
    except ValueError:
        return True
    return False


def _option_part(incomplete: str) -> str:
    """Return ``--option=`` of a word that has one. click completes what comes after it."""
    return incomplete[: incomplete.index("=") + 1] if incomplete.startswith("-") and "=" in incomplete else ""


class _Words(ShellComplete):
    """Keeps the part of the current word that click leaves out of candidates."""

    _kept = ""

    def get_completion_args(self) -> tuple[list[str], str]:
        args, incomplete = super().get_completion_args()
        self._kept = _option_part(incomplete)
        return args, incomplete

    def format_completion(self, item: CompletionItem[Any]) -> str:
        if item.type != "plain" or not self._kept:
            return super().format_completion(item)
        return super().format_completion(CompletionItem(f"{self._kept}{item.value}", help=item.help))


class _Fish(_Words, FishComplete):
    pass


class _Zsh(_Words, ZshComplete):
    source_template = _ZSH

    def format_completion(self, item: CompletionItem[Any]) -> str:
        if item.type == "plain" and not item.help:
            item = CompletionItem(_escaped(item.value))
        return super().format_completion(item)


class _Bash(BashComplete):
    source_template = _BASH
    _kept = ""
    _cut = 0
    _quoted = False

    def get_completion_args(self) -> tuple[list[str], str]:
        """Split the line itself: bash has split words at ``=`` and ``:``. A script made by click gives no line."""
        if "COMP_LINE" not in os.environ:
            return super().get_completion_args()
        line = os.fsencode(os.environ["COMP_LINE"])[: int(os.environ["COMP_POINT"])]
        end = "\0"  # tells a finished word from one that continues
        *words, incomplete = split_arg_string(os.fsdecode(line) + end)
        incomplete = incomplete.removesuffix(end)
        self._quoted = _has_open_quote(os.fsdecode(line))
        if not self._quoted:
            breaks = set(os.environ.get("COMP_WORDBREAKS", "")) & set("=:")
            self._cut = max((incomplete.rfind(character) + 1 for character in breaks), default=0)
        self._kept = _option_part(incomplete)
        return words[1:], incomplete

    def format_completion(self, item: CompletionItem[Any]) -> str:
        if item.type != "plain":
            return super().format_completion(item)
        value = f"{self._kept}{item.value}"[self._cut :]
        return super().format_completion(CompletionItem(value if self._quoted else _escaped(value)))


def register() -> None:
    """Have click speak to shells through these classes."""
    for kind in (_Bash, _Zsh, _Fish):
        add_completion_class(kind)
