"""Runs inside ranks: data-parallel replicas against the unsplit model on all their batches at once."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

import fxbraid
from fxbraid.runtime.launch import process_group
from fxbraid.zero import inner

from .families import whole_loss
from .parity import EPS, Case, make_batches, make_model, relative, share_traces


@dataclass(frozen=True)
class Layout(Case):
    """A case with ``dp`` replicas; ``rows`` and ``m`` are one replica's."""

    dp: int = 2


@dataclass
class Found:
    """The largest relative errors over all steps, and what must agree to the bit between ranks and schedules."""

    layout: Layout
    loss: float = 0.0
    grad: float = 0.0
    norm: float = 0.0
    losses: list[float] = field(default_factory=list)
    bits: dict[str, float] = field(default_factory=dict)


def whole_batches(layout: Layout) -> list[dict[str, Tensor]]:
    """Batches of all replicas together, step by step; labels are ragged, and differently so on each."""
    found = make_batches(layout.rows, layout.m * layout.dp, mask=layout.mask, steps=layout.steps)
    for batch in found:
        half = batch["labels"].shape[0] // layout.dp
        batch["labels"][:half, 6:] = -100  # the first replica has far fewer tokens than the others,
        batch["labels"][:half, 5] = batch["input_ids"][:half, 5]  # and every micro-batch has some
    return found


def own(batch: dict[str, Tensor], replica: int, dp: int) -> dict[str, Tensor]:
    """What one replica gets of it."""
    return {name: value.chunk(dp)[replica] for name, value in batch.items()}


@lru_cache(maxsize=8)
def expected(layout: Layout) -> list[tuple[Tensor, dict[str, Tensor], Tensor]]:
    """(loss, gradients, norm) of every step of the unsplit model on all the batches."""
    plain = make_model(layout.model, tied=layout.tied, layers=layout.layers, dtype=layout.dtype)
    optimizer = torch.optim.AdamW(plain.parameters(), lr=2e-4, eps=EPS)
    found = []
    for batch in whole_batches(layout):
        loss = whole_loss(plain, batch, layout.m * layout.dp)
        loss.backward()
        grads = {name: p.grad.clone() for name, p in plain.named_parameters() if p.grad is not None}
        norm = torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        found.append((loss.detach(), grads, norm))
    return found


def build(layout: Layout, **more: Any) -> Any:
    """The braided model of a layout."""
    plain = make_model(layout.model, tied=layout.tied, layers=layout.layers, dtype=layout.dtype)
    options: dict[str, Any] = {
        "tp_size": layout.tp,
        "pp_size": layout.pp,
        "dp_size": layout.dp,
        "n_microbatches": layout.m,
        "schedule": layout.schedule,
        "compile": layout.compile,
        "braided": layout.braided,
        "reproducible": layout.reproducible,
    }
    example = own(whole_batches(replace(layout, steps=1))[0], 0, layout.dp)
    return fxbraid.braid(plain, example, **{**options, **dict(layout.options), **more})


def compare(model: Any, layout: Layout, grads: dict[str, Tensor], scale: float = 1.0) -> float:
    """The largest relative error of this rank's gradients against ``scale`` times those of the unsplit model."""
    worst = 0.0
    for name, parameter in model.named_parameters():
        if name not in grads:
            assert parameter.grad is None, name
            continue
        assert parameter.grad is not None, name
        whole = model.plan.tp.params[name].take(grads[name], model._mesh.tp_rank) * scale
        worst = max(worst, relative(parameter.grad, whole, grads[name] * scale))
    return worst


def run_layout(layout: Layout) -> Found:
    """Three AdamW steps with clipping."""
    wanted = expected(replace(layout, tp=1, pp=1, schedule="", compile=False, reproducible=False, options=()))
    model = build(layout)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-4, eps=EPS)
    found = Found(layout)
    for batch, (loss, grads, norm) in zip(whole_batches(layout), wanted, strict=True):
        got = model.step(**own(batch, model._mesh.dp_rank, layout.dp))
        found.losses.append(got.item())
        found.loss = max(found.loss, relative(got, loss))
        found.grad = max(found.grad, compare(model, layout, grads))
        for name, parameter in model.named_parameters():
            key = f"{name}@{model._mesh.tp_rank}"
            found.bits[key] = found.bits.get(key, 0.0) + parameter.grad.double().mul(7).sin().sum().item()
        found.norm = max(found.norm, relative(model.clip_grad_norm_(0.5), norm))
        optimizer.step()
        optimizer.zero_grad()
    return found


def run_layouts(layouts: list[Layout]) -> list[Found]:
    """In a rank: all of them, one after the other, in one process group."""
    torch.set_num_threads(1)
    share_traces()
    with process_group(timeout_s=60):
        return [run_layout(layout) for layout in layouts]


def merge(found: list[Found]) -> Found:
    """One of all ranks: the largest errors; ranks that hold the same must agree to the bit."""
    whole = found[0]
    for one in found[1:]:
        assert one.losses == whole.losses
        whole.loss, whole.grad = max(whole.loss, one.loss), max(whole.grad, one.grad)
        whole.norm = max(whole.norm, one.norm)
        for key, value in one.bits.items():
            assert whole.bits.setdefault(key, value) == value, f"ranks disagree about {key}"
    return whole


# -- one launch, many checks


def run_checks(layouts: list[Layout]) -> tuple[list[Found], dict[str, Any]]:
    """In a rank of 4: the layouts, and everything else that replicas promise; what is returned is compared between
    ranks."""
    torch.set_num_threads(1)
    share_traces()
    said: dict[str, Any] = {}
    with process_group(timeout_s=60):
        found = [run_layout(layout) for layout in layouts]
        layout = replace(layouts[0], steps=2)
        wanted = expected(
            replace(layout, tp=1, pp=1, schedule="", compile=False, reproducible=False, options=())
        )
        model = build(layout)
        for check in (accumulates, ignores, refuses, explains):
            model.zero_grad()
            said[check.__name__] = check(model, layout, wanted)
        for check in (shares_out, takes_a_mesh):
            said[check.__name__] = check(layout, wanted)
    return found, said


def accumulates(model: Any, layout: Layout, wanted: Any) -> float:
    """Two steps without zero_grad, then zeroed in place and two more: the largest error against the sum."""
    batches = [own(batch, model._mesh.dp_rank, layout.dp) for batch in whole_batches(layout)]
    plain = make_model(layout.model, tied=layout.tied, layers=layout.layers, dtype=layout.dtype)
    for batch in whole_batches(layout):
        whole_loss(plain, batch, layout.m * layout.dp).backward()
    grads = {name: p.grad.clone() for name, p in plain.named_parameters() if p.grad is not None}
    worst = 0.0
    for _ in range(2):
        for batch in batches:
            model.step(**batch)
        worst = max(worst, compare(model, layout, grads))
        kept = {name: p.grad for name, p in model.named_parameters()}
        model.zero_grad(set_to_none=False)
        assert all(p.grad is kept[name] for name, p in model.named_parameters())
    model.zero_grad()
    model.step(**batches[0])
    first = {name: p.grad for name, p in model.named_parameters()}
    copies = {name: g.clone() for name, g in first.items()}
    model.zero_grad()
    model.step(**batches[1])
    assert all(torch.equal(first[name], copies[name]) for name in first), (
        "a gradient that was kept has changed"
    )
    peak, before = model.measure_peak(**batches[0]), {n: p.grad.clone() for n, p in model.named_parameters()}
    assert peak > 0 and all(torch.equal(p.grad, before[n]) for n, p in model.named_parameters())
    return worst


def ignores(model: Any, layout: Layout, wanted: Any) -> list[float]:
    """No label counts on the first replica, then on none: errors of loss and gradients; what one process has then."""
    replica = model._mesh.dp_rank
    plain = make_model(layout.model, tied=layout.tied, layers=layout.layers, dtype=layout.dtype)
    batch = whole_batches(replace(layout, steps=1))[0]
    half = batch["labels"].shape[0] // layout.dp
    batch["labels"][:half] = -100
    loss = whole_loss(plain, batch, layout.m * layout.dp)
    loss.backward()
    grads = {name: p.grad for name, p in plain.named_parameters() if p.grad is not None}
    got = model.step(**own(batch, replica, layout.dp))
    errors = [relative(got, loss.detach()), compare(model, layout, grads)]
    model.eval()
    seen = model(**own(batch, replica, layout.dp))
    errors.append(relative(seen.loss, loss.detach()))
    assert seen.logits is None or seen.logits.shape[0] == half
    model.train()
    model.zero_grad()
    batch["labels"][:] = -100
    assert torch.isnan(whole_loss(plain, batch, layout.m * layout.dp))
    assert torch.isnan(model.step(**own(batch, replica, layout.dp)))
    return errors


def refuses(model: Any, layout: Layout, wanted: Any) -> dict[str, str]:
    """What every rank says where replicas do not fit; afterwards they still work together."""
    replica, said = model._mesh.dp_rank, {}
    batch = own(whole_batches(replace(layout, steps=1))[0], replica, layout.dp)

    def refused(name: str, call: Any, **given: Any) -> None:
        try:
            call(**given)
            said[name] = "nothing"
        except fxbraid.BraidError as error:
            said[name] = str(error)

    short = {name: value[:, :-2] for name, value in batch.items()}
    refused("shapes", model.step, **(short if replica else batch))
    refused("missing", model.step, **{n: v for n, v in batch.items() if not replica or n != "attention_mask"})
    refused("rows", model.step, **{n: v[:-1] if replica else v for n, v in batch.items()})
    mask = batch["attention_mask"].float().requires_grad_(bool(replica))
    refused("gradient", model.step, **{**batch, "attention_mask": mask})
    refused("count", model.step, **batch, num_items_in_batch=100 + replica)
    plain = make_model(layout.model, tied=layout.tied, layers=layout.layers, dtype=layout.dtype)
    if replica:
        with torch.no_grad():
            dict(plain.named_parameters())["model.norm.weight"][3] += 1e-3
    options = {"tp_size": layout.tp, "pp_size": layout.pp, "dp_size": 2, "n_microbatches": layout.m}
    refused("weights", lambda: fxbraid.braid(plain, batch, compile=False, **options))  # type: ignore[arg-type]
    refused("bucket", build, layout=layout, bucket_mb=0)
    refused("sizes", build, layout=layout, dp_size=3)
    refused("no dp", build, layout=layout, dp_size=None)
    said["loss"] = repr(relative(model.step(**batch), wanted[0][0]) < 1e-6)
    return said


def explains(model: Any, layout: Layout, wanted: Any) -> dict[str, Any]:
    """The program, a recorded step, the report, a profile and its simulation."""
    batch = own(whole_batches(replace(layout, steps=1))[0], model._mesh.dp_rank, layout.dp)
    model.record(**batch)
    assert compare(model, layout, wanted[0][1]) < 1e-5
    timeline = model.write_timeline()
    here = model.schedule.placement.chunks_of(model._mesh.pp_rank)
    code = model.program.code
    profile = model.profile(repeats=1, cache=False)
    result = model.simulate(profile) if dist.get_rank() == 0 else None
    return {
        "reduces": all(code.count(f"self.reduce_{chunk}()") == 1 for chunk in here),
        "samples": model.last_step.samples,
        "ranks": (timeline.p, timeline.tp_size),
        "report": f"x dp {layout.dp}," in str(model.report()),
        "link": profile.replicas.beta_bytes_per_s > 0,
        "simulated": result and [len(found) for found in result.trace.reductions],
    }


def shares_out(layout: Layout, wanted: Any) -> dict[str, Any]:
    """Three steps with the plain optimizer and with one that is shared out, both with a schedule of learning rates."""
    before, parameters, bytes_, names = [], [], [], []
    for shared in (False, True):
        model = build(layout)
        before = [p.detach().clone() for p in model.parameters()]
        make: Any = (
            fxbraid.zero_optimizer if shared else lambda model, kind, **kw: kind(model.parameters(), **kw)
        )
        optimizer = make(model, torch.optim.AdamW, lr=1e-2, eps=EPS)
        rates = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
        for batch in whole_batches(replace(layout, steps=3)):
            model.step(**own(batch, model._mesh.dp_rank, layout.dp))
            model.clip_grad_norm_(0.5)
            optimizer.step()
            optimizer.zero_grad()
            rates.step()
        parameters.append([p.detach().clone() for p in model.parameters()])
        state = inner(optimizer).state
        names.append(sorted(name for name, p in model.named_parameters() if p in state))
        bytes_.append(sum(v.nbytes for one in state.values() for v in one.values() if v.ndim))
    everyone: list[Any] = [None] * model._mesh.dp_size
    dist.all_gather_object(everyone, names[1], group=model._mesh.dp_group)
    assert sorted(name for found in everyone for name in found) == names[0]
    return {
        "same": all(map(torch.equal, *parameters)),
        "moved": not any(map(torch.equal, parameters[1], before)),
        "share": bytes_[1] / bytes_[0] < 0.6,
    }


def takes_a_mesh(layout: Layout, wanted: Any) -> float:
    """The axes of a mesh of the user's, in the order that torchtitan has them."""
    mesh = init_device_mesh("cpu", (layout.pp, 2, layout.tp), mesh_dim_names=("pp", "dp", "tp"))
    model = build(layout, device_mesh=mesh, tp_size=None, pp_size=None, dp_size=None)
    assert model._mesh.tables == [[[0], [2]], [[1], [3]]]
    model.step(**own(whole_batches(replace(layout, steps=1))[0], model._mesh.dp_rank, layout.dp))
    return compare(model, layout, wanted[0][1])


def emulated() -> dict[str, tuple[float, float]]:
    """In a rank of 4: (seconds of a step on an emulated cluster, what was predicted) by schedule."""
    from fxbraid.runtime import emulate

    torch.set_num_threads(1)
    link = emulate.Link(0.0, 1e6)
    cluster = emulate.Cluster(tp_link=link, pp_link=link, clock="virtual")
    found = {}
    with emulate.process_group(cluster, timeout_s=60):
        emulate.unit_times(lambda unit: 1e-2)
        for name in ("1f1b", "zbv", "stp"):
            layout = Layout(tp=1, pp=2, m=4, schedule=name, rows=1, steps=1, tied=False)
            model = build(layout)
            batch = own(whole_batches(layout)[0], model._mesh.dp_rank, layout.dp)
            model.step(**batch)
            predicted = model.simulate(model.profile())
            found[name] = (model.last_step.seconds, predicted.step_time)
            assert predicted.exposed_dp_share > 0
    return found
