"""Training over the mesh: gradients, the optimiser, and a selection bias that keeps the experts' loads even."""

import dataclasses
import time
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import NamedSharding

import jaxmoe
from jaxmoe.demo.data import draw_batch
from jaxmoe.demo.model import ModelConfig, Transformer, next_byte_loss
from jaxmoe.demo.options import Options

_LEARNING_RATE = 1e-2
# Of a sigmoid score, per step. DeepSeek-V3 takes 0.001 for 10^5 steps and more; the demo has a hundred.
_BIAS_RATE = 0.02


@nnx.jit
def loss_and_grads(model: Transformer, batch: jax.Array) -> tuple:
    """(loss, (logits, MoEStats of every layer)), gradients. The oracle checks this very program's results."""
    return nnx.value_and_grad(next_byte_loss, has_aux=True)(model, batch)


@nnx.jit
def update(model: Transformer, optimizer: nnx.Optimizer, grads: nnx.State, tokens_per_expert: list[jax.Array]) -> None:
    """One optimiser step, and one step of every layer's selection bias towards an even load.

    bias[e] += rate · clip((mean(tokens) - tokens[e]) / mean(tokens), -1, 1): an expert with fewer tokens than its share
    is chosen more often from now on. No auxiliary loss, so the gradients stay those of the language model. The rule
    is DeepSeek-V3's (2024), with a step that shrinks near the even share in place of the sign.
    """
    optimizer.update(model, grads)
    for block, tokens in zip(model.blocks, tokens_per_expert, strict=True):
        if block.moe.bias is not None:
            mean = tokens.mean()
            change = _BIAS_RATE * jnp.clip((mean - tokens) / mean, -1.0, 1.0)
            # On every rank, as before: the counts are spread like the experts, and another sharding would recompile.
            block.moe.bias[...] += jax.lax.with_sharding_constraint(change, jax.P())


@dataclasses.dataclass(frozen=True)
class Step:
    """What one step reports: the loss in nats per byte, [layers, E] tokens, dropped pairs and its time."""

    index: int
    loss: float
    tokens_per_expert: np.ndarray
    dropped: int
    seconds: float


class Trainer:
    """The model, its optimiser and its data, on the mesh of `options`; use it inside `jax.set_mesh(options.mesh)`."""

    def __init__(self, options: Options) -> None:
        self.options = options
        config = ModelConfig(moe=options.moe, seq=options.seq)
        self.model = Transformer(config, options.schedule, nnx.Rngs(options.seed))
        warmup = max(1, options.steps // 20)
        rate = optax.warmup_cosine_decay_schedule(
            _LEARNING_RATE / 10, _LEARNING_RATE, warmup, max(options.steps, warmup + 1), _LEARNING_RATE / 10
        )
        rule = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(rate, b2=0.95, weight_decay=0.01))
        self.optimizer = nnx.Optimizer(self.model, rule, wrt=nnx.Param)

    @property
    def num_parameters(self) -> int:
        """Of all experts together."""
        return sum(a.size for a in jax.tree.leaves(nnx.state(self.model, nnx.Param)))

    def batch(self, step: int) -> jax.Array:
        """The tokens [B, S + 1] of a step, sequences spread over the mesh."""
        o = self.options
        tokens = draw_batch(o.text, batch=o.batch, seq=o.seq, seed=o.seed, step=step)
        return jax.device_put(tokens, NamedSharding(o.mesh, jax.P(o.token_axes)))

    def steps(self) -> Iterator[Step]:
        """Train; yields after every step."""
        for index in range(self.options.steps):
            start_s = time.perf_counter()
            (loss, (_, stats)), grads = loss_and_grads(self.model, self.batch(index))
            update(self.model, self.optimizer, grads, [s.tokens_per_expert for s in stats])
            yield self._report(index, loss, stats, start_s)

    def _report(self, index: int, loss: jax.Array, stats: list[jaxmoe.MoEStats], start_s: float) -> Step:
        counts = np.stack([np.asarray(s.tokens_per_expert) for s in stats])
        dropped = sum(int(s.dropped) for s in stats)
        return Step(index, float(loss), counts, dropped, time.perf_counter() - start_s)
