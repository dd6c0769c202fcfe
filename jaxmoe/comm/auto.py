"""transport="auto": from a configuration and static shapes to a transport, by the cost model."""

import dataclasses

import jax.numpy as jnp
from jax.typing import DTypeLike

from jaxmoe.comm import ragged
from jaxmoe.config import AUTO, MoEConfig
from jaxmoe.perf.choose import Choice, choose_transport
from jaxmoe.perf.cost import Workload
from jaxmoe.perf.hardware import find_hardware


def explain_transport(
    config: MoEConfig,
    d_model: int,
    tokens_per_rank: int,
    ranks: int,
    dtype: DTypeLike = jnp.bfloat16,
    lanes: int = 1,
) -> Choice:
    """What transport="auto" resolves to for these shapes: argmin over transports of the predicted time, with figures.

    The layer calls this when it is traced, with what it sees there, and so gets the same answer.

    Args:
      config: the layer; its `auto`, `wire_rows`, `combine_dtype` and router count, whatever its `transport` is.
      d_model: D.
      tokens_per_rank: T.
      ranks: R, over all axes of `config.axis`.
      dtype: of the tokens.
      lanes: token chunks of the schedule, `schedule.num_lanes`.

    Returns:
      Choice: `name`, `wire_rows`, `reason`, and each transport's bytes and predicted microseconds. Print it.

    Raises:
      ValueError: shapes that no layer could have, or an unknown hardware.

    Example:
      >>> from jaxmoe.config import AutoTransport, RouterConfig
      >>> config = MoEConfig(
      ...     router=RouterConfig(num_experts=256, top_k=8), transport="auto", auto=AutoTransport(hardware="h200")
      ... )
      >>> explain_transport(config, 7168, 4096, 8).name
      'all_gather'

    References: the cost model of `jaxmoe.perf`.
    """
    workload = Workload(
        tokens=tokens_per_rank,
        d_model=d_model,
        num_experts=config.router.num_experts,
        top_k=config.router.top_k,
        ranks=ranks,
        dtype=jnp.dtype(dtype).name,
        combine_dtype=None if config.combine_dtype is None else jnp.dtype(config.combine_dtype).name,
        wire_rows=config.wire_rows,
        lanes=lanes,
    )
    auto, refused = config.auto, {}
    if auto.allow_ragged:
        try:
            ragged.preflight(ranks, config.router.num_experts)
        except NotImplementedError as error:
            refused[ragged.NAME] = str(error)
    hardware = find_hardware(auto.hardware)
    return choose_transport(workload, hardware, skew=auto.skew, allow_ragged=auto.allow_ragged, refused=refused)


def resolve_transport(config: MoEConfig, x_shape: tuple[int, ...], ranks: int, dtype, lanes: int) -> MoEConfig:
    """`config` with "auto" replaced by the choice, its `wire_rows` included; any other transport as it is."""
    if config.transport != AUTO:
        return config
    tokens, d_model = x_shape
    choice = explain_transport(config, d_model, tokens, ranks, dtype, lanes)
    return dataclasses.replace(config, transport=choice.name, wire_rows=choice.wire_rows)
