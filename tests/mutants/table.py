"""All mutants, by the room of the code that they break."""

from __future__ import annotations

from tests.mutants import (
    caller,
    checkpoints,
    combination,
    copies,
    cuts,
    devices,
    directory,
    graph,
    ground,
    host,
    machine,
    memory,
    policies,
    protocol,
    pushes,
    replicas,
    rounds,
    rows,
    rules,
    sklearn,
    sockets,
    store,
    training,
)
from tests.mutants.mutant import Mutant

ROOMS: dict[str, tuple[Mutant, ...]] = {
    "memory": memory.MUTANTS,
    "copies": copies.MUTANTS,
    "pushes": pushes.MUTANTS,
    "rows": rows.MUTANTS,
    "rounds": rounds.MUTANTS,
    "cuts": cuts.MUTANTS,
    "devices": devices.MUTANTS,
    "protocol": protocol.MUTANTS,
    "sklearn": sklearn.MUTANTS,
    "sockets": sockets.MUTANTS,
    "machine": machine.MUTANTS,
    "host": host.MUTANTS,
    "directory": directory.MUTANTS,
    "caller": caller.MUTANTS,
    "graph": graph.MUTANTS,
    "rules": rules.MUTANTS,
    "ground": ground.MUTANTS,
    "training": training.MUTANTS,
    "checkpoints": checkpoints.MUTANTS,
    "combination": combination.MUTANTS,
    "store": store.MUTANTS,
    "replicas": replicas.MUTANTS,
    "policies": policies.MUTANTS,
}
MUTANTS: tuple[Mutant, ...] = tuple(m for room in ROOMS.values() for m in room)
