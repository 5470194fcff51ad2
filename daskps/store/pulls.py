"""The half of a store's handle that reads: pulls, and what the store is."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from daskps import codecs
from daskps.store.arguments import least_version
from daskps.store.handle import DEFAULT, ELSEWHERE, Handle
from daskps.store.picture import draw, node_link
from daskps.store.renamed import Renamed
from daskps.store.repr import counted_tables
from daskps.store.targets import device_for, pulled, reading
from daskps.tracebacks import entrance, hide

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from daskps.cluster.caller.link import CallFuture
    from daskps.cluster.caller.routes import Request
    from daskps.cluster.caller.shard_map import StoreMap
    from daskps.typing import Array


class Readable(Handle):
    """Reading parameters and properties of a store.

    Parameters
    ----------
    uid, name : str
        Id and name of the store.
    """

    # -- pulls ---------------------------------------------------------------

    def pull(
        self,
        names: str | Iterable[str] | None = None,
        *,
        rows: Mapping[str, Any] | None = None,
        out: Mapping[str, Array] | None = None,
        min_version: int | None = None,
        device: str | None = None,
        codec: str | codecs.Codec | None = None,
        timeout: Any = DEFAULT,
    ) -> dict[str, Array]:
        """Read parameters, and rows of tables.

        Parameters
        ----------
        names : str or iterable of str, optional
            Names of parameters; all by default, and with ``()`` none.
        rows : mapping of str to array_like of int, optional
            Ids of the rows to read, by the names of tables. Without it none are read.
        out : mapping of str to ndarray, optional
            Arrays of the parameters' shapes and dtypes to fill, of rows with the shape
            of the ids and then that of a row; they are returned. No two may share
            memory.
        min_version : int or Version, optional
            Wait until this version is reached: exactly the shards and versions of a
            :class:`Version`, or by every shard the pull touches.
        device : str, optional
            The device of this process that the parameters go to, as in :func:`create`:
            arrays of CuPy for "cuda". Not with `out`, whose arrays may be on any device.
        codec : {None, "bf16", "fp16"} or codecs.BFloat16 or codecs.Float16
            The values of floats are rounded so, rows too, and travel in these bytes. Not
            with `device`, nor with arrays of one in `out`.
        timeout : float, str or None
            Seconds or a duration such as "30s"; None waits for ever.

        Returns
        -------
        dict of str to ndarray
            The values of each shard at one version; shards may differ in theirs. More
            than 65,536 rows of a table are read part by part, each of one version.

        Raises
        ------
        UnknownParameterError, ShardLostError, StoreClosedError, TimeoutError
            For what its name says.
        ValueError, TypeError
            For ids that a table does not have, an `out` that does not fit, and a
            `min_version` that no store reaches.

        Notes
        -----
        During a BSP run shards may be a round apart. A pull may then read a round that
        is withdrawn when the run fails; a :meth:`snapshot` never does.

        Examples
        --------
        >>> store = daskps.create({"w": np.arange(3.0), "b": 1.0})
        >>> store.pull("w")
        {'w': array([0., 1., 2.])}
        >>> buffer = np.empty(3)
        >>> store.pull("w", out={"w": buffer})["w"] is buffer
        True
        """
        try:
            known = None
            if (
                min_version is None
                and device is None
                and codec is None
                and (out is not None or rows is not None)
            ):
                known = self._at_hand()
            if known is not None and rows is not None:
                if names == () and isinstance(rows, dict) and timeout is DEFAULT:
                    of_tables = known.rows.pull(rows, out)
                    if of_tables is not None:
                        return of_tables
                known = None
            if known is None:
                where: dict[str, Any] = {"device": device, "codec": codec}
                make = self._pulling(names, out, min_version, rows, **where)
                asked: dict[str, Array] = self._do(make, timeout, "a pull")
                return asked
            # Into arrays as before: all of it is ready.
            deadline = self._deadline(timeout, "a pull")
            try:
                found: Any = known.reads.read(names, out, 0, deadline)
                if found is None:
                    request = self._pulling(names, out, None)(known.meta)
                    found = self._finish(request, known.pull(request, deadline))
                    if request.target is not None and out is not None:
                        known.reads.learn(names, out, request.target)
            except ELSEWHERE:
                # Once more, so as to find them, or to say what was lost.
                found = self._do(self._pulling(names, out, None), deadline, "a pull")
            values: dict[str, Array] = found
            return values
        except BaseException as error:
            hide(error)
            raise

    def pull_async(
        self,
        names: str | Iterable[str] | None = None,
        *,
        rows: Mapping[str, Any] | None = None,
        out: Mapping[str, Array] | None = None,
        min_version: int | None = None,
        device: str | None = None,
        codec: str | codecs.Codec | None = None,
        timeout: Any = DEFAULT,
    ) -> CallFuture[dict[str, Array]]:
        """Start a pull and return its future.

        Parameters
        ----------
        names, rows, out, min_version, device, codec, timeout
            As in :meth:`pull`. `out` belongs to the pull until it is done.

        Returns
        -------
        Future
            Like one of `concurrent.futures`, and awaitable.

        Raises
        ------
        ValueError, TypeError
            For arguments that cannot be, before anything is sent.
        StoreClosedError
            If this handle was closed. All other errors of :meth:`pull` are the
            future's.

        Examples
        --------
        >>> store = daskps.create({"w": np.arange(3.0)})
        >>> future = store.pull_async()
        >>> future.result()["w"]
        array([0., 1., 2.])
        """
        # One deadline for all of it, from here on.
        deadline = self._deadline(timeout, "a pull")
        link = self._bind()
        where: dict[str, Any] = {"device": device, "codec": codec}
        make = self._pulling(names, out, min_version, rows, **where)
        return link.start(lambda: self._do_async(link, make, deadline))

    def _pulling(
        self,
        names: str | Iterable[str] | None,
        out: Mapping[str, Array] | None,
        min_version: int | None,
        rows: Mapping[str, Any] | None = None,
        *,
        device: str | None = None,
        codec: Any = None,
    ) -> Callable[[StoreMap], Request]:
        """Return a function that plans a pull."""
        where = device_for(device, out)
        least, reads_in = least_version(min_version), _words_of(codec, where, out)

        def make(meta: StoreMap) -> Request:
            targets = pulled(meta, names, rows, out, device=where)
            request = reading(meta, targets, least)
            return request.in_codec(reads_in) if reads_in else request

        return make

    def _told(self, rows: Iterable[Iterable[tuple[int, int]]]) -> tuple[int, ...]:
        pairs = sorted((shard, v) for row in rows for shard, v in row)
        self._last_versions = tuple(v for _, v in pairs)
        return self._last_versions

    # -- what it is ----------------------------------------------------------

    @property
    @entrance
    def names(self) -> list[str]:
        """Names of the arrays, in order, and then those of the tables."""
        return [*self.layout.names]

    @property
    @entrance
    def placement(self) -> tuple[str, ...]:
        """Address of each shard's owner, as this handle's latest call has found it."""
        return self._attached().meta.owners

    def to_json(self) -> str:
        """Return parameters, shards and workers as a graph, in JSON.

        It is in the node-link form, which ``networkx.node_link_graph`` reads. Nodes
        have a "kind": "array", "table", "shard" or "worker". Edges go from each
        parameter to the shards that have some of it, with the first of its elements (or
        rows) there and the one after the last, and from each shard to its owner, as
        this handle's latest call has found it.

        Returns
        -------
        str
            The text.

        Raises
        ------
        StoreClosedError
            If this handle was closed.

        Examples
        --------
        >>> import json
        >>> store = daskps.create({"w": np.zeros((3, 2))}, shards=2)
        >>> graph = json.loads(store.to_json())
        >>> [node["id"] for node in graph["nodes"]][:3]
        ['parameter:w', 'shard:0', 'shard:1']
        >>> graph["edges"][0]
        {'source': 'parameter:w', 'target': 'shard:0', 'kind': 'piece', 'start': 0,
        'stop': 3}
        """
        meta = self._attached().meta
        return json.dumps(node_link(meta.layout, meta.owners, meta.name))

    def visualize(self, filename: str = "daskps.svg") -> Any:
        """Draw parameters, shards and workers as a graph, by graphviz as Dask does.

        Parameters
        ----------
        filename : str
            File name: ".svg", ".png", ".pdf", ".jpeg" or ".jpg" at its end say what is
            drawn, and without one it is given ".png". With ".dot" or ".gv" the source
            alone is written, for which nothing need be installed.

        Returns
        -------
        IPython.display.Image, IPython.display.SVG or None
            The picture that a notebook shows; None without IPython and for a source.

        Raises
        ------
        ImportError
            Where graphviz is not installed.
        StoreClosedError
            If this handle was closed.

        Examples
        --------
        >>> import pathlib, tempfile
        >>> store = daskps.create({"w": np.zeros((3, 2))}, shards=2)
        >>> file = pathlib.Path(tempfile.mkdtemp()) / "store.dot"
        >>> store.visualize(str(file))
        >>> print(file.read_text().partition("[")[0])
        digraph "session-..." {
          rankdir=LR
          "parameter:w"
        """
        meta = self._attached().meta
        return draw(node_link(meta.layout, meta.owners, meta.name), filename)

    @property
    @entrance
    def device(self) -> str | None:
        """The device of its owners that it is on; None for host memory."""
        return self._attached().meta.device or None

    @property
    @entrance
    def nbytes(self) -> int:
        """Bytes of one copy of all values, without unbounded rows.

        Only the shards know how many of these there are: :meth:`stats` asks them.
        """
        return self.layout.nbytes

    @property
    @entrance
    def optimizer(self) -> dict[str, str]:
        """For each array or table with an update rule, the rule's repr."""
        meta = self._attached().meta
        names = meta.layout.names
        return {names[i]: rule for i, rule in meta.optimizers.items()}

    @property
    @entrance
    def version(self) -> int:
        """Smallest version of all shards; awaitable with an asynchronous client."""
        return self._ask("versions", lambda rows: min(self._told(rows)))

    @property
    @entrance
    def versions(self) -> tuple[int, ...]:
        """Version of each shard; awaitable with an asynchronous client."""
        return self._ask("versions", self._told)

    def stats(self, *, timeout: Any = DEFAULT) -> dict[str, Any]:
        """Return counters.

        Parameters
        ----------
        timeout : float, str or None
            Seconds or a duration such as "30s"; None waits for ever.

        Returns
        -------
        dict
            "shards": one row per shard, with its worker, generation, version, how many
            epochs of :func:`train` it has had ("epoch"), bytes of its values ("nbytes")
            and of all its memory ("segment_nbytes"), of each table the "rows" that it
            has and the table's "steps" ("tables"), whether readers take its lock
            ("locked_reads"), pushes, duplicates and parked calls, the worker of its
            second copy ("copy", "" without one), that one's bytes ("copy_nbytes"), and
            how many updates it has yet to get ("behind"), and what its host has
            served for all its shards and all who call, trainers too: messages
            ("calls") and calls by socket ("socket_calls"; "plain_reads" is 0 and goes
            with the next release). "handle":
            of this handle in this process, the way that verbs take from here to each
            worker ("carriers": "process" is a call, "machine" acts on the shards'
            memory, "message" goes over the network, "socket" too, by a socket of its
            own), of each of the last two the reason ("why"), messages, calls without
            one ("local_calls"), bytes of the arrays in messages ("nbytes"), rows of
            tables that it has asked for and brought ("rows_pulled", "rows_pushed"), and
            retries; "sockets" that this process has to those workers, calls that took
            them and the bytes of their arrays ("socket_calls", "socket_nbytes"), and
            "fallbacks", how often a message went instead and why. "process" has the
            counts of all handles and trainers of this process with its client or worker,
            and "workers" those in each worker of the store. "tables", by name:
            "rows", "dim", "dtype", bytes of all rows ("nbytes"), and "steps", how many
            updates the optimizer has made of it. Counters of carriers and sockets have
            the names "ways", "lanes", "lane_calls" and "lane_nbytes" too, for one
            release.

        Raises
        ------
        ShardLostError, StoreClosedError, TimeoutError
            For what its name says.

        Examples
        --------
        >>> store = daskps.create({"w": np.zeros(3)}, optimizer=daskps.optim.SGD(0.1))
        >>> _ = store.push({"w": np.ones(3)})
        >>> [row["pushes"] for row in store.stats()["shards"]]
        [1, 1]
        """
        on_loop = self._bind().asynchronous

        def finish(rows: list[list[dict[str, Any]]]) -> dict[str, Any]:
            found = sorted((r for rs in rows for r in rs), key=lambda r: r["shard"])
            handle, process = dict[str, Any](), dict[str, Any]()
            if (shards := self._shards) is not None:
                handle = Renamed(shards.stats(on_loop))
                process = shards.process_counts()
            workers = {row["worker"]: row.pop("callers") for row in found}
            tables = counted_tables(self.layout, found)
            found = [Renamed(row) for row in found]
            counted = {"handle": handle, "process": process, "workers": workers}
            return {"shards": found, **counted, "tables": tables}

        return self._ask("stats", finish, timeout)

    def __contains__(self, name: object) -> bool:
        return name in self.layout.by_name or name in self.layout.table_by_name

    def __iter__(self) -> Iterator[str]:
        return iter(self.names)

    def __len__(self) -> int:
        return len(self.layout.names)


def _words_of(codec: Any, device: str, out: Any) -> str:
    """Return the name of the codec that values travel in, "" without one."""
    chosen = codecs.choose(codec)
    if chosen is None:
        return ""
    if why := codecs.why_not_plain("codec= of a pull", chosen):
        raise ValueError(why)
    arrays = out.values() if isinstance(out, Mapping) else ()
    if device or not all(isinstance(array, np.ndarray) for array in arrays):
        raise ValueError(
            "a codec rounds arrays in host memory; leave codec= out, or device= and the "
            "arrays of a device in out="
        )
    return chosen.name
