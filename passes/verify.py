"""The verifier that runs between passes: each check states what a pass promises the next one.

It runs where ``FXBRAID_VERIFY=1`` (the test suite sets it) or ``lower_model(..., verify=True)``, and raises
:class:`~fxbraid.passes.errors.VerifyError`, which always means a bug of fxbraid.
"""

from __future__ import annotations

from collections import Counter

from torch import fx

from ..schedule.lower import Away, Back, Offload, Reload, Run
from ..schedule.offload import Parcel
from .block import Block
from .errors import VerifyError
from .joint import VIEWS, JointGraph, Phase
from .launches import LAUNCHES, WAIT
from .marks import MARKS, TP_GATHER, is_collective, is_mark
from .units import ChunkUnits

_ORDER = {Phase.F: 0, Phase.I: 1, Phase.W: 2}


def verify_split(joint: JointGraph) -> None:
    """Every node has a phase, no phase reads a later one, and W holds no collective (see pass ``regather``)."""
    for node in joint.graph.nodes:
        if node.op != "call_function":
            continue
        if (node in joint.phase) == (node in joint.free):
            raise VerifyError(f"{node.name} must be in exactly one of F, I, W, or be a view of a parameter")
        if node in joint.free:
            if node.target not in VIEWS:
                raise VerifyError(f"{node.name} is no view and can't be made twice")
            continue
        phase = joint.phase[node]
        if phase is Phase.W and is_collective(node) and node.target is not TP_GATHER:
            raise VerifyError(f"collective {node.name} lies in W")
        for source in node.all_input_nodes:
            if source in joint.phase and _ORDER[joint.phase[source]] > _ORDER[phase]:
                raise VerifyError(f"{node.name} of {phase} reads {source.name} of {joint.phase[source]}")
            if phase is Phase.F and source in joint.tangents:
                raise VerifyError(f"{node.name} of F reads the gradient {source.name}")


def verify_units(chunk: ChunkUnits) -> None:
    """Every node of every phase lies in exactly one unit, no unit holds a mark, and within F, and within I then W,
    each unit reads only earlier ones and what the program passes. Heavy units of W, which run before light
    ones where they are queued, read none of these."""
    joint = chunk.joint
    for phase, units in chunk.units.items():
        planned = Counter(str(n.target) for n in joint.phase if joint.phase[n] is phase and not is_mark(n))
        built: Counter[str] = Counter()
        for unit in units:
            for node in unit.graph_module.graph.nodes:
                if node.op == "call_function":
                    if node.target in MARKS:
                        raise VerifyError(f"unit {unit.label} holds a mark: {node.format_node()}")
                    built[str(node.target)] += 1
        views = {str(v) for v in VIEWS}
        wrong = {
            t
            for t in planned | built
            if planned[t] != built[t] and not (t in views and built[t] > planned[t])
        }
        if wrong:
            raise VerifyError(
                f"units of {phase} of chunk {chunk.index} do not hold each node once: "
                f"{ {t: (planned[t], built[t]) for t in wrong} } (planned, built)"
            )
    _verify_reads(chunk)


def _verify_reads(chunk: ChunkUnits) -> None:
    joint = chunk.joint
    starts: dict[Phase, set[fx.Node]] = {
        Phase.F: {*joint.inputs.values(), *joint.boundary},
        Phase.I: {*chunk.for_I, *joint.tangents},
        Phase.W: {*chunk.for_W, *chunk.handed},
    }
    light: set[fx.Node] = set()
    for phase, units in chunk.units.items():
        known = set(starts[phase])
        for unit in units:
            if phase is Phase.W and not unit.heavy:
                light |= set(unit.outs)
            elif late := light & set(unit.args):
                raise VerifyError(
                    f"unit {unit.label} reads {min(n.name for n in late)} of a unit that runs after it"
                )
            for arg in unit.args:
                source = arg.args[0] if chunk.is_collective(arg) else arg
                if arg not in known and chunk.resolve(source) not in known:  # type: ignore[arg-type]
                    raise VerifyError(f"unit {unit.label} reads {arg.name}, which nothing before it makes")
            known |= set(unit.outs)


def verify_offload(program: fx.GraphModule) -> None:
    """Every parcel that leaves is let go of, takes memory again and is waited for, once and in this order, before its
    backward reads it; no two are in one slot on the host at once."""
    taken: dict[int, Parcel] = {}
    slot_of: dict[fx.Node, int] = {}
    done: dict[fx.Node, tuple[set[int], set[int]]] = {}
    for node in program.graph.nodes:
        instruction = node.meta.get("instruction")
        if isinstance(instruction, Offload):
            slot, numbers = node.args[2:]
            if slot in taken:
                raise VerifyError(f"{node.name} leaves to slot {slot}, where {taken[slot]} still is")
            if len(numbers) != len(instruction.parcel.items):
                raise VerifyError(f"{node.name} moves storages {numbers} of {instruction.parcel}")
            taken[slot], slot_of[node], done[node] = instruction.parcel, slot, (set(), set())
        elif isinstance(instruction, Away | Reload | Back):
            source = node.args[0]
            gone, back = done.pop(source, (None, None))
            if gone is None or back is None:
                raise VerifyError(f"{node.name} reads {source}, which is not on its way, or twice")
            every = set(range(len(instruction.parcel.items)))
            if isinstance(instruction, Back):
                if gone != every or back != every:
                    raise VerifyError(f"{node.name}: of {every} {gone} were let go of and {back} reloaded")
                del taken[slot_of[source]]
                continue
            now = set(instruction.items)
            if isinstance(instruction, Away) and gone.isdisjoint(now) and back.isdisjoint(now):
                gone |= now
            elif isinstance(instruction, Reload) and now <= gone and back.isdisjoint(now):
                back |= now
            else:
                raise VerifyError(f"{node.name} at {sorted(now)}: {gone} are gone and {back} back already")
            done[node], slot_of[node] = (gone, back), slot_of[source]
        elif isinstance(instruction, Run) and any(
            "parked" in arg.meta and not isinstance(arg.args[0].meta.get("instruction"), Back)
            for arg in node.all_input_nodes
        ):
            raise VerifyError(f"{node.name} reads a parcel that is not back")
    if taken:
        raise VerifyError(f"{list(taken.values())} never come back")


def verify_block(block: Block) -> None:
    """Every launch is waited for exactly once, behind it."""
    order = {node: i for i, node in enumerate(block.graph_module.graph.nodes)}
    for node in order:
        if node.target in LAUNCHES:
            waits = [u for u in node.users if u.target is WAIT]
            if len(waits) != 1 or len(node.users) != 1 or order[waits[0]] <= order[node]:
                raise VerifyError(
                    f"block {block.name}: {node.name} has {len(waits)} waits among {list(node.users)}"
                )
    block.graph_module.graph.lint()
