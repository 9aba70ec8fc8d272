"""What runs add up to, and how it is shown."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from dynamo_elastic.errors import ResourceMissing
from dynamo_elastic.failpoint_table import FAILPOINTS, Stage
from dynamo_elastic.failpoints import Act
from dynamo_elastic.testing.chaos.elsewhere import ELSEWHERE
from dynamo_elastic.testing.chaos.gpu_scenario import (
    FIRST_ON_GPU,
    Move,
    gpu_places,
    gpu_scenarios,
)
from dynamo_elastic.testing.chaos.image_scenario import ImageScenario, image_cells
from dynamo_elastic.testing.chaos.matrix import (
    FIRST_ON_IMAGES,
    cells,
    places,
    places_reached,
    scenario,
)
from dynamo_elastic.testing.chaos.report import write_report
from dynamo_elastic.testing.chaos.scenario import (
    AtFailpoint,
    AtRandom,
    Fault,
    Resize,
    Scenario,
    cast,
)
from dynamo_elastic.testing.chaos.tally import has_enough, tally, tally_of_result
from dynamo_elastic.testing.chaos.verdict import Verdict

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"


def verdict(number: int, **more: Any) -> dict[str, Any]:
    base = Verdict(number, "up: kill", "up", "scale.before_check", "", "kill", True)
    return base.as_json() | {"requests": 5, "silence_s": 0.5} | more


VERDICTS = [
    verdict(0),
    verdict(1, act="stop", place="any moment", process="<agent>"),
    verdict(2, fired=False),
    verdict(3, lost=2, violations=["no request is lost: x", "no request is lost: y"]),
    verdict(4, hang="it <stands> still"),
]


def test_sums() -> None:
    sums = tally(VERDICTS).metrics()
    assert sums["runs"] == 5
    assert sums["runs_with_fault"] == 4
    assert (sums["failpoints"], sums["faults"]) == (1, 2)
    assert sums["failpoints_3_times"] == 1
    assert (sums["violations"], sums["hangs"], sums["requests_lost"]) == (2, 1, 2)
    assert sums["requests_total"] == 25


def test_parts_add_up_to_what_all_of_it_comes_to() -> None:
    parts = [tally(VERDICTS[:3]), tally(VERDICTS[3:])]
    assert parts[0] + parts[1] == tally(VERDICTS)


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A place for results."""
    (tmp_path / "provenance.py").write_text((BENCHMARKS / "provenance.py").read_text())
    (tmp_path / "results").mkdir()
    return tmp_path


def test_both_files_are_written(checkout: Path) -> None:
    report, page = write_report(VERDICTS, benchmarks=checkout)
    read = json.loads(report.read_text())
    assert read["metrics"]["hangs"] == 1
    assert [v["number"] for v in read["detail"]["bad"]] == [3, 4]
    assert read["detail"]["around"] == {"stop": {"<agent>": 1}}
    text = page.read_text()
    assert "3 (2 bad)" in text
    assert "&lt;agent&gt;" in text
    assert "http" not in text, "it needs nothing from elsewhere"


def test_verdicts_are_added_to_an_earlier_result(checkout: Path) -> None:
    onto, _ = write_report(VERDICTS[:2], benchmarks=checkout)
    onto = onto.rename(checkout / "earlier.json")
    elsewhere = {
        "date": "2026-12-24",
        "commit": "abcdefabcdef",
        "command": "python there",
        "hardware": {"cores": 2, "gpus": ["NVIDIA H200"]},
        "versions": {},
    }
    report, page = write_report(VERDICTS[2:], onto=onto, provenance=elsewhere, benchmarks=checkout)
    read = json.loads(report.read_text())
    assert tally_of_result(read) == tally(VERDICTS)
    parts = read["detail"]["parts"]
    assert [part["runs"] for part in parts] == [2, 3]
    assert parts[1]["commit"] == "abcdefabcdef"
    assert "2026-12-24, commit abcdefabcdef, NVIDIA H200" in page.read_text()


def test_what_a_result_lacks_is_played() -> None:
    result = {"metrics": tally(VERDICTS).metrics(), "detail": tally(VERDICTS).detail()}
    assert has_enough(result, "scale.before_check", "kill")
    assert not has_enough(result, "scale.before_check", "stop")
    assert not has_enough(result, "scale.after_check", "kill")
    assert has_enough(result, "any moment", "kill -9")


def test_what_is_stored_can_be_added_to() -> None:
    """The newest result of all."""
    newest = max((BENCHMARKS / "results").glob("chaos-*.json"))
    read = json.loads(newest.read_text())
    sums = tally_of_result(read).metrics()
    assert sums == read["metrics"]
    assert sum(part["runs"] for part in read["detail"]["parts"]) == sums["runs"]


def test_outside_a_checkout_it_says_so(tmp_path: Path) -> None:
    with pytest.raises(ResourceMissing, match="checkout"):
        write_report(VERDICTS, benchmarks=tmp_path)


def test_a_number_is_the_same_run_for_ever() -> None:
    assert [scenario(n) for n in range(50)] == [scenario(n) for n in range(50)]
    assert len({str(scenario(n)) for n in range(200)}) > 150


def test_parts_are_given_to_who_is_there() -> None:
    order = ["slot0", "slot2", "slot1"]
    fault = AtFailpoint("worker.serve.begin", "slot2", Act.KILL)
    joins = cast(Scenario(0, Resize.UP, fault, AtFailpoint("x", "", Act.KILL)), order)
    assert isinstance(joins.fault, AtFailpoint)
    assert joins.fault.file == "slot1:worker.serve.begin"
    assert joins.via == AtFailpoint("x", "", Act.KILL)
    stays = cast(Scenario(0, Resize.UP, AtRandom(Fault.KILL, "engine1", 0.1)), order)
    assert stays.fault.process == "engine2"


@pytest.mark.parametrize("down", [False, True])
def test_every_cell_has_its_turn(down: bool) -> None:
    wanted = {str(Scenario(0, *cell)) for cell in cells(down)}
    numbers = range(int(down), 2 * len(cells(down)), 2)
    assert {str(scenario(n)) for n in numbers} == wanted
    assert {c[1].fault for c in cells(down) if isinstance(c[1], AtRandom)} == set(Fault)


def test_work_on_images_has_its_turn_too() -> None:
    count = len(image_cells())
    numbers = range(FIRST_ON_IMAGES, FIRST_ON_IMAGES + count)
    wanted = {str(ImageScenario(0, *cell)) for cell in image_cells()}
    assert {str(scenario(n)) for n in numbers} == wanted
    stages = {Stage.TAKE, Stage.STORE, Stage.REMOVE}
    assert {f.place for _, f in image_cells()} == {f.name for f in FAILPOINTS if f.stage in stages}


def test_every_failpoint_is_hit_here_or_elsewhere() -> None:
    names = {f.name for f in FAILPOINTS}
    assert places_reached() | ELSEWHERE.keys() == names
    assert not places_reached() & ELSEWHERE.keys()
    for where in set(ELSEWHERE.values()):
        file, _, test = where.partition("::")
        assert f"def {test}(" in (BENCHMARKS.parent / file).read_text()


def test_runs_on_a_gpu_are_numbered_for_ever() -> None:
    runs = gpu_scenarios(*Move)
    assert len({run.number for run in runs}) == len(runs)
    assert runs[0].number == FIRST_ON_GPU > FIRST_ON_IMAGES + len(image_cells())
    assert {(r.place, r.act) for r in runs} == {(p, a) for p in gpu_places() for a in Act}


def test_places_are_failpoints_that_there_are() -> None:
    known = {f.name for f in FAILPOINTS}
    passed = {name for of_resize in places().values() for name in of_resize}
    assert passed
    assert passed <= known, "run `dynamo-elastic-chaos discover` again"
