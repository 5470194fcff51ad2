"""How the gradients of a run travel: fewer bytes, less precision.

Examples
--------
>>> def loop(trainer, part):
...     return trainer.pushpull({"w": part})["w"]
>>> store = daskps.create({"w": np.zeros(1)}, optimizer=daskps.optim.SGD(1.0))
>>> daskps.run(store, loop, [np.array([1.111111])], codec=daskps.codecs.BFloat16())
[array([-1.109375])]
"""

from daskps.codecs.bfloat16 import BFloat16
from daskps.codecs.choice import Codec as Codec
from daskps.codecs.choice import choose as choose
from daskps.codecs.choice import named as named

__all__ = ["BFloat16"]
