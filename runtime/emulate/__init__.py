"""The emulated cluster: a machine without GPUs that behaves, in time, like one with slow links.

Real processes, real gloo collectives, the real program and the real numbers; but a collective or message completes
at the latest launch of its ranks + alpha + bytes x factor / beta, behind what was launched before it on its group or
in its direction. Waiting sleeps. A c10d backend, so that functional collectives, DTensor, ``dist`` and
torch.distributed.pipelining run on it unchanged::

    cluster = emulate.Cluster(emulate.Link(5e-6, 50e9), emulate.Link(10e-6, 25e9), clock="virtual")

    def rank_main() -> float:                              # started by fxbraid.runtime.launch.launch
        with emulate.process_group(cluster, timeout_s=60):
            model = fxbraid.braid(...)
            emulate.unit_times(lambda unit: 1e-3 if unit.matmuls else 0.0)
            with emulate.stopwatch() as reading:
                model.step(**batch)
            print(reading.label, reading.seconds)

Three clocks:

``virtual``  Each rank carries a device clock. Units (``unit_times``, ``device_time``) advance it, launches are
             stamped with it, waits set it to the end of what they wait for. No sleeping; the same program gives the
             same times, to the bit, however loaded the machine is. For tests and CI.
``paced``    The same device clock, slept out on the wall clock, which is what ``now`` and ``stopwatch`` read.
``wall``     Computing takes the time that it takes; only links are modelled.

Every output must carry ``label()`` (or ``str(cluster)``), which names the clock. Fidelity is measured by
``python -m fxbraid.runtime.emulate``.
"""

from .clocks import Lateness
from .cluster import CLOCKS, Cluster, Link, Op, collective_seconds, factor
from .group import name_axis
from .session import (
    BACKEND,
    Reading,
    active,
    change,
    device_time,
    label,
    now,
    process_group,
    stopwatch,
)
from .units import check_times, spend, timed, unit_times

__all__ = [
    "BACKEND",
    "CLOCKS",
    "Cluster",
    "Lateness",
    "Link",
    "Op",
    "Reading",
    "active",
    "change",
    "check_times",
    "collective_seconds",
    "device_time",
    "factor",
    "label",
    "name_axis",
    "now",
    "process_group",
    "spend",
    "stopwatch",
    "timed",
    "unit_times",
]
