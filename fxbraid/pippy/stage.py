"""A chunk as a stage of torch.distributed.pipelining."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch import Tensor, nn

from ..compat_pippy import TorchStage
from ..passes.buffers import Layout
from ..passes.errors import BraidError
from ..runtime.p2p import empty
from ..schedule import Action, Phase
from ..schedule.lower import Channel
from .share import Kind, Share

if TYPE_CHECKING:
    from ..model import BraidedModel


def stages(model: BraidedModel) -> list[BraidedStage]:
    """This rank's chunks as torch's stages, in model order: what a ``_PipelineScheduleRuntime``, or a schedule class of
    torch that is one (``ScheduleDualPipeV``, ...), takes.

    Each ``stage.submod`` has its chunk's parameters under Hugging Face's names. Local. Raises :class:`BraidError` where
    there is no pipeline group.
    """
    mesh = model._mesh
    if mesh.pp_group is None:
        raise BraidError(
            "torch's pipelines need a process group of the pipeline's ranks, and this model has none; start it with "
            'torchrun, or give device_mesh a "pp" axis (of size 1 if there is one rank)'
        )
    share = Share(model)
    return [BraidedStage(share, chunk) for chunk in model.schedule.placement.chunks_of(mesh.pp_rank)]


def loss(output: Tensor, target: Any) -> Tensor:
    """The ``loss_fn`` of a schedule on our stages: what the last one returns is the loss, 0-d, a micro-batch's share of
    the whole batch's. ``target`` is not read: labels are among the inputs."""
    return output


class BraidedStage(TorchStage):
    """One chunk. The runtime's actions run its blocks, one by one; messages travel over the model's channels, which are
    one-directional, so that no order of sends and receives can block.

    Does for torch's runtime what its ``PipelineStage`` does, without autograd and without inferring shapes: they are
    known from the chunk's graph. ``share`` holds the values; all stages of a rank have the same.
    """

    def __init__(self, share: Share, chunk: int) -> None:
        model = share.model
        mesh, schedule = model._mesh, model.schedule
        super().__init__(
            _parameters(model, chunk), chunk, schedule.n_chunks, mesh.device, group=mesh.pp_group
        )
        self.share = share
        place = schedule.placement
        self._groups = mesh.channel_groups(schedule)
        self._global = {c: mesh.global_rank(place.rank_of(c)) for c in range(place.n_chunks)}
        here = place.chunks_of(mesh.pp_rank)
        self._next_is_here, self._previous_is_here = chunk + 1 in here, chunk - 1 in here

    # -- what the runtime prepares

    def _prepare_forward_infra(self, num_microbatches: int, *args: Any, **kwargs: Any) -> Any:
        self.chunks = num_microbatches
        # The runtime looks for skip connections here; a chunk has none.
        self.args_recv_info = dict.fromkeys(range(num_microbatches), ())
        return ()

    def _prepare_backward_infra(self, num_microbatches: int, *args: Any, **kwargs: Any) -> Any:
        return ()

    def _create_grad_recv_info(self, act_send_info: Any) -> Any:
        return ()

    def _get_init_p2p_neighbors_ops(self) -> list[dist.P2POp]:
        return []  # channels are connected as they are made

    def clear_runtime_states(self) -> None:
        """A step begins. Raises :class:`BraidError` outside of :class:`Runtime`'s."""
        _ = self.share.engine

    # -- what the runtime runs

    def forward_one_chunk(
        self,
        fwd_chunk_id: int,
        args: Any = (),
        kwargs: Any = None,
        save_forward_output: bool = True,
    ) -> Any:
        """F; the arguments are not read, the batch is known. Returns :meth:`hand_over`."""
        self.share.run((Action(Phase.F, self.stage_index, fwd_chunk_id),))
        return self.hand_over(fwd_chunk_id)

    def hand_over(self, microbatch: int) -> Any:
        """What F has made: the loss of the last chunk, else the boundary values."""
        if self.is_last:
            return self.share.take("y", self.stage_index, microbatch)[0]
        if self._next_is_here:
            return tuple(self.share.take("y", self.stage_index, microbatch))
        return ()  # it waits for its send

    def backward_one_chunk(
        self,
        bwd_chunk_id: int,
        loss: Any = None,
        full_backward: bool = True,
        last_backward: bool = False,
    ) -> None:
        """B, or I alone."""
        self.share.run((Action(Phase.B if full_backward else Phase.I, self.stage_index, bwd_chunk_id),))

    def backward_weight_one_chunk(self, bwd_chunk_id: int, last_backward: bool = False) -> None:
        """W."""
        self.share.run((Action(Phase.W, self.stage_index, bwd_chunk_id),))

    def perform_reduce_grad(self, grad_scale_factor: int) -> None:
        """All of the chunk's W's are done. There is nothing to scale: the loss is that of the whole batch."""
        self.share.reduce(self.stage_index)

    # -- the turn of a V

    def set_local_fwd_input(self, prev_stage_outputs: Any, mb_index: int) -> None:
        self.share.put("x", self.stage_index, mb_index, prev_stage_outputs)

    def get_local_bwd_output(self, mb_index: int) -> tuple[Tensor, ...]:
        return tuple(self.share.take("dx", self.stage_index, mb_index))

    def set_local_bwd_input(self, next_stage_bwd_outputs: Any, mb_index: int) -> None:
        self.share.put("dy", self.stage_index, mb_index, next_stage_bwd_outputs)

    # -- messages

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        if self.is_first or self._previous_is_here:
            return []
        return self._receive(Channel("F", self.stage_index - 1), "x", fwd_chunk_id)

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        if self.is_last or self._next_is_here:
            return []
        return self._receive(Channel("I", self.stage_index + 1), "dy", bwd_chunk_id)

    def get_fwd_send_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        return self._send(Channel("F", self.stage_index), "y", fwd_chunk_id)

    def get_bwd_send_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        return self._send(Channel("I", self.stage_index), "dx", bwd_chunk_id)

    def _receive(self, channel: Channel, kind: Kind, microbatch: int) -> list[dist.P2POp]:
        layouts: list[Layout] = self.share.engine.layouts(channel)
        buffers = [empty(layout) for layout in layouts]
        self.share.put(kind, self.stage_index, microbatch, buffers)
        peer, group = self._global[channel.chunk], self._groups[channel]
        return [dist.P2POp(dist.irecv, buffer, peer, group) for buffer in buffers]

    def _send(self, channel: Channel, kind: Kind, microbatch: int) -> list[dist.P2POp]:
        values = self.share.take(kind, self.stage_index, microbatch)
        peer, group = self._global[channel.target], self._groups[channel]
        return [dist.P2POp(dist.isend, value.contiguous(), peer, group) for value in values]


def _parameters(model: BraidedModel, chunk: int) -> nn.Module:
    """A module that has the chunk's parameters under their names, and nothing to run."""
    root = nn.Module()
    known = dict(model.named_parameters(remove_duplicate=False))
    for name in model.plan.partition.chunks[chunk].params:
        if name not in known:
            continue
        *path, leaf = name.split(".")
        module = root
        for step in path:
            if not hasattr(module, step):
                module.add_module(step, nn.Module())
            module = module.get_submodule(step)
        module.register_parameter(leaf, known[name])
    return root
