"""The Flax module: meshes, transforms, dtypes, sharding metadata, against the dense oracle."""

import contextlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from contract.harness import TOLERANCE, rel_err
from flax import nnx
from jax.sharding import AxisType, Mesh
from jax.sharding import PartitionSpec as P

import jaxmoe
from jaxmoe.layers.nnx import RouterBias, with_config, with_schedule

D, F, E, K, B, S = 16, 24, 8, 2, 8, 3
ROUTER = jaxmoe.RouterConfig(num_experts=E, top_k=K)


def _mesh(shape, names, axis_type=AxisType.Auto):
    devices = np.array(jax.devices()[: int(np.prod(shape))]).reshape(shape)
    return Mesh(devices, names, axis_types=(axis_type,) * len(names))


def _x(dtype=jnp.float32, seed=0):
    return jax.random.normal(jax.random.key(seed), (B, S, D), dtype)


def _check(layer, x, y, stats, tolerance=TOLERANCE["float32"]):
    """The layer's output against the oracle with the same expert ids, all on one device."""
    params = jax.tree.map(np.asarray, layer.params())
    ids = np.asarray(stats.routing.expert_ids)
    want, own = jaxmoe.dense_moe(params, np.asarray(x).astype(np.float32), ROUTER, expert_ids=ids)
    assert rel_err(np.asarray(y).astype(np.float32), want) <= tolerance
    np.testing.assert_array_equal(stats.tokens_per_expert, np.bincount(ids.reshape(-1), minlength=E))
    np.testing.assert_allclose(stats.routing.weights, own.weights, rtol=2e-3 if tolerance > 1e-4 else 1e-4)


MESHES = {
    "8": ((8,), ("expert",), "expert", P("expert")),
    "2 data × 4": ((2, 4), ("data", "expert"), "expert", P(("data", "expert"))),
    "batch over data, sequence over experts": ((2, 3), ("data", "expert"), "expert", P("data", "expert")),
    "EP over two axes": ((2, 4), ("node", "gpu"), ("node", "gpu"), P(("node", "gpu"))),
    "an axis that nothing is spread over": ((2, 4), ("other", "expert"), "expert", P("expert")),
}


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit], ids=["Auto", "Explicit"])
@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.slow
def test_meshes_forward_and_gradient(mesh, axis_type):
    """Every way to spread tokens and experts gives the oracle's output and gradients, router included."""
    shape, names, axis, spec = MESHES[mesh]
    experts = 6 if 3 in shape else E
    router = jaxmoe.RouterConfig(num_experts=experts, top_k=K)
    config = jaxmoe.MoEConfig(router=router, axis=axis, token_spec=spec if axis_type == AxisType.Auto else None)
    mesh = _mesh(shape, names, axis_type)
    x = _x()
    dy = _x(seed=1)
    with jax.set_mesh(mesh):
        layer = jaxmoe.MoE(D, F, router, config=config, schedule=jaxmoe.TokenChunks(2), rngs=nnx.Rngs(0))
        assert layer.gate_up[...].sharding.is_equivalent_to(jax.NamedSharding(mesh, P(axis)), 3)
        assert (
            layer.router[...].sharding.is_fully_replicated and len(layer.router[...].sharding.device_set) == mesh.size
        )
        placed = jax.device_put(x, jax.NamedSharding(mesh, P(*spec, *(None,) * (3 - len(spec)))))
        cotangent = jax.device_put(dy, placed.sharding)

        @nnx.jit
        def step(layer, x, dy):
            def loss(layer, x):
                y, stats = layer(x)
                return (y * dy).sum(), (y, stats)

            (_, aux), grads = nnx.value_and_grad(loss, argnums=(0, 1), has_aux=True)(layer, x)
            return aux, grads

        (y, stats), (grads, dx) = step(layer, placed, cotangent)
        assert y.sharding.is_equivalent_to(placed.sharding, 3)
    params = jax.tree.map(np.asarray, layer.params())

    def oracle(params, x):
        return (jaxmoe.dense_moe(params, x, router, expert_ids=np.asarray(stats.routing.expert_ids))[0] * dy).sum()

    want, want_x = jax.grad(oracle, argnums=(0, 1))(params, x)
    assert rel_err(dx, want_x) <= 1e-5
    for name in ("router", "gate_up", "down"):
        assert rel_err(grads[name][...], getattr(want, name)) <= 1e-5, name


@pytest.mark.parametrize("how", ["eager", "jax.jit", "nnx.jit", "mesh argument"])
def test_transforms(how):
    mesh = _mesh((4,), ("expert",))
    context = contextlib.nullcontext() if how == "mesh argument" else jax.set_mesh(mesh)
    with context:
        layer = jaxmoe.MoE(D, F, ROUTER, mesh=mesh if how == "mesh argument" else None, rngs=nnx.Rngs(0))
        x = _x()
        if how == "jax.jit":
            graph, state = nnx.split(layer)
            y, stats = jax.jit(lambda state, x: nnx.merge(graph, state)(x))(state, x)
        elif how == "nnx.jit":
            y, stats = nnx.jit(lambda layer, x: layer(x))(layer, x)
        else:
            y, stats = layer(x)
    _check(layer, x, y, stats)
    assert float(stats.load.sum()) == pytest.approx(1.0)
    assert float(stats.imbalance) >= 1.0 and int(stats.dropped) == 0


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit], ids=["Auto", "Explicit"])
def test_a_training_loop_compiles_once(axis_type):
    """The parameters that a step returns have the shardings that it was given."""
    traced = 0
    with jax.set_mesh(_mesh((4,), ("expert",), axis_type)) as mesh:
        layer = jaxmoe.MoE(D, F, ROUTER, use_bias=True, rngs=nnx.Rngs(0))
        x = jax.device_put(_x(), jax.NamedSharding(jax.sharding.get_mesh(), P("expert")))

        @jax.jit
        def step(state, x):
            nonlocal traced
            traced += 1
            return jax.tree.map(lambda a: a * 0.5, state)

        state = jax.tree.map(lambda a: a, nnx.state(layer))
        for _ in range(3):
            state = step(state, x)
        assert step._cache_size() == 1 and traced == 1, mesh


def test_remat_and_scan_over_layers():
    """Composes with remat, scan and grad; the routing recomputed in the backward pass is the same."""
    mesh = _mesh((4,), ("expert",))
    config = jaxmoe.MoEConfig(router=ROUTER)
    keys = jax.random.split(jax.random.key(0), 2)
    layers = jax.vmap(lambda k: jaxmoe.init_params(k, D, F, ROUTER))(keys)

    def loss(layers, x, run):
        def body(h, params):
            return h + run(params, h), None

        return (jax.lax.scan(body, x, layers)[0] ** 2).sum()

    def sharded(params, h):
        return jaxmoe.moe(params, h, config, schedule=jaxmoe.TokenChunks(2), mesh=mesh)[0]

    def dense(params, h):
        return jaxmoe.dense_moe(params, h, ROUTER)[0]

    got = jax.jit(jax.grad(lambda w, x: loss(w, x, jax.checkpoint(sharded))))(layers, _x())
    want = jax.jit(jax.grad(lambda w, x: loss(w, x, dense)))(layers, _x())
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert rel_err(a, b) <= 1e-5


@pytest.mark.parametrize(
    "dtype, param_dtype, out",
    [(None, "float32", "float32"), ("bfloat16", "float32", "bfloat16"), (None, "bfloat16", "bfloat16")],
)
def test_dtypes(dtype, param_dtype, out):
    x = _x(jnp.bfloat16 if out == "bfloat16" else jnp.float32)
    layer = jaxmoe.MoE(D, F, ROUTER, dtype=dtype, param_dtype=param_dtype, rngs=nnx.Rngs(0))
    y, stats = layer(x)
    assert y.dtype == out and layer.gate_up[...].dtype == param_dtype
    assert stats.routing.weights.dtype == jnp.float32
    _check(layer, x, y, stats, TOLERANCE[out])


def test_kernel_init_and_default_scale():
    layer = jaxmoe.MoE(D, F, ROUTER, kernel_init=nnx.initializers.ones, rngs=nnx.Rngs(0))
    assert all((v[...] == 1).all() for v in (layer.router, layer.gate_up, layer.down))
    layer = jaxmoe.MoE(64, 96, ROUTER, rngs=nnx.Rngs(0))
    for v, fan_in in ((layer.router, 64), (layer.gate_up, 64), (layer.down, 96)):
        assert float(v[...].std()) == pytest.approx(fan_in**-0.5, rel=0.1)


def test_bias_is_state_that_selects_and_gets_no_gradient():
    layer = jaxmoe.MoE(D, F, ROUTER, use_bias=True, rngs=nnx.Rngs(0))
    layer.bias[...] = jnp.where(jnp.arange(E) < K, 100.0, 0.0)
    y, stats = layer(_x())
    assert set(np.unique(stats.routing.expert_ids)) == set(range(K))
    assert float(stats.imbalance) == pytest.approx(E / K)
    grads = nnx.grad(lambda m: m(_x())[0].sum())(layer)
    assert "bias" not in nnx.to_pure_dict(grads) and isinstance(layer.bias, RouterBias)


def test_mask_and_counts_are_two_ways_to_say_the_same():
    mesh = _mesh((4,), ("expert",))
    layer = jaxmoe.MoE(D, F, ROUTER, mesh=mesh, rngs=nnx.Rngs(0))
    x = _x()
    counts = jnp.array([6, 0, 2, 5], jnp.int32)
    mask = (jnp.arange(B * S // 4)[None] < counts[:, None]).reshape(B, S)
    y1, s1 = layer(x, num_valid=counts)
    y2, s2 = layer(x, mask=mask)
    np.testing.assert_array_equal(y1, y2)
    np.testing.assert_array_equal(s1.tokens_per_expert, s2.tokens_per_expert)
    assert int(s1.tokens_per_expert.sum()) == K * 13 and (np.asarray(y1)[~np.asarray(mask)] == 0).all()


def test_copies_share_variables():
    layer = jaxmoe.MoE(D, F, ROUTER, rngs=nnx.Rngs(0))
    other = with_config(with_schedule(layer, jaxmoe.TokenChunks(3)), transport="naive")
    assert layer.schedule == jaxmoe.Sequential() and layer.config.transport == "all_gather"
    assert rel_err(other(_x())[0], layer(_x())[0]) <= TOLERANCE["float32"]


def test_config_must_agree_with_router():
    other = jaxmoe.RouterConfig(num_experts=4, top_k=1)
    with pytest.raises(ValueError, match="config.router must be the router given"):
        jaxmoe.MoE(D, F, ROUTER, config=jaxmoe.MoEConfig(router=other), rngs=nnx.Rngs(0))
