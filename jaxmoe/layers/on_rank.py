"""One rank's part of a MoE layer, inside shard_map: routing, metadata, lanes, and the woven stages."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from jaxmoe.comm import (
    Handle,
    RoutingTable,
    check_tokens,
    check_wire,
    gather_routing,
    limit_to_capacity,
    local_experts,
    send_home,
    send_rows,
    transport_of,
)
from jaxmoe.comm.auto import resolve_transport
from jaxmoe.compat import varying_axes
from jaxmoe.config import MoEConfig
from jaxmoe.experts import expert_down, expert_down_activated, expert_up, expert_up_activated
from jaxmoe.layers.params import MoEParams, MoEStats
from jaxmoe.mesh import axis_tuple, vary
from jaxmoe.routing.gating import Routing, gate
from jaxmoe.routing.plan import count_tokens
from jaxmoe.schedules import Schedule, Sequential, Stage, weave


def _stages(config: MoEConfig, dtype) -> list[Stage]:
    """dispatch, up, down, combine: (parameters, handle, value) -> value."""
    check_wire(transport_of(config.transport), config.wire_dtype, config.wire_dtype_combine)
    backend = config.experts
    return [
        Stage(name="dispatch", kind="comm", fn=lambda p, handle, x: send_rows(x, handle, config.wire_dtype)),
        Stage(
            name="up",
            kind="compute",
            fn=lambda p, handle, x: expert_up(x, p["gate_up"], handle.row_map, backend),
            reads=("gate_up",),
            primal=lambda p, handle, x: expert_up_activated(x, p["gate_up"], handle.row_map, backend),
        ),
        Stage(
            name="down",
            kind="compute",
            fn=lambda p, handle, pre: _rounded(
                expert_down(pre, p["down"], handle.weights, handle.row_map, backend), config, dtype
            ),
            reads=("down",),
            primal=lambda p, handle, h: _rounded(
                expert_down_activated(h, p["down"], handle.weights, handle.row_map, backend), config, dtype
            ),
        ),
        Stage(
            name="combine",
            kind="comm",
            fn=lambda p, handle, partial: send_home(
                partial, handle, dtype, config.combine_dtype, config.wire_dtype_combine
            ),
        ),
    ]


def _rounded(partial, config: MoEConfig, dtype):
    """The partial sums in the dtype in which they travel, so that the stage's result is what is kept and sent."""
    return partial.astype(jnp.dtype(config.combine_dtype or dtype))


def _lanes(x, table: RoutingTable, config: MoEConfig, axes, n: int) -> tuple[list[jax.Array], list[Handle]]:
    """The n token chunks and their handles; T is padded to a multiple of n with tokens that have no expert."""
    T = x.shape[0]
    size = -(-T // n)
    short = size * n - T
    if short:
        x = jnp.pad(x, ((0, short), (0, 0)))
        ids = jnp.pad(table.expert_ids, ((0, 0), (0, short), (0, 0)), constant_values=-1)
        table = RoutingTable(ids, jnp.pad(table.weights, ((0, 0), (0, short), (0, 0))))
    transport, E = transport_of(config.transport), config.router.num_experts
    chunks = [x[i * size : (i + 1) * size] for i in range(n)]
    wire_rows = None if config.wire_rows is None else -(-config.wire_rows // n)
    return chunks, [transport.arrange(table.tokens(i * size, size), E, axes, wire_rows) for i in range(n)]


def route(params: MoEParams, x: Float[Array, "T D"], config: MoEConfig, valid: Bool[Array, "T"] | None) -> Routing:
    """gate(x @ router), in float32."""
    logits = jnp.dot(x.astype(jnp.float32), params.router.astype(jnp.float32), precision=config.router.precision)
    return gate(logits, config.router, bias=params.bias, valid=valid)


def moe_on_rank(
    params: MoEParams,
    x: Float[Array, "T D"],
    config: MoEConfig,
    *,
    schedule: Schedule | None = None,
    valid: Bool[Array, "T"] | None = None,
    routing: Routing | None = None,
) -> tuple[Float[Array, "T D"], MoEStats]:
    """y[t] = Σ_k weights[t, k] · expert_{ids[t, k]}(x[t]), from inside `jax.shard_map`.

    Args:
      params: this rank's: router [D, E] whole, gate_up [L, D, 2F] and down [L, F, D] of its own experts.
      x: [T, D], this rank's tokens.
      config: the layer; `config.axis` names axes of the surrounding shard_map.
      schedule: the issue order; None is `Sequential()`.
      valid: [T]; False marks padding, which is neither sent nor counted and gets zeros. A rank may have none valid.
      routing: ids and weights [T, K] to use in place of the router.

    Returns:
      y [T, D] in the dtype of x, and MoEStats with `tokens_per_expert` and `dropped_per_expert` of this rank's L
      experts, counted over the tokens of its EP group.

    Raises:
      ValueError: experts that do not divide over the ranks, an unknown transport or backend.
      NotImplementedError: a wire dtype that the transport cannot carry.

    Example: `jaxmoe.moe` is this function under shard_map.
    """
    axes = axis_tuple(config.axis)
    schedule = schedule or Sequential()
    first, L = local_experts(config.router.num_experts, axes)
    # Marked as varying first, so that gradients of what ranks share are summed once, outside the schedule.
    around = tuple(sorted(set(axes).union(*(varying_axes(a) for a in jax.tree.leaves((params, x))))))
    params, x = vary(params, around), vary(x, around)
    if valid is not None:
        # Padding may hold anything; a NaN there would reach the router's gradient as 0 · NaN.
        x = jnp.where(valid[:, None], x, 0)
    if routing is None:
        routing = route(params, x, config, valid)
    else:
        check_tokens(x, routing)
    if valid is not None:
        routing = Routing(jnp.where(valid[:, None], routing.expert_ids, -1), routing.weights)
    if x.shape[0] == 0:  # on every rank, since shapes are the same on all: nothing to send, nothing to wait for
        none = vary(jnp.zeros((L,), jnp.int32), around)
        return x, MoEStats(routing, none, none)
    config = resolve_transport(config, x.shape, config.router.num_experts // L, x.dtype, schedule.num_lanes)
    routed = gather_routing(routing, axes)
    table = limit_to_capacity(routed, config.router.num_experts, config.capacity)
    chunks, handles = _lanes(x, table, config, axes, schedule.num_lanes)
    shared = {"gate_up": params.gate_up, "down": params.down}
    ys = weave(_stages(config, x.dtype), schedule.orders(), shared, handles, chunks)
    y = jnp.concatenate(ys)[: x.shape[0]]
    counts = count_tokens(routed.expert_ids.reshape(-1, routed.expert_ids.shape[-1]) - first, L)
    kept = sum(h.row_map.group_sizes for h in handles)
    return y, MoEStats(routing, counts, counts - kept)
