"""The table that ``__torch_function__`` looks a torch function up in.

It is empty at first; ``dispatch`` sets the resolver that fills it entry by entry,
each time a function is met for the first time.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

Handler = Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]


class Handlers(dict[Any, Handler]):
    """torch function -> handler(func, args, kwargs); made on the first lookup."""

    resolver: Callable[[Any], Handler]

    def __missing__(self, func: Any) -> Handler:
        handler = self[func] = self.resolver(func)
        return handler


HANDLERS = Handlers()


def handles(*funcs: Any) -> Callable[[Handler], Handler]:
    """Decorator: the handler of these torch functions."""

    def register(handler: Handler) -> Handler:
        for func in funcs:
            HANDLERS[func] = handler
        return handler

    return register
