"""The tree: its links, the direction of its imports, and what an import costs."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from mpi_jobs import job_environment

ROOT = Path(__file__).parent.parent
LINKED = ("benchmarks", "collectives", "kernels", "mesh", "styles")
ALLOWED = {
    "mesh": {"mesh"},
    "kernels": {"kernels"},
    "collectives": {"collectives", "mesh", "kernels"},
    "dtensor": {"dtensor", "collectives", "mesh", "kernels"},
    "styles": {"styles", "dtensor", "collectives", "mesh", "kernels"},
}
# Who may import what is heavy, or not always there; and only inside of functions.
LAZY = {
    "mpi4py": r"collectives/mpi\.py",
    "cupy": r"collectives/nccl\.py|kernels/.*",
    "cupyx": r"collectives/nccl\.py|kernels/.*",
}


def product_files() -> list[str]:
    """Our sources, relative to the root, by their real paths."""
    found = []
    for folder in ALLOWED:
        for path in (ROOT / folder).rglob("*.py"):
            if not any(path.is_relative_to(ROOT / "dtensor" / x) for x in LINKED):
                found.append(str(path.relative_to(ROOT)))
    return sorted(found)


def imports_of(file: str) -> Iterator[tuple[str, ast.stmt]]:
    """(name, statement) of every import in a file; a relative one keeps its dots."""
    for node in ast.walk(ast.parse((ROOT / file).read_text())):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name, node
        elif isinstance(node, ast.ImportFrom):
            module = "." * node.level + (node.module or "")
            for alias in node.names:
                yield f"{module}.{alias.name}", node


def layer_of(module: str) -> str:
    """The layer of a name that begins with ``dtensor``."""
    second = [*module.split("."), ""][1]
    return second if second in LINKED else "dtensor"


def test_there_are_files() -> None:
    found = product_files()
    assert "mesh/world.py" in found
    assert "dtensor/lifecycle.py" in found
    assert not any(name.startswith("dtensor/mesh") for name in found)


@pytest.mark.parametrize("name", LINKED)
def test_links(name: str) -> None:
    link = ROOT / "dtensor" / name
    assert (ROOT / name).is_dir()
    assert not (ROOT / name).is_symlink()
    assert link.is_symlink()
    assert os.readlink(link) == f"../{name}"


@pytest.mark.parametrize("file", product_files())
def test_imports(file: str) -> None:
    here = file.split("/")[0]
    for name, statement in imports_of(file):
        where = f"{file}:{statement.lineno} imports {name}"
        top = name.split(".")[0]
        assert not name.startswith("."), f"{where}: relative"
        assert top not in LINKED, f"{where}: one import name, dtensor"
        assert not name.startswith("torch.distributed"), where
        if top == "dtensor" and file != "dtensor/__init__.py":  # the face shows all
            assert layer_of(name) in ALLOWED[here], f"{where}: against the direction"


@pytest.mark.parametrize("file", product_files())
def test_lazy_imports(file: str) -> None:
    top_level = ast.parse((ROOT / file).read_text()).body
    outside = {
        s.lineno for s in top_level if isinstance(s, ast.Import | ast.ImportFrom)
    }
    for name, statement in imports_of(file):
        allowed = LAZY.get(name.split(".")[0])
        if allowed is not None:
            where = f"{file}:{statement.lineno} imports {name}"
            assert re.fullmatch(allowed, file), where
            assert statement.lineno not in outside, f"{where} outside of a function"


def test_import_is_light() -> None:
    code = """
import sys, torch
before = set(sys.modules)
import dtensor
heavy = ("cupy", "cupyx", "mpi4py", "torch.distributed", "torch._dynamo")
new = sorted(set(sys.modules) - before)
print(*(n for n in new if n.startswith(heavy)))
"""
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        env=job_environment(),
    )
    assert done.stdout.split() == []


def test_packages_are_listed() -> None:
    text = (ROOT / "pyproject.toml").read_text()
    block = re.search(r"^packages = \[\n(.*?)^\]", text, re.MULTILINE | re.DOTALL)
    assert block is not None
    files = [p.relative_to(ROOT) for p in (ROOT / "benchmarks").rglob("*.py")]
    folders = {Path(file).parent.parts for file in [*product_files(), *files]}
    packages = {
        ".".join(parts if parts[0] == "dtensor" else ("dtensor", *parts))
        for parts in folders
    }
    assert sorted(re.findall(r'"(.*?)"', block[1])) == sorted(packages)


def test_benchmarks_may_import_what_they_compare_with() -> None:
    """The only folder that may: the peers of the product are not of the product."""
    names = {name for name, _ in imports_of("benchmarks/peers.py")}
    assert any(name.startswith("torch.distributed") for name in names)
    assert not any(file.startswith("benchmarks") for file in product_files())


def test_benchmarks_have_one_import_name() -> None:
    for path in (ROOT / "benchmarks").rglob("*.py"):
        for name, statement in imports_of(str(path.relative_to(ROOT))):
            where = f"{path.name}:{statement.lineno} imports {name}"
            assert not name.startswith("."), where
            assert name.split(".")[0] not in LINKED, where


def test_no_test_package() -> None:
    assert not (ROOT / "tests" / "__init__.py").exists()
