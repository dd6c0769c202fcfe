"""The MoE layer as a function of global arrays."""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Bool, Float, Int

from jaxmoe.config import MoEConfig
from jaxmoe.layers import checks
from jaxmoe.layers.on_rank import moe_on_rank
from jaxmoe.layers.params import MoEParams, MoEStats
from jaxmoe.mesh import AnyMesh, axis_tuple, current_mesh
from jaxmoe.routing.check import check_routing
from jaxmoe.routing.gating import Routing
from jaxmoe.schedules import Schedule


class _Inputs(NamedTuple):
    """The arrays that enter shard_map."""

    params: MoEParams
    x: jax.Array
    num_valid: jax.Array | None
    mask: jax.Array | None
    routing: Routing | None


def moe(
    params: MoEParams,
    x: Float[Array, "... D"],
    config: MoEConfig,
    *,
    schedule: Schedule | None = None,
    mesh: AnyMesh | None = None,
    num_valid: Int[Array, "R"] | None = None,
    mask: Bool[Array, "..."] | None = None,
    routing: Routing | None = None,
) -> tuple[Float[Array, "... D"], MoEStats]:
    """y[n] = Σ_k weights[n, k] · expert_{ids[n, k]}(x[n]), experts and tokens spread over `config.axis`.

    Works eagerly and under jit and grad, with `jax.set_mesh` or `mesh=`, on Auto and Explicit axes; without a mesh,
    or with `config.axis=None`, all experts are local.

    Args:
      params: router [D, E], gate_up [E, D, 2F], down [E, F, D]; experts sharded over `config.axis`.
      x: [..., D] float32, bfloat16 or float16, tokens sharded over `config.axis` (and over data axes, if any).
      config: the layer.
      schedule: the issue order; None is `Sequential()`.
      mesh: None takes the mesh of `jax.set_mesh`.
      num_valid: [R] int32, valid tokens of each rank that holds tokens; the others are padding at its end.
      mask: [...] bool, False for padding anywhere. Padding is neither sent nor counted, and gets zeros.
      routing: ids [..., K] int32 and weights [..., K] float32 to use in place of the router.

    Returns:
      y [..., D] in the dtype and sharding of x, and MoEStats.

    Raises:
      ValueError: arrays, mesh, axis or shardings that do not fit; the message says the remedy.

    Example:
      >>> import jax, jax.numpy as jnp, jaxmoe
      >>> cfg = jaxmoe.MoEConfig(router=jaxmoe.RouterConfig(num_experts=8, top_k=2))
      >>> params = jaxmoe.init_params(jax.random.key(0), 16, 32, cfg.router)
      >>> y, stats = jaxmoe.moe(params, jnp.ones((4, 16)), cfg)
      >>> y.shape, int(stats.tokens_per_expert.sum())
      ((4, 16), 8)

    References: GShard (Lepikhin et al., 2020); Mixtral (2024); DeepSeek-V3 (2024).
    """
    mesh, axes = current_mesh(mesh), axis_tuple(config.axis)
    checks.check_arrays(params, x, config)
    if routing is not None:
        checks.check_given_routing(routing, x)
        if config.checks:
            check_routing(routing, config.router.num_experts)
    if mesh is None or not axes:
        checks.check_valid(num_valid, mask, x, 1)
        return _on_rank(_Inputs(params, x, num_valid, mask, routing), config, schedule, (), ())
    checks.check_experts(config, mesh, axes)
    checks.check_explicit_params(params, mesh, axes)
    spec = checks.token_spec(x, config, mesh, axes)
    over = checks.token_axes(spec)
    checks.check_valid(num_valid, mask, x, checks.num_shards(mesh, over))
    # Trees of PartitionSpecs, in the shape of the trees of arrays that they describe.
    tokens: Any = spec
    row: Any = P(*spec, None)
    per_rank: Any = P(over)
    per_expert: Any = P(axes)
    specs = _Inputs(
        params=params.specs(axes),
        x=row,
        num_valid=None if num_valid is None else per_rank,
        mask=None if mask is None else tokens,
        routing=None if routing is None else Routing(row, row),
    )
    run = jax.shard_map(
        lambda inputs: _on_rank(inputs, config, schedule, axes, tuple(a for a in over if a not in axes)),
        mesh=mesh,
        in_specs=(specs,),
        out_specs=(row, MoEStats(Routing(row, row), per_expert, per_expert)),
    )
    return run(_Inputs(params, x, num_valid, mask, routing))


def _on_rank(inputs: _Inputs, config: MoEConfig, schedule, axes: tuple[str, ...], data_axes: tuple[str, ...]):
    """Flatten the token dimensions, run the rank's part, and add the counts of the data-parallel replicas."""
    lead, D = inputs.x.shape[:-1], inputs.x.shape[-1]
    x = inputs.x.reshape(-1, D)
    valid = None
    if inputs.num_valid is not None:
        valid = jnp.arange(x.shape[0]) < inputs.num_valid[0]
    elif inputs.mask is not None:
        valid = inputs.mask.reshape(-1)
    routing = jax.tree.map(lambda a: a.reshape(-1, a.shape[-1]), inputs.routing)
    local = config if axes else dataclasses.replace(config, axis=None)
    y, stats = moe_on_rank(inputs.params, x, local, schedule=schedule, valid=valid, routing=routing)
    counts = stats.tokens_per_expert, stats.dropped_per_expert
    if data_axes:
        counts = lax.psum(counts, data_axes)
    unflat = jax.tree.map(lambda a: a.reshape(*lead, a.shape[-1]), stats.routing)
    return y.reshape(*lead, D), MoEStats(unflat, *counts)
