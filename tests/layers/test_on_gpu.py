"""The layer on one GPU with the Pallas kernels, forward and gradient, against the dense oracle."""

import jax
import jax.numpy as jnp
import pytest
from contract.harness import TOLERANCE, rel_err

import jaxmoe
from jaxmoe.experts import choose_backend, pallas


@pytest.mark.gpu
@pytest.mark.parametrize("schedule", [jaxmoe.Sequential(), jaxmoe.TokenChunks(3)], ids=str)
@pytest.mark.parametrize("valid", [300, 171, 0])
def test_layer_with_kernels(schedule, valid):
    """Forward without gradient (SwiGLU fused), forward with gradient, and every gradient; padding holds NaN."""
    T, D, F, router = 300, 256, 192, jaxmoe.RouterConfig(num_experts=16, top_k=4)
    assert choose_backend(num_rows=T, widths=(D, 2 * F), dtype=jnp.bfloat16) == "pallas"
    params = jaxmoe.init_params(jax.random.key(0), D, F, router, jnp.bfloat16)
    x, dy = (jax.random.normal(jax.random.key(i), (T, D), jnp.bfloat16) for i in (1, 2))
    x = jnp.where(jnp.arange(T)[:, None] < valid, x, jnp.nan)
    mesh = jaxmoe.make_mesh(1)
    config = jaxmoe.MoEConfig(router=router)
    count = jnp.array([valid], jnp.int32)

    def forward(params, x):
        return jaxmoe.moe(params, x, config, schedule=schedule, mesh=mesh, num_valid=count)

    y, stats = jax.jit(forward)(params, x)
    y_again, vjp, _ = jax.vjp(jax.jit(forward), params, x, has_aux=True)
    grads = vjp(dy)
    wide = lambda t: jax.tree.map(lambda a: a.astype(jnp.float32), t)  # noqa: E731
    clean = jnp.where(jnp.isnan(x), 0, x)

    def dense(params, x):
        mask = jnp.arange(T) < valid
        return jaxmoe.dense_moe(params, x, router, mask=mask, expert_ids=stats.routing.expert_ids)[0]

    with jax.default_matmul_precision("highest"):
        want, want_vjp = jax.vjp(dense, wide(params), wide(clean))
        want_grads = want_vjp(wide(dy))
    assert rel_err(wide(y), want) <= TOLERANCE["bfloat16"]
    assert rel_err(wide(y_again), want) <= TOLERANCE["bfloat16"]
    for got, ref in zip(jax.tree.leaves(wide(grads)), jax.tree.leaves(want_grads), strict=True):
        assert rel_err(got, ref) <= TOLERANCE["bfloat16"]


def test_kernels_lower_for_ranks_without_a_gpu(monkeypatch):
    """Under shard_map on 4 ranks, forward and gradient: kernels are chosen in every direction, and types fit."""
    monkeypatch.setattr(pallas, "device_kind", lambda: "NVIDIA H200")
    router = jaxmoe.RouterConfig(num_experts=16, top_k=4)
    params = jax.eval_shape(lambda: jaxmoe.init_params(jax.random.key(0), 256, 128, router, jnp.bfloat16))
    x = jax.ShapeDtypeStruct((1024, 256), jnp.bfloat16)
    config, mesh = jaxmoe.MoEConfig(router=router), jaxmoe.make_mesh(4)

    def forward(params, x):
        return jaxmoe.moe(params, x, config, schedule=jaxmoe.TokenChunks(2), mesh=mesh)[0]

    def gradient(params, x):
        return jax.grad(lambda *a: forward(*a).astype(jnp.float32).sum(), argnums=(0, 1))(params, x)

    for function, products in ((forward, 2 * 2), (gradient, 2 * 2 + 2 * 4)):
        text = jax.jit(function).trace(params, x).lower(lowering_platforms=("cuda",)).as_text()
        assert "ragged_dot" not in text
        # The same kernel at the same shapes is one custom call, called from several places.
        assert 0 < text.count("@mosaic_gpu") and text.count("stablehlo.custom_call") >= products - 1
