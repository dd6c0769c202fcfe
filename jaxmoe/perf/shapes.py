"""The MoE layers of published models: the one table that tests, benchmarks and tuning share."""

import dataclasses


@dataclasses.dataclass(frozen=True, kw_only=True)
class Shape:
    """One MoE layer.

    Attributes:
      name: as `--shape` takes it.
      d_model: D, the width of a token.
      d_expert: F, the hidden width of an expert.
      num_experts: E, routed experts.
      top_k: K, experts per token.
    """

    name: str
    d_model: int
    d_expert: int
    num_experts: int
    top_k: int


# From the models' published config.json files: hidden_size, moe_intermediate_size (or intermediate_size), the routed
# experts and those per token.
SHAPES: dict[str, Shape] = {
    shape.name: shape
    for shape in (
        Shape(name="qwen3-30b-a3b", d_model=2048, d_expert=768, num_experts=128, top_k=8),
        Shape(name="deepseek-v3", d_model=7168, d_expert=2048, num_experts=256, top_k=8),
        Shape(name="gpt-oss-120b", d_model=2880, d_expert=2880, num_experts=128, top_k=4),
        Shape(name="mixtral-8x7b", d_model=4096, d_expert=14336, num_experts=8, top_k=2),
    )
}

# No model's: small enough for virtual devices on a laptop.
TINY = Shape(name="tiny", d_model=64, d_expert=96, num_experts=16, top_k=2)
