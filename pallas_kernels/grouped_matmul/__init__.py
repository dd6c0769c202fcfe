"""Grouped matmul on Hopper: each group of sorted rows times its own matrix, and the two gradients."""

from pallas_kernels.grouped_matmul.config import Config as Config
from pallas_kernels.grouped_matmul.config import choose_config as choose_config
from pallas_kernels.grouped_matmul.config import choose_dw_config as choose_dw_config
from pallas_kernels.grouped_matmul.ops import grouped_matmul as grouped_matmul
from pallas_kernels.grouped_matmul.ops import grouped_matmul_dw as grouped_matmul_dw
from pallas_kernels.grouped_matmul.ops import grouped_swiglu as grouped_swiglu
