"""The demo's transformer."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jaxmoe
from jaxmoe.demo.model import ModelConfig, Transformer, next_byte_loss

CONFIG = ModelConfig(
    moe=jaxmoe.MoEConfig(router=jaxmoe.RouterConfig(num_experts=4, top_k=2, score="sigmoid")),
    seq=12,
    d_model=16,
    d_ff=8,
)


@pytest.fixture(scope="module")
def model():
    return Transformer(CONFIG, jaxmoe.Sequential(), nnx.Rngs(0))


@pytest.fixture(scope="module")
def forward():
    return nnx.jit(lambda model, tokens: model(tokens))


@pytest.fixture(scope="module")
def tokens():
    return jax.random.randint(jax.random.key(0), (3, 12), 0, 256)


def test_shapes(model, forward, tokens):
    logits, stats = forward(model, tokens)
    assert logits.shape == (3, 12, 256)
    assert logits.dtype == jnp.float32
    assert [int(s.tokens_per_expert.sum()) for s in stats] == [3 * 12 * 2] * 2


def test_no_byte_sees_a_later_one(model, forward, tokens):
    changed = tokens.at[:, 7].set((tokens[:, 7] + 1) % 256)
    a, b = forward(model, tokens)[0], forward(model, changed)[0]
    np.testing.assert_allclose(a[:, :7], b[:, :7], rtol=0, atol=1e-6)
    assert (jnp.abs(a[:, 7:] - b[:, 7:]).max((0, 2)) > 1e-4).all()


def test_first_loss_is_that_of_a_uniform_guess(model, tokens):
    loss, _ = nnx.jit(next_byte_loss)(model, tokens)
    assert float(loss) == pytest.approx(math.log(256), rel=0.02)


def test_another_moe_can_take_a_layers_place(model, forward, tokens):
    logits, beside = model(tokens, lambda i, layer, h: (jnp.zeros_like(h), i))
    assert beside == [0, 1]
    assert (jnp.abs(logits - forward(model, tokens)[0]) > 1e-4).any()
