"""The bench: refusals before any rank starts, the table and the JSON, the verdict, and whole runs."""

from __future__ import annotations

import csv
import io
import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

from fxbraid import schedule as schedules
from fxbraid.bench import run as run_module
from fxbraid.bench.bitwise_pairs import accumulation, equal_pairs
from fxbraid.bench.cli import app
from fxbraid.bench.config import BenchConfig, ConfigError, check_config, skip_reason
from fxbraid.bench.engines import shard_part
from fxbraid.bench.entries import Entry, expand, parse
from fxbraid.bench.models import build_model, load_config, make_batch
from fxbraid.bench.parity import Difference, Part, compare, run_reference
from fxbraid.bench.pippy import SCHEDULES, try_compiled
from fxbraid.bench.ranks import Result, Row
from fxbraid.bench.record import as_csv, as_json
from fxbraid.bench.table import etas, make_table, verdict
from fxbraid.runtime.launch import RankError, launch, process_group


def text_of(output: str) -> str:
    """The words of a boxed message."""
    return " ".join(re.sub(r"[│╭╮╰╯─]", " ", output).split())


# --- refusals ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tp": 4}, "2 key-value heads are not divisible by --tp 4; use --tp 1 or 2"),
        ({"tp": 3}, "4 attention heads are not divisible by --tp 3; use --tp 1 or 2"),
        ({"pp": 0}, "--pp is 0; give a number that is at least 1"),
        ({"microbatches": -1}, "--microbatches is -1"),
        ({"seq": 1}, "--seq is 1; give at least 2"),
        ({"steps": 0}, "--repeat is 0; give a number that is at least 1"),
        ({"seed": 10**23}, f"--seed is {10**23}; give a whole number from -2^63 to 2^63 - 2"),
        ({"tp": 1, "ratio": 0.5}, "--ratio 0.5 sets the TP link, and with --tp 1 there are no all-reduces"),
        (
            {"link": "1e-3,1e6", "pp_link": "ib", "ratio": 0.3},
            "--link 1e-3,1e6 has nothing to set: --ratio 0.3 sets the TP link and --pp-link ib the other",
        ),
        (
            {"link": "nvlink", "pp_link": "real"},
            "--pp-link real does not go with a TP link or compute that is",
        ),
        ({"ratio": 0.3, "pp_link": "real"}, "--pp-link real does not go with a TP link or compute that is"),
        ({"schedules": ("ScheduleGPipe:blocking",)}, "or gpipe:blocking for fxbraid's schedule of that name"),
        ({"schedules": ("zigzag:free",)}, "no schedule is named 'zigzag'"),
        ({"pp": 8}, "stp on --pp 8 wants 16 chunks, and qwen2-tiny has 8 layers"),
        ({"pp": 16, "schedules": ("ScheduleGPipe",)}, "ScheduleGPipe on --pp 16 wants 16 chunks"),
        ({"schedules": ("zigzag",)}, "no schedule is named 'zigzag'"),
        ({"schedules": ()}, "--schedules names none"),
        ({"model": "qwen9"}, "no model is called 'qwen9' and no file has that path"),
        ({"layers": 0}, "--layers is 0"),
        (
            {"layers": 3},
            "stp on --pp 2 wants 4 chunks, and qwen2-tiny has 3 layers; use a smaller --pp, more",
        ),
        (
            {"link": "infiniband"},
            "--link: 'infiniband' is no link (it has no comma); give real, nvlink, pcie, ib",
        ),
        ({"link": "1e-6,0"}, "--link: '1e-6,0' is no link (beta_bytes_per_s=0.0 is no bandwidth"),
        ({"link": "ib", "pp_link": "fast"}, "--pp-link: 'fast' is no link"),
        (
            {"pp_link": "ib"},
            "--pp-link ib is for emulated links and modelled compute, and here both are real",
        ),
        ({"clock": "paced"}, "--clock paced is for emulated links and modelled compute"),
        (
            {"link": "ib", "clock": "virtual"},
            "--clock virtual counts modelled times, and --compute real has none",
        ),
        (
            {"compute": "modelled", "ratio": 1.0, "clock": "wall"},
            "--clock wall runs units for as long as they",
        ),
        (
            {"compute": "modelled", "ratio": 1.0, "clock": "atomic"},
            "--clock atomic is not one of virtual, paced",
        ),
        (
            {"compute": "modelled"},
            "--compute modelled needs a link that is modelled as well: give --ratio 0.37",
        ),
        ({"compute": "guessed"}, "--compute guessed is not one of real, modelled"),
        ({"times": "random"}, "--times random is not one of equal, flops"),
        ({"ratio": -0.5}, "--ratio is -0.5; give T_AR / T_F, 0 or more"),
        ({"unit_ms": 0.0}, "--unit-ms is 0; give milliseconds above 0"),
        ({"arithmetic": False}, "--timing-only leaves nothing to time with real compute"),
        (
            {"arithmetic": False, "compute": "modelled", "ratio": 1.0},
            "ScheduleGPipe is torch's own class, which",
        ),
        (
            {"schedules": ("order:STP",)},
            "'order:STP' asks for the order of a class that torch.distributed.pipeli",
        ),
    ],
)
def test_what_cannot_run_is_refused_with_numbers(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        check_config(BenchConfig(**options))


def test_a_config_with_dropout_is_refused(tmp_path: Path) -> None:
    load_config("llama-tiny", attention_dropout=0.25).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=r"attention_dropout is 0\.25"):
        check_config(BenchConfig(model=str(tmp_path / "config.json")))


def test_refusals_reach_the_command_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_ranks(*_: Any, **__: Any) -> None:
        raise AssertionError("a rank was started")

    monkeypatch.setattr(run_module, "launch", no_ranks)
    result = CliRunner().invoke(app, ["--tp", "4"])
    assert result.exit_code == 2
    assert "2 key-value heads are not divisible by --tp 4" in text_of(result.output)


def test_options_that_smollm2_would_ignore_are_refused() -> None:
    result = CliRunner().invoke(app, ["--model", "smollm2", "--seq", "32", "--compile"])
    assert result.exit_code == 2
    assert "--seq, --compile means nothing with --model smollm2" in text_of(result.output)


def test_a_launcher_with_another_number_of_ranks_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "x", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match="is 4 ranks, and this launcher started 2; use --nproc-per-node 4"):
        run_module.run_bench(BenchConfig(), Console(), run_module.Outputs(), 1.0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--timeout 0", "--timeout is 0; give seconds above 0"),
        ("--timeout=-5", "--timeout is -5; give seconds above 0"),
        ("--timeout nan", "--timeout is nan; give seconds above 0"),
        ("--timeout inf", "--timeout is inf; give seconds above 0, at most"),
        ("--json same --csv ./same", "--json and --csv are one file, same; give each its own"),
        ("--json none/x.json", "--json none/x.json: there is no folder"),
        ("--csv folder", "--csv folder is a folder; give the name of a file"),
        ("--plot none/x.png", "--plot none/x.png: there is no folder"),
        ("--model smollm2 --json none/x.json", "--json none/x.json: there is no folder"),
        ("--times flops", "--times is for modelled compute, and here it is real; add --compute modelled"),
        (
            "--times equal --unit-ms 2 --link ib",
            "--times, --unit-ms is for modelled compute, and here it is real",
        ),
    ],
)
def test_what_would_fail_or_be_ignored_later_is_refused_before_any_rank_starts(
    options: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_module, "launch", lambda *_, **__: pytest.fail("a rank was started"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    result = CliRunner().invoke(app, options.split())
    assert result.exit_code == 2, result.output
    assert message in text_of(result.output)
    assert [path.name for path in tmp_path.iterdir()] == ["folder"]


@pytest.mark.parametrize("rank", ["1", "x"])
def test_a_rank_variable_without_a_launcher_means_nothing(
    rank: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(run_module, "launch", lambda *_, **__: [result_with(1e-7)])
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    monkeypatch.setenv("RANK", rank)
    result = CliRunner().invoke(app, ["--json", str(tmp_path / "out.json")])
    assert result.exit_code == 0 and "All 2 give the loss" in text_of(result.output), result.output
    assert json.loads((tmp_path / "out.json").read_text())["ok"]


def test_a_plot_needs_a_known_ending_before_anything_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib", reason="matplotlib (the extra plot) is not installed")
    monkeypatch.setattr(run_module, "launch", lambda *_, **__: pytest.fail("a rank was started"))
    result = CliRunner().invoke(app, ["--plot", "bench.xyz"])
    assert result.exit_code == 2
    assert "--plot bench.xyz has no known ending; use one of" in text_of(result.output)


def test_a_plot_without_matplotlib_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    result = CliRunner().invoke(app, ["--plot", "bench.png"])
    assert result.exit_code == 2
    assert "--plot needs matplotlib; pip install 'fxbraid[plot]'" in text_of(result.output)


def test_names_say_engine_and_mode() -> None:
    assert parse("stp") == Entry("stp", "fxbraid", "stp")
    assert parse("stp:blocking") == Entry("stp:blocking", "fxbraid", "stp", "blocking")
    assert parse("zbv:free") == Entry("zbv:free", "fxbraid", "zbv", "free")
    assert parse("ScheduleGPipe").engine == "torch"
    for name in ("order:ZBVZeroBubble", "order:ScheduleZBVZeroBubble"):
        assert parse(name) == Entry("order:ZBVZeroBubble", "order", "ScheduleZBVZeroBubble", "blocking")
    few = BenchConfig(microbatches=1)
    assert skip_reason(few, parse("1f1b")) is None
    for name in ("Schedule1F1B", "order:1F1B"):
        assert skip_reason(few, parse(name)) == "it needs m >= 2 stages, and m is 1"


def test_groups_stand_for_every_schedule_once() -> None:
    assert expand(("stp", "zbv", "stp")) == ("stp", "zbv")
    assert expand(("STP", "stp", "GPipe", "STP:free", "order:ScheduleGPipe", "order:GPipe")) == (
        "stp",
        "gpipe",
        "stp:free",
        "order:GPipe",
    )
    everything = expand(("all",))
    assert set(schedules.FAMILIES) | set(SCHEDULES) | {"auto", "stp:blocking", "stp:free"} <= set(everything)
    assert sum(name.startswith("order:") for name in everything) == len(SCHEDULES) == 7
    assert set(expand(("ours", "torch", "orders"))) == set(everything)


def test_what_must_agree_to_the_bit_is_known_from_the_order_of_weight_gradients() -> None:
    zbv, one, stp, gpipe = (schedules.build(name, p=4, m=12) for name in ("zbv", "1f1b", "stp", "gpipe"))
    assert accumulation(zbv, False) == accumulation(one, False) == accumulation(gpipe, False)
    assert accumulation(stp, False) == accumulation(schedules.unbraid(stp), False) != accumulation(zbv, False)
    assert accumulation(schedules.reproducible(stp), False) == accumulation(zbv, False)
    # Compiled, other chunks are other artefacts.
    assert accumulation(zbv, True) != accumulation(one, True) == accumulation(gpipe, True)
    digests = {"a": ("x", "1"), "b": ("y", "2"), "c": ("x", "1"), "d": ("x", "3")}
    assert equal_pairs(digests) == {"a = c": True, "c = d": False}


# --- results -----------------------------------------------------------------------------------


def result_with(grad: float, bitwise: bool = True) -> Result:
    rows = (
        Row("stp", "fxbraid", None, 6.0, Difference(0.0, 1e-7, "a"), (0.2, 0.1, 0.4), (2048, 1024), "own"),
        Row(
            "ScheduleGPipe", "torch", None, 6.0, Difference(0.0, grad, "lm_head.weight"), (0.3,), (None, None)
        ),
        Row("ScheduleDualPipeV", skipped="it needs m >= 2p = 4, and m is 3"),
    )
    return Result(
        "qwen2-tiny", 10, 6.0, rows, {"stp = stp:blocking": bitwise}, "wall clock, gloo on loopback"
    )


def test_the_table_and_the_verdict_show_what_was_measured() -> None:
    console = Console(width=80, record=True, file=open(os.devnull, "w"))  # noqa: SIM115
    console.print(make_table(BenchConfig(), result_with(1e-7)))
    shown = console.export_text()
    assert re.search(r"stp\s+fxbraid\s+200\s+100-400\s+5120\s+2\s+1e-07", shown)
    assert re.search(r"GPipe\s+torch\s+300\s+300-300\s+3413\s+-\s+1e-07", shown)
    assert re.search(r"DualPipeV\s+skipped", shown)
    said = verdict(BenchConfig(), result_with(1e-7))
    assert "ScheduleDualPipeV was skipped: it needs m >= 2p = 4, and m is 3." in said
    assert "All 2 give the loss and gradients" in said
    assert "bitwise equal" in said


def test_a_difference_is_named_and_fails() -> None:
    assert result_with(1e-7).ok
    wrong = result_with(3e-3)
    assert not wrong.ok
    said = verdict(BenchConfig(), wrong)
    assert "ScheduleGPipe differs from one process" in said
    assert "3.0e-03" in said and "lm_head.weight" in said
    assert not result_with(1e-7, bitwise=False).ok
    assert not result_with(float("inf")).ok


@pytest.mark.parametrize(("grad", "code"), [(1e-7, 0), (1e-2, 1)])
def test_the_exit_code_is_the_verdict(
    grad: float, code: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(run_module, "launch", lambda *_, **__: [result_with(grad)])
    result = CliRunner().invoke(app, ["--json", str(tmp_path / "out.json")])
    assert result.exit_code == code, result.output
    assert json.loads((tmp_path / "out.json").read_text())["ok"] is (code == 0)


def test_an_invalid_time_fails_and_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    result = result_with(1e-7)
    bad = replace(result, rows=(replace(result.rows[0], errors=(0.4, 0.5)), *result.rows[1:]))
    monkeypatch.setattr(run_module, "launch", lambda *_, **__: [bad])
    done = CliRunner().invoke(app, ["--json", str(tmp_path / "out.json")])
    assert done.exit_code == 1, done.output
    content = json.loads((tmp_path / "out.json").read_text())
    assert (content["ok"], content["valid"]) == (True, False)


def test_a_failing_rank_is_shown_with_its_message(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise RankError(3, "ValueError: no", "Traceback")

    monkeypatch.setattr(run_module, "launch", fail)
    result = CliRunner().invoke(app, [])
    assert result.exit_code == 1
    assert "rank 3 failed: ValueError: no" in result.output


def test_json_has_every_sample_and_where_it_came_from() -> None:
    content = as_json(BenchConfig(steps=3), result_with(1e-7))
    assert content["rows"][0]["samples_s"] == (0.2, 0.1, 0.4)
    assert content["rows"][0]["median_s"] == 0.2
    assert content["rows"][2]["skipped"].startswith("it needs")
    assert content["clock"] == "wall clock, gloo on loopback"
    assert content["clock_name"] == "loopback"
    assert content["machine"]["cores"] >= 1
    assert content["versions"]["torch"] == torch.__version__
    json.dumps(content)


def test_csv_has_a_line_per_schedule_and_its_clock() -> None:
    lines = list(csv.DictReader(io.StringIO(as_csv(BenchConfig(), result_with(1e-7)))))
    assert [line["name"] for line in lines] == ["stp", "ScheduleGPipe", "ScheduleDualPipeV"]
    assert float(lines[0]["median_s"]) == 0.2 and lines[0]["peak_bytes"] == "2048"
    assert lines[1]["peak_bytes"] == "" and lines[2]["skipped"].startswith("it needs")
    assert {line["clock"] for line in lines} == {"wall clock, gloo on loopback"}


def test_times_with_too_much_emulation_error_are_marked_invalid() -> None:
    good, bad = (replace(result_with(1e-7).rows[0], errors=(0.01, 0.02, e)) for e in (0.9, 0.01))
    assert good.valid and bad.valid
    bad = replace(good, errors=(0.01, 0.2, 0.3))
    assert not bad.valid
    result = replace(result_with(1e-7), rows=(bad,))
    console = Console(width=100, record=True, file=open(os.devnull, "w"))  # noqa: SIM115
    console.print(make_table(BenchConfig(), result))
    assert re.search(r"stp\s+fxbraid INVALID", console.export_text())
    assert "stp is INVALID: 20.0 % of its time is the emulation's own, and 5 % is allowed" in verdict(
        BenchConfig(), result
    )
    assert as_json(BenchConfig(), result)["rows"][0]["valid"] is False


def test_eta_comes_from_three_rows_of_one_run() -> None:
    base = result_with(1e-7).rows[0]
    medians = {"stp": 1.1, "stp:blocking": 2.0, "stp:free": 1.0, "zbv": 3.0}
    rows = tuple(replace(base, name=name, samples_s=(s,)) for name, s in medians.items())
    result = replace(result_with(1e-7), rows=rows)
    (found,) = etas(BenchConfig(), result)
    assert (found.schedule, found.best) == ("stp", pytest.approx(1 - 5 / 32))
    assert found.value == pytest.approx(0.9)
    assert "stp: eta 0.900, eta_max 0.844, eta / eta_max 1.067." in verdict(BenchConfig(), result)
    invalid = replace(result, rows=tuple(replace(r, errors=(0.4,) * (r.name == "stp:free")) for r in rows))
    assert etas(BenchConfig(), invalid) == []
    assert "stp: no eta, since stp:free is INVALID." in verdict(BenchConfig(), invalid)
    assert "published order" not in verdict(BenchConfig(), result)
    few = verdict(BenchConfig(microbatches=4), result)
    assert "stp: m = 4 is below 3p - 1 = 5, where the published order does not exist" in few
    assert "eta 0.900, eta_max 0 (so few" in verdict(BenchConfig(microbatches=1), result)
    flat = replace(result, rows=tuple(replace(row, samples_s=(1.0,)) for row in rows))
    assert "nothing to hide" in verdict(BenchConfig(), flat)


# --- parity ------------------------------------------------------------------------------------


def test_a_shard_tells_its_dimension_by_its_shape() -> None:
    full = torch.arange(12.0).view(4, 3)
    part = shard_part("w", full[2:], (2, 3), (4, 3), (1, 2))
    assert (part.dim, part.index, part.count) == (0, 1, 2)
    assert torch.equal(part.of(full), full[2:])
    assert shard_part("w", full, (4, 3), (4, 3), (1, 2)).dim is None


SPOILS = ("", "value", "nan", "missing", "half", "none")


def compare_spoiled() -> dict[str, Difference | str]:
    """In a rank, by what is wrong with its gradients: the comparison, or the error that it raises."""
    import torch.distributed as dist

    found: dict[str, Difference | str] = {}
    with process_group(timeout_s=30):
        config = load_config("llama-tiny", num_hidden_layers=1, hidden_size=32, vocab_size=64)
        model = build_model(config, 0)
        batch = make_batch(64, 2, 8, 0, ragged=True)
        reference = run_reference(model, batch)
        loss = model(**batch).loss
        loss.backward()
        last = dist.get_rank() == 1
        for spoil in SPOILS:
            grads = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
            parts = [Part(name, grads[name]) for name, _ in model.named_parameters()]
            if spoil in ("value", "nan") and last:
                grads[parts[3].name][0] += 1e-2 if spoil == "value" else float("nan")
            if spoil == "missing":
                parts = parts[1:]
            if spoil == "half":
                parts[0] = Part(parts[0].name, parts[0].grad, 0, 0, 2)
            if spoil == "none" and last:
                parts[0] = Part(parts[0].name, None)
            try:
                found[spoil] = compare(loss, parts, reference)
            except ValueError as error:
                found[spoil] = str(error)
    return found


@pytest.fixture(scope="module")
def spoiled() -> list[dict[str, Any]]:
    return launch(compare_spoiled, (), nproc=2, timeout_s=90)


def test_equal_gradients_compare_equal_and_a_wrong_one_is_found(spoiled: list[dict[str, Any]]) -> None:
    first, second = spoiled
    assert first[""].within(0.0, 0.0) and first[""] == second[""]
    assert not first["value"].within(1e-6, 1e-5) and first["value"] == second["value"]
    assert first["value"].worst == "model.layers.0.self_attn.v_proj.weight"
    assert not first["nan"].within(1.0, 1.0)


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        ("missing", r"hold parts \[\] of parameter model.embed_tokens.weight, which is not"),
        ("half", r"hold parts \[\(0, 2\)\] of parameter model.embed_tokens.weight, which is not"),
        ("none", "model.embed_tokens.weight has no gradient on rank 1"),
    ],
)
def test_parameters_that_nobody_compared_are_an_error(
    spoiled: list[dict[str, Any]], spoil: str, message: str
) -> None:
    for found in spoiled:
        assert re.search(message, found[spoil])


@pytest.mark.slow
def test_how_torch_fails_with_compiled_layers_is_tried_and_said() -> None:
    said = {
        name: launch(try_compiled, (name,), nproc=1, timeout_s=300, on_line=lambda *_: None)[0]
        for name in ("ScheduleZBVZeroBubble", "ScheduleInterleaved1F1B")
    }
    refused = (
        r"with torch.compile\(layer\) it fails with RuntimeError: The ScheduleZBVZeroBubble schedule is not"
    )
    assert re.match(refused, said["ScheduleZBVZeroBubble"])
    assert re.match(r"with torch.compile\(layer\) it gives gradients within", said["ScheduleInterleaved1F1B"])
    assert all("; with layer.compile() it " in text for text in said.values())


# --- whole runs --------------------------------------------------------------------------------


@pytest.mark.slow  # README's first command does the same
def test_fxbraid_and_torch_agree_on_four_ranks(tmp_path: Path) -> None:
    path = tmp_path / "bench.json"
    command = [sys.executable, "-m", "fxbraid.bench", "--seq", "16", "--steps", "2", "--json", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=400, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    content = json.loads(path.read_text())
    names = [row["name"] for row in content["rows"]]
    assert names == list(BenchConfig().schedules)
    for row in content["rows"]:
        assert row["difference"]["loss"] <= 1e-6 and row["difference"]["grad"] <= 1e-5
        assert len(row["samples_s"]) == 2
        assert len(row["peak_bytes"]) == 4 and all(row["peak_bytes"])
    assert content["bitwise"] == {"stp = stp:blocking": True}
    assert "bitwise equal" in done.stdout


@pytest.mark.slow  # torchrun starts a docs/examples script in every run; a measured run is in test_bench_emulated.py
def test_it_runs_under_torchrun(tmp_path: Path) -> None:
    path = tmp_path / "bench.json"
    options = ["--tp", "1", "--seq", "16", "--steps", "1", "-m", "3", "--model", "llama-tiny"]
    names = "stp,Schedule1F1B,ScheduleDualPipeV"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += ["-m", "fxbraid.bench", *options, "--schedules", names, "--json", str(path)]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False, env=env)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("All 2 give the loss and gradients") == 1
    assert "ScheduleDualPipeV was skipped: it needs m >= 2p = 4, and m is 3." in done.stdout
    assert json.loads(path.read_text())["ok"]
