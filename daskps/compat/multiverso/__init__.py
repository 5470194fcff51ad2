"""Multiverso's tables, over stores: workers add differences, and get what all have added.

>>> from daskps.compat import multiverso
>>> def main():
...     multiverso.init()
...     table = multiverso.ArrayTableHandler(3)
...     table.add([1, 2, 3])
...     multiverso.barrier()
...     found = table.get().tolist()
...     multiverso.shutdown()
...     return found
>>> multiverso.launch(main, 2)
[[2.0, 4.0, 6.0], [2.0, 4.0, 6.0]]
"""

from daskps.compat.multiverso.services import (
    aggregate,
    barrier,
    init,
    is_master,
    launch,
    num_workers,
    shutdown,
    worker_id,
)
from daskps.compat.multiverso.tables import (
    ArrayTableHandler,
    KVTableHandler,
    MatrixTableHandler,
    TableHandler,
)
from daskps.compat.multiverso.updaters import AdaGrad, Momentum

__all__ = [
    "AdaGrad",
    "ArrayTableHandler",
    "KVTableHandler",
    "MatrixTableHandler",
    "Momentum",
    "TableHandler",
    "aggregate",
    "barrier",
    "init",
    "is_master",
    "launch",
    "num_workers",
    "shutdown",
    "worker_id",
]
