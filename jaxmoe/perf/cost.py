"""Bytes on the wire by formula, and the time they take at a given bandwidth.

Bytes on the wire are those that one rank sends to other ranks; what it keeps for itself does not count. With O the
bytes of a collective's operand on one rank, and R ranks:

  all-gather            (R-1) · O          each rank's shard reaches every other rank
  reduce-scatter        (R-1)/R · O        one partial shard to, or through, every other rank
  all-reduce            2(R-1)/R · O       a reduce-scatter and an all-gather
  all-to-all            (R-1)/R · O        one block to every other rank
  ragged-all-to-all     rows to other ranks · bytes of a row

A rank receives as much as it sends, but for the ragged one. The transports of n lanes, each of t = ceil(T/n) tokens and
blocks of W = min(t, ceil(wire_rows/n)) rows of D columns, b bytes each:

  transport         dispatch, a lane                combine, a lane
  naive             2(R-1) · t·D·b                  2(R-1) · t·D·b
  all_gather        (R-1) · t·D·b                   (R-1) · t·D·b
  all_to_all        (R-1) · W·D·b                   (R-1) · W·D·b
  ragged            (R-1) · min(t·p, W)·D·b         the same
  ragged_emulated   (R-1) · (A·D·b + 12)            (R-1) · (R·W·D·b + 12)       A = min(t·min(K, R), R·W)

and before them, whatever the transport, one all-gather of ids and weights: (R-1) · T · 2K · 4 bytes. p is the
chance that a token needs a given rank, 1 - C(E-L, K)/C(E, K), if experts are drawn evenly. 12 bytes are the three
offsets and sizes that the emulation exchanges with each rank.
"""

import dataclasses
import math

import numpy as np
from jaxtyping import Int

from jaxmoe.perf.hardware import Hardware

METADATA_ITEMSIZE = 4  # ids and weights travel as float32
# Collectives that hand data from rank to rank, so that every byte enters a node once (NCCL's rings).
RINGS = ("naive", "all_gather", "ragged_emulated")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Workload:
    """One MoE layer call, as its transport sees it.

    Attributes:
      tokens: T, per rank.
      d_model: D.
      num_experts: E.
      top_k: K.
      ranks: R, of the EP group.
      dtype: of the tokens.
      combine_dtype: of the partial sums on the wire; None is `dtype`.
      wire_rows: the most tokens that one rank sends to another; None is T.
      lanes: n, the token chunks of the schedule.

    Raises:
      ValueError: a number below 1, top_k over num_experts, or experts that do not divide over the ranks.

    Example:
      >>> load = Workload(tokens=4, d_model=8, num_experts=4, top_k=1, ranks=2)
      >>> load.experts_per_rank, load.chance, load.row_bytes
      (2, 0.5, 16)
    """

    tokens: int
    d_model: int
    num_experts: int
    top_k: int
    ranks: int
    dtype: str = "bfloat16"
    combine_dtype: str | None = None
    wire_rows: int | None = None
    lanes: int = 1

    def __post_init__(self) -> None:
        for name in ("tokens", "d_model", "num_experts", "top_k", "ranks", "lanes", "wire_rows"):
            value = getattr(self, name)
            if value is None and name == "wire_rows":
                continue
            if not isinstance(value, int) or value < 1:
                raise ValueError(f"{name} must be a positive integer; got {value!r}. Pass {name}=1 or more.")
        if self.top_k > self.num_experts:
            raise ValueError(f"top_k must be at most num_experts; got {self.top_k} of {self.num_experts}. Lower top_k.")
        if self.num_experts % self.ranks:
            raise ValueError(
                f"num_experts must be a multiple of the ranks; got {self.num_experts} experts on {self.ranks} ranks. "
                "Choose ranks that divide the experts."
            )

    @property
    def experts_per_rank(self) -> int:
        """L = E / R."""
        return self.num_experts // self.ranks

    @property
    def chance(self) -> float:
        """p = 1 - C(E-L, K) / C(E, K): that a token needs a given rank, if its K experts are drawn evenly."""
        E, K, L = self.num_experts, self.top_k, self.experts_per_rank
        return 1 - math.comb(E - L, K) / math.comb(E, K)

    @property
    def row_bytes(self) -> int:
        """D·b of a token."""
        return self.d_model * np.dtype(_numpy_name(self.dtype)).itemsize

    @property
    def combine_row_bytes(self) -> int:
        """D·b of a partial sum."""
        return self.d_model * np.dtype(_numpy_name(self.combine_dtype or self.dtype)).itemsize

    @property
    def lane_tokens(self) -> int:
        """t: of one lane, padding included."""
        return -(-self.tokens // self.lanes)

    @property
    def lane_width(self) -> int:
        """W: rows of one (source, destination) block of one lane."""
        return self.lane_tokens if self.wire_rows is None else min(-(-self.wire_rows // self.lanes), self.lane_tokens)


def _numpy_name(dtype: str) -> str:
    """The numpy dtype of the same size; numpy alone knows no bfloat16 and no float8."""
    return {"bfloat16": "float16"}.get(dtype, "int8" if dtype.startswith("float8") else dtype)


@dataclasses.dataclass(frozen=True)
class Wire:
    """One direction of one call.

    Attributes:
      bytes: that one rank sends to others; for `ragged` without counts, the expectation.
      collectives: one behind the other.
      ring: whether every byte enters a node once.
      copied_bytes: read and written in the rank's own memory by passes that transports make differently: copies and
        their sum, and the partial sums of the tokens that arrived.
    """

    bytes: int
    collectives: int
    ring: bool
    copied_bytes: int = 0


@dataclasses.dataclass(frozen=True)
class Traffic:
    """What one call sends: the routing first, then rows out, then partial sums back."""

    metadata: Wire
    dispatch: Wire
    combine: Wire

    @property
    def bytes(self) -> int:
        """All three."""
        return self.metadata.bytes + self.dispatch.bytes + self.combine.bytes


def traffic(transport: str, load: Workload, counts: Int[np.ndarray, "R R"] | None = None) -> Traffic:
    """Bytes on the wire per rank, as the head of this module defines them.

    Args:
      transport: "naive", "all_gather", "all_to_all", "ragged" or "ragged_emulated".
      load: the call.
      counts: for "ragged", tokens that rank s sends to rank d (`block_counts`); then the bytes are the busiest
        sender's, where `wire_rows` does not cut them. None takes the expectation.

    Returns:
      Traffic.

    Raises:
      ValueError: no such transport.

    Example:
      >>> load = Workload(tokens=4, d_model=8, num_experts=4, top_k=2, ranks=2)
      >>> traffic("all_gather", load).dispatch.bytes, traffic("naive", load).dispatch.bytes
      (64, 128)

    References: the ring algorithms' counts are NCCL's (its `PERFORMANCE.md`); p and the comparison with copies per
    expert follow DESIGN §3.
    """
    R, n, t, W, K = load.ranks, load.lanes, load.lane_tokens, load.lane_width, load.top_k
    out, back, others = load.row_bytes, load.combine_row_bytes, load.ranks - 1
    ring = transport in RINGS
    metadata = Wire(others * load.tokens * 2 * K * METADATA_ITEMSIZE, 1, ring=True)
    if R == 1:
        return Traffic(Wire(0, 0, ring=True), Wire(0, 0, ring=True), Wire(0, 0, ring=True))
    partial = R * t * back  # written for every token that arrived
    if transport == "naive":
        return Traffic(
            metadata,
            Wire(n * 2 * others * t * out, n * R, ring),
            Wire(n * 2 * others * t * back, n, ring, n * partial),
        )
    if transport == "all_gather":
        return Traffic(metadata, Wire(n * others * t * out, n, ring), Wire(n * others * t * back, n, ring, n * partial))
    if transport == "all_to_all":
        return Traffic(
            metadata,
            Wire(n * others * W * out, n, ring, n * (t + R * W) * out),
            Wire(n * others * W * back, n, ring, n * (2 * R * W + t) * back),
        )
    A = min(t * min(K, R), R * W)  # rows of the buffer of copies
    copied = n * (t + A + R * W)  # tokens read, copies written, and what receives them zeroed
    if transport == "ragged":
        sent, returned = (n * others * min(t * load.chance, W),) * 2 if counts is None else _busiest(counts)
        return Traffic(
            metadata,
            Wire(round(sent * out), n, ring, copied * out),
            Wire(round(returned * back), n, ring, (copied + n * A) * back),
        )
    if transport == "ragged_emulated":
        return Traffic(
            metadata,
            Wire(n * others * (A * out + 12), 2 * n, ring, copied * out),
            Wire(n * others * (R * W * back + 12), 2 * n, ring, (copied + n * A) * back),
        )
    raise ValueError(
        f"transport must have a formula; got {transport!r}. Use 'naive', 'all_gather', 'all_to_all', 'ragged' or "
        "'ragged_emulated'."
    )


def _busiest(counts: np.ndarray) -> tuple[int, int]:
    """Rows that the busiest rank sends in dispatch and, mirrored, in combine."""
    others = np.array(counts) * ~np.eye(len(counts), dtype=bool)
    return int(others.sum(axis=1).max()), int(others.sum(axis=0).max())


def block_counts(expert_ids: Int[np.ndarray, "R T K"], num_experts: int) -> Int[np.ndarray, "R R"]:
    """counts[s, d] = the tokens of rank s with an expert on rank d. Ids of -1 lie on none.

    Example:
      >>> block_counts(np.array([[[0, 1], [0, 3]], [[2, 3], [-1, 0]]]), 4).tolist()
      [[2, 1], [1, 1]]
    """
    ids = np.asarray(expert_ids)
    R = ids.shape[0]
    return np.stack([(ids // (num_experts // R) == d).any(-1).sum(-1) for d in range(R)], axis=1)


def observed_skew(counts: Int[np.ndarray, "R R"]) -> float:
    """The largest block over the mean block; 1 where nothing is sent.

    Example:
      >>> observed_skew(np.array([[2, 1], [1, 0]]))
      2.0
    """
    mean = float(np.mean(counts))
    return float(np.max(counts)) / mean if mean else 1.0


def needed_rows(load: Workload, skew: float) -> int:
    """The `wire_rows` that hold blocks of up to `skew` times the expected T·p tokens: min(T, ceil(T·p·skew)).

    Example:
      >>> needed_rows(Workload(tokens=100, d_model=8, num_experts=4, top_k=1, ranks=4), 1.5)
      38
    """
    return max(1, min(load.tokens, math.ceil(load.tokens * load.chance * skew - 1e-9)))


def predicted_us(wire: Wire, ranks: int, hardware: Hardware, measured_gbs: float | None = None) -> float:
    """latency · collectives + max(bytes in the node / link, bytes across / network) + copied bytes / memory.

    Over several nodes of G ranks, bytes/G of a ring cross (one edge in G), and (R-G)/(R-1) of what goes straight to
    each rank. Peak rates make it a lower bound; a measured rate has latency and copies in it.

    Args:
      wire: from `traffic`.
      ranks: R.
      hardware: rates in GB/s and latencies in microseconds.
      measured_gbs: bytes on the wire over time, GB/s, in place of the above.

    Returns:
      Microseconds.

    Example:
      >>> from jaxmoe.perf.hardware import HARDWARE
      >>> predicted_us(Wire(450_000, 1, ring=True), 8, HARDWARE["h200"])
      11.0
    """
    if ranks == 1:
        return 0.0
    if measured_gbs is not None:
        return wire.bytes / (measured_gbs * 1e3)  # a GB/s is a thousand bytes a microsecond
    G = hardware.ranks_per_node
    within = ranks <= G
    crossing = 0.0 if within else wire.bytes / G if wire.ring else wire.bytes * (ranks - G) / (ranks - 1)
    moving = max((wire.bytes - crossing) / hardware.link_gbs, crossing / hardware.network_gbs)
    latency = wire.collectives * (hardware.latency_us if within else hardware.network_latency_us)
    return latency + (moving + wire.copied_bytes / hardware.memory_gbs) / 1e3
