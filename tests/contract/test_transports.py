"""Dispatch and combine as public ops inside shard_map, over every transport."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from contract.harness import TRANSPORT_NAMES, rel_err
from jax.sharding import AxisType, Mesh
from jax.sharding import PartitionSpec as P

import jaxmoe

T, K, E, D = 6, 3, 8, 4
MESHES = {
    "one axis of 4": ((4,), ("expert",)),
    "one axis of 1": ((1,), ("expert",)),
    "two axes 2×2": ((2, 2), ("node", "gpu")),
    "two axes 2×4": ((2, 4), ("node", "gpu")),
}
transports = pytest.mark.parametrize("transport", TRANSPORT_NAMES)
meshes = pytest.mark.parametrize("mesh", MESHES)


def _mesh(name):
    shape, axes = MESHES[name]
    devices = np.array(jax.devices()[: math.prod(shape)]).reshape(shape)
    return Mesh(devices, axes, axis_types=(AxisType.Auto,) * len(axes))


@functools.cache
def _ops(transport, mesh_name, capacity=None):
    """(x, ids, weights, r) -> rows, sizes, y, <dispatch(x), r>, its gradient, <x, combine(r)>, over the ranks."""
    mesh = _mesh(mesh_name)
    axes = mesh.axis_names

    def on_rank(x, ids, weights, r):
        def send(x):
            return jaxmoe.dispatch(
                x, jaxmoe.Routing(ids, weights), num_experts=E, axis=axes, transport=transport, capacity=capacity
            )

        (rows, handle), vjp = jax.vjp(send, x)
        live = jnp.arange(rows.shape[0])[:, None] < handle.row_map.group_sizes.sum()
        r = jnp.where(live, r[: rows.shape[0]], jnp.nan)
        zero = jax.tree.map(lambda a: np.zeros(a.shape, jax.dtypes.float0) if a.dtype == jnp.int32 else a * 0, handle)
        (dx,) = vjp((r, zero))
        home = jaxmoe.combine(r, handle)
        y = jaxmoe.combine(rows, handle)
        left = jnp.where(live, rows * r, 0).sum()[None]
        return rows, handle.row_map.group_sizes, y, dx, home, left, (x * home).sum()[None]

    return jax.jit(jax.shard_map(on_rank, mesh=mesh, in_specs=(P(axes),) * 4, out_specs=P(axes)))


def _inputs(mesh_name, weights=None):
    R = math.prod(MESHES[mesh_name][0])
    rng = np.random.default_rng(0)
    ids = np.stack([rng.permutation(E)[:K] for _ in range(R * T)])
    ids[1] = -1
    weights = rng.uniform(size=ids.shape) if weights is None else np.full(ids.shape, weights)
    x = rng.normal(size=(R * T, D))
    r = rng.normal(size=(R * R * T * K, D))  # enough rows for every rank's buffer
    return (
        jnp.asarray(x, jnp.float32),
        jnp.asarray(ids, jnp.int32),
        jnp.asarray(weights, jnp.float32),
        jnp.asarray(r, jnp.float32),
    )


@transports
@meshes
def test_rows_are_moved_bit_for_bit_in_expert_order(transport, mesh):
    """Row by row: expert by expert, each expert's tokens in global order (rank, token, slot)."""
    x, ids, weights, r = _inputs(mesh)
    R = math.prod(MESHES[mesh][0])
    rows, sizes, *_ = _ops(transport, mesh)(x, ids, weights, r)
    rows, sizes = np.asarray(rows).reshape(R, -1, D), np.asarray(sizes).reshape(R, -1)
    for rank in range(R):
        L = E // R
        mine = range(rank * L, rank * L + L)
        want = [x[n] for e in mine for n in range(R * T) for k in range(K) if ids[n, k] == e]
        np.testing.assert_array_equal(rows[rank][: len(want)], np.array(want).reshape(-1, D))
        assert sizes[rank].tolist() == [int((np.asarray(ids) == e).sum()) for e in mine]


@transports
@meshes
def test_each_is_the_others_transpose(transport, mesh):
    """With weights of 1: Σ <dispatch(x), r> = Σ <x, combine(r)>, and the gradient of dispatch is combine."""
    *_, dx, home, left, right = _ops(transport, mesh)(*_inputs(mesh, weights=1.0))
    assert abs(float(left.sum()) - float(right.sum())) <= 1e-4 * abs(float(left.sum()))
    assert rel_err(dx, home) <= 1e-6


@transports
@meshes
def test_identity_experts(transport, mesh):
    """Weights 1/K and no expert computation: output = input where a token has experts, and exactly 0 where not."""
    x, ids, weights, r = _inputs(mesh, weights=1 / K)
    y = np.asarray(_ops(transport, mesh)(x, ids, weights, r)[2])
    routed = np.asarray((ids >= 0).any(-1))
    np.testing.assert_allclose(y[routed], np.asarray(x)[routed], rtol=1e-6)
    assert (y[~routed] == 0).all()


@transports
def test_capacity_leaves_the_rows_behind_it_alone(transport):
    x, ids, weights, r = _inputs("one axis of 4")
    ids = jnp.where(ids >= 0, jnp.arange(K)[None], -1)  # experts 0, 1, 2 get everything
    rows, sizes, y, *_ = _ops(transport, "one axis of 4", capacity=5)(x, ids, weights, r)
    assert np.asarray(sizes).tolist() == [5, 5, 5, 0, 0, 0, 0, 0]
    assert np.isfinite(y).all()
    want = np.where(np.arange(4 * T)[:, None] < 6, np.asarray(weights.sum(-1))[:, None] * np.asarray(x), 0)
    want[1] = 0  # token 1 has no expert, so tokens 0, 2, 3, 4, 5 are the first five
    np.testing.assert_allclose(y, want, rtol=1e-5, atol=1e-7)


@transports
def test_without_an_axis(transport):
    x, ids, weights, _ = _inputs("one axis of 1")
    routing = jaxmoe.Routing(ids, weights)
    rows, handle = jaxmoe.dispatch(x, routing, num_experts=E, axis=None, transport=transport)
    y = jaxmoe.combine(rows, handle)
    np.testing.assert_allclose(
        y, weights.sum(-1, keepdims=True) * jnp.where((ids >= 0).any(-1)[:, None], x, 0), rtol=1e-5
    )


@transports
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_minus_zero_infinities_and_nan_arrive_as_they_are(transport, dtype):
    """Movement changes no bit: signed zeros and infinities included; a NaN stays in its own token."""
    mesh = _mesh("one axis of 4")
    special = np.tile([-0.0, 0.0, np.inf, -np.inf, np.nan, 1e-7, 3.0, -2.5], (4, 1))
    x = jnp.asarray(special.T.reshape(8, 4)[:4], dtype)
    ids = jnp.array([[0], [2], [4], [6]])

    def on_rank(x, ids):
        return jaxmoe.dispatch(
            x, jaxmoe.Routing(ids, jnp.ones((1, 1))), num_experts=E, axis="expert", transport=transport
        )[0][:1]

    rows = jax.jit(jax.shard_map(on_rank, mesh=mesh, in_specs=P("expert"), out_specs=P("expert")))(x, ids)
    bits = {2: np.uint16, 4: np.uint32}[x.dtype.itemsize]
    np.testing.assert_array_equal(np.asarray(rows).view(bits), np.asarray(x).view(bits))


def test_unknown_transport():
    with pytest.raises(ValueError, match=r"transport must be one of .*'all_gather'.*; got 'pigeon'. The default"):
        jaxmoe.dispatch(
            jnp.zeros((1, 1)),
            jaxmoe.Routing(jnp.zeros((1, 1), jnp.int32), jnp.ones((1, 1))),
            num_experts=1,
            axis=None,
            transport="pigeon",
        )


def test_experts_that_do_not_divide():
    def on_rank(x):
        return jaxmoe.dispatch(
            x, jaxmoe.Routing(jnp.zeros((1, 1), jnp.int32), jnp.ones((1, 1))), num_experts=10, axis="expert"
        )[0]

    with pytest.raises(ValueError, match=r"multiple of the ranks on axis .*; got 10 experts on 4 ranks. Add 2 unused"):
        jax.shard_map(on_rank, mesh=_mesh("one axis of 4"), in_specs=P("expert"), out_specs=P("expert"))(
            jnp.zeros((4, 1))
        )


def test_tokens_and_routing_of_another_length_are_refused():
    routing = jaxmoe.Routing(jnp.zeros((2, 1), jnp.int32), jnp.ones((2, 1)))
    with pytest.raises(ValueError, match=r"of the same tokens; got \(4, 1\), \(2, 1\) and \(2, 1\). Reshape"):
        jaxmoe.dispatch(jnp.zeros((4, 1)), routing, num_experts=1, axis=None)


@transports
def test_gradients_of_the_pieces_beside_a_data_axis(transport):
    """dispatch, grouped_matmul and combine in a caller's own shard_map, weights spread over the EP axis alone."""
    mesh = jaxmoe.make_mesh(2, data=2)
    x, ids, weights, _ = _inputs("one axis of 4")
    w = jnp.asarray(np.random.default_rng(1).normal(size=(E, D, D)), jnp.float32)

    def on_rank(x, ids, weights, w):
        rows, handle = jaxmoe.dispatch(
            x, jaxmoe.Routing(ids, weights), num_experts=E, axis="expert", transport=transport
        )
        return jaxmoe.combine(jaxmoe.grouped_matmul(rows, w, handle.row_map.group_sizes), handle)

    both = P(("data", "expert"))
    run = jax.shard_map(on_rank, mesh=mesh, in_specs=(both, both, both, P("expert")), out_specs=both)

    def dense(x, w):
        rows = jnp.einsum("nd,edf->nef", x, w)
        return sum(
            jnp.where(ids[:, k, None] >= 0, weights[:, k, None] * rows[jnp.arange(len(x)), ids[:, k]], 0)
            for k in range(K)
        )

    got = jax.jit(jax.grad(lambda x, w: (run(x, ids, weights, w) ** 2).sum(), argnums=(0, 1)))(x, w)
    want = jax.grad(lambda x, w: (dense(x, w) ** 2).sum(), argnums=(0, 1))(x, w)
    for a, b in zip(got, want, strict=True):
        assert rel_err(a, b) <= 1e-5
