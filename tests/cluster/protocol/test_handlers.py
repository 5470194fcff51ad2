"""Each message has one handler, which a newcomer finds by the message's name."""

from __future__ import annotations

import asyncio
import inspect
import sys
from pathlib import Path
from typing import Any

import pytest

from daskps.cluster import plugins, protocol
from daskps.cluster.protocol.handlers import DIRECTORY, HOST, Handlers
from daskps.cluster.protocol.packing import unpack_reply
from daskps.errors import IllegalStateError, ProtocolError
from daskps.usercode import user_code

#: Module of the handler of each message to a host.
TO_HOSTS = {
    "host.adoption": "adopt look orphans sweep let_go",
    "host.store_messages": "hello device create load drop give_up versions has_step keeps "
    "stats",
    "host.owner_steps": "apply lr_factors scale_lr",
    "host.questions": "row_changes table_ids measure",
    "host.cuts": "prepare_cut begin_cut fill_cut drop_cut mark_lost acknowledge",
    "host.installation": "install warm",
    "host.copies": "move_fill move_own move_drop copy_follow",
    "host.moving": "move_begin move_read move_state move_last move_back copy_on "
    "copy_next move_deposed relay_end",
    "host.reductions": "aggregate take_aggregate drop_aggregate allreduce reduced "
    "sums free end_sums",
    "host.runs": "begin_run end_run finish heard resume hold goes_on rounds epochs changed",
    "host.saving": "write_checkpoint edges has_copy sees_file",
}
#: And to the directory.
TO_THE_DIRECTORY = {
    "directory.cuts": "cut drop_cut",
    "directory.directory": "hello locate producer ended",
    "directory.store_registry": "create commit grew viewing await_store find list delete "
    "close",
    "directory.recoveries": "recover recovering recovery_failed",
    "directory.copies": "copies copy-ended copy-silent",
    "directory.drains": "drain leaving",
    "directory.resharding": "reshard reshard_commit",
    "directory.move": "awaits removed memory-lost",
    "directory.runs": "open_run close_run fence_run epochs trained_by",
    "directory.trainers": "register collects barrier trains_on finishes finished report progress "
    "running watch verdict note receipts",
}


def modules(handlers: Handlers) -> dict[str, str]:
    return {n: h.function.__module__ for n, h in handlers.by_name.items()}


@pytest.mark.parametrize(
    ("handlers", "listed"), [(HOST, TO_HOSTS), (DIRECTORY, TO_THE_DIRECTORY)]
)
def test_all_handlers_and_their_modules(handlers: Handlers, listed: Any) -> None:
    found = {
        name: f"daskps.cluster.{module}"
        for module, names in listed.items()
        for name in names.split()
    }
    assert modules(handlers) == found


def test_what_the_host_is_handed_is_what_the_plugin_names() -> None:
    assert {m.__name__ for m in plugins.SERVING} == set(modules(HOST).values())


def test_grep_finds_the_handler_of_a_message() -> None:
    for door, handlers in (("HOST", HOST), ("DIRECTORY", DIRECTORY)):
        for name, handler in handlers.by_name.items():
            module = sys.modules[handler.function.__module__]
            source = Path(inspect.getfile(module)).read_text("utf-8")
            assert source.count(f'@{door}.handles("{name}"') == 1


def test_user_code_is_called_by_these_alone() -> None:
    """Errors of theirs pass as they are; all others say what could not be made out."""
    of_users = {n for n, h in HOST.by_name.items() if h.user_code}
    told_why = {"goes_on", "finish", "resume", "allreduce"}
    assert of_users == {"create", "aggregate", "apply"} | told_why
    assert not any(h.user_code for h in DIRECTORY.by_name.values())


def test_two_handlers_of_one_name_fail_where_the_second_is_defined() -> None:
    handlers = Handlers("a test", expected=())

    @handlers.handles("ask")
    def first(owner: Any) -> None: ...

    with pytest.raises(
        IllegalStateError, match=r"first and .*second both serve the message .ask. t"
    ):

        @handlers.handles("ask")
        def second(owner: Any) -> None: ...


class Asked:
    """A receiver of which each message is served in one way."""

    handlers = Handlers("a test", " to it", expected=(ValueError,))

    @handlers.handles("at_once")
    def at_once(self, n: int) -> int:
        return n + 1

    @handlers.handles("later")
    async def later(self, n: int = 0) -> int:
        if n % 2:
            raise ValueError(f"{n} is odd")
        return n + 2

    @handlers.handles("ours")
    def ours(self) -> None:
        raise ZeroDivisionError("oh")

    @handlers.handles("users", user_code=True)
    def users(self) -> None:
        raise ZeroDivisionError("oh")

    @handlers.handles("exits", user_code=True)
    def exits(self) -> None:
        with user_code("a rule"):
            sys.exit(3)

    def ask(self, method: object, **message: Any) -> Any:
        work = self.handlers.serve(method, message, self.handlers.owners(self).get)
        return unpack_reply(asyncio.run(work), "a test")


def test_a_message_is_served_by_its_handler() -> None:
    assert Asked().ask("at_once", n=1) == 2
    assert Asked().ask("later", n=2) == 4
    assert Asked().ask("later") == 2


@pytest.mark.parametrize(
    ("message", "error", "says"),
    [
        ({"method": "nothing"}, ProtocolError, "a test knows no message 'nothing'"),
        ({"method": ["x"]}, ProtocolError, "a test knows no message"),
        ({"method": "at_once", "n": "1"}, ProtocolError, "'at_once' to it with n='1'"),
        ({"method": "at_once"}, ProtocolError, r"without \['n'\]"),
        ({"method": "later", "n": 1}, ValueError, "1 is odd"),
        ({"method": "ours"}, ProtocolError, "'ours' to it cannot be made out: Zero"),
        ({"method": "users"}, ZeroDivisionError, "^oh$"),
        ({"method": "exits"}, RuntimeError, r"^a rule called sys.exit\(3\)"),
    ],
)
def test_what_cannot_be_served_is_refused(
    message: Any, error: type[Exception], says: str
) -> None:
    with pytest.raises(error, match=says):
        Asked().ask(**message)


def test_only_what_was_not_expected_is_logged(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr(
        protocol.handlers.logger,
        "exception",
        lambda text, *args: said.append(text % args),
    )
    for method, more in (("later", {"n": 1}), ("ours", {}), ("exits", {})):
        with pytest.raises((ValueError, ProtocolError, RuntimeError)):
            Asked().ask(method, **more)
    assert said == ["a message 'ours' to it failed"]


def test_each_handler_is_a_method_of_one_part() -> None:
    with pytest.raises(IllegalStateError, match="is a method of 0 parts"):
        Asked.handlers.owners(object())
    with pytest.raises(IllegalStateError, match="is a method of 2 parts"):
        Asked.handlers.owners(Asked(), Asked())
