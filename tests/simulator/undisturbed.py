"""What a run in rounds must come to, worked out without a cluster."""

from __future__ import annotations

import numpy as np

from daskps import config, optim
from daskps.layout.arrays import Layout
from daskps.optim.local import LocalModel

#: Of an array that has slots.
RULE = optim.Adam(0.1)


def undisturbed(gradients: list[float]) -> list[float]:
    """Return what an array of one 0.0 is after so many rounds, by :data:`RULE`.

    Parameters
    ----------
    gradients : list of float
        The sum of each round.

    Returns
    -------
    list of float
        One more than there are rounds.
    """
    layout = Layout.build({"m": ((1,), "float64")}, 1)
    model = LocalModel(layout, {0: RULE}, str(config.load().cache))
    params, found = {"m": np.zeros(1)}, [0.0]
    model.reset(params)
    for gradient in gradients:
        model.update(params, {0: np.full(1, gradient)}, epoch=0)
        found.append(float(params["m"][0]))
    return found
