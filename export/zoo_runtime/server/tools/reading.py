"""Calls in a text that grows: what is content, and what is a call."""

from __future__ import annotations

from collections.abc import Collection, Generator, Iterator
from dataclasses import dataclass

from zoo_runtime.server.tools.formats import Call, ToolFormat
from zoo_runtime.server.tools.json_text import MalformedError, UnfinishedError

__all__ = ["CallPart", "CallReader"]

_SPACE = " \t\n\r"


@dataclass(frozen=True)
class CallPart:
    """The beginning of a call, with its name, or more of its arguments."""

    index: int
    """Place of the call in the answer."""
    name: str | None = None
    arguments: str = ""


class CallReader:
    """Divides a text into content, as str, and calls, as :class:`CallPart`.

    How the text is cut into pieces changes nothing but the cuts of the parts. A text that looks like a call, but is
    not one of a known function with an object of arguments, is content. White space beside a call is left out.

    Args:
        form: how calls are written.
        names: names of the functions.
        certain: whether the text is known to become valid: then arguments are returned before they are complete.
    """

    def __init__(self, form: ToolFormat, names: Collection[str], *, certain: bool = False) -> None:
        self._form = form
        self._names = frozenset(names)
        self._certain = certain
        self._held = ""
        """Text that may belong to a call."""
        self._opened: tuple[int, str] | None = None
        """The place of the text that may be a call, and its opening."""
        self._closes = False
        """Whether the mark after a call may follow."""
        self._follows = False
        """Whether there was no content since the last call."""
        self._sent: list[int] = []
        """Number of characters of arguments that were returned, for each call of the opened text."""
        self.count = 0
        """Number of calls so far."""
        self.is_cut = False
        """Whether the text ended within a call."""

    def feed(self, text: str) -> list[str | CallPart]:
        """Add text; return what is certain."""
        self._held += text
        return list(self._parts(is_last=False))

    def end(self) -> list[str | CallPart]:
        """Return the rest, after the last text."""
        return list(self._parts(is_last=True))

    def _parts(self, *, is_last: bool) -> Iterator[str | CallPart]:
        while True:
            if self._opened is None:
                if self._closes and not self._close(is_last):
                    return
                if not (yield from self._search(is_last)):
                    return
            assert self._opened is not None
            place, opening = self._opened
            try:
                calls, end = self._form.read(self._held[place:], opening)
                if any(call.name not in self._names for call in calls):
                    raise MalformedError(end)
            except UnfinishedError:
                if self._certain:
                    yield from self._news(self._form.begun(self._held[place:]))
                if is_last:
                    yield from self._give_up()
                return
            except MalformedError as error:
                self._opened, self._follows = None, False
                yield self._take(place + (error.end or len(opening)))
            else:
                yield from self._news(calls)
                self._take(place + end)
                self.count += len(calls)
                self._opened, self._sent = None, []
                self._closes = self._follows = True

    def _news(self, calls: list[Call]) -> Iterator[CallPart]:
        """Yield what is new of the calls of the opened text."""
        for place, call in enumerate(calls):
            index = self.count + place
            if place == len(self._sent):
                self._sent.append(0)
                yield CallPart(index, call.name)
            if fresh := call.arguments[self._sent[place] :]:
                self._sent[place] = len(call.arguments)
                yield CallPart(index, arguments=fresh)

    def _give_up(self) -> Iterator[str]:
        """End within what may be a call. The beginning of one in a certain text is no content."""
        text = self._take(len(self._held))
        self.count += len(self._sent)
        self.is_cut = bool(self._sent)
        if not self._certain:
            yield text

    def _close(self, is_last: bool) -> bool:
        """Leave out the closing mark after a call. Return False if it may be there, but more text is needed."""
        closing, rest = self._form.closing, self._held.lstrip(_SPACE)
        if closing and closing.startswith(rest) and rest != closing:
            self._held = "" if is_last else self._held
            return is_last
        if closing and rest.startswith(closing):
            self._held = rest[len(closing) :]
        self._closes = False
        return True

    def _search(self, is_last: bool) -> Generator[str, None, bool]:
        """Yield content up to the next opening. Return whether there is one."""
        openings = self._form.openings
        found = [(place, opening) for opening in openings if (place := self._held.find(opening)) >= 0]
        place, opening = min(found, default=(len(self._held), ""))
        end = place
        if not found and not is_last:
            sizes = [size for text in openings for size in range(1, len(text)) if self._held.endswith(text[:size])]
            end -= max(sizes, default=0)
        shown = self._held[:end]
        if self._follows and not shown.strip(_SPACE + self._form.joint):
            shown = ""  # what joins calls is no content
        elif found or self._follows or not is_last:
            shown = shown.rstrip(_SPACE)
        if shown:
            self._follows = False
            yield self._take(len(shown))
        if found:
            self._opened = (place - len(shown), opening)
        return bool(found)

    def _take(self, size: int) -> str:
        text, self._held = self._held[:size], self._held[size:]
        return text
