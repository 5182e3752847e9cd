"""Arguments given by name, in the order of the op's signature.

A rule counts operands by position. ``torch.mm(mat2=b, input=a)`` names them, in any
order, and torch takes NumPy's names (``x1``, ``axis``, ``keepdims``) as well. Here such
a call gets torch's own names, its first argument by position, the others in the order
that the op's schema has.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from dtensor.calls import name_of

# NumPy's names, which torch takes, and what a schema calls a method's tensor.
ALIASES = {
    "axis": "dim",
    "keepdims": "keepdim",
    "x": "input",
    "a": "input",
    "x1": "input",
    "x2": "other",
    "self": "input",
}


@functools.cache
def signatures(func: Any) -> tuple[tuple[str, ...], ...]:
    """Names of the arguments of a torch function, per overload; empty if unknown."""
    if isinstance(func, torch._ops.OpOverload):
        found = [func._schema]
    else:
        name = name_of(func)
        named = name if "::" in name else f"aten::{name}"
        found = torch._C._jit_get_schemas_for_operator(named)
    own = isinstance(func, (torch._ops.OpOverload, torch._ops.OpOverloadPacket))
    return tuple(
        tuple("input" if a.name == "self" and not own else a.name for a in s.arguments)
        for s in found
    )


def by_signature(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The same call with its named arguments in the order of the signature.

    Args:
        func: The torch function, one that runs in C++.
        args: Positional arguments.
        kwargs: Named arguments.
    """
    tensors = 0
    for k, v in kwargs.items():
        if k in ALIASES:
            break
        tensors += isinstance(v, (torch.Tensor, list, tuple))
    else:  # one tensor after positional ones is in its place
        if args and tensors < 2 or not tensors:
            return args, kwargs
    known = signatures(func)
    here = {n for s in known for n in s}
    named = {
        k if k in here else ALIASES.get(k, k) if ALIASES.get(k) in here else k: v
        for k, v in kwargs.items()
    }
    for names in known:
        if named.keys() <= set(names):
            if not args and names[0] in named:
                args = (named.pop(names[0]),)
            return args, {n: named[n] for n in names if n in named}
    return args, named
