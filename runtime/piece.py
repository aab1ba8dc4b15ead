"""``compile="block"`` on a rank: the pieces of its blocks, bound to parameters and gradients."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor, nn

from ..compat import generated_code
from ..passes.block import Block
from ..passes.compile import Artefacts
from ..passes.compile_block import Piece, cut
from ..passes.errors import UnsupportedError
from .boxed import boxed
from .emulate import active
from .unit import GradSlot

State = Mapping[str, Tensor]
Slots = Mapping[int, Mapping[str, GradSlot]]


def compile_block(block: Block, artefacts: Artefacts, state: State, slots: Slots) -> None:
    """Cut ``block`` at its sends, compile the pieces, and put them in the place of its units.

    ``block.plan`` keeps the graph of units.
    """
    pieces = cut(block)
    block.plan = block.graph_module
    block.graph_module = pieces.bind(lambda piece: BoundPiece(piece, artefacts, state, slots))


class BoundPiece(nn.Module):
    """``forward([values])``: a piece on this rank's parameters and buffers; the list is emptied, so that a value that
    nobody else holds is freed inside. Its gradients go to their slots, when it is done, in the order of its units."""

    def __init__(self, piece: Piece, artefacts: Artefacts, state: State, slots: Slots) -> None:
        super().__init__()
        # A tuple, not attributes: these are the model's parameters, not the block's.
        self._state = tuple(state[name] for name in piece.state)
        self._slots = tuple(slots[chunk][name] for chunk, name in piece.grads)
        self._artefact = artefacts.get_piece(piece)
        self._call = boxed(self._artefact)
        self._session = active()
        self._piece = piece

    @property
    def code(self) -> str:
        """What runs: the Python that Inductor generated (or, where there was nothing to compile, the graph's)."""
        return generated_code(self._artefact) or self._piece.graph_module.code

    def forward(self, values: list[Tensor]) -> Sequence[Tensor]:
        self._refuse_modelled_time()
        values[:0] = self._state
        try:
            outs = self._call(values)
        except Exception as error:
            error.add_note(f'in block {self._piece.name} (compile="block"): {", ".join(self._piece.units)}')
            raise
        if not self._slots:
            return outs
        count = len(outs) - len(self._slots)
        for slot, grad in zip(self._slots, outs[count:], strict=True):
            slot.add(grad)
        return outs[:count]

    def _refuse_modelled_time(self) -> None:
        session = self._session
        if session is not None and session.units is not None and session.cluster.clock != "wall":
            raise UnsupportedError(
                f"unit_times gives each unit its time on the {session.cluster.clock} clock, but with "
                f'compile="block" the {len(self._piece.units)} units of {self._piece.name} are one call; use '
                'compile="unit" or False (the order is the same), or clock="wall"'
            )

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._piece.name})"
