"""A byte-level transformer with a MoE layer in every block, in Flax nnx."""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

import jaxmoe
from jaxmoe.schedules import Schedule

VOCABULARY = 256  # a byte

# Block i's MoE layer applied to h: the layer itself, or what an oracle puts in its place. (i, layer, h) -> (y, aux)
ApplyMoE = Callable[[int, jaxmoe.MoE, jax.Array], tuple[jax.Array, object]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The sizes of the demo's transformer; `moe` decides its MoE layers."""

    moe: jaxmoe.MoEConfig
    seq: int
    d_model: int = 64
    d_ff: int = 128
    num_layers: int = 2
    num_heads: int = 4


class Attention(nnx.Module):
    """Causal self-attention with several heads."""

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs) -> None:
        self.num_heads = config.num_heads
        self.qkv = nnx.Linear(config.d_model, 3 * config.d_model, use_bias=False, rngs=rngs)
        self.out = nnx.Linear(config.d_model, config.d_model, use_bias=False, rngs=rngs)

    def __call__(self, x: Float[Array, "B S D"]) -> Float[Array, "B S D"]:
        q, k, v = jnp.split(self.qkv(x).reshape(*x.shape[:-1], 3 * self.num_heads, -1), 3, axis=-2)
        mixed = jax.nn.dot_product_attention(q, k, v, is_causal=True)
        return self.out(mixed.reshape(x.shape))


class Block(nnx.Module):
    """x + attention(norm(x)), then x + moe(norm(x))."""

    def __init__(self, config: ModelConfig, schedule: Schedule, rngs: nnx.Rngs) -> None:
        self.attention_norm = nnx.RMSNorm(config.d_model, rngs=rngs)
        self.attention = Attention(config, rngs)
        self.moe_norm = nnx.RMSNorm(config.d_model, rngs=rngs)
        self.moe = jaxmoe.MoE(
            config.d_model,
            config.d_ff,
            config.moe.router,
            config=config.moe,
            schedule=schedule,
            use_bias=True,
            rngs=rngs,
        )


class Transformer(nnx.Module):
    """Bytes in, logits of the next byte out.

    Args:
      config: the sizes and the MoE layers.
      schedule: of the MoE layers.
      rngs: nnx random streams; "params" is used.

    Example:
      >>> moe = jaxmoe.MoEConfig(router=jaxmoe.RouterConfig(num_experts=4, top_k=2))
      >>> model = Transformer(ModelConfig(moe=moe, seq=8), jaxmoe.Sequential(), nnx.Rngs(0))
      >>> logits, stats = model(jnp.zeros((1, 8), jnp.int32))
      >>> logits.shape, len(stats)
      ((1, 8, 256), 2)
    """

    def __init__(self, config: ModelConfig, schedule: Schedule, rngs: nnx.Rngs) -> None:
        # Embeddings of variance 1, large beside what the blocks add at first: tokens that look alike are routed alike,
        # and with variance 1 / D all of them went to the same two experts for 20 steps and the loss ended 0.15 higher.
        init = nnx.initializers.normal(1.0)
        self.embed = nnx.Embed(VOCABULARY, config.d_model, embedding_init=init, rngs=rngs)
        self.position = nnx.Embed(config.seq, config.d_model, embedding_init=init, rngs=rngs)
        self.blocks = nnx.List([Block(config, schedule, rngs) for _ in range(config.num_layers)])
        self.norm = nnx.RMSNorm(config.d_model, rngs=rngs)
        # Small logits at first, so that the first loss is that of a uniform guess, ln 256 = 5.55.
        small = nnx.initializers.normal(0.02)
        self.logits = nnx.Linear(config.d_model, VOCABULARY, use_bias=False, kernel_init=small, rngs=rngs)

    def __call__(self, tokens: Int[Array, "B S"], apply_moe: ApplyMoE | None = None) -> tuple[jax.Array, list]:
        """Logits [B, S, 256], and what each block's MoE layer returned beside its output (MoEStats)."""
        apply_moe = apply_moe or (lambda i, layer, h: layer(h))
        x = self.embed(tokens) + self.position(jnp.arange(tokens.shape[1]))
        beside = []
        for i, block in enumerate(self.blocks):
            x = x + block.attention(block.attention_norm(x))
            y, aux = apply_moe(i, block.moe, block.moe_norm(x))
            x = x + y
            beside.append(aux)
        return self.logits(self.norm(x)), beside


def next_byte_loss(
    model: Transformer, batch: Int[Array, "B S1"], apply_moe: ApplyMoE | None = None
) -> tuple[Float[Array, ""], tuple[jax.Array, list]]:
    """The mean of -log p(next byte), in nats, over a batch [B, S + 1]; beside it the logits and each layer's aux."""
    logits, beside = model(batch[:, :-1], apply_moe)
    log_p = jax.nn.log_softmax(logits.astype(jnp.float32))
    picked = jnp.take_along_axis(log_p, batch[:, 1:, None], axis=-1)
    return -picked.mean(), (logits, beside)
