"""The rule table: its names exist in torch, and it is what register_rule fills."""

from __future__ import annotations

import pytest
import torch

from dtensor.notation import parse
from dtensor.rules.table import NUMBERLESS, RULES, rule_of

PLACES = (
    torch,
    torch.Tensor,
    torch.special,
    torch.nn.functional,
    torch._C._nn,
    torch._C._linalg,  # type: ignore[attr-defined]
    torch.ops.aten,
    torch._C._special,  # type: ignore[attr-defined]
    torch._C._linalg,  # type: ignore[attr-defined]
    torch._C._fft,  # type: ignore[attr-defined]
    torch._VF,
)
# Names that functions answer with, unlike those they are found under.
ANSWERS = {
    "linalg_vector_norm": torch.linalg.vector_norm,
    "getitem": torch.Tensor.__getitem__,
    "setitem": torch.Tensor.__setitem__,
}


@pytest.mark.parametrize("name", sorted(n for n in RULES if "::" not in n))
def test_the_name_is_one_of_torch(name: str) -> None:
    if name in ANSWERS:
        assert ANSWERS[name].__name__.strip("_") == name.strip("_")
        return
    assert not name.endswith("_")
    found = [n for p in PLACES for n in (name, f"{name}_") if hasattr(p, n)]
    assert found, f"torch has no op {name}"


def test_numberless_ops_have_rules() -> None:
    assert set(RULES) >= NUMBERLESS
    op = rule_of("add", False)
    assert op is not None and not op.numbers
    assert rule_of("no such op", False) is None


def test_notation() -> None:
    n = parse("mk,kn->mn + n", linear=True)
    assert n.contracted == {"k"} and n.affine == {2} and n.linear == [{0}, {1}]
    assert parse("ii->i").whole == {"i"}
    assert parse("Md->Md").whole == {"M"}
    assert parse("md->md").linear == []
    with pytest.raises(ValueError, match="no operand has"):
        parse("m->n")
