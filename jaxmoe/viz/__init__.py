"""Pictures, as matplotlib Figures that belong to no window: nothing here touches pyplot or any global state."""

import importlib.util

if importlib.util.find_spec("matplotlib") is None:
    raise ModuleNotFoundError("jaxmoe.viz needs matplotlib. Install it: pip install 'jaxmoe[viz]'", name="matplotlib")

from jaxmoe.viz.routing import batch_routing as batch_routing
from jaxmoe.viz.routing import expert_load as expert_load
from jaxmoe.viz.training import loss_curve as loss_curve
