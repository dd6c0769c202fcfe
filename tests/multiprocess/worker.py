"""One of several processes over gloo: runs the layer on the mesh of all of them and checks its own tokens."""

import sys

import jax

process, count, port, per_process = (int(a) for a in sys.argv[1:])
jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", per_process)
jax.config.update("jax_cpu_collectives_implementation", "gloo")
jax.distributed.initialize(f"localhost:{port}", count, process)

import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
from jax.sharding import PartitionSpec as P  # noqa: E402

import jaxmoe  # noqa: E402
from jaxmoe.comm import available_transports  # noqa: E402

mesh = jaxmoe.make_mesh()
R = mesh.shape["expert"]
T, D, F = 6, 8, 12
router = jaxmoe.RouterConfig(num_experts=2 * R, top_k=3)
params = jaxmoe.init_params(jax.random.key(0), D, F, router)
x = np.asarray(jax.random.normal(jax.random.key(1), (R * T, D)))
dy = np.asarray(jax.random.normal(jax.random.key(2), (R * T, D)))
num_valid = np.array([T, 0, 3, 1] * R, np.int32)[:R]
mask = (np.arange(T)[None] < num_valid[:, None]).reshape(-1)


def spread(array, spec):
    array = np.asarray(array)
    return jax.make_array_from_callback(array.shape, jax.NamedSharding(mesh, spec), lambda at: array[at])


placed = jax.tree.map(spread, params, params.specs(("expert",)))
arguments = placed, spread(x, P("expert", None)), spread(num_valid, P("expert")), spread(dy, P("expert", None))


def dense(params, x):
    return (jaxmoe.dense_moe(params, x, router, mask=jnp.asarray(mask))[0] * dy).sum()


want_y = np.asarray(jaxmoe.dense_moe(params, jnp.asarray(x), router, mask=jnp.asarray(mask))[0])
want = jax.tree.leaves(jax.grad(dense, argnums=(0, 1))(params, jnp.asarray(x)))


def check(got, want, what):
    for shard in got.addressable_shards:
        part = want[shard.index]
        error = np.linalg.norm(np.asarray(shard.data) - part) / (np.linalg.norm(part) or 1.0)
        if not error <= 1e-5:
            raise SystemExit(f"process {process}: {what}: relative error {error}")


for transport in available_transports(R, router.num_experts):
    config = jaxmoe.MoEConfig(router=router, transport=transport)
    for schedule in (
        (jaxmoe.TokenChunks(2),) if transport != "all_gather" else (jaxmoe.Sequential(), jaxmoe.TokenChunks(2))
    ):

        def loss(params, x, num_valid, dy, config=config, schedule=schedule):
            y, _ = jaxmoe.moe(params, x, config, schedule=schedule, mesh=mesh, num_valid=num_valid)
            return (y * dy).sum(), y

        (_, y), grads = jax.jit(jax.value_and_grad(loss, argnums=(0, 1), has_aux=True))(*arguments)
        check(y, want_y, f"{transport} {schedule} y")
        for name, g, w in zip(("router", "gate_up", "down", "x"), jax.tree.leaves(grads), want, strict=True):
            check(g, np.asarray(w), f"{transport} {schedule} d{name}")
print(f"process {process} of {count}: {R} ranks agree with the oracle")
