"""Described bandwidths of the machines that run MoE layers. Peak figures: a measured one should take their place."""

import dataclasses
import math

import jax


@dataclasses.dataclass(frozen=True, kw_only=True)
class Hardware:
    """What moves bytes between ranks, and within one. Change a number with `dataclasses.replace`.

    Attributes:
      name: as `HARDWARE` and `AutoTransport(hardware=...)` know it.
      link_gbs: GB/s per GPU and direction to GPUs of the same node.
      network_gbs: GB/s per GPU and direction to other nodes.
      memory_gbs: GB/s of the GPU's own memory, reads and writes together.
      ranks_per_node: GPUs that reach each other at `link_gbs`.
      latency_us: of one collective within a node, its launch included.
      network_latency_us: of one collective across nodes.
      measured_gbs: (transport, GB/s) pairs, as `jaxmoe bench transport` reports them; they replace the described
        rates, latencies and copies of that transport's dispatch and combine.
      sources: (field, where the number is from) pairs.
      virtual: the devices share one machine's memory, or are unknown; times mean nothing, ratios of bytes do.

    Raises:
      ValueError: a rate that is not positive.

    Example:
      >>> import dataclasses
      >>> dataclasses.replace(HARDWARE["h200"], link_gbs=360.0).link_gbs
      360.0
    """

    name: str
    link_gbs: float
    network_gbs: float
    memory_gbs: float
    ranks_per_node: int
    latency_us: float
    network_latency_us: float
    measured_gbs: tuple[tuple[str, float], ...] = ()
    sources: tuple[tuple[str, str], ...] = ()
    virtual: bool = False

    def __post_init__(self) -> None:
        rates = [(f, getattr(self, f)) for f in ("link_gbs", "network_gbs", "memory_gbs", "ranks_per_node")]
        for name, rate in (*rates, *((f"measured_gbs of {t!r}", gbs) for t, gbs in self.measured_gbs)):
            if not rate > 0:
                raise ValueError(f"{name} must be positive; got {rate!r}. Pass GB/s per GPU and direction.")
        for name in ("latency_us", "network_latency_us"):
            if not getattr(self, name) >= 0:
                raise ValueError(f"{name} must be 0 or more; got {getattr(self, name)!r}. Pass microseconds.")

    def measured(self, transport: str) -> float | None:
        """The measured GB/s of this transport, or None."""
        return dict(self.measured_gbs).get(transport)


_NVLINK4 = "NVLink 4: 18 links of 25 GB/s a direction (NVIDIA states 900 GB/s, both directions)"
_NVLINK5 = "NVLink 5: 18 links of 50 GB/s a direction (NVIDIA states 1.8 TB/s, both directions)"
_NDR = "one 400 Gb/s NDR InfiniBand or Ethernet port (ConnectX-7) a GPU"
_HGX = "HGX and DGX boards: 8 GPUs on one NVSwitch fabric"
_ASSUMED = "assumed, a round figure for a small NCCL collective; measure your own"


def _gpu(
    name: str,
    *,
    link: tuple[float, str],
    memory: tuple[float, str],
    network: tuple[float, str] = (50.0, _NDR),
    node: tuple[int, str] = (8, _HGX),
) -> Hardware:
    """An entry from (number, its source) pairs."""
    return Hardware(
        name=name,
        link_gbs=link[0],
        network_gbs=network[0],
        memory_gbs=memory[0],
        ranks_per_node=node[0],
        latency_us=10.0,
        network_latency_us=25.0,
        sources=(
            ("link_gbs", link[1]),
            ("network_gbs", network[1]),
            ("memory_gbs", memory[1]),
            ("ranks_per_node", node[1]),
            ("latency_us", _ASSUMED),
            ("network_latency_us", _ASSUMED),
        ),
    )


_NOMINAL = "nominal: virtual devices share one machine's memory"
_CPU = Hardware(
    name="virtual-cpu",
    link_gbs=10.0,
    network_gbs=10.0,
    memory_gbs=math.inf,  # with latencies of zero: bytes on the wire alone decide
    ranks_per_node=2**20,  # one node, whatever the number of virtual devices
    latency_us=0.0,
    network_latency_us=0.0,
    sources=tuple(
        (field, _NOMINAL)
        for field in (
            "link_gbs",
            "network_gbs",
            "memory_gbs",
            "ranks_per_node",
            "latency_us",
            "network_latency_us",
        )
    ),
    virtual=True,
)

HARDWARE: dict[str, Hardware] = {
    hardware.name: hardware
    for hardware in (
        _gpu(
            "a100",
            link=(300.0, "NVLink 3: 12 links of 25 GB/s a direction (A100 datasheet: 600 GB/s, both directions)"),
            memory=(2039.0, "A100 80GB SXM datasheet"),
            network=(25.0, "one 200 Gb/s HDR InfiniBand port (ConnectX-6) a GPU"),
        ),
        _gpu("h100", link=(450.0, _NVLINK4), memory=(3350.0, "H100 SXM datasheet")),
        _gpu(
            "h800",
            link=(160.0, "DeepEP's README: the most that NVLink gives on an H800"),
            memory=(3350.0, "the H100's"),
        ),
        _gpu("h20", link=(450.0, _NVLINK4), memory=(4000.0, "H20 product brief: 4.0 TB/s")),
        _gpu("h200", link=(450.0, _NVLINK4), memory=(4800.0, "H200 datasheet; a device copy measures 4240")),
        _gpu("b200", link=(900.0, _NVLINK5), memory=(8000.0, "B200 datasheet: up to 8 TB/s")),
        _gpu(
            "gb200",
            link=(900.0, _NVLINK5),
            memory=(8000.0, "GB200 datasheet: 8 TB/s a GPU"),
            node=(72, "GB200 NVL72: 72 GPUs in one NVLink domain"),
        ),
        _CPU,
    )
}


def find_hardware(name: str | Hardware | None = None) -> Hardware:
    """The described hardware of a name, or of the devices that JAX found.

    Args:
      name: an entry of `HARDWARE`; a `Hardware` is returned as it is; None asks the first device for its kind. A kind
        without an entry gets the virtual one's numbers under its own name, marked virtual.

    Returns:
      Hardware.

    Raises:
      ValueError: no entry of this name.

    Example:
      >>> find_hardware("h200").link_gbs
      450.0
    """
    if isinstance(name, Hardware):
        return name
    if name is not None:
        if name not in HARDWARE:
            raise ValueError(
                f"hardware must be one of {sorted(HARDWARE)}; got {name!r}. Choose one, or pass a "
                "jaxmoe.perf.Hardware with your own numbers."
            )
        return HARDWARE[name]
    device = jax.devices()[0]
    if device.platform == "cpu":
        return _CPU
    # Words, not substrings: an H20 is no H200. "NVIDIA H100 80GB HBM3", "NVIDIA A100-SXM4-80GB".
    words = device.device_kind.lower().replace("-", " ").split()
    found = next((HARDWARE[word] for word in words if word in HARDWARE), None)
    return found or dataclasses.replace(_CPU, name=f"unknown ({device.device_kind})")
