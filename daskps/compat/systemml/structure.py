"""A list of matrices as one vector, and back."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from daskps.typing import Array


@dataclass(frozen=True)
class Structure:
    """Names and shapes of a list of matrices, all of them float64 as theirs are."""

    #: The owner's name, for messages.
    what: str
    #: None where they have places in a list and no names.
    names: tuple[str, ...] | None
    shapes: tuple[tuple[int, ...], ...]

    @classmethod
    def of(cls, what: str, given: Any) -> Structure:
        """Return how a list or mapping of matrices is made up.

        Parameters
        ----------
        what : str
            The owner's name, for messages.
        given : sequence or mapping of str to array_like
            The matrices.

        Returns
        -------
        Structure
            Its structure.

        Raises
        ------
        TypeError
            For what is no collection, or has what is no matrix of numbers.
        ValueError
            For an empty one.
        """
        values = _listed(what, given)
        if not values:
            raise ValueError(f"{what} is empty; give at least one matrix")
        names = tuple(given) if isinstance(given, Mapping) else None
        shapes = tuple(_matrix(f"{what}[{i}]", v).shape for i, v in enumerate(values))
        return cls(what, names, shapes)

    @property
    def size(self) -> int:
        """How many numbers there are."""
        return sum(int(np.prod(shape)) for shape in self.shapes)

    def flat(self, given: Any) -> Array:
        """Return a collection of this structure as one vector.

        Parameters
        ----------
        given : sequence or mapping of str to array_like
            The matrices.

        Returns
        -------
        ndarray, shape (size,)
            Float64.

        Raises
        ------
        TypeError, ValueError
            For what has another structure.
        """
        values = _listed(self.what, given)
        names = tuple(given) if isinstance(given, Mapping) else None
        if self.names is not None and names is not None:
            if set(names) != set(self.names):
                raise ValueError(
                    f"{self.what} has the names {sorted(names)}, expected "
                    f"{sorted(self.names)}"
                )
            values = [given[name] for name in self.names]
        elif names != self.names or len(values) != len(self.shapes):
            raise ValueError(
                f"{self.what} is a {type(given).__name__} of {len(values)}, expected "
                f"{self._described()}"
            )
        arrays = [_matrix(f"{self.what}[{i}]", v) for i, v in enumerate(values)]
        for i, (array, shape) in enumerate(zip(arrays, self.shapes, strict=True)):
            if array.shape != shape:
                raise ValueError(
                    f"{self.what}[{i}] has shape {array.shape}, expected {shape}"
                )
        return np.concatenate([array.reshape(-1) for array in arrays])

    def _described(self) -> str:
        if self.names is None:
            return f"a list of {len(self.shapes)}"
        return f"a dict of {list(self.names)}"

    def unflat(self, vector: Array) -> Any:
        """Return the matrices that a vector holds, each in memory of its own.

        Parameters
        ----------
        vector : ndarray, shape (n,)
            At least as many numbers as there are.

        Returns
        -------
        list or dict of str to ndarray
            As they were given.
        """
        arrays, at = [], 0
        for shape in self.shapes:
            size = int(np.prod(shape))
            arrays.append(np.array(vector[at : at + size]).reshape(shape))
            at += size
        if self.names is None:
            return arrays
        return dict(zip(self.names, arrays, strict=True))


def _listed(what: str, given: Any) -> list[Any]:
    if isinstance(given, Mapping):
        return list(given.values())
    if isinstance(given, (list, tuple)):
        return list(given)
    raise TypeError(
        f"{what} is a list of matrices, or a dict of them, found {type(given).__name__}"
    )


def _matrix(what: str, value: Any) -> Array:
    try:
        return np.asarray(value, float)
    except (TypeError, ValueError) as error:
        raise TypeError(f"{what} is no matrix of numbers: {error}") from None
