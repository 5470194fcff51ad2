"""SystemML's `paramserv`: a model, and the two functions that compute and apply gradients.

For example:

>>> from daskps.compat import systemml
>>> def gradients(model, hyperparams, features, labels):
...     return [features.T @ (features @ model[0] - labels) / len(labels)]
>>> def aggregate(model, hyperparams, gradients):
...     return [model[0] - hyperparams["lr"] * gradients[0]]
>>> X = np.eye(4)
>>> [w] = systemml.paramserv(
...     model=[np.zeros(4)], features=X, labels=X @ np.arange(4.0), upd=gradients,
...     agg=aggregate, utype="BSP", epochs=100, k=2, hyperparams={"lr": 0.5},
... )
>>> w.round(3)
array([0., 1., 2., 3.])
"""

from daskps.compat.systemml.serving import paramserv

__all__ = ["paramserv"]
