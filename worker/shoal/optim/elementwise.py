"""Which optimizers may run on a part of the parameters and give the bits of the whole.

Shoal runs the optimizer's class on the blocks that a worker holds, so every element must depend on itself alone. The
classes below were tried; a subclass may compute anything, so it counts as unknown.
"""

from __future__ import annotations

import torch
from shoal_protos.errors import UserError
from torch.optim import Optimizer

ELEMENTWISE: tuple[type[Optimizer], ...] = (
    torch.optim.SGD,
    torch.optim.Adam,
    torch.optim.AdamW,
    torch.optim.NAdam,
    torch.optim.RAdam,
    torch.optim.Adamax,
    torch.optim.Adagrad,
    torch.optim.Adadelta,
    torch.optim.RMSprop,
    torch.optim.Rprop,
    torch.optim.ASGD,
)

NOT_ELEMENTWISE = {
    "lbfgs": "searches along a line through all parameters",
    "adafactor": "scales by rows and columns of whole matrices",
    "muon": "orthogonalises whole matrices",
    "singledevicemuon": "orthogonalises whole matrices",
    "muonwithauxadam": "orthogonalises whole matrices",
    "lamb": "scales by the norms of whole tensors",
    "fusedlamb": "scales by the norms of whole tensors",
    "fusedmixedprecisionlamb": "scales by the norms of whole tensors",
    "onebitlamb": "scales by the norms of whole tensors",
    "lamb8bit": "scales by the norms of whole tensors",
    "sparseadam": "needs sparse gradients",
}
"""Class names in lower case, whoever ships them, and what they do."""
COMPRESSING = ("onebitadam", "zerooneadam", "onebitlamb")
"""Those that compress gradients on their way and feed the error back."""


def names() -> str:
    """The allowed classes, for a sentence."""
    return ", ".join(kind.__name__ for kind in ELEMENTWISE)


def check_optimizer(optimizer: Optimizer, elementwise: bool) -> None:
    """Refuse an optimizer that is not elementwise, and an unknown one without `shoal.elementwise: true`."""
    kind = type(optimizer)
    if kind in ELEMENTWISE:
        return
    for ancestor in kind.__mro__:
        reason = NOT_ELEMENTWISE.get(ancestor.__name__.lower())
        if reason is not None:
            raise UserError(
                f"optimizer {kind.__name__} {reason}; Shoal runs optimizers on blocks of parameters, so every element "
                f"must be computed by itself. Supported: {names()}."
            )
    if not elementwise:
        raise UserError(
            f"optimizer {kind.__name__} ({kind.__module__}) is not known to compute every element by itself. "
            f"Supported: {names()}; if it does, set `shoal.elementwise: true`."
        )
