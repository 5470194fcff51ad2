"""Codecs for the gradients of a run: fewer bytes, less precision.

Examples
--------
>>> def loop(trainer, part):
...     return trainer.pushpull({"w": part})["w"]
>>> store = daskps.create({"w": np.zeros(1)}, optimizer=daskps.optim.SGD(1.0))
>>> daskps.run(store, loop, [np.array([1.111111])], codec=daskps.codecs.BFloat16())
[array([-1.109375])]
"""

from daskps.codecs.base import Codec
from daskps.codecs.base import Encoded as Encoded
from daskps.codecs.choice import choose as choose
from daskps.codecs.choice import is_plain as is_plain
from daskps.codecs.choice import keep as keep
from daskps.codecs.choice import name_of as name_of
from daskps.codecs.choice import named as named
from daskps.codecs.choice import why_not_plain as why_not_plain
from daskps.codecs.halves import BFloat16, Float16
from daskps.codecs.int8 import Int8
from daskps.codecs.top_k import TopK
from daskps.codecs.two_bit import TwoBit

__all__ = ["BFloat16", "Codec", "Float16", "Int8", "TopK", "TwoBit"]
