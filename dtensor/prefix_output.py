"""Puts ``[rank] `` before each line that a program writes, then becomes the program.

``dtensor-run --prefix`` starts it as a script on every rank, before the user's program:
``prefix_output.py NAME,NAME,... PROGRAM ARGUMENT ...``, where one of the names is the
variable in which the launcher says the rank. It imports nothing but the standard
library, and nothing of ours.

MPI launchers have options for this, but each its own, and MPICH's marks whatever piece
of a line it happens to read. Here the program keeps its process, which the MPI launcher
knows and signals; its output goes through a second process, in a session of its own,
that ends when all output has been passed on, also after the program was killed.
"""

from __future__ import annotations

import os
import re
import selectors
import sys
from collections.abc import Sequence

_LINES = re.compile(rb"[^\r\n]*(?:\r\n|\n|\r)")


class Prefixer:
    """Turns the pieces in which output comes into lines with a prefix.

    Args:
        prefix: What every line begins with.

    Example:
        >>> lines = Prefixer(b"[1] ")
        >>> lines.add(b"a li")
        b''
        >>> lines.add(b"ne\\nand mo")
        b'[1] a line\\n'
        >>> lines.end()
        b'[1] and mo\\n'
    """

    def __init__(self, prefix: bytes) -> None:
        self._prefix = prefix
        self._part = b""

    def add(self, data: bytes) -> bytes:
        """Take a piece; returns the lines that it completes."""
        self._part += data
        lines = _LINES.findall(self._part)
        self._part = self._part[sum(map(len, lines)) :]
        return b"".join(self._prefix + line for line in lines)

    def end(self) -> bytes:
        """Returns the last line, if it had no end."""
        part, self._part = self._part, b""
        return self._prefix + part + b"\n" if part else b""


def pass_on(routes: Sequence[tuple[int, int]], prefix: bytes) -> None:
    """Copy until all sources end.

    Args:
        routes: (source, sink) file descriptors.
        prefix: What every line begins with.
    """
    with selectors.DefaultSelector() as selector:
        for source, sink in routes:
            state = (sink, Prefixer(prefix))
            selector.register(source, selectors.EVENT_READ, state)
        while selector.get_map():
            for key, _ in selector.select():
                sink, lines = key.data
                data = os.read(key.fd, 1 << 16)
                _write(sink, lines.add(data) if data else lines.end())
                if not data:
                    selector.unregister(key.fd)


def _write(sink: int, data: bytes) -> None:
    while data:
        data = data[os.write(sink, data) :]


def main(arguments: Sequence[str]) -> None:
    """Start the second process and become the program; does not return."""
    names, *program = arguments
    ranks = [os.environ[name] for name in names.split(",") if name in os.environ]
    prefix = f"[{ranks[0] if ranks else '?'}] ".encode()
    pipes = [(*os.pipe(), sink) for sink in (1, 2)]
    # Forked twice, so that the program has no child that it does not know of.
    child = os.fork()
    if child == 0:
        if os.fork() == 0:
            os.setsid()
            for _, write_end, _ in pipes:
                os.close(write_end)
            try:
                pass_on([(read_end, sink) for read_end, _, sink in pipes], prefix)
            except OSError:  # nobody reads any more
                os._exit(1)
        os._exit(0)
    os.waitpid(child, 0)
    for read_end, write_end, sink in pipes:
        os.dup2(write_end, sink)
        os.close(write_end)
        os.close(read_end)
    os.execvp(program[0], program)


if __name__ == "__main__":
    main(sys.argv[1:])
