"""Progress of a store and the run that made it, which the next run goes on from."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, fields
from typing import TYPE_CHECKING, Any

from daskps.checkpoint.fields import Fields
from daskps.epochs import Epochs
from daskps.errors import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from daskps.training.steps import FitPlan


@dataclass(frozen=True, slots=True)
class TrainedBy:
    """The run that has trained a store last: what its batches depend on.

    Parameters
    ----------
    sync : str
        The policy: "bsp", "asp", or "ssp(s)" with its staleness.
    scheme, seed, batch_size, shuffle, average
        As `train` takes them.
    sync_every : int
        Batches between two synchronisations, 0 for all of an epoch.
    rows : tuple of int
        Rows of each trainer.
    epochs : int
        How many epochs the store was to have had at its end.
    """

    sync: str
    scheme: str
    seed: int
    batch_size: int
    shuffle: bool
    sync_every: int
    average: str
    rows: tuple[int, ...]
    epochs: int

    @classmethod
    def of(
        cls, plan: FitPlan, sync: str, scheme: str, lengths: Sequence[int]
    ) -> TrainedBy:
        """Return what a run is that is planned so, with so many rows for each trainer."""
        end = plan.first + plan.epochs
        return cls(
            sync=sync,
            scheme=scheme,
            seed=plan.seed,
            batch_size=plan.batch_size,
            shuffle=plan.shuffle,
            sync_every=plan.sync_every,
            average=plan.chosen.average,
            rows=tuple(lengths),
            epochs=end,
        )

    def check_goes_on(self, other: TrainedBy) -> None:
        """Refuse a run that would not go on with the batches of this one.

        Raises
        ------
        ValueError
            Naming everything that differs.
        """
        # Arguments of `train`: all but the rows and the epochs.
        names = [field.name for field in fields(self)][:-2]
        pairs = [(n, getattr(self, n), getattr(other, n)) for n in names]
        pairs.append(("trainers", len(self.rows), len(other.rows)))
        found = [
            f"{name}={now!r} (it had {before!r})"
            for name, before, now in pairs
            if now != before
        ]
        if not found and self.rows != other.rows:
            rank = next(r for r, n in enumerate(self.rows) if n != other.rows[r])
            found = [
                f"{other.rows[rank]:,} rows for trainer {rank} (it had "
                f"{self.rows[rank]:,})"
            ]
        if found:
            raise ValueError(
                f"resume=True goes on with the batches of the run before, which differ "
                f"with {', '.join(found)}; call train as then, with the same data, or "
                f"with resume=False to begin with the next epoch"
            )

    def to_json(self) -> dict[str, Any]:
        """Return it as plain values of JSON."""
        return {**asdict(self), "rows": list(self.rows)}

    @classmethod
    def from_json(cls, found: Any, file: str = "") -> TrainedBy:
        """Return what was written, looked at value by value.

        Parameters
        ----------
        found : object
            As `to_json` returns it.
        file : str
            Where it was read, for errors.

        Raises
        ------
        CheckpointError
            For anything else.
        """
        of = Fields(found, file, "progress.run")
        for name in ("sync", "scheme", "average"):
            of.text(name)
        shuffle = of.get("shuffle")
        if not isinstance(shuffle, bool):
            raise CheckpointError(f"{file}: shuffle is {shuffle!r:.60}", file)
        of.whole("batch_size", least=1)
        of.whole("sync_every")
        of.whole("epochs")
        if type(of.get("seed")) is not int or of.get("seed") < 0:
            raise CheckpointError(f"{file}: the seed is {of.get('seed')!r:.60}", file)
        values = {field.name: of.get(field.name) for field in fields(cls)}
        return cls(**{**values, "rows": of.wholes("rows")})


@dataclass(frozen=True, slots=True)
class Progress:
    """Place of a store in its epochs, and the run that has brought it there."""

    epochs: Epochs
    #: None where none has, or one without epochs.
    run: TrainedBy | None = None

    @property
    def n_trainers(self) -> int | None:
        """How many trainers the run had."""
        return None if self.run is None else len(self.run.rows)

    @property
    def described(self) -> str:
        """The run as text; "" where there was none."""
        return "" if self.run is None else json.dumps(self.run.to_json())

    def to_json(self) -> dict[str, Any]:
        """Return it as plain values of JSON."""
        run = {} if self.run is None else {"run": self.run.to_json()}
        return {"epochs": list(self.epochs), **run}

    @classmethod
    def from_json(cls, found: Mapping[str, Any], file: str = "") -> Progress:
        """Return what was written, looked at value by value.

        Raises
        ------
        CheckpointError
            For anything else.
        """
        of = Fields(found, file, "progress")
        epochs = of.wholes("epochs")
        if len(epochs) != len(Epochs()):
            raise CheckpointError(f"{file}: epochs are {epochs}", file)
        run = TrainedBy.from_json(found["run"], file) if "run" in found else None
        return cls(Epochs(*epochs), run)
