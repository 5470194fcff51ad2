"""Counters of `stats` under the names that they had, for one release."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

#: Old names, and those of today.
RENAMED = {
    "ways": "carriers",
    "lanes": "sockets",
    "lane_calls": "socket_calls",
    "lane_nbytes": "socket_nbytes",
}


class Renamed(dict[str, Any]):
    """Counters that have their old names too; reading one by these warns.

    Parameters
    ----------
    counters : mapping
        The counters by their names of today.
    """

    def __init__(self, counters: Mapping[str, Any]) -> None:
        super().__init__(counters)
        self.update({o: counters[n] for o, n in RENAMED.items() if n in counters})
        if carriers := counters.get("carriers"):
            words = {"socket": "lane"}
            self["ways"] = {w: words.get(by, by) for w, by in carriers.items()}

    def __getitem__(self, name: str) -> Any:
        """Return a counter; warn where it is asked for by its old name."""
        if name in RENAMED:
            text = f"the counter {name!r} is called {RENAMED[name]!r} now"
            warnings.warn(text, FutureWarning, stacklevel=2)
        return super().__getitem__(name)
