"""Sequential, and token chunks: the tokens of one batch in n lanes, so that a chunk's collectives hide under others."""

import dataclasses
from typing import Protocol

from jaxmoe.schedules.weave import Orders, Slot

# The stages of a MoE layer, in order.
DISPATCH, UP, DOWN, COMBINE = range(4)
NUM_STAGES = 4


class Schedule(Protocol):
    """A schedule of one MoE layer: how many token chunks are its lanes, and their issue orders."""

    @property
    def num_lanes(self) -> int: ...

    def orders(self) -> Orders: ...


@dataclasses.dataclass(frozen=True)
class Sequential:
    """One lane: dispatch, up, down, combine, each behind the one before. The oracle of the other schedules.

    Example:
      >>> Sequential().orders().forward
      ((0, 0), (0, 1), (0, 2), (0, 3))
    """

    @property
    def num_lanes(self) -> int:
        return 1

    def orders(self) -> Orders:
        return TokenChunks(1).orders()


@dataclasses.dataclass(frozen=True)
class TokenChunks:
    """n lanes, each a block of every rank's tokens; costs no extra bytes over `all_gather`.

    Forward, chunk i: its combine hides under up(i + 1), its dispatch under down(i - 1); the first dispatch and the
    last combine have nothing to hide under. So 2 of 2n collectives are exposed. Chunk 1 is dispatched before chunk 0
    computes, and hides under up(0). Backward is the same list with lanes and stages mirrored (lane i becomes
    n - 1 - i, stage s becomes 3 - s), not reversed: the transposed collectives then lie in the same windows.

    Args:
      n: the number of chunks. Tokens per rank are padded to a multiple of it.

    Raises:
      ValueError: n is not a positive integer.

    Example:
      >>> TokenChunks(2).orders().forward
      ((0, 0), (1, 0), (0, 1), (0, 2), (0, 3), (1, 1), (1, 2), (1, 3))
    """

    n: int

    def __post_init__(self) -> None:
        if not isinstance(self.n, int) or isinstance(self.n, bool) or self.n < 1:
            raise ValueError(f"TokenChunks takes a positive integer; got {self.n!r}. Use 2 to 8, or Sequential().")

    @property
    def num_lanes(self) -> int:
        return self.n

    def orders(self) -> Orders:
        n = self.n
        order: list[Slot] = [(0, DISPATCH)]
        for i in range(n):
            if i == 0 and n > 1:
                order.append((1, DISPATCH))
            if i > 0:
                order.append((i - 1, COMBINE))
            order.append((i, UP))
            if 0 < i < n - 1:
                order.append((i + 1, DISPATCH))
            order.append((i, DOWN))
        order.append((n - 1, COMBINE))
        mirrored = tuple((n - 1 - lane, NUM_STAGES - 1 - stage) for lane, stage in order)
        return Orders(num_lanes=n, num_stages=NUM_STAGES, forward=tuple(order), backward=mirrored)
