"""The stores of a kvstore, and how a push comes to them."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

import daskps
from daskps import config, optim
from daskps.compat.mxnet.keys import Keys, in_keys, key_of
from daskps.compat.mxnet.workers import told
from daskps.errors import NoOptimizerError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from daskps.codecs import TwoBit
    from daskps.compat.mxnet.workers import Crew
    from daskps.store.store import ParameterStore
    from daskps.typing import Array


class KeyStores:
    """A store for the keys that have begun together.

    Parameters
    ----------
    kind : str
        Type of the kvstore.
    crew : Crew
        The workers that use it.
    client : distributed.Client, optional
        The client that makes its stores.
    """

    def __init__(self, kind: str, crew: Crew, client: Any) -> None:
        self._kind, self._crew, self._client = kind, crew, client
        self._rule: optim.Rule | None = None
        self._codec: TwoBit | None = None
        self._left: dict[str, Array] = {}
        self._keys, self._stores = Keys(), list[Any]()

    def _check_rule(self) -> None:
        if self._rule is None:
            raise NoOptimizerError("there is no state without set_optimizer")

    def _store_of(self, name: str) -> ParameterStore:
        store: ParameterStore = self._stores[self._keys.number_of(name)]
        return store

    def _shapes(self, names: Sequence[str]) -> list[tuple[int, ...]]:
        return [self._store_of(name)[name].shape for name in names]

    def _make(self, arrays: Mapping[str, Array], name: str | None) -> ParameterStore:
        # A function sees its array as a whole, and makes its own precision.
        by_function = isinstance(self._rule, optim.Function)
        shards = 1 if by_function else None
        narrow = {} if self._rule is None or by_function else _narrow(arrays)
        specs = {
            name: daskps.ArraySpec(array.shape, array.dtype, master="float32")
            for name, array in narrow.items()
        }
        with in_keys(arrays):
            store: ParameterStore = daskps.create(
                {**arrays, **specs},
                name=name,
                optimizer=self._rule,
                shards=shards,
                client=self._client,
            )
        if narrow:
            store.assign(narrow)
        return store

    def _restore(
        self, url: str, values: Mapping[str, Array], name: str | None
    ) -> ParameterStore:
        store: ParameterStore = daskps.restore(
            url, name=name, optimizer=self._rule, client=self._client
        )
        store.assign(values, allow_missing=False)
        return store

    def _set_rule(self, rule: optim.Rule) -> None:
        """Make all stores again, with what they hold and another rule."""
        self._rule = rule
        self._replace(lambda number, values: partial(self._make, values))

    def _replace(
        self, made: Callable[[int, Mapping[str, Array]], Callable[..., ParameterStore]]
    ) -> None:
        """Have another store take the place of each, made of what it holds."""
        self._crew.settle()
        self._crew.meet()
        for number, store in enumerate(self._stores):
            make = made(number, store.pull(timeout=None))
            self._stores[number] = self._crew.make_store(make, f"store {number}")
            # All have read it by now, or they would have made none.
            if self._crew.rank == 0:
                store.delete()

    def _deliver(self, store: ParameterStore, name: str, total: Array) -> None:
        """Bring one push to where it belongs; behind the program, in order."""
        if "_sync" not in self._kind:
            self._update(store, name, total)
            return
        what = f"a push of key {key_of(name)!r}"
        found, there = self._crew.gather({what: self._sent(name, total)})
        error: Exception | None = None
        if there.argmax() == self._crew.rank:  # the first of those that are there
            try:
                self._update(store, name, self._summed(found[what], there, total))
            except Exception as failed:  # noqa: BLE001 - raised again by all
                error = failed
        told(self._crew, error, what)

    def _sent(self, name: str, total: Array) -> Array:
        """Return what travels of a push: the numbers, or a row of words for each worker."""
        if self._codec is None or total.dtype.kind != "f":
            return total
        flat = total.reshape(-1)
        how: Any = {"cache_dir": config.cache_dir()}
        made = self._codec.encode_pieces(
            flat, [(0, flat.size)], self._left.get(name), **how
        )
        if made.residual is not None:
            self._left[name] = made.residual
        words = np.zeros((self._crew.size, *made.words[0].shape), made.words[0].dtype)
        words[self._crew.rank] = made.words[0]
        return words

    def _summed(self, found: Array, there: Array, like: Array) -> Array:
        """Return the sum of what workers have sent that are there."""
        if self._codec is None or like.dtype.kind != "f":
            return found
        total, one = np.zeros(like.size, like.dtype), np.empty(like.size, like.dtype)
        for words in found[there]:
            self._codec.decode_piece(words, one, cache_dir=config.cache_dir())
            total += one
        return total.reshape(like.shape)

    def _update(self, store: ParameterStore, name: str, total: Array) -> None:
        deliver = store.assign if self._rule is None else store.push
        with in_keys([name]):
            deliver({name: total}, timeout=None)


def _narrow(arrays: Mapping[str, Array]) -> dict[str, Array]:
    """Return those that are updated in a wider copy: small steps would be lost."""
    return {name: array for name, array in arrays.items() if array.dtype == "f2"}
