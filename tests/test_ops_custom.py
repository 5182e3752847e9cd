"""``register_rule``: ops of ``torch.library`` on DTensors."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from op_harness import LINE, Case, assert_right, eighths, place

from dtensor import (
    Partial,
    RedistributionWarning,
    Replicate,
    Shard,
    ShardingError,
    count_collectives,
    redistribution,
    register_rule,
    simulate,
)
from dtensor.calls import Call
from dtensor.notation import Notation
from dtensor.rules.table import RULES
from dtensor.testing import RuleBroken, check_rule

LIBRARY: Any = torch.library.Library("dtensor_test", "DEF")  # type: ignore[no-untyped-call]
LIBRARY.define("project(Tensor x, Tensor w) -> Tensor")
LIBRARY.define("bend(Tensor x) -> Tensor")
LIBRARY.define("add(Tensor x, Tensor y) -> Tensor")
LIBRARY.define("scale_rows(Tensor x, Tensor s) -> Tensor")
KIND = "CompositeImplicitAutograd"
LIBRARY.impl("project", lambda x, w: torch.matmul(x, w), KIND)
LIBRARY.impl("bend", lambda x: x.sin() + 1, KIND)
LIBRARY.impl("add", lambda x, y: x + 2 * y.sum(), KIND)
LIBRARY.impl("scale_rows", lambda x, s: x * s.unsqueeze(1), KIND)


@torch.library.custom_op("dtensor_test::cube", mutates_args=())
def cube(x: torch.Tensor) -> torch.Tensor:
    """An op without a fake implementation: shapes come from the letters."""
    return x**3


OPS = torch.ops.dtensor_test


@pytest.fixture(autouse=True)
def rules() -> Iterator[None]:
    before = dict(RULES)
    register_rule("dtensor_test::project", "bsd,df->bsf", linear=True)
    register_rule("dtensor_test::bend", "md->md")
    register_rule("dtensor_test::scale_rows", "md,m->md")
    register_rule("dtensor_test::cube", "md->md")
    yield
    RULES.clear()
    RULES.update(before)


def test_values_and_gradients() -> None:
    b = eighths
    cases = [
        Case("project", OPS.project, [b(2, 5, 6), b(6, 3)]),
        Case("project overload", OPS.project.default, [b(2, 5, 6), b(6, 3)]),
        Case("bend", OPS.bend, [b(5, 3)]),
        Case("scale_rows", OPS.scale_rows, [b(5, 3), b(5)]),
        Case("cube", cube, [b(5, 3)], grad=False),
        Case("cube packet", OPS.cube, [b(5, 3)], grad=False),
        Case("add", OPS.add, [b(5, 3), b(5, 3)]),
        Case("aten add", torch.ops.aten.add, [b(5, 3), b(5, 3)]),
        Case("aten overload", torch.ops.aten.mul.Tensor, [b(5, 3), b(5, 3)]),
        Case(
            "aten sum",
            torch.ops.aten.sum.dim_IntList
            and (lambda x: torch.ops.aten.sum.dim_IntList(x, [0])),
            [b(5, 3)],
        ),
    ]
    assert_right(cases, LINE)


def test_the_rule_moves_nothing_that_fits() -> None:
    def program() -> None:
        x = place(eighths(2, 5, 6), LINE, (Shard(2),))
        w = place(eighths(6, 3), LINE, (Shard(0),))
        with count_collectives() as c:
            y = OPS.project(x, w)
            z = cube(place(eighths(5, 3), LINE, (Shard(0),)))
        assert y.placements == (Partial(),)
        assert z.placements == (Shard(0),)
        assert c.calls("all_gather") == c.calls("all_reduce") == 0

    simulate(program)


def test_an_op_that_is_not_called_linear_reduces_addends_first() -> None:
    def program() -> None:
        x = place(eighths(5, 3), LINE, (Partial(),))
        assert OPS.bend(x).placements == (Replicate(),)

    simulate(program)


def test_a_rule_may_be_given_after_the_op_was_used() -> None:
    def program() -> None:
        x = place(eighths(5, 3), LINE, (Shard(0),))
        with redistribution("warn"), pytest.warns(RedistributionWarning):
            assert OPS.add(x, x).placements == (Replicate(),)
        register_rule("dtensor_test::add", "Md,Md->Md")
        with redistribution("allow"):
            assert OPS.add(x, x).placements == (Replicate(),)
        register_rule("dtensor_test::add", "md,md->md")
        assert OPS.add(x, x).placements == (Shard(0),)

    simulate(program, ranks=4)


def test_a_rule_that_does_not_fit_says_so() -> None:
    def program() -> None:
        x = place(eighths(5, 3), LINE, (Shard(0),))
        s = place(eighths(1), LINE, (Replicate(),))
        with pytest.raises(ShardingError, match="'md,m->md' does not fit"):
            OPS.scale_rows(x, s)
        with pytest.raises(ShardingError, match="'md->md' does not fit"):
            OPS.bend(s)

    simulate(program)


def test_a_rule_without_an_arrow() -> None:
    with pytest.raises(ValueError, match="no '->'"):
        register_rule("dtensor_test::bend", "md")


def test_an_unknown_op_is_an_error() -> None:
    with pytest.raises(
        ValueError, match=r"no op of this name, got 'matmull'.*'matmul'"
    ):
        register_rule("matmull", "mk,kn->mn")
    with pytest.raises(ValueError, match="got 'dtensor_test::no_such'"):
        register_rule("dtensor_test::no_such", "m->m")


def test_check_rule_passes_right_rules() -> None:
    samples = [(eighths(2, 5, 6), eighths(6, 3)), (eighths(1, 4, 2), eighths(2, 2))]
    found = check_rule(OPS.project, samples)
    assert found["rows"] == 2 * 2 * 5 * 4
    assert found["without communication"] >= 32
    counts = check_rule(torch.addmm, [(eighths(4), eighths(5, 3), eighths(3, 4))])
    assert counts["rows"] == 2 * min(64, 3 * 4 * 4)


def test_check_rule_names_what_is_wrong() -> None:
    x = eighths(5, 3)
    register_rule("dtensor_test::add", "md,md->md")  # but the sum is over all of y
    with pytest.raises(
        RuleBroken, match=r"result 0 placed .* differs.*placed \['R', 'S\(0"
    ):
        check_rule(OPS.add, [(x, x)])
    register_rule("dtensor_test::bend", "md->md", linear=True)  # it is not
    with pytest.raises(RuleBroken, match=r"placed \['P'\]"):
        check_rule(OPS.bend, [(x,)])
    with pytest.raises(ValueError, match="nothing to try"):
        check_rule(OPS.bend, [])


def test_the_function_form_and_the_decorator() -> None:
    @register_rule("dtensor_test::add")
    def rows_free(call: Call) -> Notation:
        return Notation([("m", "d"), ("n", "e")], [("m", "d")], whole={"n", "e"})

    assert check_rule(OPS.add, [(eighths(5, 3), eighths(2, 2))])["rows"] == 32
    assert RULES["dtensor_test::add"] is rows_free
