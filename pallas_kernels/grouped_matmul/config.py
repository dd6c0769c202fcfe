"""Tile sizes of the grouped matmul: what may be chosen, and what is chosen for a shape."""

import dataclasses
from typing import Literal

from pallas_kernels._common import hopper

# A block on its way out, 64 rows of 128 bytes, for each of the two compute warpgroups.
_STAGED_BYTES = 2 * 64 * 128
_SMEM_BYTES = hopper.SMEM_BYTES - 2048  # the barriers and the compiler's scratch need a little


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """Tiles of one block of the grid (one SM).

    Args:
        rows: rows of the output tile, 64, 128 or 256.
        cols: columns of the output tile, 128, 192 or 256. With SwiGLU half of them are gate and half up.
        stages: steps of 64 along the contraction that are in flight.
        split: how the two compute warpgroups share the tile: "rows" or "cols".
        cluster: "cols": two neighbour tiles in a row share the left operand's copy; "rows": two in a column share
            the right operand's; None: no sharing.
        band: row tiles of one group that are walked together before the next columns, for reuse in L2.

    Raises:
        ValueError: sizes outside of the above, or too much shared memory.
    """

    rows: int = 128
    cols: int = 256
    stages: int = 4
    split: Literal["rows", "cols"] = "rows"
    cluster: Literal["rows", "cols"] | None = "cols"
    band: int = 8

    def __post_init__(self) -> None:
        def check(ok: bool, rule: str) -> None:
            if not ok:
                raise ValueError(f"grouped matmul tiles: {rule}; got {self}")

        check(self.rows in (64, 128, 256), "rows must be 64, 128 or 256")
        check(self.cols in (128, 192, 256), "cols must be 128, 192 or 256")
        check(self.split in ("rows", "cols"), 'split must be "rows" or "cols"')
        check(self.cluster in ("rows", "cols", None), 'cluster must be "rows", "cols" or None')
        check(self.split == "cols" or self.rows >= 128, "64 rows cannot be split over two warpgroups, use split='cols'")
        check(self.rows * self.cols <= 256 * 192, "rows × cols is at most 256 × 192, the registers hold no more")
        check(self.band >= 1, "band must be at least 1")
        check(
            self.stages >= 2 and self.ring_bytes + 2 * _STAGED_BYTES <= _SMEM_BYTES,
            f"stages must be at least 2, and they ({self.ring_bytes} bytes) must leave {2 * _STAGED_BYTES} of the "
            f"{_SMEM_BYTES} bytes of shared memory to the output",
        )

    @property
    def ring_bytes(self) -> int:
        """Shared memory of the operands in flight."""
        return self.stages * (self.rows + self.cols) * hopper.TILE_K * 2

    @property
    def staged(self) -> int:
        """Output blocks that fit beside the operands. With room for a whole tile (fewer stages) nothing waits between
        its stores, which is worth more than a fourth stage where the contraction is short."""
        return (_SMEM_BYTES - self.ring_bytes) // _STAGED_BYTES

    @property
    def cluster_size(self) -> int:
        return {None: 1, "rows": 2, "cols": 2}[self.cluster]

    @property
    def cluster_rows(self) -> int:
        """Rows that one entry of the tile table covers."""
        return self.rows * (2 if self.cluster == "rows" else 1)

    @property
    def cluster_cols(self) -> int:
        return self.cols * (2 if self.cluster == "cols" else 1)


# Measured on an H200 with group sizes from a multinomial over a Dirichlet(4) draw; the runs are in benchmarks/. "cols"
# moves more bytes through L2 but has the finer rows (128 against 256), so it wins where groups are short; "rows" wins
# where the contraction is long and L2 is what limits. Split over columns it is a little faster still.
_COLS = Config(cluster="cols")
_ROWS = Config(cluster="rows")
_ROWS_BY_COLUMN = Config(cluster="rows", split="cols")
_DECODE = Config(rows=64, split="cols", cluster=None)
# (contraction, output columns, transposed): tiles.
_MEASURED = {
    (2048, 1536, False): _COLS,  # Qwen3-30B up
    (768, 2048, False): _COLS,  # Qwen3-30B down
    (7168, 4096, False): _ROWS_BY_COLUMN,  # DeepSeek-V3 up
    (2048, 7168, False): _COLS,  # DeepSeek-V3 down
    (4096, 28672, False): _COLS,  # Mixtral up
    (14336, 4096, False): _ROWS_BY_COLUMN,  # Mixtral down
    (2880, 5760, False): _COLS,  # gpt-oss up
    (1536, 2048, True): _COLS,
    (2048, 768, True): _ROWS,
    (4096, 7168, True): _ROWS,
    (7168, 2048, True): _ROWS,
    (28672, 4096, True): _ROWS,
    (4096, 14336, True): _COLS,
    (5760, 2880, True): _COLS,
}
_LONG = 4096  # contractions above this are better off with "rows"
_WASTE = 1.25  # columns computed over columns wanted, above which the narrower cluster is better


def choose_config(M: int, D: int, F: int, G: int, *, transpose_rhs: bool = False, swiglu: bool = False) -> Config:
    """Tiles for M rows in G groups, contraction D and F columns; F counts gate and up columns where there are both."""
    if M <= 64 * G and not swiglu:
        return _DECODE  # the weights' bandwidth decides, and 64 rows waste the least
    found = _MEASURED.get((D, F, transpose_rhs))
    if found is None:
        padded = -(-F // _COLS.cluster_cols) * _COLS.cluster_cols
        found = _ROWS if D > _LONG or padded > _WASTE * F else _COLS
    return _ROWS if swiglu and found.split == "cols" else found  # gate and up must meet in one warpgroup


def choose_dw_config() -> Config:
    """Tiles for the weight gradient: one choice was the fastest, or within noise of it, at every measured shape."""
    return _ROWS
