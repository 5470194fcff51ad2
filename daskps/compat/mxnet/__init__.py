"""MXNet's kvstore, over stores: arrays by key, which workers push and pull.

For example:

>>> from daskps.compat import mxnet
>>> kv = mxnet.kvstore.create("local")
>>> kv.init("w", np.zeros(2))
>>> kv.push("w", [np.ones(2), np.full(2, 3.0)])
>>> out = np.empty(2)
>>> kv.pull("w", out)
>>> out
array([4., 4.])
"""

from daskps.compat.mxnet import kvstore
from daskps.compat.mxnet.binding import DataBatch
from daskps.compat.mxnet.executor_group import DataParallelExecutorGroup
from daskps.compat.mxnet.monitor import TensorMonitor
from daskps.compat.mxnet.workers import launch

__all__ = [
    "DataBatch",
    "DataParallelExecutorGroup",
    "TensorMonitor",
    "kvstore",
    "launch",
]
