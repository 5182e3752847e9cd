"""The tutorial in docs/placements.md runs, and says what it says."""

from __future__ import annotations

import re
from pathlib import Path

PAGE = Path(__file__).parent.parent / "docs" / "placements.md"
BLOCK = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)


def test_the_tutorial_runs() -> None:
    # One program: later blocks go on from earlier ones.
    names: dict[str, object] = {"__name__": "placements"}
    blocks = BLOCK.findall(PAGE.read_text())
    assert len(blocks) >= 8
    for block in blocks:
        exec(compile(block, PAGE.name, "exec", dont_inherit=True), names)
