"""What a transport costs: shapes, hardware, bytes on the wire, predicted times, and the choice between transports."""

from jaxmoe.perf.choose import Choice as Choice
from jaxmoe.perf.choose import Option as Option
from jaxmoe.perf.choose import choose_transport as choose_transport
from jaxmoe.perf.cost import Traffic as Traffic
from jaxmoe.perf.cost import Wire as Wire
from jaxmoe.perf.cost import Workload as Workload
from jaxmoe.perf.cost import block_counts as block_counts
from jaxmoe.perf.cost import needed_rows as needed_rows
from jaxmoe.perf.cost import observed_skew as observed_skew
from jaxmoe.perf.cost import predicted_us as predicted_us
from jaxmoe.perf.cost import traffic as traffic
from jaxmoe.perf.hardware import HARDWARE as HARDWARE
from jaxmoe.perf.hardware import Hardware as Hardware
from jaxmoe.perf.hardware import find_hardware as find_hardware
from jaxmoe.perf.shapes import SHAPES as SHAPES
from jaxmoe.perf.shapes import TINY as TINY
from jaxmoe.perf.shapes import Shape as Shape
