"""jaxmoe: expert parallelism for JAX on GPUs, with an overlap of communication and computation that XLA keeps."""

from jaxmoe.comm import Handle as Handle
from jaxmoe.comm import combine as combine
from jaxmoe.comm import dispatch as dispatch
from jaxmoe.comm import explain_transport as explain_transport
from jaxmoe.config import AutoTransport as AutoTransport
from jaxmoe.config import MoEConfig as MoEConfig
from jaxmoe.config import RouterConfig as RouterConfig
from jaxmoe.experts import grouped_matmul as grouped_matmul
from jaxmoe.layers import MoE as MoE
from jaxmoe.layers import MoEParams as MoEParams
from jaxmoe.layers import MoEStats as MoEStats
from jaxmoe.layers import dense_moe as dense_moe
from jaxmoe.layers import init_params as init_params
from jaxmoe.layers import moe as moe
from jaxmoe.layers import moe_on_rank as moe_on_rank
from jaxmoe.mesh import make_mesh as make_mesh
from jaxmoe.routing import Routing as Routing
from jaxmoe.routing import gate as gate
from jaxmoe.schedules import Orders as Orders
from jaxmoe.schedules import Sequential as Sequential
from jaxmoe.schedules import Stage as Stage
from jaxmoe.schedules import TokenChunks as TokenChunks
from jaxmoe.schedules import weave as weave

__version__ = "0.1.0"
