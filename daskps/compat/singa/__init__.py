"""SINGA's worker groups: one net in sub-nets, each for some of the rows of a batch.

For example:

>>> from daskps.compat import singa
>>> class Rows(singa.Layer):
...     def forward(self, step):
...         return np.array([[1.0], [2.0], [3.0]])
>>> class Product(singa.Layer):
...     def forward(self, params, rows):
...         return (rows * params["w"]).mean(), rows
...     def backward(self, params, rows, gradient):
...         return {"w": gradient * rows.mean(axis=0)}, [None]
>>> net = [
...     Rows("rows", "data", shape=(3, 1)),
...     Product("loss", "loss", ("rows",), params={"w": np.zeros(1)}),
... ]
>>> group = singa.WorkerGroup(net, 3, batch=3)
>>> def main(group):
...     group.put_own()
...     losses = [group.train_one_batch(step) for step in range(2)]
...     return group.collect_all()["w"].round(3).tolist()
>>> singa.launch(main, group, updater=daskps.optim.SGD(0.1))
[[-0.4], [-0.4], [-0.4]]
"""

from daskps.compat.singa.group import WorkerGroup
from daskps.compat.singa.launching import launch
from daskps.compat.singa.net import Layer, partition, to_json

__all__ = ["Layer", "WorkerGroup", "launch", "partition", "to_json"]
