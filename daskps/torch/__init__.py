"""PyTorch modules in stores: a torch optimizer over a trainer, and embeddings over tables.

Each function says the same with `daskps.create`, `run` and `train`, and gives the same
numbers. Parameters and gradients in host memory are read and written where they are;
those on a GPU go to a store with ``device="cuda"`` without a copy to the host, and to a
store in host memory by one.
"""

from daskps.torch.modules import create, load_into, view
from daskps.torch.optimizer import EmbeddingBag, Optimizer
from daskps.torch.training import train_module

__all__ = ["EmbeddingBag", "Optimizer", "create", "load_into", "train_module", "view"]
