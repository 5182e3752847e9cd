"""Random programs on shards against plain torch: a slice; ``make fuzz`` runs 10,000."""

from __future__ import annotations

import datetime
import os

import pytest
from fuzz_programs import MESHES, STEPS, Program, agreed, difference
from hypothesis import HealthCheck, given, note, seed, settings
from hypothesis import strategies as st

PROGRAMS = int(os.environ.get("DTENSOR_FUZZ", "120"))
PARTS = 40 if PROGRAMS > 1000 else 2
SEED = int(os.environ.get("DTENSOR_FUZZ_SEED", datetime.date.today().toordinal()))

small = st.integers(0, 11)
steps = st.tuples(st.sampled_from(sorted(STEPS)), *[small] * 5)
programs = st.builds(
    Program,
    st.sampled_from(sorted(MESHES)),
    st.lists(
        st.tuples(st.integers(0, 15), st.integers(0, 10**6)), min_size=1, max_size=3
    ).map(tuple),
    st.lists(steps, min_size=3, max_size=12).map(tuple),
)


@pytest.mark.parametrize("part", range(PARTS))
def test_programs(part: int) -> None:
    @seed(SEED * 1000 + part)
    @settings(
        max_examples=PROGRAMS // PARTS,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(programs)
    def check(program: Program) -> None:
        wrong = difference(program)
        if wrong and wrong != "refused":
            note(wrong)
            raise AssertionError(wrong)

    check()


def test_the_fuzzer_sees_a_wrong_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(ts: list, i: int, j: int, k: int) -> object:  # type: ignore[type-arg]
        x = ts[0]
        return x * 1 if type(x).__name__ == "Tensor" else x * 0.5 + x.detach() * 0.5

    monkeypatch.setitem(STEPS, "neg", wrong)
    program = Program("4", ((0, 3),), (("neg", 0, 0, 0, 0, 0),))
    assert "gradient" in agreed(program)
