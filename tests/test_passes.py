"""shard, capture, normalise_loss and partition: what they accept, make and refuse."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fxbraid.compat import FakeTensorMode
from fxbraid.passes.capture import capture, fake_inputs, merge
from fxbraid.passes.errors import CaptureError, PartitionError, PlanError, UnsupportedError
from fxbraid.passes.loss import normalise_loss
from fxbraid.passes.marks import TP_COPY, TP_REDUCE
from fxbraid.passes.partition import partition
from fxbraid.passes.shard import canonical_names, read_plan, shard

from .tiny import batch, lower, qwen2

CPU = torch.device("cpu")


def captured(model: nn.Module, micro: dict[str, Any] | None = None, *, tp_size: int = 2) -> Any:
    mode = FakeTensorMode()
    local = shard(model, tp_size=tp_size, fake_mode=mode, device=CPU)
    given = fake_inputs(micro or batch(2), fake_mode=mode, device=CPU)
    return merge(capture(local.module, given, fake_mode=mode))


class TestShard:
    def test_local_shapes_follow_the_plan(self) -> None:
        params = read_plan(qwen2(), tp_size=2, tp_plan="auto").params
        local = {name: shard.local_shape for name, shard in params.items()}
        assert local["model.layers.0.self_attn.q_proj.weight"] == (16, 32)
        assert local["model.layers.0.self_attn.k_proj.bias"] == (8,)
        assert local["model.layers.0.self_attn.o_proj.weight"] == (32, 16)
        assert local["model.layers.0.mlp.down_proj.weight"] == (32, 24)
        assert local["model.layers.0.input_layernorm.weight"] == (32,)
        assert local["model.embed_tokens.weight"] == (96, 32)

    def test_shards_put_together_are_the_parameter(self) -> None:
        model = qwen2()
        plan = read_plan(model, tp_size=2, tp_plan="auto")
        for name, parameter in model.named_parameters():
            part = plan.params[name]
            pieces = [part.take(parameter, rank) for rank in range(2)]
            assert all(tuple(p.shape) == part.local_shape for p in pieces)
            whole = pieces[0] if part.dim is None else torch.cat(pieces, part.dim)
            assert torch.equal(whole, parameter)

    def test_the_cut_vocabulary_is_said(self) -> None:
        notes = lower(qwen2()).plan.notes
        assert "lm_head.weight: 96 rows of the vocabulary, 48 on each TP rank" in notes

    def test_one_copy_for_linears_that_share_an_input_and_one_reduce_for_each_row_parallel_one(self) -> None:
        graph = captured(qwen2()).graph_module.graph
        copies = [n for n in graph.nodes if n.target is TP_COPY]
        assert [len(n.users) for n in copies] == [3, 2] * 4
        assert sum(n.target is TP_REDUCE for n in graph.nodes) == 8

    def test_heads_that_do_not_divide(self) -> None:
        with pytest.raises(PlanError, match=r"num_attention_heads=4 .* tp_size=3; use tp_size 1, 2 or 4"):
            read_plan(qwen2(), tp_size=3, tp_plan="auto")
        with pytest.raises(PlanError, match=r"num_key_value_heads=3 of .*neither divides by tp_size=2 nor"):
            read_plan(
                qwen2(num_attention_heads=6, num_key_value_heads=3, hidden_size=48), tp_size=2, tp_plan="auto"
            )

    def test_features_that_do_not_divide(self) -> None:
        with pytest.raises(
            PlanError, match=r"gate_proj.weight is 45, not divisible by tp_size=2; use 1, 3, 5"
        ):
            read_plan(qwen2(intermediate_size=45), tp_size=2, tp_plan="auto")

    def test_an_unknown_style_names_module_and_style(self) -> None:
        plan = {"model.layers.*.mlp.up_proj": "sideways"}
        with pytest.raises(PlanError, match=r"model\.layers\.0\.mlp\.up_proj the style 'sideways'"):
            read_plan(qwen2(), tp_size=2, tp_plan=plan)

    def test_a_model_without_a_plan(self) -> None:
        for wrong, said in (
            (
                {"model.layers.*.self_atn.q_proj": "colwise"},
                r"matches no module or parameter of Qwen2ForCausalLM",
            ),
            ({"model.layers.*.mlp.up_proj": "colwize"}, r"style 'colwize', which fxbraid does not know"),
            (
                {"model.layers.*.mlp.up_proj.weight": "colwise"},
                r"name the module, model\.layers\.0\.mlp\.up_proj",
            ),
            ({}, r"tp_plan=\{\} names no module"),
            (5, r'tp_plan=5: use "auto" or a dict'),
        ):
            with pytest.raises(PlanError, match=said):
                read_plan(qwen2(), tp_size=2, tp_plan=wrong)  # type: ignore[arg-type]
        with pytest.raises(PlanError, match="Linear has no tensor-parallel plan"):
            read_plan(nn.Linear(4, 4), tp_size=2, tp_plan="auto")
        assert read_plan(nn.Linear(4, 4), tp_size=1, tp_plan="auto").styles == {}

    def test_names_of_tied_parameters(self) -> None:
        names = canonical_names(qwen2(tie_word_embeddings=True))
        assert names["lm_head.weight"] == "model.embed_tokens.weight"


class TestCapture:
    def test_the_model_and_its_config_are_left_alone(self) -> None:
        model = qwen2(use_cache=True)
        before = {k: v.clone() for k, v in model.state_dict().items()}
        captured(model)
        assert model.config.use_cache is True
        assert not model._forward_pre_hooks and not model.model.layers[0].self_attn.q_proj._forward_pre_hooks
        assert "forward" not in vars(model.model.layers[0].self_attn.o_proj)
        assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())

    def test_outputs_and_inputs_are_named(self) -> None:
        result = captured(qwen2())
        assert set(result.inputs) == {"input_ids", "attention_mask", "labels"}
        assert result.outputs == ("loss", "logits")

    def test_a_branch_on_values_names_module_and_line(self) -> None:
        model = qwen2()
        norm = model.model.layers[2].post_attention_layernorm

        class Branching(type(norm)):  # type: ignore[misc]
            def forward(self, x: Tensor) -> Tensor:
                if x.sum() > 0:  # the line that the error must quote
                    return super().forward(x)
                return x

        norm.__class__ = Branching
        with pytest.raises(CaptureError) as error:
            captured(model)
        assert "model.layers.2.post_attention_layernorm" in str(error.value)
        assert "if x.sum() > 0" in str(error.value)
        assert "test_passes.py" in str(error.value)

    def test_dropout_in_training_is_refused_with_module_and_way_out(self) -> None:
        model = qwen2(attention_dropout=0.1)
        with pytest.raises(UnsupportedError, match=r"model\.layers\.0\.self_attn.*dropout p=0\.1.*eval\(\)"):
            captured(model.train())
        captured(model.eval())

    def test_an_unknown_keyword(self) -> None:
        class Strict(nn.Module):
            def forward(self, x: Tensor) -> Tensor:
                return x.sum()

        with pytest.raises(CaptureError, match=r"no keyword 'y'; it takes x"):
            captured(Strict(), {"y": torch.ones(2, 2)}, tp_size=1)

    def test_a_written_buffer_is_refused(self) -> None:
        class Counting(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.linear = nn.Linear(4, 4)
                self.register_buffer("calls", torch.zeros(()))

            def forward(self, x: Tensor) -> dict[str, Tensor]:
                self.calls += 1  # type: ignore[operator]
                return {"loss": self.linear(x).sum()}

        with pytest.raises(UnsupportedError, match="writes its calls"):
            captured(Counting(), {"x": torch.ones(2, 4)}, tp_size=1)

    def test_in_place_operators_on_activations_are_made_functional(self) -> None:
        class InPlace(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))

            def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
                for layer in self.layers:
                    x = layer(x)
                    x += 1
                    x.mul_(2)
                return {"loss": nn.functional.cross_entropy(x, y)}

        micro = {"x": torch.ones(2, 4), "y": torch.zeros(2, dtype=torch.long)}
        result = captured(InPlace(), micro, tp_size=1)
        ops = [str(n.target) for n in result.graph_module.graph.nodes]
        assert not any("_." in op.split("::")[-1] and op.endswith("_.Tensor") for op in ops), ops
        assert "aten.cross_entropy_loss.default" in ops
        assert normalise_loss(result).counts == ("loss_count_0",)


class TestLoss:
    def test_shares_of_ragged_micro_batches_add_up(self) -> None:
        model = qwen2().eval()
        whole = batch(4)
        normalised = normalise_loss(captured(model, batch(2), tp_size=1))
        assert normalised.counts == ("loss_count_0",)
        state = dict(model.named_parameters()) | dict(model.named_buffers())
        module = copy.deepcopy(normalised.captured.graph_module)
        for node in module.graph.find_nodes(op="get_attr"):
            owner, _, leaf = str(node.target).rpartition(".")
            target = module.get_submodule(owner)
            target._parameters.pop(leaf, None)
            target._buffers.pop(leaf, None)
            setattr(target, leaf, state[str(node.target)].detach())
        names = normalised.captured.inputs
        parts = [{k: v[i : i + 2] for k, v in whole.items()} for i in (0, 2)]
        assert normalised.count is not None
        counts = [normalised.count(*(p[n] for n in names if n in p))[0] for p in parts]
        total = sum(counts)
        assert counts[0] != counts[1]
        given = [{**p, "loss_count_0": total.float()} for p in parts]  # type: ignore[union-attr]
        loss = sum(module(*(g[n] for n in names))[0] for g in given)
        assert torch.allclose(loss, model(**whole).loss, rtol=1e-6)  # type: ignore[arg-type]

    @pytest.mark.parametrize("reduction", ["sum", "mean"])
    def test_a_loss_that_is_no_cross_entropy_must_be_declared(self, reduction: str) -> None:
        class Squares(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))

            def forward(self, x: Tensor) -> dict[str, Tensor]:
                for layer in self.layers:
                    x = layer(x)
                return {"loss": (x**2).mean()}

        micro = {"x": torch.ones(2, 4)}
        with pytest.raises(UnsupportedError, match='loss_reduction="sum"'):
            normalise_loss(captured(Squares(), micro, tp_size=1))
        result = normalise_loss(captured(Squares(), micro, tp_size=1), loss_reduction=reduction)
        assert len(result.counts) == (reduction == "mean")

    def test_an_unknown_reduction(self) -> None:
        with pytest.raises(UnsupportedError, match="loss_reduction='most'"):
            normalise_loss(captured(qwen2()), loss_reduction="most")


class TestPartition:
    def test_only_one_activation_crosses_each_boundary(self) -> None:
        chunks = lower(n_chunks=4).partition.chunks
        assert [(c.boundary_in, c.boundary_out) for c in chunks] == [(0, 1), (1, 1), (1, 1), (1, 0)]
        assert [list(c.layers) for c in chunks] == [[0], [1], [2], [3]]

    def test_tables_and_masks_are_made_again_in_each_chunk(self) -> None:
        for chunk in lower(n_chunks=4).partition.chunks:
            assert "attention_mask" in chunk.inputs
            ops = [str(n.target) for n in chunk.graph_module.graph.nodes]
            assert ops.count("aten.cos.default") == 1

    def test_every_parameter_is_in_the_chunk_that_reads_it(self) -> None:
        model = qwen2(tie_word_embeddings=True)
        chunks = lower(model, n_chunks=2).partition.chunks
        names = [n for c in chunks for n in c.params]
        assert len(names) == len(set(names))
        # A tied parameter stands once under each of its names, so that its two gradients stay apart.
        assert set(names) == {n for n, _ in model.named_parameters(remove_duplicate=False)}
        assert "model.embed_tokens.weight" in chunks[0].params and "lm_head.weight" in chunks[1].params

    def test_a_heavy_head_makes_the_last_chunk_shorter(self) -> None:
        model = qwen2(num_hidden_layers=8, vocab_size=1024)
        even = [len(c.layers) for c in lower(qwen2(num_hidden_layers=8), n_chunks=2).partition.chunks]
        skewed = lower(model, n_chunks=2).partition
        lengths = [len(c.layers) for c in skewed.chunks]
        assert even == [4, 4]
        assert lengths[0] > lengths[1]
        costs, normalised = skewed.costs, normalise_loss(captured(model)).captured
        for at in range(1, 8):
            other = partition(normalised, 2, split=[at, 8 - at]).costs
            assert max(costs) <= max(other)

    def test_refusals_have_numbers(self) -> None:
        with pytest.raises(PartitionError, match="4 layers, fewer than the 5 chunks"):
            lower(n_chunks=5)
        with pytest.raises(PartitionError, match=r"split=\[1, 2\] must have 2 entries .* add up to 4"):
            lower(n_chunks=2, split_layers=[1, 2])
        assert [len(c.layers) for c in lower(n_chunks=2, split_layers=[3, 1]).partition.chunks] == [3, 1]

    def test_a_skip_goes_through_the_chunks_between_and_is_named(self) -> None:
        class Skipping(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

            def forward(self, x: Tensor) -> dict[str, Tensor]:
                first = self.layers[0](x)
                return {"loss": (self.layers[2](self.layers[1](first)) + first).sum()}

        result = normalise_loss(
            captured(Skipping(), {"x": torch.ones(2, 4)}, tp_size=1), loss_reduction="sum"
        )
        parts = partition(result.captured, 3)
        assert [(c.boundary_in, c.boundary_out) for c in parts.chunks] == [(0, 1), (1, 2), (2, 0)]
        (skip,) = parts.skips
        assert (skip.made, skip.read, skip.through, skip.nbytes) == (0, (1, 2), (1,), 32)
        assert str(skip).startswith("skip connection: linear of layers.0 (32 bytes")
