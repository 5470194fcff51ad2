"""Update rules and learning-rate schedules.

Layer 1: imports the standard library, NumPy, `daskps.errors` and, when a rule is
bound to a dtype, `daskps.kernels`. Importing it does not import Numba.

Examples
--------
>>> rules = {"emb*": daskps.optim.Adagrad(0.1), "*": daskps.optim.SGD(0.1)}
>>> store = daskps.create({"emb": np.zeros(2), "b": 0.0}, optimizer=rules)
>>> store.optimizer
{'emb': 'Adagrad(lr=0.1)', 'b': 'SGD(lr=0.1)'}
"""

from daskps.optim import schedules as schedules
from daskps.optim.adadelta import Adadelta as Adadelta
from daskps.optim.adagrad import Adagrad as Adagrad
from daskps.optim.adam import Adam as Adam
from daskps.optim.adam import AdamW as AdamW
from daskps.optim.adamax import Adamax as Adamax
from daskps.optim.base import Rule as Rule
from daskps.optim.binding import Bound as Bound
from daskps.optim.binding import BoundFunction as BoundFunction
from daskps.optim.binding import bind as bind
from daskps.optim.composed import chain as chain
from daskps.optim.composed import clip_by_value as clip_by_value
from daskps.optim.composed import scaled as scaled
from daskps.optim.dcasgd import DCASGD as DCASGD
from daskps.optim.ftrl import Ftrl as Ftrl
from daskps.optim.function import Function as Function
from daskps.optim.master import WithMaster as WithMaster
from daskps.optim.patterns import resolve as resolve
from daskps.optim.rmsprop import RMSprop as RMSprop
from daskps.optim.sgd import SGD as SGD

__all__ = [
    "DCASGD",
    "SGD",
    "Adadelta",
    "Adagrad",
    "Adam",
    "AdamW",
    "Adamax",
    "Ftrl",
    "Function",
    "RMSprop",
    "Rule",
    "chain",
    "clip_by_value",
    "resolve",
    "scaled",
    "schedules",
]
