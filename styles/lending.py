"""What a module's own code gets in place of a parameter, for the time of a call.

A parameter may lie so that it can be kept, saved and updated well, and be needed in
another form: a head of keys that several ranks share is stored once for all of them,
and each rank computes with its own head. A style names a ``Lending`` for it; a pair of
module hooks lends the form, so the module's class, forward and signature stay as they
are. The adjoint of what is lent brings the gradient back to the parameter.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn
from torch.nn.utils import parametrize

from dtensor.placement import Replicate
from dtensor.tensor import DTensor

LENDER = "_dtensor_lender"


class Lending:
    """One form of a parameter; subclasses are frozen dataclasses."""

    def lent(self, held: DTensor, axis: int) -> DTensor:
        """The form, made from a parameter by differentiable steps.

        Args:
            held: The parameter; whole along all other axes that cut it.
            axis: The axis of the style.
        """
        raise NotImplementedError


class Lender:
    """The hooks of one module whose parameters are lent in another form."""

    def __init__(self) -> None:
        self.lendings: dict[str, tuple[int, Lending]] = {}
        self._given: list[list[tuple[str, Any, Any]]] = []

    def install(self, module: nn.Module) -> None:
        """Put the hooks on."""
        module.__dict__[LENDER] = self
        module.register_forward_pre_hook(self.lend)
        module.register_forward_hook(self.take_back, prepend=True, always_call=True)

    def lend(self, module: nn.Module, args: Any) -> None:
        """Pre-hook: the forms in the place of the parameters."""
        given: list[tuple[str, Any, Any]] = []
        for name, (axis, lending) in self.lendings.items():
            held = module._parameters.get(name)
            if isinstance(held, DTensor):
                places = [
                    p if i == axis or not p.is_cut() else Replicate()
                    for i, p in enumerate(held.placements)
                ]
                given.append(
                    (name, held, lending.lent(held.redistribute(places), axis))
                )
        self._given.append(given)
        table: dict[str, Any] = module._parameters
        for name, _, form in given:
            table[name] = form

    def take_back(self, module: nn.Module, args: Any, output: Any) -> None:
        """Hook: the parameters again; runs after a failure too."""
        if self._given:
            table: dict[str, Any] = module._parameters
            for name, held, form in self._given.pop():
                if table.get(name) is form:
                    table[name] = held

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_given": []}


def check_lendings(
    what: str, shown: str, module: nn.Module, lendings: Mapping[str, Lending]
) -> None:
    """Refuse a parametrized weight: it is computed anew at each access.

    Raises:
        ValueError: A parameter to lend is parametrized.
    """
    for name in lendings:
        if parametrize.is_parametrized(module, name):
            raise ValueError(
                f"{what}: {name!r} of {shown!r} is parametrized, got a style that lends "
                f"it in another form, expected a plain parameter. Call "
                f"torch.nn.utils.parametrize.remove_parametrizations first."
            )


def bind_lendings(
    module: nn.Module, axis: int, lendings: Mapping[str, Lending]
) -> None:
    """Let a module's parameters be lent from now on."""
    if not lendings:
        return
    lender: Lender | None = module.__dict__.get(LENDER)
    if lender is None:
        lender = Lender()
        lender.install(module)
    for name, lending in lendings.items():
        if module._parameters.get(name) is not None:
            lender.lendings[name] = axis, lending
