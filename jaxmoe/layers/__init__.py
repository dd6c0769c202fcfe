"""Layers: the MoE layer as a function and as a Flax module, and its dense oracle."""

from jaxmoe.layers.dense import dense_moe as dense_moe
from jaxmoe.layers.functional import moe as moe
from jaxmoe.layers.nnx import MoE as MoE
from jaxmoe.layers.on_rank import moe_on_rank as moe_on_rank
from jaxmoe.layers.params import MoEParams as MoEParams
from jaxmoe.layers.params import MoEStats as MoEStats
from jaxmoe.layers.params import init_params as init_params
from jaxmoe.layers.wire_error import wire_error as wire_error
