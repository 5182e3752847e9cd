"""``distribute_module``: lay a module out by functions instead of styles."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from dtensor.mesh.ambient import mesh_or_ambient
from dtensor.mesh.device_mesh import DeviceMesh
from dtensor.placement import Replicate, show
from dtensor.styles.crossing import CROSSING
from dtensor.styles.held import Held, check_weights, held_in, laid_out, lazy_names
from dtensor.styles.loading import watch_loading
from dtensor.tensor import DTensor

WHAT, DISTRIBUTED = "distribute_module", "_dtensor_distributed"

PartitionFn = Callable[[str, nn.Module, DeviceMesh], None]
ForwardFn = Callable[[nn.Module, Any, DeviceMesh], Any]


def distribute_module(
    module: nn.Module,
    device_mesh: DeviceMesh | None = None,
    partition_fn: PartitionFn | None = None,
    input_fn: ForwardFn | None = None,
    output_fn: ForwardFn | None = None,
    *,
    src_data_rank: int | None = 0,
) -> nn.Module:
    """Make a module's parameters and buffers DTensors, as ``partition_fn`` says.

    What ``partition_fn`` leaves plain is replicated, so without it everything is.
    Frozen parameters stay frozen, tied ones stay one parameter, and where a function
    fails the module stays as it was. Every rank of the mesh must call. Inputs are then
    DTensors, or made such by ``input_fn``; ``parallelize_module`` does that by itself.

    Args:
        module: The module; it is changed in place.
        device_mesh: The mesh; the ambient one by default.
        partition_fn: ``partition_fn(name, submodule, mesh)``, called for the module
            (named ``""``) and all its submodules. It registers new parameters, such as
            ``nn.Parameter(distribute_tensor(submodule.weight, mesh, [Shard(0)]))``.
        input_fn: ``input_fn(module, inputs, mesh)``, called before each forward with
            the tuple of positional inputs; gives those that the forward gets.
        output_fn: ``output_fn(module, outputs, mesh)``, called after each forward;
            gives what the caller gets.
        src_data_rank: For what is replicated: position in the mesh of the rank whose
            values count. None: the ranks hold the same values and nothing is sent.

    Returns:
        ``module``.

    Raises:
        ValueError: No mesh, a module that is laid out already, or tied parameters
            that were laid out unlike.
        TypeError: A function that does not take three arguments.

    Bytes sent per rank: at most those of the parameters and buffers (broadcasts).

    Example:
        >>> from dtensor.collectives.simulate import simulate
        >>> from dtensor.mesh.device_mesh import init_device_mesh
        >>> def program():
        ...     with init_device_mesh("cpu", (2,)):
        ...         linear = distribute_module(nn.Linear(4, 6))
        ...     return linear.weight.placements
        >>> simulate(program, ranks=2)
        [(Replicate(),), (Replicate(),)]
    """
    if not isinstance(module, nn.Module):
        raise TypeError(
            f"{WHAT}: not a module, got {type(module).__name__}, expected an "
            f"nn.Module. Call {WHAT}(module, mesh)."
        )
    mesh = mesh_or_ambient(WHAT, device_mesh)
    functions = (
        ("partition_fn", partition_fn, "name, submodule, mesh"),
        ("input_fn", input_fn, "module, inputs, mesh"),
        ("output_fn", output_fn, "module, outputs, mesh"),
    )
    for name, function, takes in functions:
        _check_function(name, function, takes)
    before = held_in(module)
    _check_fresh(module, before)
    check_weights(WHAT, module)
    with _Undone(module):
        if partition_fn is not None:
            for path, submodule in module.named_modules():
                partition_fn(path, submodule, mesh)
        _replicate_rest(module, before, mesh, src_data_rank)
    module.__dict__[DISTRIBUTED] = True
    if input_fn is not None:
        module.register_forward_pre_hook(_Inputs(input_fn, mesh))
    if output_fn is not None:
        module.register_forward_hook(_Outputs(output_fn, mesh))
    return module


class _Inputs:
    """Pre-hook that calls ``input_fn``; a class, so that modules can be pickled."""

    def __init__(self, function: ForwardFn, mesh: DeviceMesh) -> None:
        self.function, self.mesh = function, mesh

    def __call__(self, module: nn.Module, inputs: Any) -> Any:
        """The inputs that the forward gets."""
        return self.function(module, inputs, self.mesh)


class _Outputs(_Inputs):
    """Hook that calls ``output_fn``."""

    def __call__(self, module: nn.Module, inputs: Any, outputs: Any = None) -> Any:
        """The outputs that the caller gets."""
        return self.function(module, outputs, self.mesh)


class _Undone:
    """Puts all tables of a module back where the block fails."""

    def __init__(self, module: nn.Module) -> None:
        self.tables: list[tuple[dict[str, Any], dict[str, Any]]] = [
            (table, dict(table))
            for inner in module.modules()
            for table in (inner._parameters, inner._buffers, inner._modules)
        ]

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, *_: Any) -> None:
        if kind is not None:
            for table, content in self.tables:
                table.clear()
                table.update(content)


def _replicate_rest(
    module: nn.Module, before: list[Held], mesh: DeviceMesh, src: int | None
) -> None:
    """Lay out what is still plain; keep ties and frozen parameters as they were."""
    old = {(id(held.owner), held.table, held.name): held.tensor for held in before}
    now = held_in(module)
    # What became of each tensor that was there before.
    became: dict[int, tuple[Held, DTensor]] = {}
    for held in now:
        origin = old.get((id(held.owner), held.table, held.name), held.tensor)
        if not isinstance(held.tensor, DTensor):
            continue
        other, first = became.setdefault(id(origin), (held, held.tensor))
        if first.placements != held.tensor.placements:
            raise ValueError(
                f"{WHAT}: tied parameters must lie alike, got "
                f"{show(first.placements)} for {other.full!r} and "
                f"{show(held.tensor.placements)} for {held.full!r}. Give both one placement "
                f"in partition_fn, or untie them first."
            )
    whole = [Replicate()] * mesh.ndim
    made: dict[int, Tensor] = {}
    for held in now:
        origin = old.get((id(held.owner), held.table, held.name), held.tensor)
        if id(origin) in became:
            new: Tensor = became[id(origin)][1]
            if new.requires_grad and not origin.requires_grad:
                new.requires_grad_(False)
        elif id(origin) in made:
            new = made[id(origin)]
        else:
            with torch.no_grad():
                new = laid_out(WHAT, held.full, held.tensor, mesh, whole, src)
            made[id(origin)] = new
        held.put(new)
        watch_loading(held.owner)


def _check_fresh(module: nn.Module, held: list[Held]) -> None:
    done = module.__dict__.get(DISTRIBUTED, False)
    styled = any(CROSSING in inner.__dict__ for inner in module.modules())
    typed = [one.full for one in held if isinstance(one.tensor, DTensor)]
    if done or styled or (typed and len(typed) == len(held)):
        raise ValueError(
            f"{WHAT}: {type(module).__name__} is laid out already, got DTensors in "
            f"{typed[:4]}, expected plain tensors. Call it once; lay a tensor out anew "
            f"with x.redistribute(placements)."
        )
    for name in lazy_names(held):
        raise ValueError(
            f"{WHAT}: {name!r} has no shape yet. Run the module once on an example "
            f"before laying it out."
        )


def _check_function(name: str, function: Any, takes: str) -> None:
    if function is None:
        return
    try:
        inspect.signature(function).bind(None, None, None)
    except ValueError:  # a builtin says nothing of its arguments
        return
    except TypeError:
        raise TypeError(
            f"{WHAT}: {name} is called with three arguments, got {function!r}. Write "
            f"def {name}({takes})."
        ) from None
