"""Break one feature of a transformers model in place, to see whether the oracle notices.

    model = load_reference(folder)
    for mutation in MUTATIONS:
        if mutation.applies(model):
            with mutation.broken(model):
                ...                       # a server with that fault

What can be broken is found in the live model (`Anatomy.of`), not looked up by model type.
"""

from tf_tools.mutations._activations import ACTIVATIONS
from tf_tools.mutations._anatomy import Anatomy
from tf_tools.mutations._attention import ATTENTION
from tf_tools.mutations._blocks import BLOCKS
from tf_tools.mutations._mutation import Mutation, Site
from tf_tools.mutations._norms import NORMS
from tf_tools.mutations._rotary import ROTARY
from tf_tools.mutations._routers import ROUTERS
from tf_tools.mutations._weights import WEIGHTS

__all__ = ["MUTATIONS", "Anatomy", "Mutation", "Site"]

MUTATIONS: tuple[Mutation, ...] = (*ATTENTION, *ROTARY, *NORMS, *BLOCKS, *ACTIVATIONS, *WEIGHTS, *ROUTERS)
"""Every fault that the oracle is known to be sensitive to."""
