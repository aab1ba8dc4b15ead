"""Part of pass ``follow``: attention, convolutions, norms of groups, reading and writing by index, and constants."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import replace
from typing import Any

from torch import fx

from .cut_sums import Operand, aligned, combine, is_zero
from .cuts import WHOLE, Broken, Call, Laid, Partial, Placed, State, lengths, shape_of
from .layout import Section

# -- attention ---------------------------------------------------------------------------------------------------


def attention(call: Call) -> State:
    """``scaled_dot_product_attention``: heads may be cut, and the features of values."""
    q, k, v = (call.arg(i, name) for i, name in enumerate(("query", "key", "value")))
    mask = call.arg(3, "attn_mask")
    shared = bool(call.arg(7, "enable_gqa", False)) and _share_heads(call, q, k, v)
    batch = aligned(len(call.shape) - 2)

    def labels(node: fx.Node, *tail: Hashable, hide: bool = False) -> list[Hashable]:
        own: list[Hashable] = batch[len(batch) - (len(shape_of(node)) - 2) :]
        return [*own[:-1], "kv" if hide else own[-1], *tail] if own else list(tail)

    operands: list[Operand] = [
        (q, labels(q, "s", "d")),
        (mask, labels(mask, "s", "t") if mask is not None else []),
    ]
    mixes: set[Hashable] = {"s", "t", "d"}
    if shared:
        # Their heads fit those of the queries, rank by rank: only the rest is left to compare.
        for node, tail in ((k, ("t", "d")), (v, ("t", "e"))):
            laid = call.laid(node)
            if laid.dim not in (None, len(shape_of(node)) - 3) or laid.even:
                raise Broken(
                    "reads keys or values whose heads are whole and something else is cut", laid.owner
                )
            if laid.dim is None:
                operands.append((node, labels(node, *tail, hide=True)))
    else:
        operands += [(k, labels(k, "t", "d")), (v, labels(v, "t", "e"))]
    result = combine(call, operands, [*batch, "s", "e"], mixes=mixes)
    call.same_constants()
    return result


def _share_heads(call: Call, q: Any, k: Any, v: Any) -> bool:
    """Do queries have more heads than keys? Then each rank's must be those that its keys belong to."""
    if any(isinstance(call.state(n), Partial) for n in (q, k, v)):
        return False
    nodes = [(call.laid(n), shape_of(n)) for n in (q, k, v)]
    (a, shape), (b, _), (c, _) = nodes
    dim = len(shape) - 3
    full = [laid.unsplit(size)[-3] for laid, size in nodes]
    if full[0] == full[1] == full[2] and all(laid.dim == dim for laid in (a, b, c)):
        return False
    if a.dim != dim:
        if b.dim == len(shape_of(k)) - 3 or c.dim == len(shape_of(v)) - 3:
            raise Broken(
                "reads whole queries with keys or values of which each rank has some heads",
                b.owner or c.owner,
            )
        return False
    for laid, size, heads in ((b, nodes[1][1], full[1]), (c, nodes[2][1], full[2])):
        sections = laid.sections if laid.dim == len(size) - 3 else (Section(heads, 1),)
        if len(a.sections) != 1 or len(sections) != 1 or not _fits(a.sections[0], sections[0], call.tp_size):
            raise Broken(
                f"reads queries of which each rank has heads {lengths(a.sections)} with keys or values of "
                f"{lengths(sections)}",
                a.owner,
            )
    return True


def _fits(queries: Section, keys: Section, tp_size: int) -> bool:
    """Is the key-value head of every query head on the rank, and at the place where the rank looks for it?"""
    if queries.parts != tp_size or queries.length % keys.length or queries.size % keys.size:
        return False
    local, full, copies = queries.length // keys.length, queries.size // keys.size, tp_size // keys.parts
    return all(
        (rank * queries.length + i) // full == (rank // copies) * keys.length + i // local
        for rank in range(tp_size)
        for i in range(queries.length)
    )


# -- convolutions and norms of groups ----------------------------------------------------------------------------


def conv(call: Call) -> State:
    """``conv1d`` and the like: channels are summed over, or belong to groups that may be cut."""
    x, weight, bias = call.arg(0, "input"), call.arg(1, "weight"), call.arg(2, "bias")
    groups, full_groups = call.arg(6, "groups", 1), call.twin_arg(6, "groups", 1)
    space = len(shape_of(weight)) - 2
    batch: list[Hashable] = ["n"] if len(shape_of(x)) > space + 1 else []
    inner: list[Hashable] = [("space", i) for i in range(space)]
    kernel: list[Hashable] = [("kernel", i) for i in range(space)]
    mixes = {*inner, *kernel}
    ours, theirs = call.laid(x), call.laid(weight)
    if any(
        call.arg(i, key) != call.twin_arg(i, key)
        for i, key in ((3, "stride"), (4, "padding"), (5, "dilation"))
    ):
        raise Broken("convolves in other steps than unsplit", call.owner)
    if theirs.dim == 0 and ours.dim == len(batch) and groups * call.tp_size in (full_groups, groups * groups):
        sections = _channels(call, ours, theirs, groups)
        outs: list[Hashable] = [*batch, "o", *inner]
        replaced = Laid(len(batch), sections, theirs.owner)
        if isinstance(bias, fx.Node) and (call.laid(bias).dim != 0 or call.laid(bias).sections != sections):
            raise Broken("adds a bias that is cut otherwise than its weight", theirs.owner)
        return replaced if len(outs) == len(call.shape) else replace(replaced, dim=0)
    if (groups, full_groups) != (1, 1) and not (ours.whole and theirs.whole):
        raise Broken(
            f"convolves channels in groups, {groups} on a rank and {full_groups} unsplit, whose channels and weights "
            "are not cut alike",
            ours.owner or theirs.owner,
        )
    operands: list[Operand] = [
        (x, [*batch, "i", *inner]),
        (weight, ["o", "i" if groups == 1 else "group", *kernel]),
    ]
    result = combine(call, operands, [*batch, "o", *inner], sums={"i"}, mixes=mixes, linear=True)
    if isinstance(result, Partial) and isinstance(bias, fx.Node):
        raise Broken("adds a bias to a sum over this rank's channels alone", result.owner)
    call.same_constants()
    return combine(call, [*operands, (bias, ["o"])], [*batch, "o", *inner], sums={"i"}, mixes=mixes)


def _channels(call: Call, x: Laid, weight: Laid, groups: int) -> tuple[Section, ...]:
    """How the result of a convolution of cut groups is cut, which is how its weight is."""
    channels = shape_of(call.node.args[0])[x.dim]  # type: ignore[index]
    outs = shape_of(call.node.args[1])[0]
    per_group, outs_per_group = channels // groups, outs // groups
    wanted = tuple(Section(s.size // per_group * outs_per_group, s.parts) for s in x.sections)
    if wanted != weight.sections or any(s.length % per_group for s in x.sections):
        raise Broken("convolves groups of channels that are cut otherwise than its weight", x.owner)
    return weight.sections


def group_norm(call: Call) -> State:
    """Over groups of channels, of which a rank may have some."""
    x = call.node.args[0]
    laid, shape = call.laid(x), shape_of(x)
    groups, full = call.arg(1, "num_groups"), call.twin_arg(1, "num_groups")
    labels = aligned(len(shape))
    operands: list[Operand] = [
        (x, labels),
        *((n, [labels[1]]) for n in call.node.all_input_nodes if n is not x),
    ]
    mixes = set(labels[2:])
    if laid.dim == 1:
        channels = shape[1] // groups
        if laid.unsplit(shape)[1] != channels * full or any(s.length % channels for s in laid.sections):
            mixes.add(labels[1])
    elif groups != full:
        raise Broken(f"normalises {groups} groups where the unsplit model has {full}", laid.owner)
    return combine(call, operands, labels, mixes=mixes)


# -- by index ----------------------------------------------------------------------------------------------------


def index(call: Call) -> State:
    """``x[i, :, j]``: dimensions that are indexed must be whole."""
    x, given = call.node.args[0], list(call.node.args[1])  # type: ignore[arg-type]
    ndim = len(shape_of(x))
    given += [None] * (ndim - len(given))
    nodes = [n for n in given if n is not None]
    picked = [d for d, n in enumerate(given) if n is not None]
    if any(n.meta["val"].dtype.is_floating_point or str(n.meta["val"].dtype) == "torch.bool" for n in nodes):
        raise Broken("takes as many elements as a mask says", call.laid(x).owner, definite=False)
    width = max(len(shape_of(n)) for n in nodes)
    rows: list[Hashable] = aligned(width, "index")
    out: list[Hashable] = [("x", d) for d in range(ndim) if d not in picked]
    start = picked[0] if picked == list(range(picked[0], picked[-1] + 1)) else 0
    out[start:start] = rows
    operands: list[Operand] = [(x, [("x", d) for d in range(ndim)])]
    operands += [(n, rows[width - len(shape_of(n)) :]) for n in nodes]
    return combine(call, operands, out, mixes={("x", d) for d in picked}, linear=True)


def index_select(call: Call) -> State:
    x, rows = call.node.args[0], call.node.args[2]
    if call.state(rows) == Placed(
        -1
    ):  # ``styles.part``: this rank's place of a whole value that was cut in places
        return _own_part(call, x)
    ndim = len(shape_of(x))
    labels: list[Hashable] = list(range(ndim))
    dim = call.dim(1)
    out = [*labels[:dim], "rows", *labels[dim + 1 :]]
    return combine(call, [(x, labels), (rows, ["rows"])], out, mixes={dim}, linear=True)


def _own_part(call: Call, x: Any) -> State:
    source = x.args[0]
    state, shape = call.state(source), shape_of(source)
    ndim = len(shape) + 1
    if not isinstance(state, Laid) or not state.whole or call.dim(1, ndim=ndim) != ndim - 2:
        raise Broken("reads the rank in a way that can't be followed", definite=False)
    if shape_of(x) != (*shape[:-1], call.tp_size, shape[-1] // call.tp_size):
        raise Broken("reads the rank in a way that can't be followed", definite=False)
    return Laid(ndim - 1, (Section(shape[-1], call.tp_size),), _owner(call))


def _owner(call: Call) -> str:
    """The module that takes its part of a whole value."""
    stack = list((call.node.meta.get("nn_module_stack") or {}).values())
    return f"{stack[-1][0]}.weight" if stack else ""


def gather(call: Call) -> State:
    """``gather`` and ``take_along_dim``: along other dimensions than ``dim``, input and index lie alike."""
    x, rows = call.node.args[0], call.arg(2, "index")
    ndim = len(shape_of(x))
    dim = call.dim(1)
    labels: list[Hashable] = list(range(ndim))
    other = [*labels[:dim], "rows", *labels[dim + 1 :]]
    laid = call.state(rows)
    if (
        isinstance(laid, Laid)
        and laid.whole
        and any(a != b for d, (a, b) in enumerate(zip(shape_of(x), shape_of(rows), strict=True)) if d != dim)
    ):
        cut = call.state(x)
        if not isinstance(cut, Laid) or not cut.whole:
            raise Broken("reads by an index that is shorter", getattr(cut, "owner", ""), definite=False)
    return combine(call, [(x, labels), (rows, other)], other, mixes={dim}, linear=True)


def scatter(call: Call) -> State:
    """``scatter`` and its kind: into ``x`` along ``dim``, all else alike."""
    x, rows, source = call.node.args[0], call.arg(2, "index"), call.arg(3, "src")
    if not isinstance(source, fx.Node):
        source = None
    ndim = len(shape_of(x))
    dim = call.dim(1)
    labels: list[Hashable] = list(range(ndim))
    other = [*labels[:dim], "rows", *labels[dim + 1 :]]
    result = combine(call, [(x, labels), (rows, other), (source, other)], labels, mixes={dim, "rows"})
    if not (isinstance(result, Laid) and result.whole) and any(
        a != b
        for n in (rows, source)
        if n is not None
        for d, (a, b) in enumerate(zip(shape_of(x), shape_of(n), strict=True))
        if d != dim
    ):
        raise Broken("writes by an index that is shorter", getattr(result, "owner", ""), definite=False)
    return result


def index_add(call: Call) -> State:
    """Rows of ``source`` into rows of ``x``."""
    x, rows, source = call.node.args[0], call.arg(2, "index"), call.arg(3, "source")
    ndim = len(shape_of(x))
    dim = call.dim(1)
    labels: list[Hashable] = list(range(ndim))
    other = [*labels[:dim], "rows", *labels[dim + 1 :]]
    states = [call.state(n) for n in (x, source)]
    given, added = states
    alike = isinstance(given, Partial) and isinstance(added, Partial) and given.factor == added.factor
    if isinstance(added, Partial) and call.name == "index_add" and (alike or is_zero(x)):
        return added
    return combine(call, [(x, labels), (rows, ["rows"]), (source, other)], labels, mixes={dim, "rows"})


def put(call: Call) -> State:
    """``slice_scatter`` and ``select_scatter``: into a part of one dimension."""
    x, source = call.node.args[:2]
    position = 2
    ndim = len(shape_of(x))
    dim = int(call.arg(position, "dim", 0)) % ndim
    labels: list[Hashable] = list(range(ndim))
    inner = labels if call.name == "slice_scatter" else [*labels[:dim], *labels[dim + 1 :]]
    if call.name == "slice_scatter":
        inner = [*labels[:dim], "part", *labels[dim + 1 :]]
    result = combine(call, [(x, labels), (source, inner)], labels, mixes={dim, "part"})
    call.same_constants()
    return result


def to_complex(call: Call) -> State:
    """Pairs in the last dimension become numbers."""
    labels = aligned(len(call.shape) + 1)
    return combine(call, [(call.node.args[0], labels)], labels[:-1], mixes={labels[-1]})


def to_real(call: Call) -> State:
    labels = aligned(len(call.shape))
    return combine(call, [(call.node.args[0], labels[:-1])], labels)


# -- constants ---------------------------------------------------------------------------------------------------

_VALUES = {"full": 1, "new_full": 2, "full_like": 1}


def filled(call: Call) -> State:
    """Tensors of one value: where they are shorter than unsplit, they fit any cut."""
    if call.twin is None:
        source = call.state(call.node.args[0]) if call.name.endswith("_like") else WHOLE
        return source if isinstance(source, Laid) else WHOLE
    if call.name in _VALUES:
        ours, theirs = (get(_VALUES[call.name], "fill_value") for get in (call.arg, call.twin_arg))
        if ours != theirs:
            raise Broken(f"fills with {ours} what is filled with {theirs} unsplit")
    full = call.twin_shape or ()
    if len(full) != len(call.shape):
        raise Broken("has another number of dimensions than unsplit")
    even = tuple((d, n) for d, (m, n) in enumerate(zip(call.shape, full, strict=True)) if m != n)
    return Laid(even=even) if even else WHOLE
