"""Checkpoints: what is written where, when it counts, and what is believed of it."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

_PLAN, _LIST = "tests/checkpoint/test_plan.py", "tests/checkpoint/test_listing.py"
_MANIFEST = "tests/checkpoint/test_manifest.py"
_LOCAL = "tests/checkpoint/test_local_files.py"
_STORAGE = "tests/checkpoint/test_storage.py"
_STORE = "tests/store/test_checkpoints.py"

MUTANTS = (
    Mutant(
        "chunks-at-the-borders-of-shards",
        "daskps.checkpoint.plan:_chunks",
        "if run.stop > chunk.stop:",
        "if run.stop >= chunk.stop:",
        (f"{_PLAN}::test_files_are_the_same_from_any_number_of_shards",),
    ),
    Mutant(
        "hashes-at-the-end-of-a-range",
        "daskps.checkpoint.plan:rows_local",
        'last = int(np.searchsorted(edges, np.uint64(high - 1), "right"))',
        'last = int(np.searchsorted(edges, np.uint64(high - 1), "right")) - 1',
        (f"{_PLAN}::test_unbounded_rows_come_back_in_any_cut",),
    ),
    Mutant(
        "names-that-differ-in-case",
        "daskps.checkpoint.arrays:key",
        "if len(name) <= _MOST and _PLAIN.fullmatch(name) and not is_taken:",
        "if len(name) <= _MOST and _PLAIN.fullmatch(name.lower()) and not is_taken:",
        ("tests/checkpoint/test_names.py::test_other_names_are_read_and_hashed",),
    ),
    Mutant(
        "digests-of-files-unread",
        "daskps.checkpoint.digests:check_content",
        "if (now := digest(content)) != file.digest:",
        "if (now := digest(content)) == file.path:",
        (
            f"{_MANIFEST}::test_content_of_files",
            f"{_STORE}::test_every_file_flipped_torn_or_missing_is_found",
        ),
    ),
    Mutant(
        "files-outside-the-folder",
        "daskps.checkpoint.texts:_file",
        'if path.startswith("/") or "\\\\" in path or {"", ".", ".."} & {*at}:',
        'if path.startswith("/"):',
        (f"{_MANIFEST}::test_files_outside_the_folder_are_refused",),
    ),
    Mutant(
        "retention-of-all-lineages",
        "daskps.checkpoint.listing:retain",
        "if entry.manifest is not None and entry.manifest.lineage == lineage",
        "if entry.manifest is not None",
        (f"{_LIST}::test_retention_keeps_to_its_lineage",),
    ),
    Mutant(
        "sweeping-what-is-being-written",
        "daskps.checkpoint.listing:sweep",
        "if age is not None and age > ABANDONED_SECONDS:",
        "if age is not None:",
        (f"{_LIST}::test_what_nobody_finishes_is_swept_after_a_day",),
    ),
    Mutant(
        "secrets-of-filesystems",
        "daskps.checkpoint.storage:Storage._said",
        'said = f"{name}: {text:.200}" if self._is_open and text else name',
        'said = f"{name}: {text:.200}" if text else name',
        (f"{_STORAGE}::test_secrets_are_never_shown",),
    ),
    Mutant(
        "manifests-without-a-rename",
        "daskps.checkpoint.local_files:put",
        "os.replace(root / part, at)",
        "at.write_bytes(bytes(content))",
        (f"{_LOCAL}::test_a_file_that_counts_is_whole_or_as_it_was",),
    ),
    Mutant(
        "names-that-are-not-on-the-disk",
        "daskps.cluster.host.saving:_Writing.sync_names",
        "if self.files:",
        "if not self.files:",
        (f"{_STORE}::test_all_is_on_the_disk_before_the_manifest",),
    ),
    Mutant(
        "manifest-before-the-rest",
        "daskps.cluster.caller.saving:_seal",
        "for path, text in texts.items():",
        "for path, text in [(MANIFEST, to_bytes(manifest)), *texts.items()]:",
        (f"{_STORE}::test_a_save_may_be_killed_at_every_operation",),
    ),
    Mutant(
        "state-of-another-rule-comes-along",
        "daskps.checkpoint.selection:Selection.__init__",
        "and (at[member.index][1] or not is_slot(array.area))",
        "and True",
        (
            "tests/store/test_partial_restore.py"
            "::test_state_of_other_rules_is_left_behind",
        ),
    ),
    Mutant(
        "values-become-infinite-in-a-narrow-dtype",
        "daskps.shards.installation:_as_dtype",
        "if (np.isfinite(values) & ~np.isfinite(found)).any():",
        "if False:",
        ("tests/store/test_partial_restore.py::test_values_too_large_for_a_dtype",),
    ),
)
