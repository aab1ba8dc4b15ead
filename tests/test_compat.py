"""Fails loudly where a torch version moves one of the private names that fxbraid leans on."""

from __future__ import annotations

import torch

from fxbraid import compat


def test_every_private_name_is_there_with_the_arguments_that_are_used() -> None:
    assert compat.missing() == []
    for name in compat.__all__:
        assert hasattr(compat, name), name


def test_a_name_that_moved_is_reported(monkeypatch) -> None:  # type: ignore[no-untyped-def]
    monkeypatch.setattr(compat, "standalone_compile", lambda gm: gm)
    assert compat.missing() == ["<lambda>(example_inputs)"]


def test_descriptors_have_the_fields_that_are_read() -> None:
    from dataclasses import fields

    def names(kind: type) -> set[str]:
        return {field.name for field in fields(kind)}

    assert "target" in names(compat.ParamAOTInput) and "target" in names(compat.BufferAOTInput)
    assert "idx" in names(compat.PlainAOTInput) and "idx" in names(compat.PlainAOTOutput)
    assert "output" in names(compat.TangentAOTInput) and "grad_of" in names(compat.GradAOTOutput)


def test_the_timeout_of_a_group_can_be_read(tmp_path) -> None:  # type: ignore[no-untyped-def]
    from datetime import timedelta

    import torch.distributed as dist

    store = f"file://{tmp_path}/store"
    dist.init_process_group("gloo", init_method=store, rank=0, world_size=1, timeout=timedelta(seconds=33))
    try:
        assert compat.timeout_of(dist.group.WORLD, torch.device("cpu")) == timedelta(seconds=33)
    finally:
        dist.destroy_process_group()


def test_the_functional_collectives_are_registered() -> None:
    assert hasattr(torch.ops._c10d_functional, "all_reduce")
    assert hasattr(torch.ops._c10d_functional, "wait_tensor")


def test_inductor_has_what_pins_a_block() -> None:
    from dataclasses import fields
    from inspect import signature

    from torch._inductor import config
    from torch._inductor.dependencies import WeakDep
    from torch._inductor.fx_passes.control_dependencies import preserve_node_ordering
    from torch._inductor.scheduler import BaseSchedulerNode, Scheduler
    from torch._inductor.utils import is_collective, is_wait

    from fxbraid.passes.compile_pin import options

    for name in options():
        assert hasattr(config, name), name
    assert {"graph", "additional_deps_map"} <= set(signature(preserve_node_ordering).parameters)
    assert {"name", "mutating_buf", "is_fake"} <= {field.name for field in fields(WeakDep)}
    for method in ("add_fake_dep", "get_buffer_names", "get_name"):
        assert hasattr(BaseSchedulerNode, method), method
    assert hasattr(Scheduler, "compute_ancestors")
    assert callable(is_collective) and callable(is_wait)


def test_views_share_a_storage_and_copies_do_not() -> None:
    with compat.FakeTensorMode():
        x = torch.empty(4, 6)
        assert compat.same_storage(x, x.t()) and not compat.same_storage(x, x.clone())


def test_an_alias_of_a_group_does_not_depend_on_how_many_groups_there_are(tmp_path) -> None:  # type: ignore[no-untyped-def]
    import torch.distributed as dist

    def names(extra: int) -> tuple[str, ...]:
        dist.init_process_group("gloo", init_method=f"file://{tmp_path}/{extra}", rank=0, world_size=1)
        try:
            groups = [dist.new_group([0]) for _ in range(extra + 2)]
            one, two = groups[extra:]
            found = tuple(compat.alias_group(group) for group in (one, two, one))
            total = torch.ops._c10d_functional.all_reduce(torch.ones(2), "sum", found[0])
            assert torch.equal(torch.ops._c10d_functional.wait_tensor(total), torch.ones(2))
            return found
        finally:
            dist.destroy_process_group()

    assert names(0) == names(3) == ("fxbraid.tp0", "fxbraid.tp1", "fxbraid.tp0")


def test_a_compiled_artefact_shows_its_code() -> None:
    from torch import fx

    from fxbraid.passes.compile import compile_graph

    graph = fx.Graph()
    x = graph.placeholder("x")
    x.meta["val"] = torch.empty(8, 8)
    graph.output((graph.call_function(torch.ops.aten.sin.default, (x,)),))
    artefact = compile_graph(fx.GraphModule({}, graph), "test-compat", name="test")
    assert "def call(self, args)" in (compat.generated_code(artefact) or "")
    assert compat.generated_code(torch.sin) is None


def test_holders_of_a_storage_are_counted() -> None:
    tensor = torch.zeros(4)
    assert compat.holders(tensor) == 1
    view = tensor[1:]
    assert compat.holders(tensor) == compat.holders(view) == 2
    del view
    assert compat.holders(tensor) == 1


def test_below_autograd_nothing_is_recorded_and_the_results_are_the_same() -> None:
    weight = torch.randn(3, 3, requires_grad=True)
    with compat.below_autograd():
        product = weight @ weight
    assert not product.requires_grad
    assert torch.equal(product, (weight @ weight).detach())


def test_a_group_says_which_devices_it_serves(tmp_path) -> None:  # type: ignore[no-untyped-def]
    import torch.distributed as dist

    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        group = dist.group.WORLD
        assert compat.serves(group, torch.device("cpu")) and not compat.serves(group, torch.device("xla"))
    finally:
        dist.destroy_process_group()


def test_without_modes_operators_run_for_real_inside_a_trace() -> None:
    seen = []

    class Reads(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with compat.without_modes():
                seen.append((torch.arange(4) * 2).tolist())
            return x + sum(seen[-1])

    exported = torch.export.export(Reads(), (torch.zeros(2),), strict=False)
    assert seen[0] == [0, 2, 4, 6]
    assert [n.target for n in exported.graph.nodes if n.op == "call_function"] == [torch.ops.aten.add.Tensor]


def test_an_index_in_a_vmapped_mask_is_one_operator() -> None:
    from torch._dynamo._trace_wrapped_higher_order_op import TransformGetItemToIndex

    class Masks(torch.nn.Module):
        def forward(self, groups: torch.Tensor) -> torch.Tensor:
            with TransformGetItemToIndex():
                return torch.vmap(lambda i: groups[i])(torch.tensor([2, 0]))

    with compat.plain_index():
        exported = torch.export.export(Masks(), (torch.arange(3),), strict=False)
    assert exported.module()(torch.arange(3)).tolist() == [2, 0]
    assert all(n.op != "get_attr" or "constant" in str(n.target) for n in exported.graph.nodes)


def test_the_fake_backend_communicates_nothing() -> None:
    import torch.distributed as dist

    dist.init_process_group("fake", store=compat.FakeStore(), rank=0, world_size=64)
    try:
        values = torch.ones(3)
        dist.all_reduce(values)
        assert dist.get_world_size() == 64
    finally:
        dist.destroy_process_group()
