"""Linear models in scikit-learn's words, trained by `train` and `run` on a cluster."""

from daskps.sklearn.averaged import Averaged
from daskps.sklearn.linear import SGDClassifier, SGDRegressor

__all__ = ["Averaged", "SGDClassifier", "SGDRegressor"]
