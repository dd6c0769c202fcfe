# ---
# jupyter:
#   jupytext:
#     formats: ipynb,py:percent
#     text_representation:
#       extension: .py
#       format_name: percent
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # jaxmoe: quick start
#
# An expert-parallel MoE layer on eight devices: make it, look at its routing, check it against a dense oracle, and
# change how its communication is scheduled. No GPU is needed: the eight devices are virtual ones of this CPU, and the
# number of them has to be set before JAX touches any device.

# %%
import jax

jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 8)

import jax.numpy as jnp
from flax import nnx

import jaxmoe
from jaxmoe import viz

# %% [markdown]
# ## The layer
#
# Eight ranks share sixteen experts, two on each. Every token goes to two of them. Inside `jax.set_mesh`, the layer
# makes its parameters where they belong: the experts spread over the axis `"expert"`, the router on every rank.

# %%
mesh = jaxmoe.make_mesh(8)
router = jaxmoe.RouterConfig(num_experts=16, top_k=2)

with jax.set_mesh(mesh):
    layer = jaxmoe.MoE(32, 64, router, rngs=nnx.Rngs(0))

for name in ("router", "gate_up", "down"):
    weight = getattr(layer, name)[...]
    print(f"{name:8}{weight.shape!s:15} on each device {weight.sharding.shard_shape(weight.shape)}")

# %% [markdown]
# Sixty-four tokens, eight on each rank. Every token is a letter of a sentence, and equal letters have equal vectors.

# %%
text = "Every token goes to two experts, and every expert is on one rank"
table = jax.random.normal(jax.random.key(1), (128, 32))
x = table[jnp.array([ord(c) for c in text])]
x = jax.device_put(x, jax.NamedSharding(mesh, jax.P("expert")))


@nnx.jit
def apply(layer, x):
    return layer(x)


with jax.set_mesh(mesh):
    y, stats = apply(layer, x)

print("output", y.shape, y.sharding.spec)
print("tokens per expert", stats.tokens_per_expert)
print(f"the fullest expert has {stats.imbalance:.2f} times the even share; {stats.dropped} dropped")

# %% [markdown]
# ## Where the tokens went
#
# A column is a token, a row is an expert, and the colour is the weight of the expert's output in the sum. Equal
# letters go to the same two experts, whichever rank they start from.

# %%
# %matplotlib inline
viz.batch_routing(
    stats.routing.expert_ids,
    stats.routing.weights,
    num_experts=16,
    ranks=8,
    token_labels=[c if c != " " else "·" for c in text],
)

# %% [markdown]
# ## The oracle
#
# `jaxmoe.dense_moe` is the same layer on one device, written to be obviously right: every expert computes every token,
# and a mask picks. It takes the recorded `expert_ids`, so that a tie in the scores cannot be broken differently.


# %%
def relative(a, b):
    """‖a - b‖ / ‖b‖, on the host."""
    a, b = jax.device_get((a, b))
    return float(jnp.linalg.norm((a - b).ravel()) / jnp.linalg.norm(b.ravel()))


params, x_one = jax.device_put(jax.device_get((layer.params(), x)), jax.devices()[0])
ids = jax.device_get(stats.routing.expert_ids)
y_dense, _ = jaxmoe.dense_moe(params, x_one, router, expert_ids=ids)
print(f"output: {relative(y, y_dense):.1e}")

# %% [markdown]
# The same for the gradients of a loss, with respect to the input and every parameter.

# %%
target = jax.random.normal(jax.random.key(2), x.shape)


@nnx.jit
def gradients(layer, x):
    def loss(layer, x):
        return jnp.sum((layer(x)[0] - target) ** 2)

    return nnx.grad(loss, argnums=(0, 1))(layer, x)


def dense_loss(params, x):
    return jnp.sum((jaxmoe.dense_moe(params, x, router, expert_ids=ids)[0] - target) ** 2)


with jax.set_mesh(mesh):
    got, got_x = gradients(layer, x)
want, want_x = jax.jit(jax.grad(dense_loss, argnums=(0, 1)))(params, x_one)

errors = {name: relative(got[name][...], getattr(want, name)) for name in ("router", "gate_up", "down")}
errors["x"] = relative(got_x, want_x)
for name, error in errors.items():
    print(f"∂ {name:8} {error:.1e}")
assert max(errors.values()) < 1e-5

# %% [markdown]
# ## Another schedule, the same numbers
#
# `Sequential` dispatches all tokens, computes, and combines. `TokenChunks(4)` cuts each rank's tokens into four lanes
# and issues them interleaved, so that on GPUs a chunk's collectives run while another chunk computes. What is computed
# is the same. The forward order of four chunks, as data:

# %%
stage_names = ("dispatch", "up", "down", "combine")
schedule = jaxmoe.TokenChunks(4)
print(" → ".join(f"{stage_names[stage]} {lane}" for lane, stage in schedule.orders().forward))

# %%
with jax.set_mesh(mesh):
    chunked = jaxmoe.MoE(32, 64, router, schedule=schedule, rngs=nnx.Rngs(0))  # the same seed: the same parameters
    y_chunked, _ = apply(chunked, x)
    got_chunked, got_x_chunked = gradients(chunked, x)

same = {name: relative(got_chunked[name][...], got[name][...]) for name in ("router", "gate_up", "down")}
same |= {"x": relative(got_x_chunked, got_x)}
print(f"output     {relative(y_chunked, y):.1e}")
for name, error in same.items():
    print(f"∂ {name:8} {error:.1e}")
assert relative(y_chunked, y) < 1e-6
assert max(same.values()) < 1e-5

# %% [markdown]
# The weights' gradients are sums over tokens, and four chunks add them up in another order: that is the last digit of
# float32, and all of the difference.
