"""PyTorch's grouped product, and a MoE layer of PyTorch's own parts, as things that the harness can time."""

import importlib.util

import numpy as np


def available() -> bool:
    """Whether PyTorch with a GPU and a grouped product is here."""
    if importlib.util.find_spec("torch") is None:
        return False
    import torch

    return torch.cuda.is_available() and hasattr(torch, "_grouped_mm")


class Waitable:
    """Calls a function of PyTorch's; `jax.block_until_ready` on the result waits for the GPU."""

    def __init__(self, function) -> None:
        self.function = function

    def __call__(self) -> "Waitable":
        self.out = self.function()
        return self

    def block_until_ready(self) -> "Waitable":
        import torch

        torch.cuda.synchronize()
        return self


def _normal(*shape):
    import torch

    return torch.randn(*shape, device="cuda", dtype=torch.bfloat16)


def products(M: int, D: int, F: int, sizes: np.ndarray) -> dict[str, Waitable]:
    """The grouped product and its two gradients by direction, on random data."""
    import torch

    offsets = torch.tensor(np.cumsum(sizes), dtype=torch.int32, device="cuda")
    x, w, dy = _normal(M, D), _normal(len(sizes), D, F), _normal(M, F)
    return {
        "forward": Waitable(lambda: torch._grouped_mm(x, w, offs=offsets)),
        "data gradient": Waitable(lambda: torch._grouped_mm(dy, w.transpose(1, 2), offs=offsets)),
        "weight gradient": Waitable(lambda: torch._grouped_mm(x.t(), dy, offs=offsets)),
    }


def layer(T: int, D: int, F: int, E: int, K: int) -> dict[str, Waitable]:
    """softmax top-k, sort, gather, grouped products, SwiGLU, weighted sum of gathered rows; and its autograd."""
    import torch

    x, dy = _normal(T, D).requires_grad_(), _normal(T, D)
    router = (_normal(D, E) * D**-0.5).requires_grad_()
    gate_up = (_normal(E, D, 2 * F) * D**-0.5).requires_grad_()
    down = (_normal(E, F, D) * F**-0.5).requires_grad_()

    def forward():
        weights, ids = torch.softmax(x.float() @ router.float(), -1).topk(K)
        weights = weights / weights.sum(-1, keepdim=True)
        order = torch.argsort(ids.reshape(-1), stable=True)
        offsets = torch.bincount(ids.reshape(-1), minlength=E).cumsum(0).to(torch.int32)
        rows = x[order // K]
        gate, up = torch._grouped_mm(rows, gate_up, offs=offsets).chunk(2, -1)
        out = torch._grouped_mm(torch.nn.functional.silu(gate) * up, down, offs=offsets)
        place = torch.empty_like(order)
        place[order] = torch.arange(T * K, device="cuda")
        return (out[place].view(T, K, D) * weights[..., None]).sum(1).to(torch.bfloat16)

    def inference():
        with torch.no_grad():
            return forward()

    def training():
        return torch.autograd.grad(forward(), (x, router, gate_up, down), dy)

    return {"forward": Waitable(inference), "forward + backward": Waitable(training)}
