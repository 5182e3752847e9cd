"""What a style is: one method that says how a module lies along one mesh axis.

A style describes layout only. It holds no mesh; ``parallelize_module`` binds it to
one, checks it, and does all the work, so that every style keeps frozen parameters
frozen, ties tied and failures without trace.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from dtensor.placement import Placement, Replicate
from dtensor.styles.lending import Lending


@dataclass(frozen=True, slots=True)
class Port:
    """One tensor that goes into, or comes out of, a module.

    Args:
        given: How the plain local tensors of the ranks make up the value, along the
            axis of the style. None: each holds all of it (``Replicate``).
        wanted: The placement that the DTensor is brought to. None: left as it is.
        size: Global length in elements of the dim that ``given`` shards, where the
            module knows it. Where it is not known the shards are compared, by one
            small all-gather.
        local: Hand it on as this rank's plain tensor instead of a DTensor.
    """

    given: Placement | None = None
    wanted: Placement | None = None
    size: int | None = None
    local: bool = False


Ports = Port | tuple[Port | None, ...] | None


@dataclass(frozen=True)
class Layout:
    """How a module lies along one mesh axis: what ``ParallelStyle.layout`` returns.

    Args:
        parameters: Placement of parameters and buffers by name (dotted for those of
            submodules). Those not named are replicated.
        inputs: One port for all tensors that come in, or one (or None) for each
            positional argument. None: inputs are left alone.
        keywords: Ports of arguments by name. The name is looked for among the keyword
            arguments of a call, then, by the signature, among the positional ones.
        outputs: One port for all tensors that go out, or one (or None) for each.
        around: What plain tensors are along this axis in all modules inside this one
            (None: each rank holds all of the value).
        lent: Other forms of parameters, by name, that the module's own code computes
            with; see ``lending.py``.
        average: Divide the cotangents of plain outputs by the ranks of the axis.
    """

    parameters: Mapping[str, Placement] = field(default_factory=dict)
    inputs: Ports = None
    keywords: Mapping[str, Port] = field(default_factory=dict)
    outputs: Ports = None
    around: Placement | None = None
    lent: Mapping[str, Lending] = field(default_factory=dict)
    average: bool = False

    def entries(self) -> list[Port]:
        """Ports of what comes in."""
        return [*_listed(self.inputs), *self.keywords.values()]

    def exits(self) -> list[Port]:
        """Ports of what goes out."""
        return _listed(self.outputs)

    @property
    def typed_inside(self) -> bool:
        """Whether the module's own code sees DTensors."""
        entries = self.entries()
        return any(not port.local for port in entries) or (
            bool(self.parameters) and not entries
        )

    @property
    def plain(self) -> bool:
        """Whether the style gives plain tensors, to the module or to its caller."""
        return any(port.local for port in [*self.entries(), *self.exits()])


def _listed(ports: Ports) -> list[Port]:
    listed = ports if isinstance(ports, tuple) else (ports,)
    return [port for port in listed if port is not None]


class ParallelStyle:
    """Base of all styles, of this project's and of yours.

    A style of your own is a class with one method. This one cuts the filters of a
    convolution, and gives the channels that result as a shard::

        class Filters(ParallelStyle):
            def layout(self, module):
                return Layout(
                    {"weight": Shard(0), "bias": Shard(0)},
                    inputs=Port(given=Replicate(), wanted=Replicate()),
                )

    Args:
        mesh_dim: Name (or number) of the mesh axis the style binds to. None: the
            ``mesh_dim`` of the call, else the only axis, else the one named "tp".
    """

    mesh_dim: str | int | None = None

    def __init__(self, *, mesh_dim: str | int | None = None) -> None:
        self.mesh_dim = mesh_dim

    def layout(self, module: nn.Module) -> Layout:
        """How ``module`` lies along the axis of this style.

        It must not change the module, and it must answer alike on every rank.

        Args:
            module: The module that the plan names.

        Raises:
            TypeError: A kind of module that the style has no layout for.
        """
        raise NotImplementedError(
            f"{type(self).__name__}: a style defines layout(self, module), got none. "
            f"Return a Layout from it."
        )

    def layout_over(self, module: nn.Module, ranks: int) -> Layout:
        """``layout``, for a style that depends on the number of ranks.

        Args:
            module: The module that the plan names.
            ranks: Number of ranks along the axis.
        """
        return self.layout(module)

    def __repr__(self) -> str:
        given = ", ".join(
            f"{name}={value!r}"
            for name, value in vars(self).items()
            if value is not None and not name.startswith("_")
        )
        return f"{type(self).__name__}({given})"

    # ---- reading arguments, for the styles -------------------------------------
    def _placement(self, name: str, given: Any, default: Placement) -> Placement:
        """One placement, as PyTorch takes it: itself, in a tuple of one, or None."""
        if given is None:
            return default
        if isinstance(given, (tuple, list)) and len(given) == 1:
            given = given[0]
        if not isinstance(given, Placement):
            raise TypeError(
                f"{type(self).__name__}: {name} is not a placement, got {given!r}, "
                f"expected Shard(dim), Replicate() or Partial() for the axis of the "
                f"style. Write for example {type(self).__name__}({name}=Replicate())."
            )
        return given

    def _placements(self, name: str, given: Any) -> tuple[Placement | None, ...] | None:
        """One placement, or one (or None) per tensor; None where none was given."""
        if given is None or isinstance(given, Placement):
            return None if given is None else (given,)
        if not isinstance(given, (tuple, list)):
            raise TypeError(
                f"{type(self).__name__}: {name} is not a row of placements, got "
                f"{given!r}, expected one placement (or None) per tensor. Write for "
                f"example {name}=(Shard(1), None)."
            )
        return tuple(
            None if one is None else self._placement(name, one, Replicate())
            for one in given
        )

    def _paired(
        self,
        given: tuple[str, tuple[Placement | None, ...] | None],
        wanted: tuple[str, tuple[Placement | None, ...] | None],
        local: bool,
    ) -> tuple[Port | None, ...] | None:
        """One port per tensor from two rows of placements; None where there are none."""
        (name, first), (other, second) = given, wanted
        if first is None and second is None:
            return None
        if first is None or second is None or len(first) != len(second):
            raise ValueError(
                f"{type(self).__name__}: {name} and {other} do not match, got {first} "
                f"and {second}, expected as many placements in both. Give each tensor "
                f"one in both, or None in both to leave it alone."
            )
        return tuple(
            None if p is None else Port(p, q, local=local)
            for p, q in zip(first, second, strict=True)
        )
