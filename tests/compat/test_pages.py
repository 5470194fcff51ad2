"""Pages "Coming from ...": all members of the other system, each with its test."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
NAMED = re.compile(r"`(tests/[\w/]+\.py)::(\w+)`")
#: What the pages of those systems list, by our module.
MEMBERS = {
    "bigdl": "AllReduceParameter init getWeights putGradients "
    "aggregateGradientPartition sendWeightPartition weightPartition gradientPartition "
    "size paramOffset compress Serializable",
    "mxnet": "kvstore.create init push pull pushpull broadcast row_sparse_pull "
    "set_updater set_optimizer set_gradient_compression rank num_workers barrier "
    "save_optimizer_states load_optimizer_states DataParallelExecutorGroup bindExec "
    "reshape forward backward getOutputs getOutputsMerged getInputGrads "
    "getInputGradsMerged getParams setParams updateMetric installMonitor getBatchSize "
    "getOutputShapes priority ignore_sparse is_capable DataDesc dist_device_sync",
    "multiverso": "init barrier shutdown num_workers worker_id TableHandler "
    "ArrayTableHandler:new ArrayTableHandler:add ArrayTableHandler:get "
    "MatrixTableHandler:new MatrixTableHandler:add MatrixTableHandler:get",
    "singa": "batch net owner put update server version memory nodes collect get "
    "performance JSON sync_freq warmup_steps updaters",
    "systemml": "model features labels upd agg val_features val_labels val mode utype "
    "freq epochs batchsize nbatches k scheme runtime_balancing weighting hyperparams "
    "checkpointing seed modelAvg num_backup_workers he pull push server workers keys "
    "strategies",
}


@pytest.mark.parametrize("system", MEMBERS)
def test_all_members_have_a_row_and_their_test(system: str) -> None:
    page = (ROOT / "docs" / f"coming-from-{system}.md").read_text()
    table = page.split("## Members")[1].split("\n## ")[0]
    rows = [line for line in table.splitlines() if line.startswith("|")][2:]
    theirs = " ".join(row.split("|")[1] for row in rows)
    missing = [name for name in MEMBERS[system].split() if name not in theirs]
    assert not missing
    for row in rows:
        shown = row.rstrip("| ").split("|")[-1]
        named = NAMED.findall(shown)
        assert named or shown.strip() in ("the same", "no meaning here"), row
        for file, name in named:
            text = (ROOT / file).read_text()
            assert re.search(rf"^(?:async )?def {name}\(", text, re.MULTILINE), name


@pytest.mark.parametrize("system", MEMBERS)
def test_front_ends_are_named_as_themselves(system: str) -> None:
    module = importlib.import_module(f"daskps.compat.{system}")
    page = (ROOT / "docs" / f"coming-from-{system}.md").read_text()
    for name in module.__all__:
        assert hasattr(module, name)
        assert name in page
