"""What a style is: one method that says how a module lies along one mesh axis.

A style describes layout only. It holds no mesh; ``parallelize_module`` binds it to
one, checks it, and does all the work, so that every style keeps frozen parameters
frozen, ties tied and failures without trace.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import nn

from dtensor.placement import Placement


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
    """

    given: Placement | None = None
    wanted: Placement | None = None
    size: int | None = None


@dataclass(frozen=True)
class Layout:
    """How a module lies along one mesh axis: what ``ParallelStyle.layout`` returns.

    Args:
        parameters: Placement of parameters and buffers by name (dotted for those of
            submodules). Those not named are replicated.
        inputs: One port for all tensors that come in, or one (or None) for each
            positional argument. None: inputs are left alone.
        keywords: Ports of keyword arguments, by name.
        outputs: One port for all tensors that go out, or one (or None) for each.
        local: The outputs are plain local tensors instead of DTensors.
        around: What plain tensors are along this axis in all modules inside this one
            (None: each rank holds all of the value).
    """

    parameters: Mapping[str, Placement] = field(default_factory=dict)
    inputs: Port | tuple[Port | None, ...] | None = None
    keywords: Mapping[str, Port] = field(default_factory=dict)
    outputs: Port | tuple[Port | None, ...] | None = None
    local: bool = False
    around: Placement | None = None


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

    def __repr__(self) -> str:
        given = ", ".join(
            f"{name}={value}" for name, value in vars(self).items() if value is not None
        )
        return f"{type(self).__name__}({given})"
