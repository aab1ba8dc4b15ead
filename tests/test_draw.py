"""Pictures: well formed, complete, and looked at by a browser."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ET
from io import StringIO
from pathlib import Path

import pytest
import typer
from rich.console import Console
from typer.testing import CliRunner

from fxbraid.draw import to_html, to_svg, to_terminal, to_trace
from fxbraid.draw.cli import draw
from fxbraid.draw.layout import blocks
from fxbraid.draw.palette import paint, rgb
from fxbraid.schedule import build
from fxbraid.simulate import Link, Result, constants, simulate
from tests import chrome

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
