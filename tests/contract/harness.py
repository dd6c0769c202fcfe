"""What the contract tests share: the lists of backends, one compiled step each, and the float64 oracle."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import jaxmoe
from jaxmoe.comm import available_transports
from jaxmoe.experts import BACKENDS as EXPERT_BACKENDS
from jaxmoe.permute import BACKENDS as PERMUTE_BACKENDS

# Every backend there is: a new one inherits the suite by being registered.
EXPERT_NAMES = sorted(EXPERT_BACKENDS)
PERMUTE_NAMES = sorted(PERMUTE_BACKENDS)
SCHEDULES = [jaxmoe.Sequential(), jaxmoe.TokenChunks(3)]

# ‖got − want‖ / ‖want‖ against float64, by dtype of the computation.
TOLERANCE = {"float32": 2e-6, "bfloat16": 2e-2, "float16": 3e-3}

R, T, K, E, D, F = 4, 5, 3, 8, 16, 12
# On a CPU all but `ragged`, whose refusal tests/comm/test_ragged.py checks; `ragged_emulated` runs its program.
TRANSPORT_NAMES = available_transports(R, E)


def rel_err(got, want) -> float:
    """‖got − want‖ / ‖want‖ in float64; the plain norm where want is zero. NaN never passes a comparison."""
    got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
    return float(np.linalg.norm(got - want) / (np.linalg.norm(want) or 1.0))


@dataclasses.dataclass(frozen=True)
class Setting:
    """One compiled step: everything static about it."""

    transport: str = "all_gather"
    schedule: object = jaxmoe.Sequential()
    experts: str | None = None
    dtype: str = "float32"
    capacity: int | None = None
    wire_rows: int | None = None
    ranks: int = R
    axis_type: AxisType = AxisType.Auto
    num_experts: int = E
    top_k: int = K
    combine_dtype: str | None = None
    wire_dtype: str | None = None
    wire_dtype_combine: str | None = None

    @property
    def config(self) -> jaxmoe.MoEConfig:
        return jaxmoe.MoEConfig(
            router=jaxmoe.RouterConfig(num_experts=self.num_experts, top_k=self.top_k),
            transport=self.transport,
            experts=self.experts,
            capacity=self.capacity,
            wire_rows=self.wire_rows,
            combine_dtype=self.combine_dtype,
            wire_dtype=self.wire_dtype,
            wire_dtype_combine=self.wire_dtype_combine,
        )

    @functools.cached_property
    def mesh(self):
        return jaxmoe.make_mesh(self.ranks, axis_type=self.axis_type)


@functools.cache
def compiled_step(setting: Setting):
    """step(params, x, routing, num_valid, dy) -> (y, stats, gradients of params, x and the combine weights)."""
    mesh = setting.mesh

    def step(params, x, routing, num_valid, dy):
        def forward(params, x, weights):
            given = jaxmoe.Routing(routing.expert_ids, weights)
            return jaxmoe.moe(
                params, x, setting.config, schedule=setting.schedule, mesh=mesh, num_valid=num_valid, routing=given
            )

        y, vjp, stats = jax.vjp(forward, params, x, routing.weights, has_aux=True)
        return y, stats, vjp(dy)

    return jax.jit(step)


def place(setting: Setting, params, x, routing, num_valid, dy):
    """The arguments of a step, sharded as its mesh wants them."""
    mesh, rows = setting.mesh, P("expert", None)
    put = lambda a, spec: jax.device_put(a, jax.NamedSharding(mesh, spec))  # noqa: E731
    params = jax.tree.map(put, params, params.specs(("expert",)))
    return (
        params,
        put(x, rows),
        jax.tree.map(lambda a: put(a, rows), routing),
        put(num_valid, P("expert")),
        put(dy, rows),
    )


def random_case(seed: int = 0, *, ids=None, valid=None, setting: Setting = Setting(), tokens: int = T):
    """(params, x, routing, num_valid, dy) for a setting: random floats, and random or given expert ids [N, K]."""
    rng = np.random.default_rng(seed)
    n, e, k = setting.ranks * tokens, setting.num_experts, setting.top_k
    normal = lambda *shape: jnp.asarray(rng.normal(size=shape), setting.dtype)  # noqa: E731
    params = jaxmoe.MoEParams(normal(D, e), normal(e, D, 2 * F) * 0.3, normal(e, F, D) * 0.3)
    if ids is None:
        ids = np.stack([rng.permutation(e)[:k] for _ in range(n)])
    weights = rng.uniform(0.1, 1.0, size=(n, k)).astype(np.float32)
    routing = jaxmoe.Routing(jnp.asarray(ids, jnp.int32), jnp.asarray(weights))
    valid = [tokens] * setting.ranks if valid is None else valid
    return params, normal(n, D), routing, jnp.asarray(valid, jnp.int32), normal(n, D)


@functools.cache
def _dense_step(router: jaxmoe.RouterConfig):
    """(params, x, ids, weights, dy) -> y and the gradients of params, x and weights, compiled once a router."""

    def step(params, x, ids, weights, dy):
        def forward(params, x, weights):
            return jaxmoe.dense_moe(params, x, router, routing=jaxmoe.Routing(ids, weights))[0]

        y, vjp = jax.vjp(forward, params, x, weights)
        return y, vjp(dy)

    return jax.jit(step)


def oracle(params, x, routing, num_valid, dy, setting: Setting):
    """The step's y and gradients by `dense_moe` on one device in float64."""
    tokens = x.shape[0] // setting.ranks
    mask = np.arange(tokens)[None] < np.asarray(num_valid)[:, None]
    ids = np.where(mask.reshape(-1, 1), np.asarray(routing.expert_ids), -1)
    wide = lambda t: jax.tree.map(lambda a: np.asarray(a.astype(jnp.float32), np.float64), t)  # noqa: E731
    with jax.enable_x64(True):
        step = _dense_step(setting.config.router)
        return jax.tree.map(np.asarray, step(wide(params), wide(x), ids, wide(routing.weights), wide(dy)))


def check_step(setting: Setting, case) -> None:
    """Run a step and compare output and every gradient with the oracle; return nothing, raise on a difference."""
    y, stats, grads = compiled_step(setting)(*place(setting, *case))
    want_y, want_grads = oracle(*case, setting)
    tolerance = TOLERANCE[setting.dtype]
    assert rel_err(y, want_y) <= tolerance
    for (path, got), want in zip(jax.tree_util.tree_leaves_with_path(grads), jax.tree.leaves(want_grads), strict=True):
        assert rel_err(got, want) <= tolerance, jax.tree_util.keystr(path)
    assert int(stats.dropped) == 0
