"""DTensor: a torch tensor that is this rank's shard, plus a spec.

The C++ tensor inside is the local shard, so autograd, optimizers, hooks and
serialization are torch's own. What a user reads (``shape``, ``size()``, ``numel``,
``stride`` ...) answers for the global tensor; ``to_local()`` is the way to the
shard. Operations go to ``registry.HANDLERS``.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch._C import DisableTorchFunctionSubclass as NoTF

from dtensor import boundary
from dtensor.absent import absent
from dtensor.errors import ShardingError
from dtensor.mesh.ambient import mesh_or_ambient
from dtensor.mesh.device_mesh import DeviceMesh
from dtensor.placement import (
    Partial,
    Placements,
    PlacementsLike,
    Replicate,
    Shard,
    in_order,
    placements_of,
    show,
)
from dtensor.redistribute import alias, plain, transition
from dtensor.registry import HANDLERS
from dtensor.spec import Spec, spec_of

if TYPE_CHECKING:
    from dtensor.explain import Explanation

ShardOrder = Mapping[int, Sequence[int | str]]
_BASE: Any = torch.Tensor
_functions_on = torch._C._is_torch_function_enabled


class DTensor(torch.Tensor):
    """A tensor laid out over a ``DeviceMesh``, as this rank's shard and a spec.

    Make one with ``distribute_tensor`` or ``DTensor.from_local``.
    """

    _spec: Spec
    # Set on the result of a view op whose input had to be moved: a copy, so that a
    # write into it could not reach the base.
    _moved_view: bool = False
    # On a leaf: a plain ``.grad`` in C++ holds unreduced addends (see leaves.py).
    _grad_is_dual: bool = False

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Look the function up and let its handler answer."""
        return HANDLERS[func](func, args, kwargs if kwargs is not None else {})

    # ---- what a user reads: the global tensor --------------------------------
    # With torch functions off, a DTensor is its shard, as it is for C++: torch's kernels
    # for meta tensors are Python, run there, and read shapes and strides.
    @property
    def shape(self) -> torch.Size:  # type: ignore[override]
        """Global shape."""
        if _functions_on():
            return self._spec.shape
        return _BASE.shape.__get__(self)  # type: ignore[no-any-return]

    def size(self, dim: int | None = None) -> Any:
        """Global size, of one dim or of all."""
        return self.shape if dim is None else self.shape[dim]

    def numel(self) -> int:
        """Elements of the global tensor."""
        return math.prod(self.shape)

    nelement = numel

    def __len__(self) -> int:
        """Global size of the first dim."""
        shape = self.shape
        if not shape:
            raise TypeError("len: a 0-d tensor has no length")
        return shape[0]

    def stride(self, dim: int | None = None) -> Any:
        """Strides of the global tensor, in elements, in the shard's dim order."""
        if not _functions_on():
            return _BASE.stride(self) if dim is None else _BASE.stride(self, dim)
        with NoTF():
            local = _BASE.stride(self)
        shape, out, step = self._spec.shape, [0] * len(self._spec.shape), 1
        for d in sorted(range(len(shape)), key=lambda d: (local[d], -d)):
            if local[d] == 0 and shape[d] != 1:
                continue
            out[d] = step
            step *= max(1, shape[d])
        return tuple(out) if dim is None else out[dim]

    @property
    def dtype(self) -> torch.dtype:  # type: ignore[override]
        """Element type."""
        with NoTF():
            return _BASE.dtype.__get__(self)  # type: ignore[no-any-return]

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        """Device of the local shard."""
        with NoTF():
            return _BASE.device.__get__(self)  # type: ignore[no-any-return]

    @property
    def placements(self) -> Placements:
        """One placement per mesh axis."""
        return self._spec.placements

    @property
    def device_mesh(self) -> DeviceMesh:
        """The mesh."""
        return self._spec.mesh

    def __repr__(self, *, tensor_contents: object = None) -> str:  # type: ignore[override]
        """Type and shard of this rank; never communicates."""
        s = self._spec
        with NoTF():
            local = _BASE.shape.__get__(self)
            tail = ", requires_grad=True" if _BASE.requires_grad.__get__(self) else ""
        return (
            f"DTensor(shape={tuple(s.shape)}, placements={show(s.placements)}, "
            f"mesh={s.mesh!r}, local_shape={tuple(local)}, dtype={self.dtype}{tail})"
        )

    __str__ = __repr__

    def __format__(self, spec: str) -> str:
        """A 0-dim replicated value formats as its number, everything else as repr."""
        if not self._spec.shape and not any(p.is_partial() for p in self.placements):
            return format(self.item(), spec)
        if spec:
            raise TypeError(
                f"format: no format {spec!r} for a value that is not whole on every "
                f"rank or not one number, got {self!r}. Write x.item() for a number "
                "and x.full_tensor() for a tensor, on every rank: both communicate."
            )
        return repr(self)

    def __iter__(self) -> Iterator[Any]:
        """The slices along the first dim."""
        return iter(self.unbind(0))

    def __hash__(self) -> int:
        return id(self)

    # ---- to and from the shard -----------------------------------------------
    @staticmethod
    def from_local(
        local_tensor: torch.Tensor,
        device_mesh: DeviceMesh | None = None,
        placements: PlacementsLike | None = None,
        *,
        run_check: bool = True,
        shape: Sequence[int] | None = None,
        stride: Sequence[int] | None = None,
        grad_placements: PlacementsLike | None = None,
        shard_order: ShardOrder | None = None,
    ) -> DTensor:
        """A DTensor whose shard on this rank is ``local_tensor``.

        On a replicated axis the ranks hold equal values and each expects the whole
        gradient, so the backward all-reduces over it; ``grad_placements`` says
        otherwise.

        Args:
            local_tensor: This rank's shard; autograd runs through to it.
            device_mesh: The mesh; the ambient one by default.
            placements: One per axis; all ``Replicate`` by default.
            run_check: Compare shapes and dtypes over the mesh (one small gather,
                every rank of the mesh must call). Without it, equal shards are
                taken for granted where ``shape`` is not given.
            shape: Global shape in elements; found from the shards by default.
            stride: Accepted for PyTorch's sake; strides follow the shards.
            grad_placements: Placements in which the gradient of ``local_tensor`` is
                wanted: per axis ``Replicate`` (the whole gradient) or ``Partial``
                (this rank's addend). By default Replicate where ``placements`` has
                Replicate.
            shard_order: As in ``distribute_tensor``.

        Raises:
            ShardingError: Shards that are not cut as ``torch.chunk`` cuts, or
                ranks that disagree, on all ranks alike.
        """
        mesh = mesh_or_ambient("from_local", device_mesh)
        if isinstance(local_tensor, DTensor):
            raise TypeError(
                "from_local: got a DTensor, expected this rank's plain shard. Call "
                "x.redistribute(placements) to change a layout."
            )
        if not isinstance(local_tensor, torch.Tensor):
            raise TypeError(
                f"from_local: expected a torch.Tensor, got {type(local_tensor)}."
            )
        if placements is None:
            placements = (Replicate(),) * mesh.ndim
        placements = in_order("from_local", placements, shard_order, mesh)
        local, dims = local_tensor, local_tensor.ndim
        if mesh.coordinate is None and shape is not None:
            dims = len(tuple(shape))
        places = placements_of("from_local", placements, mesh.ndim, dims)
        spec = boundary.spec_of_local(local, mesh, places, shape, run_check)
        if mesh.coordinate is None:
            (local,) = absent([(tuple(spec.local_shape), local.dtype)], [local])
        return typed(boundary.local_in(local, spec, grad_placements), spec)

    def to_local(
        self, *, grad_placements: PlacementsLike | None = None
    ) -> torch.Tensor:
        """This rank's shard as a plain tensor; autograd runs through it.

        On a replicated axis every rank is taken to compute the same thing with the
        result and to call backward on it, so the cotangent that comes back is
        replicated; ``grad_placements`` with ``Partial()`` there says that each rank
        computes its own addend.

        Args:
            grad_placements: Placements of the cotangent that comes back.
        """
        return boundary.local_out(self, self._spec, grad_placements)

    def redistribute(
        self,
        device_mesh: DeviceMesh | PlacementsLike | None = None,
        placements: PlacementsLike | None = None,
        *,
        async_op: bool = False,
        shard_order: ShardOrder | None = None,
    ) -> DTensor:
        """The same global value in other placements; every rank of the mesh calls.

        ``x.redistribute(Shard(0))``, ``x.redistribute([Shard(0), Replicate()])`` and
        ``x.redistribute(mesh, placements)`` are the same call. A single placement
        stands for every axis of an n-D mesh only where it is ``Replicate()``. The
        result may share memory with this tensor, as that of ``Tensor.to`` does.

        Args:
            device_mesh: The mesh, or the placements. On another mesh than this
                tensor's, blocks go point to point; every rank of either must call.
            placements: One per mesh axis.
            async_op: Accepted for PyTorch's sake; the result is there on return.
            shard_order: As in ``distribute_tensor``.

        Raises:
            ShardingError: Placements that do not fit the tensor, the mesh or the
                dtype, or another mesh.
        """
        if placements is None:
            if isinstance(device_mesh, DeviceMesh) or device_mesh is None:
                raise ShardingError(
                    "redistribute: no placements given. Write "
                    "x.redistribute([Shard(0)]) with one placement per mesh axis."
                )
            mesh, placements = self._spec.mesh, device_mesh
        else:
            mesh = self._spec.mesh if device_mesh is None else device_mesh  # type: ignore[assignment]
        if isinstance(placements, Replicate):
            placements = (placements,) * mesh.ndim
        placements = in_order("redistribute", placements, shard_order, mesh)
        places = placements_of(
            "redistribute", placements, mesh.ndim, len(self._spec.shape)
        )
        boundary.check_dtype("redistribute", self.dtype, places)
        if mesh is not self._spec.mesh:
            from dtensor.across import to_mesh

            return to_mesh(self, mesh, places)
        return redistributed(self, self._spec.replace(places))

    def explain_redistribute(
        self,
        placements: PlacementsLike,
        *,
        shard_order: ShardOrder | None = None,
    ) -> Explanation:
        """The plan that ``redistribute`` to these placements follows; moves nothing.

        Args:
            placements: One per mesh axis.
            shard_order: As in ``distribute_tensor``.
        """
        from dtensor.explain import explain

        spec = self._spec
        if isinstance(placements, Replicate):
            placements = (placements,) * spec.mesh.ndim
        wanted = in_order("explain_redistribute", placements, shard_order, spec.mesh)
        return explain(spec.placements, wanted, spec.shape, spec.mesh, dtype=self.dtype)

    def full_tensor(
        self, *, grad_placements: PlacementsLike | None = None
    ) -> torch.Tensor:
        """The whole global value on every rank of the mesh, as a plain tensor.

        Args:
            grad_placements: As in ``to_local``, for the replicated result.
        """
        return boundary.full_out(self, self._spec, grad_placements)

    def backward(
        self,
        gradient: torch.Tensor | None = None,
        retain_graph: bool | None = None,
        create_graph: bool = False,
        inputs: Any = None,
    ) -> None:
        """As ``Tensor.backward``; a replicated loss counts once.

        Args:
            gradient: Of this tensor: a DTensor of its shape, or this rank's plain
                local cotangent. May be left out for one element.
            retain_graph, create_graph, inputs: As in torch.
        """
        given = (self, gradient, retain_graph, create_graph, inputs)
        HANDLERS[_BASE.backward](_BASE.backward, given, {})

    # ---- properties that torch stores on the C++ tensor ----------------------
    @property
    def data(self) -> DTensor:
        """The same shard without autograd."""
        with NoTF():
            local = _BASE.data.__get__(self)
        out = typed(local, self._spec)
        if self._moved_view:
            out._moved_view = True
        return out

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        if not isinstance(value, DTensor) or value._spec is not self._spec:
            got = repr(value) if isinstance(value, DTensor) else "a plain tensor"
            raise ShardingError(
                f"data: only a DTensor of the same layout can be put in, got {got}, "
                f"expected {self._spec!r}. Use value.redistribute(x.placements), or "
                "distribute_tensor(value, x.device_mesh, x.placements)."
            )
        with NoTF():
            _BASE.data.__set__(self, value)

    @property
    def grad(self) -> torch.Tensor | None:
        """The gradient as a DTensor; reading it never communicates.

        A leaf's gradient has the leaf's placements (or Partial ones inside
        ``no_grad_sync``); that of ``retain_grad()`` has the dual placements.
        """
        with NoTF():
            g = _BASE.grad.__get__(self)
            if g is not None and type(g) is not DTensor:
                dual = self._grad_is_dual or not _BASE.is_leaf.__get__(self)
                typed(g, self._spec.dual() if dual else self._spec)
        return g  # type: ignore[no-any-return]

    @grad.setter
    def grad(self, value: torch.Tensor | None) -> None:
        if value is not None:
            boundary.check_grad(self._spec, value)
        self._grad_is_dual = False
        with NoTF():
            _BASE.grad.__set__(self, value)

    @grad.deleter
    def grad(self) -> None:
        self.grad = None


def typed(local: torch.Tensor, spec: Spec) -> DTensor:
    """Give a fresh local tensor its type; the tensor itself becomes the DTensor.

    Args:
        local: A plain tensor that nobody else holds.
        spec: Its spec.
    """
    local.__class__ = DTensor
    local._spec = spec  # type: ignore[attr-defined]
    return local  # type: ignore[return-value]


def local_of(x: torch.Tensor) -> torch.Tensor:
    """The local shard as a plain alias, autograd kept; no boundary, no copy."""
    return plain(x)


_itemsize: Any = _BASE.itemsize.__get__


def redistributed(x: DTensor, spec: Spec) -> DTensor:
    """``x`` in another spec of the same mesh and shape; differentiable."""
    if spec is x._spec:
        return x
    with NoTF():
        out = transition(x._spec, spec, _itemsize(x))(x)
    if type(out) is not torch.Tensor or out is x:
        out = alias(out)
    return typed(out, spec)


def distribute_tensor(
    tensor: torch.Tensor,
    device_mesh: DeviceMesh | None = None,
    placements: PlacementsLike | None = None,
    *,
    src_data_rank: int | None = 0,
    shard_order: ShardOrder | None = None,
) -> DTensor:
    """Lay a full tensor out over a mesh; the result is a leaf.

    Args:
        tensor: The global value, of one shape and dtype on every rank of the mesh.
        device_mesh: The mesh; the ambient one by default.
        placements: One per mesh axis; all ``Replicate`` by default.
        src_data_rank: Position in the mesh (row-major) of the rank whose values
            count; they are broadcast. None: every rank holds the same values
            already and nothing is sent.
        shard_order: For a dim that several axes cut, their names or numbers, the
            outermost first: ``{0: ("tp", "dp")}``. By default the order of the mesh.
            ``[Shard(0, depth=1), Shard(0, depth=0)]`` says the same.

    Returns:
        A DTensor with ``requires_grad`` as ``tensor`` has it.

    Raises:
        ShardingError: Placements that do not fit the mesh or the tensor.
        ValueError: A tensor that autograd has a history of.

    Bytes sent per rank: at most the tensor's (a broadcast).
    """
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(
            f"distribute_tensor: expected a torch.Tensor, got {type(tensor).__name__}. "
            "Write torch.as_tensor(x)."
        )
    mesh = mesh_or_ambient("distribute_tensor", device_mesh)
    if placements is None:
        placements = (Replicate(),) * mesh.ndim
    placements = in_order("distribute_tensor", placements, shard_order, mesh)
    places = placements_of("distribute_tensor", placements, mesh.ndim, tensor.ndim)
    if isinstance(tensor, DTensor):
        if tensor._spec.mesh is mesh and tensor.placements == places:
            return tensor
        raise ShardingError(
            f"distribute_tensor: the tensor is distributed already, as {tensor!r}. "
            "Call x.redistribute(placements)."
        )
    if not tensor.is_leaf:
        raise ValueError(
            "distribute_tensor: got a tensor with an autograd history, expected a "
            "leaf. Call distribute_tensor(t.detach(), ...), or DTensor.from_local(t, "
            "mesh, [Replicate()]) to keep the gradient."
        )
    spec = spec_of(mesh, places, tensor.shape)
    if tensor.requires_grad:
        spec.dual()  # refuses what has no gradient of its own
    with torch.no_grad():
        local = boundary.scatter(tensor.detach(), spec, src_data_rank)
    out = typed(local, spec)
    if tensor.requires_grad:
        out.requires_grad_(True)
    if isinstance(tensor, torch.nn.Parameter):
        out = torch.nn.Parameter(out, tensor.requires_grad)  # type: ignore[assignment]
    return out


__all__ = [
    "DTensor",
    "Partial",
    "Replicate",
    "Shard",
    "distribute_tensor",
    "local_of",
    "redistributed",
    "typed",
]
