"""Pictures: well formed, complete, and looked at by a browser."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ET
from collections.abc import Iterable
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import typer
from rich.console import Console
from typer.testing import CliRunner

from fxbraid.draw import to_html, to_svg, to_terminal, to_trace
from fxbraid.draw.cli import draw
from fxbraid.draw.layout import blocks
from fxbraid.draw.measured import Measured
from fxbraid.draw.measured import to_trace as to_measured_trace
from fxbraid.draw.palette import paint, rgb
from fxbraid.schedule import build
from fxbraid.simulate import Box, Link, Result, constants, simulate
from fxbraid.timeline import Timeline
from tests import chrome
from tests.timelines import straggling

SVG = "{http://www.w3.org/2000/svg}"


@pytest.fixture(scope="module")
def result() -> Result:
    schedule = build("stp", p=4, m=12)
    return simulate(schedule, constants(schedule, 1, 1, 1, 0.25))


def test_the_svg_shows_every_action_and_every_braid(result: Result) -> None:
    root = ET.fromstring(to_svg(result))
    composites = sum(block.braided for rank in range(4) for block in blocks(result, rank))
    actions = sum(len(block.strands) for rank in range(4) for block in blocks(result, rank))
    assert len(root.findall(f"{SVG}rect[@class='o']")) == composites + 1  # and the legend's
    assert len(root.findall(f"{SVG}text[@class='n']")) == actions
    title = root.find(f"{SVG}title")
    assert title is not None and title.text is not None and "step 78.75" in title.text
    width, height = (float(x) for x in root.attrib["viewBox"].split()[2:])
    for rect in root.iter(f"{SVG}rect"):
        x, w = float(rect.attrib["x"]), float(rect.attrib["width"])
        assert x >= 0 and x + w <= width + 1 and float(rect.attrib["y"]) <= height


def test_text_is_readable_on_every_box() -> None:
    """Contrast of the ink with each colour, by the formula of WCAG 2: at least 4.5."""

    def light(colour: str) -> float:
        parts = [c / 255 for c in rgb(colour)]
        linear = [c / 12.92 if c <= 0.03928 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    place = build("stp", p=2, m=4).placement
    for phase in "FIWB":
        for chunk in range(4):
            for colour in (paint(phase, chunk, place).strong, paint(phase, chunk, place).pale):
                assert (light(colour) + 0.05) / (light("#10243e") + 0.05) >= 4.5


def test_the_terminal_picture(result: Result) -> None:
    console = Console(width=170, record=True, force_terminal=True, color_system="truecolor", file=StringIO())
    console.print(to_terminal(result, 170))
    plain = console.export_text()
    assert "rank 3" in plain and "input gradient" in plain and "12.5 chunk activations" in plain
    for microbatch in range(12):
        assert str(microbatch) in plain


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "interleaved_1f1b", "zbv", "stp"])
@pytest.mark.parametrize("p", [1, 3])
def test_every_schedule_can_be_drawn(name: str, p: int) -> None:
    schedule = build(name, p=p, m=5)
    found = simulate(schedule, constants(schedule, 1, 1, 1, 0.5, layers=2, message=1.0, link=Link(0.1, 10)))
    ET.fromstring(to_svg(found))
    json.loads(to_trace(found))
    assert "</script></html>" in to_html(found)
    Console(width=60, file=StringIO()).print(to_terminal(found, 60))


def test_the_trace_is_what_viewers_read(result: Result) -> None:
    events = json.loads(to_trace(result))["traceEvents"]
    spans = [e for e in events if e["ph"] == "X"]
    assert {e["pid"] for e in spans} == {0, 1, 2, 3}
    assert max(e["ts"] + e["dur"] for e in spans) == pytest.approx(1e3 * result.step_time)
    starts, ends = ({e["id"] for e in events if e["ph"] == ph} for ph in "sf")
    assert starts == ends and len(starts) == sum(1 for _ in result.messages())
    assert any(e["ph"] == "C" and e["args"]["live"] == 12.5 for e in events)


def test_the_page_shows_a_box_under_the_mouse(result: Result, tmp_path: Path) -> None:
    browser = chrome.find()
    if browser is None:
        pytest.skip("no Chromium here; apt-get install chromium")
    path = tmp_path / "stp.html"
    path.write_text(to_html(result), "utf-8")
    boxes = list(result.boxes(2))
    unit = next(k for k, b in enumerate(boxes) if b.lane == "compute" and b.others and len(str(b.action)) > 2)
    wire = next(k for k, b in enumerate(boxes) if b.lane == "collective" and b.exposed)
    with chrome.page(browser, tmp_path / "profile") as page:
        page.open(path)
        told = {}
        for index in (unit, wire):
            page.move(*page.js(f"fxbraid.at(2, {index})"))
            assert page.js("getComputedStyle(document.getElementById('tip')).display") == "block"
            told[index] = page.js("document.getElementById('tip').innerText")
        box = boxes[unit]
        assert f"micro-batch {box.action.microbatch} · chunk {box.action.chunk} · rank 2" in told[unit]
        assert box.unit in told[unit] and "hides the all-reduce of" in told[unit]
        assert f"start {box.start:.4g} · duration {box.end - box.start:.4g}" in told[unit]
        assert f"exposed for {boxes[wire].exposed:.4g}" in told[wire]
        page.js("fxbraid.zoom(20, 40)")
        page.move(5, 5)
        assert page.js("getComputedStyle(document.getElementById('tip')).display") == "none"


def test_the_command_writes_files(tmp_path: Path) -> None:
    app = typer.Typer()
    app.command()(draw)
    runner = CliRunner()
    files = [tmp_path / name for name in ("a.svg", "a.html", "a.json")]
    arguments = ["stp", "--pp", "2", "-m", "6"]
    for option, file in zip(("--svg", "--html", "--trace"), files, strict=True):
        arguments += [option, str(file)]
    assert runner.invoke(app, arguments).exit_code == 0
    assert all(file.stat().st_size > 1000 for file in files)
    shown = runner.invoke(app, ["dualpipev", "--braid", "--pp", "2", "-m", "4"])
    assert shown.exit_code == 0 and "rank 1" in shown.output
    wrong = runner.invoke(app, ["stp", "--times", "1,2"])
    assert wrong.exit_code == 2 and "T_F,T_I,T_W,T_AR" in wrong.output
    assert runner.invoke(app, ["nothing"]).exit_code == 2


# -- a measured step over the simulated one


@pytest.fixture(scope="module")
def both() -> tuple[Timeline, Result]:
    return straggling()


def boxes_of(svg: str, title: str) -> list[tuple[float, float]]:
    """(x, width) of the boxes of the row that is called so, by their height on the page."""
    root = ET.fromstring(svg)
    named = [t for t in root.iter(f"{SVG}text") if t.text == title]
    tops = {float(t.attrib["y"]) for t in named}
    found = []
    for rect in root.iter(f"{SVG}rect"):
        y = float(rect.attrib["y"])
        if any(top - 31 < y < top + 24 for top in tops) and "fill" in rect.attrib:
            found.append((float(rect.attrib["x"]), float(rect.attrib["width"])))
    return found


def test_the_measured_step_lies_below_the_simulated_one_on_one_axis(both: tuple[Timeline, Result]) -> None:
    timeline, planned = both
    measured = Measured(timeline)
    svg = to_svg(planned, measured=measured)
    ratio = timeline.pipeline_seconds / planned.step_time
    assert ratio > 1.2
    root = ET.fromstring(svg)
    title = root.find(f"{SVG}title")
    assert title is not None and title.text is not None
    assert f"difference {100 * (ratio - 1):+.1f} %" in title.text and "a clock" in title.text
    names = [t.text for t in root.iter(f"{SVG}text") if t.text in ("rank 0", "rank 1", "measured")]
    assert names == ["rank 0", "measured", "rank 1", "measured"]
    ends = {name: max(x + w for x, w in boxes_of(svg, name)) for name in ("rank 1", "measured")}
    left = 76.0
    assert (ends["measured"] - left) / (ends["rank 1"] - left) == pytest.approx(ratio, rel=0.02)
    # Each of both steps draws every action, and every braid.
    composites = sum(block.braided for rank in range(2) for block in blocks(planned, rank))
    assert len(root.findall(f"{SVG}rect[@class='o']")) == 2 * composites + 1
    assert {t.text for t in root.iter(f"{SVG}text")} >= {"0 s", "20 ms"}  # seconds, not units of time


def test_boxes_of_a_measured_step_are_those_of_the_simulator(both: tuple[Timeline, Result]) -> None:
    timeline, _ = both
    assert timeline.workload is not None
    place = timeline.schedule.placement
    slow = timeline.workload.imbalanced({1: 1.5}, tuple(place.rank_of(c) for c in range(place.n_chunks)))
    result, measured = simulate(timeline.schedule, slow), Measured(timeline, tp=1)

    def plain(boxes: Iterable[Box]) -> list[tuple[Any, ...]]:
        return sorted((b.step, b.lane, str(b.action), b.phase, b.start, b.end, b.exposed) for b in boxes)

    for rank in range(2):
        assert list(measured.steps(rank)) == list(result.steps(rank))
        ours, theirs = plain(measured.boxes(rank)), plain(result.boxes(rank))
        assert [o[:4] for o in ours] == [t[:4] for t in theirs]
        for one, other in zip(ours, theirs, strict=True):
            assert one[4:] == pytest.approx(other[4:], abs=1e-9)


def test_the_terminal_and_the_page_show_both(both: tuple[Timeline, Result]) -> None:
    timeline, planned = both
    console = Console(width=150, record=True, force_terminal=True, file=StringIO())
    console.print(to_terminal(planned, 150, measured=Measured(timeline)))
    plain = console.export_text()
    assert plain.count("measured  ") >= 2 and "1 measured" in plain and "difference" in plain
    page = to_html(planned, measured=Measured(timeline))
    data = json.loads(page.partition("const D = ")[2].partition(";\nconst canvas")[0])
    assert [row["name"] for row in data["ranks"]] == ["rank 0", "measured", "rank 1", "measured"]
    assert [len(row["memory"]) > 0 for row in data["ranks"]] == [True, False, True, False]
    assert data["total"] == timeline.pipeline_seconds and len(data["ranks"][1]["boxes"]) == len(
        data["ranks"][0]["boxes"]
    )


def test_the_page_says_that_a_box_was_measured(both: tuple[Timeline, Result], tmp_path: Path) -> None:
    browser = chrome.find()
    if browser is None:
        pytest.skip("no Chromium here; apt-get install chromium")
    path = tmp_path / "both.html"
    path.write_text(to_html(both[1], measured=Measured(both[0])), "utf-8")
    with chrome.page(browser, tmp_path / "profile") as page:
        page.open(path)
        for row, words in ((2, "rank 1"), (3, "rank 1 · measured")):
            page.move(*page.js(f"fxbraid.at({row}, 0)"))
            assert words in page.js("document.getElementById('tip').innerText")


def test_a_trace_of_both_reads_back_and_keeps_them_apart(
    both: tuple[Timeline, Result], tmp_path: Path
) -> None:
    timeline, planned = both
    path = tmp_path / "both.json"
    path.write_text(to_measured_trace(timeline, planned), "utf-8")
    assert Timeline.load(path) == timeline
    events = json.loads(path.read_text())["traceEvents"]
    assert {e["pid"] for e in events} == {0, 1, 2, 3, 1000, 1001}
    names = {e["pid"]: e["args"]["name"] for e in events if e.get("name") == "process_name"}
    assert names[3] == "pipeline rank 1, TP rank 1" and names[1001] == "simulated, pipeline rank 1"
    flows = [(e["id"], e["pid"]) for e in events if e["ph"] == "s"]
    assert len(flows) == len({one for one, _ in flows})


def test_the_command_draws_a_measured_file(both: tuple[Timeline, Result], tmp_path: Path) -> None:
    app = typer.Typer()
    app.command()(draw)
    runner = CliRunner()
    path, svg = tmp_path / "step.json", tmp_path / "step.svg"
    both[0].save(path)
    assert runner.invoke(app, ["--measured", str(path), "--svg", str(svg)]).exit_code == 0
    assert svg.read_text() == to_svg(both[1], measured=Measured(both[0]))
    shown = runner.invoke(app, ["--measured", str(path), "--tp-rank", "1"])
    assert shown.exit_code == 0 and "measured" in shown.output and "difference" in shown.output
    other = runner.invoke(app, ["dualpipev", "--measured", str(path)])
    assert other.exit_code == 0 and "simulated dualpipev" in other.output.replace("\n", " ")
    given = runner.invoke(
        app, ["--measured", str(path), "--times", "0.006,0.006,0.006,0.001", "--layers", "2"]
    )
    assert given.exit_code == 0 and "ms" in given.output
    (tmp_path / "no.json").write_text("{}")
    for arguments, words in (
        (["--measured", str(tmp_path / "no.json")], "no measured timeline"),
        (["--measured", str(tmp_path / "missing.json")], "missing.json"),
        (["--measured", str(path), "--tp-rank", "2"], "none of the 2 TP ranks"),
        (["gpipe", "--measured", str(path)], "chunks"),
    ):
        wrong = runner.invoke(app, arguments)
        assert wrong.exit_code == 2 and words in " ".join(wrong.output.split()), wrong.output
