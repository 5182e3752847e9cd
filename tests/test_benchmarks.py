"""The benchmarks' framework: bars, tables, comparison, report. No times asserted."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from dtensor.benchmarks import cli, compare, plots, report, results, tables
from dtensor.benchmarks.harness import Bar, Measure, interleave, summarize
from dtensor.benchmarks.registry import SUITES, available, choose
from dtensor.benchmarks.results import Result, SuiteResult

NOISE = (1.0, 1.02, 0.99, 1.01, 0.98, 1.0, 1.01, 0.99, 1.0)


def made(ours: float, machine: float = 1.0, label: str = "mm") -> Measure:
    samples = {
        "ours": [machine * ours * n for n in NOISE],
        "gloo": [machine * 2e-3 * n for n in NOISE],
        "raw": [machine * 4e-3 * n for n in NOISE],
    }
    bars = (Bar("gloo", 0.6), Bar("raw", 0.1), Bar("nobody", 1.0))
    return Measure(label, samples, bars, {"sent": 8.0}, "float32", x=64.0)


def run_of(*measures: Measure) -> Result:
    return Result({"CPU": "made up"}, {"made": SuiteResult("made", measures)})


def test_bars_and_tables() -> None:
    m = made(1e-3)
    assert [m.reached(bar) for bar in m.bars] == [True, False, None]
    assert Measure("x", {"ours": [3.0]}).reached(Bar("", plus=4.0))
    suite = run_of(m).suites["made"]
    assert tables.count_bars(suite) == (1, 3)
    (table,) = tables.tables_of(suite)
    text = tables.as_text(table)
    assert "0.50 (0.50-0.50)" in text and "1 ms" in text
    assert "<= 0.1 raw: NOT reached; <= 1 nobody: not measured" in text
    assert tables.as_markdown(table).count("\n") == 3
    assert summarize([m, made(3e-3)], "gloo").spread().median == pytest.approx(1.0)


def test_all_candidates_are_called_in_each_round() -> None:
    calls: list[str] = []
    both = {"ours": lambda: calls.append("o"), "peer": lambda: calls.append("p")}
    times = interleave(both, rounds=4, inner=2)
    assert {name: len(rows) for name, rows in times.items()} == {"ours": 4, "peer": 4}
    rounds = ["".join(calls[6 + 4 * i : 10 + 4 * i]) for i in range(4)]
    assert set(rounds) <= {"oopp", "ppoo"}


def test_results_come_back_from_disk(tmp_path: Path) -> None:
    result = run_of(made(1e-3))
    results.save(result, tmp_path / "new" / "a.json")
    assert results.load(tmp_path / "new" / "a.json") == result
    (tmp_path / "b.json").write_text("[]")
    with pytest.raises(ValueError, match=r"got format None, expected 1. Write it with"):
        results.load(tmp_path / "b.json")


@pytest.mark.parametrize(
    ("factor", "machine", "expected"),
    [(1.0, 1.0, 0), (1.0, 3.0, 0), (1.5, 1.0, 1), (1.5, 0.3, 1), (0.5, 1.0, -1)],
)
def test_compare_tells_ours_from_the_machine(
    factor: float, machine: float, expected: int
) -> None:
    old = run_of(made(1e-3), made(2e-3, label="add"))
    new = run_of(made(factor * 1e-3, machine), made(2e-3, machine, label="add"))
    first, second = compare.compare(old, new)
    assert first.slower - first.faster == expected
    assert not second.slower and not second.faster


def test_compare_takes_what_peers_moved_for_noise() -> None:
    old = run_of(made(1e-3))
    moved = made(1.2e-3)
    moved = replace(
        moved, samples={**moved.samples, "raw": [1.3 * x for x in moved.samples["raw"]]}
    )
    assert compare.noise_of_suites(old, run_of(moved))["made"] > 0.25
    assert not compare.compare(old, run_of(moved))[0].slower
    assert compare.compare(old, run_of(made(1.2e-3)))[0].slower
    assert compare.missing(old, run_of(made(1.0, label="else"))) == [
        "made: float32: mm"
    ]


def test_command_line_compares(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    old, new = tmp_path / "old.json", tmp_path / "new.json"
    results.save(run_of(made(1e-3)), old)
    results.save(run_of(made(2e-3)), new)
    assert cli.main(["--from", str(new), "--compare", str(old)]) == 1
    assert "SLOWER" in capsys.readouterr().out
    assert cli.main(["--from", str(old), "--compare", str(new)]) == 0
    assert "1 faster" in capsys.readouterr().out
    assert cli.main(["--from", str(old), "--compare", str(tmp_path / "no")]) == 2


def test_report_and_plots(tmp_path: Path) -> None:
    page = tmp_path / "docs" / "page.md"
    pair = run_of(made(1e-3), replace(made(2e-3, label="add"), x=128.0))
    report.write(replace(pair, failures={"train": "it fell"}), page)
    text = page.read_text()
    assert "| CPU | made up |" in text and "it fell" in text
    if plots.has_matplotlib():
        assert "![made](page/made.svg)" in text
        assert "</svg>" in (page.parent / "page" / "made.svg").read_text()


def test_registry() -> None:
    assert {"dispatch", "collectives"} <= {s.name for s in available()} <= set(SUITES)
    assert [s.name for s in choose(["dispatch", "dispatch"])] == ["dispatch"]
    with pytest.raises(ValueError, match="no such suite, got 'speed', expected one of"):
        choose(["speed"])


@pytest.mark.mpi
def test_a_suite_runs_on_ranks_of_its_own(tmp_path: Path) -> None:
    file = tmp_path / "r.json"
    options = ["--tiny", "--rounds", "2", "--timeout", "100", "--json", str(file)]
    assert cli.main(["collectives", "--ranks", "2", *options]) == 0
    suite = results.load(file).suites["collectives"]
    assert suite.ranks == 2
    assert all(len(m.samples["ours"]) == 2 for m in suite.measures)


@pytest.mark.mpi
def test_a_suite_that_takes_too_long_is_an_error(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert cli.main(["collectives", "--tiny", "--timeout", "0.1"]) == 1
    told = capsys.readouterr().err
    assert "ranks that did not meet in 0.1 s, expected exit code 0" in told
