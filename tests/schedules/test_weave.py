"""The executor: it issues what it was told, in that order, forward and backward, and computes the right thing."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import jaxmoe
from jaxmoe.schedules import Orders, Sequential, Stage, TokenChunks, weave

COMM = {"all_gather", "reduce_scatter", "psum_scatter"}


def _stages():
    """gather, up, down, scatter: the plain block of the prototype."""
    return [
        Stage(name="gather", kind="comm", fn=lambda p, own, x: jax.lax.all_gather(x, "expert", tiled=True)),
        Stage(name="up", kind="compute", fn=lambda p, own, x: jnp.tanh(x @ p["up"]), reads=("up",)),
        Stage(name="down", kind="compute", fn=lambda p, own, x: (x @ p["down"]) * own["scale"], reads=("down",)),
        Stage(name="scatter", kind="comm", fn=lambda p, own, x: jax.lax.psum_scatter(x, "expert", tiled=True)),
    ]


def _issued(jaxpr) -> list[str]:
    """Collectives and matrix products in the order of the program, through every inner jaxpr."""
    out = []
    for eqn in jaxpr.eqns:
        inner = [p for v in eqn.params.values() for p in (v if isinstance(v, tuple | list) else [v])]
        inner = [getattr(p, "jaxpr", p) for p in inner if hasattr(getattr(p, "jaxpr", p), "eqns")]
        for j in inner:
            out += _issued(j)
        if eqn.primitive.name in COMM:
            out.append("comm")
        elif eqn.primitive.name == "dot_general":
            out.append("dot")
    return out


def _program(n):
    mesh = jaxmoe.make_mesh(4)
    orders = TokenChunks(n).orders()

    def woven(x, up, down, scale):
        lanes = jnp.split(x, n)
        own = [{"scale": scale, "index": jnp.int32(i)} for i in range(n)]
        return jnp.concatenate(weave(_stages(), orders, {"up": up, "down": down}, own, lanes))

    spec = P("expert")
    return jax.shard_map(woven, mesh=mesh, in_specs=(spec, spec, spec, spec), out_specs=spec), orders


def _arguments():
    keys = jax.random.split(jax.random.key(0), 4)
    shapes = ((48, 8), (32, 6), (24, 8), (4,))
    return [jax.random.normal(k, s) for k, s in zip(keys, shapes, strict=True)]


@pytest.mark.parametrize("n", [1, 2, 3, 4])
def test_forward_issues_the_list(n):
    program, orders = _program(n)
    kinds = ["comm" if s in (0, 3) else "dot" for _, s in orders.forward]
    assert _issued(jax.make_jaxpr(program)(*_arguments()).jaxpr) == kinds


@pytest.mark.parametrize("n", [1, 2, 4])
def test_backward_issues_the_list(n):
    """Forward, then the backward list, in which each compute slot is two products (data and weight gradient)."""
    program, orders = _program(n)
    grad = jax.grad(lambda *a: (program(*a) ** 2).sum(), argnums=(0, 1, 2, 3))
    issued = _issued(jax.make_jaxpr(grad)(*_arguments()).jaxpr)
    forward = [k for _, s in orders.forward for k in (["comm"] if s in (0, 3) else ["dot"])]
    backward = [k for _, s in orders.backward for k in (["comm"] if s in (0, 3) else ["dot", "dot"])]
    assert issued == forward + backward


@pytest.mark.parametrize("n", [1, 2, 3])
def test_values_and_gradients(n):
    """Against the same block without schedule, ranks or barriers."""
    program, _ = _program(n)
    x, up, down, scale = _arguments()

    def plain(x, up, down, scale):
        ranks_up, ranks_down = up.reshape(4, 8, 6), down.reshape(4, 6, 8)
        return sum(scale[r] * (jnp.tanh(x @ ranks_up[r]) @ ranks_down[r]) for r in range(4))

    np.testing.assert_allclose(jax.jit(program)(x, up, down, scale), plain(x, up, down, scale), rtol=2e-4, atol=2e-5)
    loss = lambda f: jax.jit(jax.grad(lambda *a: (f(*a) ** 2).sum(), argnums=(0, 1, 2, 3)))  # noqa: E731
    for got, want in zip(loss(program)(x, up, down, scale), loss(plain)(x, up, down, scale), strict=True):
        np.testing.assert_allclose(got, want, rtol=2e-3, atol=2e-3)


def test_every_slot_is_tied():
    """One barrier for every slot but the first of each pass: the ties that keep XLA from merging lanes."""
    program, orders = _program(4)
    text = jax.jit(program).lower(*_arguments()).as_text()
    assert text.count("optimization_barrier") == len(orders.forward) - 1


@pytest.mark.parametrize("n", range(1, 9))
def test_token_chunks_hides_all_but_the_first_and_the_last(n):
    """Between a collective's slot and the next collective's stands a compute slot, but for the two ends."""
    for order, stages in ((TokenChunks(n).orders().forward, (0, 3)), (TokenChunks(n).orders().backward, (0, 3))):
        comm_at = [i for i, (_, s) in enumerate(order) if s in stages]
        gaps = [b - a - 1 for a, b in zip(comm_at, comm_at[1:], strict=False)]
        if n > 1:
            assert gaps[0] == 0 and all(g > 0 for g in gaps[1:])
            assert len(comm_at) == 2 * n
        # A window never holds its own lane's computation that needs it: the compute behind it is another lane's.
        for i in comm_at[1:-1]:
            if order[i + 1][1] not in stages:
                assert order[i + 1][0] != order[i][0] or order[i][1] == 3 or order[i][0] == n - 1


def test_backward_mirrors_lanes_and_stages():
    orders = TokenChunks(3).orders()
    assert orders.backward == tuple((2 - lane, 3 - stage) for lane, stage in orders.forward)


@pytest.mark.parametrize(
    "forward, says",
    [
        (((0, 0), (0, 2), (0, 1)), r"forward order must issue every stage .* got \[0, 2, 1\] for lane 0. Mend"),
        (((0, 0), (0, 1)), r"got \[0, 1\] for lane 0"),
        (((0, 0), (0, 1), (0, 2), (1, 0)), r"must have 3 slots.*got 4. Remove"),
    ],
    ids=["crossed", "missing", "foreign"],
)
def test_orders_refuse(forward, says):
    with pytest.raises(ValueError, match=says):
        Orders(num_lanes=1, num_stages=3, forward=forward, backward=((0, 2), (0, 1), (0, 0)))


def test_weave_refuses_orders_of_another_shape():
    with pytest.raises(ValueError, match=r"got 2 lanes × 4 stages for 1 values, 1 owns and 4 stages. Make the orders"):
        weave(_stages(), TokenChunks(2).orders(), {}, [()], [jnp.ones((4, 8))])


@pytest.mark.parametrize("n", [0, -1, 2.0, True])
def test_token_chunks_refuses(n):
    with pytest.raises(ValueError, match=r"TokenChunks takes a positive integer; got .*. Use 2 to 8, or Sequential"):
        TokenChunks(n)


def test_sequential_is_one_lane():
    assert Sequential().orders() == TokenChunks(1).orders()
