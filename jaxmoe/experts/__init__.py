"""Experts: the grouped matmul and the SwiGLU MLP made of it."""

from jaxmoe.experts.api import BACKENDS as BACKENDS
from jaxmoe.experts.api import choose_backend as choose_backend
from jaxmoe.experts.api import grouped_matmul as grouped_matmul
from jaxmoe.experts.mlp import expert_down as expert_down
from jaxmoe.experts.mlp import expert_down_activated as expert_down_activated
from jaxmoe.experts.mlp import expert_up as expert_up
from jaxmoe.experts.mlp import expert_up_activated as expert_up_activated
from jaxmoe.experts.mlp import swiglu as swiglu
