"""Views of tensors that had to be moved: writes reach the base, reads see its writes.

Where a view op has to redistribute its operand, or takes a slice along a sharded dim, its
result is a copy. It is a ``MovedView`` then: it remembers its base. A write into it, or
into a view of it, is carried back to the base; and where the base was written since it
was taken, it is taken anew before it is used. Torch's version counters tell, which count
alike on every rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch._C import DisableTorchFunctionSubclass as NoTF

from dtensor.calls import tensors_in
from dtensor.errors import ShardingError
from dtensor.redistribute import alias, plain
from dtensor.registry import HANDLERS
from dtensor.spec import Spec
from dtensor.tensor import DTensor, redistributed, typed

_version: Any = torch.Tensor._version.__get__  # type: ignore[attr-defined]
_setitem: Any = torch.Tensor.__setitem__
_getitem: Any = torch.Tensor.__getitem__
_copy: Any = torch.Tensor.copy_


@dataclass(slots=True, eq=False)
class Link:
    """How a moved view hangs together with its base.

    Attributes:
        base: The tensor it is a view of.
        holder: What holds the view's memory: the view itself, or what it is a local
            view of, in the layout that the base was moved to.
        index: What of the base ``holder`` is; None: all of it.
        version: The base's version that ``holder`` has the values of.
        spec: The base's layout, which ``index`` is of.
        siblings: Links of the same call; no two share elements of the base.
    """

    base: DTensor
    holder: DTensor
    index: Any
    version: int
    siblings: list[Link] = field(default_factory=list)
    spec: Spec = field(init=False)

    def __post_init__(self) -> None:
        self.spec = self.base._spec

    def check_base(self) -> None:
        """Refuse what was taken of a base that was turned in place since."""
        if self.base._spec is not self.spec:
            raise ShardingError(
                "view: its base was transposed, squeezed or unsqueezed in place since "
                f"it was taken, got {self.base!r}. Take the view anew."
            )

    def refresh(self) -> None:
        """Take the values anew if the base was written since."""
        if isinstance(self.base, MovedView):
            self.base._link.refresh()
        now = _version(self.base)
        self.check_base()
        if now == self.version:
            return
        if self.index is None:
            fresh = redistributed(self.base, self.holder._spec)
        else:
            fresh = HANDLERS[_getitem](_getitem, (self.base, self.index), {})
        HANDLERS[_copy](_copy, (self.holder, fresh), {})
        self.version = now

    def write_back(self) -> None:
        """Carry the values to the base."""
        if self.index is None:
            self.base.copy_(self.holder)
        else:
            self.base[self.index] = self.holder
        before, self.version = self.version, _version(self.base)
        for other in self.siblings:
            if other.version == before:
                other.version = self.version


class MovedView(DTensor):
    """A view that is a copy; see the top of this file. A DTensor in all else."""

    _link: Link

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Refresh what is stale, run, and carry back what was written."""
        kwargs = kwargs if kwargs is not None else {}
        views = [t for _, t in tensors_in(args, kwargs) if type(t) is MovedView]
        links = list({id(v._link): v._link for v in views}.values())
        for link in links:
            link.refresh()
        before = [_version(link.holder) for link in links]
        for v in views:
            v.__class__ = DTensor  # type: ignore[assignment]
        try:
            out = HANDLERS[func](func, args, kwargs)
        finally:
            for v in views:
                v.__class__ = MovedView
        for link, version in zip(links, before, strict=True):
            _share(out, link)
            if _version(link.holder) != version:
                wants = any(plain(v).requires_grad for v in views if v._link is link)
                with torch.set_grad_enabled(torch.is_grad_enabled() and wants):
                    link.write_back()
        return out

    @property
    def data(self) -> DTensor:
        """As of any DTensor; it counts no versions, so it cannot be written."""
        self._link.refresh()
        out = typed(plain(self).data, self._spec)
        out._moved_view = True
        return out

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        DTensor.data.fset(self, value)  # type: ignore[attr-defined]

    def to_local(self, **kwargs: Any) -> torch.Tensor:
        """As of any DTensor, the base's values of now."""
        self._link.refresh()
        return super().to_local(**kwargs)

    def full_tensor(self, **kwargs: Any) -> torch.Tensor:
        """As of any DTensor, the base's values of now."""
        self._link.refresh()
        return super().full_tensor(**kwargs)

    def redistribute(self, *args: Any, **kwargs: Any) -> DTensor:
        """As of any DTensor, the base's values of now."""
        self._link.refresh()
        return super().redistribute(*args, **kwargs)


def _memory(x: torch.Tensor) -> int:
    with NoTF():
        return int(x.untyped_storage()._cdata)


def _share(out: Any, link: Link) -> None:
    """Results in the memory of a moved view are linked as it is."""
    if isinstance(out, (list, tuple)):
        for o in out:
            _share(o, link)
    elif type(out) is DTensor and _memory(out) == _memory(link.holder):
        _link(out, link)


def _link(view: DTensor, link: Link) -> None:
    view.__class__ = MovedView
    view._link = link  # type: ignore[attr-defined]
    view._moved_view = False


def linked(
    out: Any,
    base: Any,
    moved: Any,
    spec: Spec | None,
    indices: Sequence[Any] | None,
) -> Any:
    """Link the results of a view op to their base; what cannot be stays marked.

    Args:
        out: A DTensor or a sequence of them.
        base: The first operand as it was given.
        moved: The first operand as it was moved.
        spec: Its spec then, or None where it did not move.
        indices: For each result what of the base it is; None: it is not known, and
            what is a local view of the moved operand goes through that.
    """
    if not isinstance(base, DTensor):
        return out
    with NoTF():
        if base.is_inference():
            return out  # no versions are kept
    many = isinstance(out, (tuple, list))
    given = list(out) if many else [out]
    version = _version(base)
    if indices is None:
        if spec is None:
            return out
        holder = moved if type(moved) is DTensor else typed(alias(moved), spec)
        link = Link(base, holder, None, version)
        for o in given:
            if _memory(o) == _memory(holder):
                _link(o, link)
        return out
    links: list[Link] = []
    made = []
    for holder, index in zip(given, indices, strict=True):
        view = typed(alias(holder), holder._spec)
        holder._moved_view = False
        links.append(Link(base, holder, index, version))
        _link(view, links[-1])
        made.append(view)
    for link in links:
        link.siblings = [other for other in links if other is not link]
    return type(out)(made) if many else made[0]
