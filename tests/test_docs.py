"""The examples in docstrings and in the README run, and print what they say."""

from __future__ import annotations

import doctest
import importlib
import re
from pathlib import Path

import pytest

from dtensor import mesh

ROOT = Path(__file__).parent.parent
PACKAGE = Path(mesh.__file__).parent.parent
BLOCK = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)


def modules() -> list[str]:
    """Names of all our modules, as a user imports them."""
    found = ["dtensor"]
    for folder in (PACKAGE, *(p for p in PACKAGE.iterdir() if p.is_dir())):
        middle = folder.relative_to(PACKAGE).parts
        for path in folder.glob("*.py"):
            if path.stem not in ("__init__", "__main__"):
                found.append(".".join(("dtensor", *middle, path.stem)))
    return sorted(found)


def test_all_folders_are_searched() -> None:
    found = modules()
    assert {"dtensor.mesh.world", "dtensor.launch"} <= {*found}
    assert any(name.startswith("dtensor.rules.") for name in found)


@pytest.mark.parametrize("name", modules())
def test_docstrings(name: str) -> None:
    try:
        module = importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name in ("cupy", "cupyx"):
            pytest.skip(f"{error.name} is an extra that is not installed")
        raise
    printed: list[str] = []
    runner = doctest.DocTestRunner(
        optionflags=doctest.NORMALIZE_WHITESPACE | doctest.ELLIPSIS
    )
    for example in doctest.DocTestFinder(exclude_empty=True).find(module):
        runner.run(example, out=printed.append)
    assert runner.summarize(verbose=False).failed == 0, "".join(printed)


def test_readme(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    # One program: later blocks go on from earlier ones.
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {"__name__": "readme"}
    for block in BLOCK.finditer((ROOT / "README.md").read_text()):
        exec(compile(block[1], "README.md", "exec"), names)
