"""Fields of a text of JSON, checked before anything is done with them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

from daskps.errors import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Iterator

T = TypeVar("T")
#: Larger numbers are no counts: words have 64 bits.
MOST = 2**63 - 1
#: The last second of the year 9999, the last that a `datetime` has.
LAST = 253_402_300_799


class Fields:
    """The entries of a JSON object, each of the kind that is asked for.

    Parameters
    ----------
    found : object
        The value that was read.
    file : str
        Of which file, for errors.
    where : str
        Of which part of it.

    Raises
    ------
    CheckpointError
        Here and in all methods, for anything else.
    """

    def __init__(self, found: Any, file: str, where: str) -> None:
        self.file, self.where = file, where
        if not isinstance(found, dict):
            raise self._wrong("", found, "an object")
        self._found = found

    def _wrong(self, name: str, found: Any, expected: str) -> CheckpointError:
        at = f"{self.where}.{name}".strip(".")
        return CheckpointError(
            f"{self.file} is no manifest of daskps: {at or 'all of it'} is "
            f"{found!r:.60}, expected {expected}; restore another checkpoint",
            self.file,
        )

    def get(self, name: str) -> Any:
        """Return an entry that may be anything."""
        if name not in self._found:
            raise self._wrong(name, "missing", "an entry of that name")
        return self._found[name]

    def _of(self, name: str, kind: type[T], expected: str) -> T:
        found = self.get(name)
        if not isinstance(found, kind):
            raise self._wrong(name, found, expected)
        return found

    def text(self, name: str) -> str:
        """Return a string."""
        return self._of(name, str, "a string")

    def whole(self, name: str, least: int = 0, most: int = MOST) -> int:
        """Return a whole number."""
        found = self.get(name)
        if type(found) is not int or not least <= found <= most:
            raise self._wrong(name, found, f"a whole number from {least}")
        return found

    def moment(self, name: str) -> float:
        """Return a moment, in seconds since 1970, that a calendar has."""
        found = self.get(name)
        if type(found) not in (int, float) or not 0 <= found <= LAST:
            raise self._wrong(name, found, "seconds since 1970, up to the year 9999")
        return float(found)

    def mapping(self, name: str) -> dict[str, Any]:
        """Return an object."""
        return self._of(name, dict, "an object")

    def items(self, name: str) -> list[Any]:
        """Return a list of anything."""
        return self._of(name, list, "a list")

    def objects(self, name: str) -> Iterator[Fields]:
        """Give the objects of a list."""
        for i, found in enumerate(self.items(name)):
            yield Fields(found, self.file, f"{self.where}.{name}[{i}]".strip("."))

    def wholes(self, name: str, most: int = MOST, *, least: int = 0) -> tuple[int, ...]:
        """Return a list of whole numbers."""
        found = self.items(name)
        if any(type(n) is not int or not least <= n <= most for n in found):
            raise self._wrong(name, found, "a list of whole numbers")
        return tuple(found)

    def numbers(self, name: str) -> tuple[float, ...]:
        """Return a list of numbers."""
        found = self.items(name)
        if any(type(n) not in (int, float) for n in found):
            raise self._wrong(name, found, "a list of numbers")
        return tuple(map(float, found))

    def texts(self, name: str) -> tuple[str, ...]:
        """Return a list of strings."""
        found = self.items(name)
        if not all(isinstance(n, str) for n in found):
            raise self._wrong(name, found, "a list of strings")
        return tuple(found)
