"""Inputs that wait for an engine, in an order that is fair to clients."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Hashable, Iterable, Iterator
from typing import Generic, TypeVar

__all__ = ["Waiting"]

T = TypeVar("T")


class Waiting(Generic[T]):
    """Items in turn: round robin of the clients, and for each client of its requests.

    So a request of many inputs, or many requests of one client, delay the first input of another client by one turn of
    each client that waits.
    """

    def __init__(self) -> None:
        self._clients: dict[Hashable, deque[deque[T]]] = {}
        """The requests of each client that waits. The next ones are first."""

    def __len__(self) -> int:
        return sum(len(request) for requests in self._clients.values() for request in requests)

    def __iter__(self) -> Iterator[T]:
        """Yield all items in the order in which :meth:`pop` would return them."""
        copied = Waiting[T]()
        for client, requests in self._clients.items():
            copied._clients[client] = deque(deque(request) for request in requests)
        while copied._clients:
            yield copied.pop()

    def add(self, items: Iterable[T], client: Hashable = None) -> None:
        """Add the items of a request."""
        if request := deque(items):
            self._clients.setdefault(client, deque()).append(request)

    def pop(self) -> T:
        """Remove and return the next item. Raises :class:`StopIteration` if there is none."""
        client = next(iter(self._clients))
        requests = self._clients.pop(client)
        request = requests.popleft()
        item = request.popleft()
        if request:
            requests.append(request)
        if requests:
            self._clients[client] = requests
        return item

    def remove(self, items: Collection[T]) -> None:
        """Remove items. The turn of others stays."""
        for client, requests in list(self._clients.items()):
            left = (deque(item for item in request if item not in items) for request in requests)
            kept = deque(request for request in left if request)
            if kept:
                self._clients[client] = kept
            else:
                del self._clients[client]

    def clear(self) -> None:
        """Remove all items."""
        self._clients.clear()
