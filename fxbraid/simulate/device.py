"""Named devices: what the vendor promises, what it gives in practice, and where each figure comes from.

Rates are for one device; links are bytes per second in one direction. Figures from data sheets are exact;
shares of them that are reached in practice come from public measurements, and where there is none from the
nearest relative, which ``sources`` says.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from fxbraid.schedule import ScheduleError

GIB = 2**30


@dataclass(frozen=True, slots=True)
class Device:
    """peak: dense bf16 FLOP/s. memory: bytes. bandwidth: of the memory. nvlink: to the other devices of a
    node. network: out of the node, per device. processors: streaming multiprocessors (or compute units).

    gemm: share of ``peak`` that the best matrix products reach. attention_f, attention_b: the same for flash
    attention, causal, head size 128, 4k to 8k tokens. stream: share of ``bandwidth`` that pointwise kernels
    reach. wire: share of a link that a collective or a message reaches. latency, network_latency: seconds
    before a collective or message moves its first byte. contention: share of the processors that a running
    collective takes from compute. host: to its own host, each way.
    """

    name: str
    peak: float
    memory: float
    bandwidth: float
    nvlink: float
    network: float
    processors: int
    gemm: float
    attention_f: float
    attention_b: float
    contention: float
    sources: Mapping[str, str]
    stream: float = 0.85
    wire: float = 0.8
    latency: float = 15e-6
    network_latency: float = 20e-6
    node: int = 8
    host: float = 32e9


_COMMON = {
    "stream": (
        "85 % of the data sheet: between the 75 % (10 MB) and 90 % (100 MB) of "
        "calculon-ai/calculon, systems/a100_80g.json"
    ),
    "wire": (
        "80 %: a maintainer of NCCL in NVIDIA/nccl-tests#212: about 20 % protocol overhead, 370 of 450 GB/s"
    ),
    "latency": (
        "10 to 20 microseconds: calculon-ai/calculon, systems/a100_80g.json (10 in the node, 20 outside)"
    ),
}

_MAMF = "stas00/ml-engineering, compute/accelerator, table of maximum achievable matmul FLOPS: "
_FA2 = (
    "FlashAttention-2 (arXiv 2307.08691), A100, causal, head size 128: up to 73 % forward and "
    "63 % backward at 16k; less at 6k"
)
_FA2_HOPPER = "FlashAttention-3 (arXiv 2407.08608): FlashAttention-2 reaches about 35 to 40 % of an H100"


def _ampere(name: str, nvlink: float, source: str) -> Device:
    return Device(
        name=name,
        peak=312e12,
        memory=80 * GIB,
        bandwidth=2.039e12,
        nvlink=nvlink,
        network=25e9,
        processors=108,
        gemm=0.869,
        attention_f=0.6,
        attention_b=0.5,
        contention=0.15,
        sources={
            "peak, memory, bandwidth": "NVIDIA A100 data sheet (80 GB SXM): 312 TFLOP/s, 80 GB, 2,039 GB/s",
            "nvlink": source,
            "network": "one HDR 200 Gb/s adapter per device: NVIDIA DGX A100 data sheet",
            "gemm": _MAMF + "A100 SXM 271.2 of 312",
            "attention": _FA2,
            "contention": "calculon-ai/calculon, systems/a100_80g.json: processor_usage 0.15",
            "host": "NVIDIA A100 data sheet: PCIe 4.0 x16, 64 GB/s both ways",
            **_COMMON,
        },
    )


def _hopper(name: str, memory: float, bandwidth: float, nvlink: float, source: str) -> Device:
    return Device(
        name=name,
        peak=989.4e12,
        memory=memory,
        bandwidth=bandwidth,
        nvlink=nvlink,
        network=50e9,
        processors=132,
        gemm=0.803,
        attention_f=0.38,
        attention_b=0.33,
        contention=0.12,
        sources={
            "peak, memory, bandwidth, nvlink": source,
            "network": "one ConnectX-7 400 Gb/s adapter per device: NVIDIA DGX H100 data sheet",
            "gemm": _MAMF + "H100 SXM 794.5 of 989, H200 the same",
            "attention": _FA2_HOPPER,
            "contention": "16 of 132 processors, NCCL's usual number of channels on NVSwitch (an assumption)",
            "host": "NVIDIA H100 and H200 data sheets: PCIe 5.0 x16, 128 GB/s both ways",
            **_COMMON,
        },
        host=64e9,
    )


_H20 = Device(
    name="h20",
    peak=148e12,
    memory=96e9,
    bandwidth=4.0e12,
    nvlink=450e9,
    network=50e9,
    processors=78,
    gemm=0.93,
    attention_f=0.55,
    attention_b=0.5,
    contention=0.2,
    sources={
        "peak, memory, bandwidth, nvlink": (
            "NVIDIA HGX H20 figures as vendors publish them: 148 TFLOP/s bf16, 96 GB, 4.0 TB/s, "
            "NVLink 900 GB/s both ways"
        ),
        "network": "one 400 Gb/s adapter per device, as in other HGX systems (an assumption)",
        "gemm": (
            "no public table; FlashMLA reaches 130 of 148 (deepseek-ai/FlashMLA#30) and cuDNN "
            "attention 129 (Dao-AILab/flash-attention#1310): a matrix product gets more (an "
            "assumption)"
        ),
        "attention": (
            "Dao-AILab/flash-attention#1310: FlashAttention-2, head size 128, 66 TFLOP/s causal at "
            "2k, 84 full"
        ),
        "contention": "16 of 78 processors, NCCL's usual number of channels on NVSwitch (an assumption)",
        "host": "PCIe 5.0 x16, 128 GB/s both ways, as in other HGX Hopper systems (an assumption)",
        **_COMMON,
    },
    host=64e9,
)

_B200 = Device(
    name="b200",
    peak=2.25e15,
    memory=180e9,
    bandwidth=8.0e12,
    nvlink=900e9,
    network=50e9,
    processors=148,
    gemm=0.776,
    attention_f=0.38,
    attention_b=0.33,
    contention=0.11,
    sources={
        "peak, memory, bandwidth, nvlink": (
            "NVIDIA HGX B200: 2.25 PFLOP/s bf16 dense, 180 GB usable, 8 TB/s, NVLink 1.8 TB/s both ways"
        ),
        "network": "one ConnectX-7 400 Gb/s adapter per device: NVIDIA DGX B200 data sheet",
        "gemm": _MAMF + "B200 SXM 1745 of 2250",
        "attention": "as the H100's (an assumption)",
        "contention": "16 of 148 processors (an assumption)",
        "host": "PCIe 5.0 x16, 128 GB/s both ways, as in HGX Hopper systems (an assumption)",
        **_COMMON,
    },
    host=64e9,
)

_L40S = Device(
    name="l40s",
    peak=362e12,
    memory=48e9,
    bandwidth=864e9,
    nvlink=32e9,
    network=25e9,
    processors=142,
    gemm=0.75,
    attention_f=0.5,
    attention_b=0.4,
    contention=0.1,
    sources={
        "peak, memory, bandwidth": "NVIDIA L40S data sheet: 362 TFLOP/s bf16 dense, 48 GB, 864 GB/s",
        "nvlink": "none: PCIe 4.0 x16, 32 GB/s each way",
        "network": "one 200 Gb/s adapter per device (an assumption)",
        "gemm": "no public table (an assumption)",
        "attention": "no public table (an assumption)",
        "contention": "16 of 142 processors (an assumption)",
        "host": "NVIDIA L40S data sheet: PCIe 4.0 x16, 64 GB/s both ways",
        **_COMMON,
    },
)

DEVICES: Mapping[str, Device] = MappingProxyType(
    {
        device.name: device
        for device in (
            _ampere("a100", 300e9, "NVIDIA A100 data sheet: 600 GB/s both ways"),
            _ampere(
                "a800",
                200e9,
                "A800: an A100 with NVLink cut from 600 to 400 GB/s both ways (NVIDIA, November 2022)",
            ),
            _hopper(
                "h100",
                80 * GIB,
                3.35e12,
                450e9,
                "NVIDIA H100 data sheet (SXM): 1,979 with sparsity, 80 GB, 3.35 TB/s, 900 GB/s",
            ),
            _hopper("h800", 80 * GIB, 3.35e12, 200e9, "H800: an H100 with NVLink cut to 400 GB/s both ways"),
            _hopper(
                "h200",
                141e9,
                4.8e12,
                450e9,
                "NVIDIA H200 data sheet (SXM): 1,979 with sparsity, 141 GB, 4.8 TB/s, 900 GB/s",
            ),
            _H20,
            _B200,
            _L40S,
        )
    }
)
"""The devices by name."""


def device(name: str) -> Device:
    """The device of that name; raises ScheduleError with those there are."""
    found = DEVICES.get(name.lower())
    if found is None:
        raise ScheduleError(f"no device is named {name!r}; there are {', '.join(DEVICES)}")
    return found
