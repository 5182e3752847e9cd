"""A slice of torch's op database, another one each day; ``make sweep`` runs it all."""

from __future__ import annotations

import datetime

import op_sweep
import pytest
import torch
from op_sweep import LAYOUTS, MIXED, RANDOM, REFUSED, UNRUNNABLE, UNWRITTEN, title

from dtensor.notation import Notation
from dtensor.rules.table import RULES

PARTS = 36
TODAY = datetime.date.today().toordinal() % PARTS
SLICE = [op for i, op in enumerate(op_sweep.entries()) if i % PARTS == TODAY]


@pytest.mark.parametrize("op", SLICE, ids=title)
@pytest.mark.parametrize("mesh", ["line", "grid"])
def test_ops_of_the_day(op: object, mesh: str) -> None:
    layouts, limit = (LAYOUTS, 6) if mesh == "line" else (MIXED, 3)
    found = op_sweep.check_entry(op, layouts, limit=limit)
    assert found or title(op) in UNRUNNABLE
    wrong = [f for f in found if f.problem and f.op not in REFUSED]
    assert not wrong, "\n".join(f"{f.layout}: {f.problem} {f.text}" for f in wrong)


@pytest.mark.parametrize("form", ["inplace", "out"])
@pytest.mark.parametrize("op", SLICE, ids=title)
def test_forms_of_the_ops_of_the_day(op: object, form: str) -> None:
    found = op_sweep.check_entry(op, LAYOUTS, limit=2, form=form)
    wrong = [f for f in found if f.problem and f.op not in REFUSED]
    assert not wrong, "\n".join(f"{f.layout}: {f.problem} {f.text}" for f in wrong)


def test_the_sweep_sees_a_wrong_rule(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(call: object) -> Notation:  # claims that cummax needs no whole dim
        return Notation([(0,)], [(0,)], shapes=[(10,)])

    monkeypatch.setitem(RULES, "digamma", wrong)
    from dtensor.registry import HANDLERS

    monkeypatch.delitem(HANDLERS, torch.digamma, raising=False)
    op = next(o for o in op_sweep.entries() if o.name == "digamma")
    assert any(f.problem for f in op_sweep.check_entry(op, LAYOUTS, limit=3))
    HANDLERS.pop(torch.digamma, None)


def test_the_lists_name_entries() -> None:
    names = {op.name for op in op_sweep.op_db}
    titles = {title(op) for op in op_sweep.op_db}
    factories = {"empty", "empty_permuted"}
    assert set(REFUSED) <= names and len(REFUSED) <= 10
    assert RANDOM | UNRUNNABLE | (UNWRITTEN - factories) <= names | titles
