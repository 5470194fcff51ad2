"""The base class of codecs, and the calls of those that a user writes."""

from __future__ import annotations

import math
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, NoReturn

import numpy as np

from daskps.errors import PushRejectedError
from daskps.usercode import user_code

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from daskps.typing import Array

#: How many words a user's codec may make of each number, and besides.
MOST_FOR_EACH, MOST_BESIDE = 64, 65_536
#: The dtypes that words may have.
DTYPES = ("uint8", "uint16", "uint32", "uint64", "int8", "float32", "float64")


class Encoded(NamedTuple):
    """One array, encoded by a codec."""

    #: Of each piece.
    words: list[Array]
    #: The rest that the words do not say, of a codec with feedback.
    residual: Array | None = None
    #: Whether all that the words stand for is finite.
    finite: bool = True


class Codec:
    """How the gradients of a run travel; subclass it to write one of your own.

    A subclass says how many words so many numbers become, makes these, and makes numbers
    of them again. It is pickled when a run begins, so every worker can decode. The
    arrays that it gets are those of one shard: where what it does to a number depends on
    the other ones, results depend on how many shards there are.

    Attributes
    ----------
    name : str
        Its name in error messages: its class.
    dtype : str
        Of the words: "uint8" (the default), "uint16", "uint32", "uint64", "int8",
        "float32" or "float64".
    feedback : bool
        Whether what the words do not say is added to the trainer's next gradient:
        ``left = left + gradient - decode(encode(left + gradient))``
        (Seide et al., "1-Bit Stochastic Gradient Descent", Interspeech 2014).

    Examples
    --------
    The signs of a gradient and their mean size, in one bit each:

    >>> class Sign(daskps.codecs.Codec):
    ...     feedback = True
    ...     def n_words(self, n):
    ...         return 8 + (n + 7) // 8
    ...     def encode(self, array, words):
    ...         words[:8].view("f8")[0] = np.abs(array).mean()
    ...         words[8:] = np.packbits(array >= 0)
    ...     def decode(self, words, out):
    ...         size, signs = words[:8].view("f8")[0], np.unpackbits(words[8:])
    ...         out[:] = np.where(signs[: len(out)], size, -size)
    >>> def loop(trainer, part):
    ...     return [trainer.pushpull({"w": part})["w"].tolist() for _ in range(2)]
    >>> store = daskps.create({"w": np.zeros(3)}, optimizer=daskps.optim.SGD(1.0))
    >>> daskps.run(store, loop, [np.array([3.0, -1.0, 2.0])], codec=Sign())
    [[[-2.0, 2.0, -2.0], [-4.0, 0.0, -4.0]]]
    """

    dtype: ClassVar[str] = "uint8"
    feedback: ClassVar[bool] = False

    @property
    def name(self) -> str:
        """Its name in error messages."""
        return type(self).__name__

    def n_words(self, n: int) -> int:
        """Return how many words `n` numbers become.

        Parameters
        ----------
        n : int
            At least 1.

        Returns
        -------
        int
            Always the same for the same `n`, at most 64 `n` + 65,536.
        """
        raise NotImplementedError

    def encode(self, array: Array, words: Array) -> object:
        """Make words.

        Parameters
        ----------
        array : ndarray, float32 or float64, shape (n,)
            Of one shard; read-only.
        words : ndarray, shape (n_words(n),)
            Zeros, which it replaces.
        """
        raise NotImplementedError

    def decode(self, words: Array, out: Array) -> object:
        """Make numbers of words again.

        Parameters
        ----------
        words : ndarray, shape (n_words(n),)
            Read-only.
        out : ndarray, float32 or float64, shape (n,)
            Zeros, which it replaces.
        """
        raise NotImplementedError

    # -- what the library calls ------------------------------------------------------

    @property
    def is_fixed(self) -> bool:
        """Whether a piece is known to become as many words each time.

        The number of words that a user's codec makes is checked each time.
        """
        return False

    def fits(self, n_words: int, n: int, start: int = 0) -> bool:
        """Return whether `n` numbers from `start` on may be so many words."""
        return n_words == _length(self, n)

    @property
    def takes_rows(self) -> bool:
        """Whether gradients of rows go by it: what is left over would be a table."""
        return not self.feedback

    def of_rows(self, dim: int) -> Codec:
        """Return the codec of rows of so many numbers, from which nothing is left over."""
        del dim
        return self

    def encode_pieces(
        self,
        array: Array,
        cuts: Sequence[tuple[int, int]],
        residual: Array | None = None,
        *,
        empty: Callable[..., Array] = np.empty,
        cache_dir: str | None = None,
    ) -> Encoded:
        """Encode the pieces of a parameter's gradient, and see that they can be decoded.

        Parameters
        ----------
        array : ndarray, float32 or float64, shape (n,)
            The gradient.
        cuts : sequence of (int, int)
            Where pieces start and stop: all of the array, one after the other.
        residual : ndarray, shape (n,), optional
            The rest of the gradients before; it stays as it is.
        empty : callable
            Makes arrays.
        cache_dir : str, optional
            Where compiled loops are kept; None for in memory.

        Returns
        -------
        Encoded
            The words of each piece, and what is left now.

        Raises
        ------
        PushRejectedError
            Where the codec raises, or does not do what it says.
        """
        del cache_dir
        given = array if residual is None else array + residual
        left = empty(len(array), array.dtype) if self.feedback else None
        found, finite = [], True
        for start, stop in cuts:
            part = given[start:stop]
            words = self._encoded(part)
            back = self._decoded(words, empty(stop - start, array.dtype))
            finite = finite and bool(np.isfinite(back).all())
            if left is not None:
                np.subtract(part, back, out=left[start:stop])
            found.append(words)
        return Encoded(found, left, finite)

    def decode_piece(
        self, words: Array, out: Array, start: int = 0, *, cache_dir: str | None = None
    ) -> None:
        """Decode the piece of a parameter that begins at `start`.

        Parameters
        ----------
        words : ndarray
            Its words.
        out : ndarray, float32 or float64, shape (n,)
            Takes the numbers.
        start : int
            Where in its parameter the piece begins.
        cache_dir : str, optional
            Where compiled loops are kept; None for in memory.

        Raises
        ------
        PushRejectedError
            Where the codec raises, or does not do what it says.
        """
        del start, cache_dir
        self._decoded(words, out)

    def warm(self, *, cache_dir: str | None = None) -> None:
        """Compile what there is to compile.

        Parameters
        ----------
        cache_dir : str, optional
            Where compiled loops are kept; None for in memory.
        """

    def _encoded(self, part: Array) -> Array:
        """Return words of a user's codec."""
        words = np.zeros(_length(self, len(part)), self.dtype)
        seen = part.view()
        seen.flags.writeable = False
        with _guarded(self, "encode"):
            self.encode(seen, words)
        if len(words) != (again := _length(self, len(part))):
            raise PushRejectedError(
                f"n_words({len(part)}) of codec={self.name!r} is {len(words)}, and "
                f"{again} when it is asked again; return the same each time"
            )
        return words

    def _decoded(self, words: Array, out: Array) -> Array:
        """Return what a user's codec makes of words, in `out`."""
        out[:] = 0
        seen = words.view()
        seen.flags.writeable = False
        with _guarded(self, "decode"):
            made = self.decode(seen, out)
        if made is not None and made is not out:
            raise PushRejectedError(
                f"decode of codec={self.name!r} returned {_shown(made)} for "
                f"{len(out):,} numbers; fill `out` and return nothing"
            )
        return out


def refuse_words(codec: Codec, words: Array, out: Array) -> NoReturn:
    """Refuse words that are not those of so many numbers.

    Raises
    ------
    PushRejectedError
        Always, with the number of elements.
    """
    raise PushRejectedError(
        f"{len(words):,} words of codec={codec.name!r} are not those of {len(out):,} "
        f"numbers of {out.dtype}"
    )


def positive(value: Any, what: str) -> float:
    """Return a number, or refuse what is none above 0.

    Raises
    ------
    TypeError, ValueError
        Naming what it is.
    """
    if isinstance(value, bool) or not isinstance(value, (int, float, np.number)):
        raise TypeError(f"{what} is a number, found {value!r:.60}")
    try:
        found = float(value)
    except OverflowError:
        found = math.inf
    if not 0 < found < math.inf:
        raise ValueError(f"{what} is above 0 and finite, found {value!r:.60}")
    return found


def _length(codec: Codec, n: int) -> int:
    """Return how many words a user's codec says that it makes."""
    with _guarded(codec, "n_words"):
        found: Any = codec.n_words(n)
    if not isinstance(found, (int, np.integer)) or isinstance(found, bool) or found < 0:
        raise PushRejectedError(
            f"n_words({n}) of codec={codec.name!r} is {found!r:.60}; return a number "
            f"of words, 0 or more"
        )
    if found > (most := MOST_FOR_EACH * n + MOST_BESIDE):
        raise PushRejectedError(
            f"n_words({n}) of codec={codec.name!r} is {found:,}; return {most:,} at most"
        )
    return int(found)


def _shown(made: Any) -> str:
    shape = getattr(made, "shape", None)
    return f"{type(made).__name__}{'' if shape is None else f' of shape {shape}'}"


@contextmanager
def _guarded(codec: Codec, method: str) -> Iterator[None]:
    """Make a refusal of whatever a user's codec raises, `SystemExit` too."""
    what = f"{method} of codec={codec.name!r}"
    try:
        with user_code(what):
            yield
    except Exception as error:
        raise PushRejectedError(
            f"{what} raised {type(error).__name__}: {error}"
        ) from error
