"""BigDL's `AllReduceParameter`, over stores: one slice of a vector for each partition.

>>> from daskps.compat import bigdl
>>> parameter = bigdl.AllReduceParameter.new_parameter(2, 3)
>>> bigdl.launch(lambda part: parameter.init(np.zeros(3, "f4")), [None, None])
[(0, 0, 2), (1, 2, 1)]
"""

from daskps.compat.bigdl.parameter import AllReduceParameter
from daskps.compat.bigdl.partitions import FutureResult, launch

__all__ = ["AllReduceParameter", "FutureResult", "launch"]
