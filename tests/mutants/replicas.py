"""Copies of a store that are trained by themselves, and groups that meet by them."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

_WEIGHTS = "tests/store/test_replica_weights.py::"
_REPLICA = "tests/store/test_replica.py::"

MUTANTS = (
    Mutant(
        "sync-under-another-number",
        "daskps.cluster.caller.producer:Repeated.turn",
        "yield self._turn",
        "yield self._turn._replace(number=self._producer.take(1)[0])",
        (_REPLICA + "test_a_sync_of_which_nothing_is_known_counts_once",),
    ),
    Mutant(
        "sync-that-forgets-what-was-done-meanwhile",
        "daskps.store.replica_weights:ReplicaWeights.end",
        "np.add(found, _difference(w, sent), out=w)",
        "np.copyto(w, found)",
        (_WEIGHTS + "test_what_was_done_during_a_sync_stays_and_goes_with_the_next",),
    ),
    Mutant(
        "base-that-stays",
        "daskps.store.replica_weights:ReplicaWeights.end",
        "np.copyto(self._base[name], found)",
        "pass",
        (_WEIGHTS + "test_what_was_done_during_a_sync_stays_and_goes_with_the_next",),
    ),
    Mutant(
        "sync-in-doubt-that-is-dropped",
        "daskps.store.replica:Replica._take_over",
        "elif not exchange.is_refused:",
        "elif exchange.is_refused:",
        (_REPLICA + "test_a_sync_of_which_nothing_is_known_counts_once",),
    ),
    Mutant(
        "refused-sync-that-is-kept",
        "daskps.store.replica:Replica._send",
        "exchange.is_refused = True",
        "exchange.is_refused = False",
        (_REPLICA + "test_a_refused_sync_is_worked_out_anew",),
    ),
    Mutant(
        "workers-that-count-alike",
        "daskps.compat.singa.worker:Worker._deliver",
        "self.trainer.push(self.grads, weight=float(self.n_rows))",
        "self.trainer.push(self.grads)",
        ("tests/compat/test_singa.py::test_a_group_does_what_one_process_does",),
    ),
    Mutant(
        "last-step-of-an-average",
        "daskps.compat.systemml.worker:Plan._computed",
        "if self.average or number + 1 < len(group):",
        "if number + 1 < len(group):",
        ("tests/compat/test_systemml.py::test_d11_two_identical_workers",),
    ),
    Mutant(
        "group-that-begins-with-its-own",
        "daskps.compat.singa.worker:Following.first_values",
        "if not self.group:",
        "if self.rank == 0:",
        ("tests/compat/test_singa.py::test_groups_add_to_a_store_of_all",),
    ),
)
