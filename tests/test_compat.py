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
