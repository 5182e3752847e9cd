"""docs/from-pytorch.md: every public name of PyTorch's, arguments, and code that runs."""

from __future__ import annotations

import importlib
import inspect
import re
from pathlib import Path
from typing import Any

import pytest

import dtensor
from dtensor import styles

PAGE = (Path(__file__).parent.parent / "docs" / "from-pytorch.md").read_text()
SECTIONS = dict(re.findall(r"^## ([\w.]+)\n(.*?)(?=^## |\Z)", PAGE, re.M | re.S))
MODULES = [
    "torch.distributed.tensor",
    "torch.distributed.tensor.parallel",
    "torch.distributed.device_mesh",
]
# Arguments of PyTorch's that ours do not take; the page says why.
WITHOUT = {
    "init_device_mesh": {"backend_override"},
    "ones empty full rand randn zeros": {"layout"},
    "DTensor.redistribute": {"forward_dtype", "backward_dtype"},
}


def names_of(module: str) -> list[str]:
    pytest.importorskip(module)
    return sorted(importlib.import_module(module).__all__)


@pytest.mark.parametrize("module", MODULES)
def test_every_public_name_has_a_row(module: str) -> None:
    rows = [r for r in SECTIONS[module].splitlines() if r.startswith("| `")]
    listed = {
        name for row in rows for name in re.findall(r"`(\w+)`", row.split("|")[1])
    }
    assert listed == {*names_of(module)}
    for row in rows:
        here = row.split("|")[2]
        for name in re.findall(r"`(\w+)`", row.split("|")[1]):
            assert hasattr(dtensor, name) == ("not yet" not in here), name
    for name in re.findall(r"^\| not there \| (.*?) \|", PAGE, re.M):
        assert all(hasattr(dtensor, n) for n in re.findall(r"`(\w+)`", name))


def parameters(function: Any) -> dict[str, inspect.Parameter]:
    found = inspect.signature(function).parameters
    return {n: p for n, p in found.items() if not n.startswith("_")}


@pytest.mark.parametrize("module", MODULES)
def test_arguments_are_those_of_pytorch(module: str) -> None:
    theirs = importlib.import_module(module)
    missing: dict[str, set[str]] = {}
    for name in names_of(module):
        ours = getattr(dtensor, name, None)
        pairs = [(name, getattr(theirs, name), ours)]
        if name in ("DTensor", "DeviceMesh"):
            for method in ("from_local", "to_local", "redistribute", "full_tensor"):
                pairs.append((f"{name}.{method}", pairs[0][1], ours))
            for method in ("size", "get_local_rank", "get_coordinate", "get_rank"):
                pairs.append((f"{name}.{method}", pairs[0][1], ours))
        for label, their, our in pairs:
            method = label.partition(".")[2]
            if method:
                their, our = getattr(their, method, None), getattr(our, method, None)
            if our is None or their is None or label in ("DTensor", "ParallelStyle"):
                continue
            known = {a for k, v in WITHOUT.items() if label in k.split() for a in v}
            try:
                given = parameters(their)
            except ValueError:  # placements are made in C++
                continue
            lost = given.keys() - parameters(our).keys() - known
            lost -= {"args", "kwargs"}
            if label == "DeviceMesh":
                lost -= {"backend_override"}
            if lost:
                missing[label] = lost
            for argument in given.keys() & parameters(our).keys():
                a, b = given[argument], parameters(our)[argument]
                assert (a.default is a.empty) == (b.default is b.empty) or (
                    label == "DeviceMesh"
                ), (label, argument)
                assert a.kind == b.kind or b.kind == b.POSITIONAL_OR_KEYWORD
    assert missing == {}


def test_styles_offers_all_that_parallel_does() -> None:
    theirs = {*names_of("torch.distributed.tensor.parallel")} - {"loss_parallel"}
    assert theirs <= {*styles.__all__}
    assert {*styles.__all__} <= {*dtensor.__all__}


def test_the_code_on_the_page_runs() -> None:
    names: dict[str, object] = {"__name__": "page"}
    blocks = re.findall(r"^```python\n(.*?)^```", PAGE, re.M | re.S)
    assert len(blocks) == 2
    for block in blocks:
        exec(compile(block, "from-pytorch.md", "exec"), names)
