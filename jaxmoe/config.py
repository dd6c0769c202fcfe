"""What a user decides, as frozen keyword-only dataclasses that refuse nonsense when they are made."""

import dataclasses
from typing import Literal

import jax
from jax import lax
from jax.sharding import PartitionSpec
from jax.typing import DTypeLike

from jaxmoe.perf.hardware import HARDWARE, Hardware

Score = Literal["softmax", "sigmoid", "sqrt_softplus"]
SCORES = ("softmax", "sigmoid", "sqrt_softplus")
AxisNames = str | tuple[str, ...] | None
AUTO = "auto"
WireDtype = Literal["float8_e4m3fn"] | None


def _positive(name: str, value: object) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(f"{name} must be a positive integer; got {value!r}. Pass {name}=1 or more.")


def check_wire_dtype(name: str, value: object) -> None:
    """Raise unless `value`, of the option `name`, is None or "float8_e4m3fn"."""
    if value is not None and not (isinstance(value, str) and value == "float8_e4m3fn"):
        raise ValueError(
            f"{name} must be None or 'float8_e4m3fn'; got {value!r}. Pass the name as a string, or None to send "
            "rows in their own dtype."
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class RouterConfig:
    """How logits become experts and weights.

    Args:
      num_experts: E, the experts of the layer over all ranks.
      top_k: K, the experts per token.
      score: how a logit becomes a score: "softmax" (Mixtral, Qwen3), "sigmoid" (DeepSeek-V3) or "sqrt_softplus".
      renormalize: divide a token's K weights by their sum.
      scale: a factor on the weights after renormalisation (DeepSeek-V3: 2.5).
      num_groups: expert groups for group-limited routing; 1 is no limit.
      top_groups: the groups a token may choose from.
      precision: of the product of tokens and router kernel. The highest by default: a rounding there changes
        which expert is chosen.

    Raises:
      ValueError: a field breaks its rule.

    Example:
      >>> RouterConfig(num_experts=8, top_k=2).score
      'softmax'
    """

    num_experts: int
    top_k: int
    score: Score = "softmax"
    renormalize: bool = True
    scale: float = 1.0
    num_groups: int = 1
    top_groups: int = 1
    precision: lax.Precision = lax.Precision.HIGHEST

    def __post_init__(self) -> None:
        for name in ("num_experts", "top_k", "num_groups", "top_groups"):
            _positive(name, getattr(self, name))
        E, K, groups = self.num_experts, self.top_k, self.num_groups
        if K > E:
            raise ValueError(
                f"top_k must be at most num_experts; got top_k={K}, num_experts={E}. Lower top_k or add experts."
            )
        if self.score not in SCORES:
            raise ValueError(f"score must be one of {', '.join(SCORES)}; got {self.score!r}. Choose one of them.")
        if E % groups:
            raise ValueError(
                f"num_groups must divide num_experts; got num_groups={groups}, num_experts={E}. "
                f"Choose num_groups among {[d for d in range(1, E + 1) if E % d == 0]}."
            )
        if self.top_groups > groups:
            raise ValueError(
                f"top_groups must be at most num_groups; got top_groups={self.top_groups}, num_groups={groups}. "
                "Lower top_groups."
            )
        if K > self.top_groups * (E // groups):
            raise ValueError(
                f"the chosen groups must hold at least top_k experts; got top_k={K} and {self.top_groups} groups of "
                f"{E // groups}. Raise top_groups or lower top_k."
            )
        if not self.scale > 0:
            raise ValueError(f"scale must be positive; got {self.scale!r}. Pass scale=1.0 for none.")


@dataclasses.dataclass(frozen=True, kw_only=True)
class AutoTransport:
    """What transport="auto" may assume.

    Args:
      hardware: a name of `jaxmoe.perf.HARDWARE`, or a `jaxmoe.perf.Hardware` with described or measured rates; None
        takes the entry of the devices that JAX found.
      skew: the largest number of tokens that one rank sends another, over the mean (`jaxmoe.perf.observed_skew`). It
        is taken as a bound: where `all_to_all` is chosen for it, blocks hold the expected tokens times this, and a
        token over them is dropped and counted, as with `wire_rows`. None bounds nothing, and nothing is dropped.
      allow_ragged: let `ragged` be chosen where its preflight passes.

    Raises:
      ValueError: an unknown hardware, or a skew below 1.

    Example:
      >>> AutoTransport(hardware="h200", skew=1.3).allow_ragged
      False
    """

    hardware: str | Hardware | None = None
    skew: float | None = None
    allow_ragged: bool = False

    def __post_init__(self) -> None:
        if isinstance(self.hardware, str) and self.hardware not in HARDWARE:
            raise ValueError(
                f"hardware must be one of {sorted(HARDWARE)}; got {self.hardware!r}. Choose one, or pass a "
                "jaxmoe.perf.Hardware with your own numbers."
            )
        if self.skew is not None and not self.skew >= 1:
            raise ValueError(
                f"skew is the largest block over the mean one and at least 1; got {self.skew!r}. Pass 1.0 or more."
            )


def _is_wide_float(dtype: DTypeLike) -> bool:
    return jax.numpy.issubdtype(dtype, jax.numpy.floating) and jax.numpy.finfo(dtype).bits >= 16


@dataclasses.dataclass(frozen=True, kw_only=True)
class MoEConfig:
    """What a MoE layer is and how its tokens travel.

    Args:
      router: the routing rule.
      axis: the mesh axis, or axes from outer to inner, over which experts are spread (EP); None for no EP.
      token_spec: how the leading dimensions of x are sharded on a mesh of Auto axes; None shards the first over
        `axis`. On Explicit axes the type of x says it, and this stays None.
      transport: "all_gather" (the default, always works), "all_to_all" (one copy per (token, rank)), "ragged" (the
        same with exact sizes, GPU only), or "naive" (the baseline). "ragged_emulated" tests `ragged` on a CPU. "auto"
        takes the one that the cost model predicts to be fastest, when the layer is traced; `jaxmoe.explain_transport`
        says which and why.
      auto: what "auto" may assume; other transports ignore it.
      experts: the grouped-matmul backend, "pallas" (Hopper GPUs), "xla" or "reference"; None chooses by device,
        sizes and dtype, each direction for itself.
      capacity: the most rows an expert takes from all tokens of its EP group in one call; None drops nothing.
        Rows over it are dropped in the order (rank, token, slot), last first, and counted.
      wire_rows: with "all_to_all" and "ragged", and with "auto" where it takes one of them, the most tokens that one
        rank sends to another in one call; None drops nothing, at the all-gather's bytes. Each of a schedule's n lanes
        takes ceil(wire_rows / n). A token over it loses its slots on that rank, in the order (rank, token), last first,
        and they are counted as dropped. Without expert parallelism nothing travels, and nothing is dropped.
      combine_dtype: the dtype in which partial sums cross the wire and are added up; None is the dtype of x.
        float32 doubles the bytes of a bf16 combine and leaves one rounding.
      wire_dtype: the dtype in which tokens cross the wire; None is the dtype of x. "float8_e4m3fn" sends D + 4·⌈D/128⌉
        bytes a row, with one float32 scale per 128 columns, dequantised on arrival. The router sees the exact tokens,
        and the gradient is straight-through. Any transport but "naive".
      wire_dtype_combine: the same for the partial sums on their way back, which are then added up in float32 at home.
        Needs a transport that brings them there: "all_to_all" or "ragged".
      checks: refuse routing with repeated or foreign expert ids that a caller passes in.

    Raises:
      ValueError: a field breaks its rule.

    Example:
      >>> MoEConfig(router=RouterConfig(num_experts=8, top_k=2)).transport
      'all_gather'
    """

    router: RouterConfig
    axis: AxisNames = "expert"
    token_spec: PartitionSpec | None = None
    transport: str = "all_gather"
    auto: AutoTransport = AutoTransport()
    experts: str | None = None
    capacity: int | None = None
    wire_rows: int | None = None
    combine_dtype: DTypeLike | None = None
    wire_dtype: WireDtype = None
    wire_dtype_combine: WireDtype = None
    checks: bool = False

    def __post_init__(self) -> None:
        if self.capacity is not None:
            _positive("capacity", self.capacity)
        if self.wire_rows is not None:
            _positive("wire_rows", self.wire_rows)
        if self.combine_dtype is not None and not _is_wide_float(self.combine_dtype):
            raise ValueError(
                f"combine_dtype must be a float dtype of 16 bits or more; got {self.combine_dtype!r}. Use float32, "
                "bfloat16 or None; for fp8 on the way back, wire_dtype_combine."
            )
        check_wire_dtype("wire_dtype", self.wire_dtype)
        check_wire_dtype("wire_dtype_combine", self.wire_dtype_combine)
        if self.combine_dtype is not None and self.wire_dtype_combine is not None:
            raise ValueError(
                f"combine_dtype and wire_dtype_combine both say what crosses the wire in combine; got "
                f"{self.combine_dtype!r} and {self.wire_dtype_combine!r}. Leave one at None."
            )
