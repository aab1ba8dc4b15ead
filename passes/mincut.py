"""The minimum cut of a network, by Dinic's algorithm (Dinic 1970; blocking flows along shortest paths).

Contract: arcs with whole capacities -> the side of the sink: of all minimum cuts, the one with the smallest side.
Deterministic: the same arcs in the same order give the same cut on every rank.
"""

from __future__ import annotations

#: More than any sum of capacities.
INFINITE = 1 << 80


class Network:
    """Nodes are numbers; :attr:`SOURCE` and :attr:`SINK` are there already."""

    SOURCE, SINK = 0, 1

    def __init__(self) -> None:
        self._out: list[list[int]] = [[], []]
        self._head: list[int] = []
        self._left: list[int] = []

    def add(self) -> int:
        """A new node."""
        self._out.append([])
        return len(self._out) - 1

    def join(self, tail: int, head: int, capacity: int) -> None:
        """An arc. Its reverse is the next number."""
        for at, to, left in ((tail, head, capacity), (head, tail, 0)):
            self._out[at].append(len(self._head))
            self._head.append(to)
            self._left.append(left)

    def sink_side(self) -> set[int]:
        """Cut, and return what lies with the sink."""
        while (level := self._levels()) is not None:
            self._block(level)
        found = {self.SINK}
        todo = [self.SINK]
        while todo:
            for arc in self._out[todo.pop()]:
                tail = self._head[arc]
                if self._left[arc ^ 1] and tail not in found:
                    found.add(tail)
                    todo.append(tail)
        return found

    def _levels(self) -> list[int] | None:
        """Arcs from the source to each node; None where no path leads to the sink."""
        level = [-1] * len(self._out)
        level[self.SOURCE] = 0
        layer = [self.SOURCE]
        while layer and level[self.SINK] < 0:
            following = []
            for node in layer:
                for arc in self._out[node]:
                    head = self._head[arc]
                    if self._left[arc] and level[head] < 0:
                        level[head] = level[node] + 1
                        following.append(head)
            layer = following
        return level if level[self.SINK] >= 0 else None

    def _block(self, level: list[int]) -> None:
        """Push flow along paths that climb ``level``, until none is left."""
        at = [0] * len(self._out)
        path: list[int] = []
        node = self.SOURCE
        while True:
            if node == self.SINK:
                pushed = min(self._left[arc] for arc in path)
                for arc in path:
                    self._left[arc] -= pushed
                    self._left[arc ^ 1] += pushed
                first = next(k for k, arc in enumerate(path) if not self._left[arc])
                node = self._head[path[first] ^ 1]
                del path[first:]
                continue
            arcs = self._out[node]
            while at[node] < len(arcs):
                arc = arcs[at[node]]
                if self._left[arc] and level[self._head[arc]] == level[node] + 1:
                    break
                at[node] += 1
            if at[node] < len(arcs):
                path.append(arcs[at[node]])
                node = self._head[path[-1]]
            elif path:
                node = self._head[path.pop() ^ 1]
                at[node] += 1
            else:
                return
