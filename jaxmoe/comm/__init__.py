"""Transports: the collectives under dispatch and combine."""

from jaxmoe.comm.api import TRANSPORTS as TRANSPORTS
from jaxmoe.comm.api import available_transports as available_transports
from jaxmoe.comm.api import combine as combine
from jaxmoe.comm.api import dispatch as dispatch
from jaxmoe.comm.api import limit_to_capacity as limit_to_capacity
from jaxmoe.comm.api import send_home as send_home
from jaxmoe.comm.api import send_rows as send_rows
from jaxmoe.comm.api import transport_of as transport_of
from jaxmoe.comm.auto import explain_transport as explain_transport
from jaxmoe.comm.handle import Handle as Handle
from jaxmoe.comm.handle import RoutingTable as RoutingTable
from jaxmoe.comm.handle import check_tokens as check_tokens
from jaxmoe.comm.handle import gather_routing as gather_routing
from jaxmoe.comm.handle import local_experts as local_experts
from jaxmoe.comm.wire import check_wire as check_wire
