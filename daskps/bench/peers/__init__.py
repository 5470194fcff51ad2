"""Other systems doing the same jobs: each a module with the interface `Peer`.

Everything they start listens on this machine alone and is ended by its handle.
"""


class PeerError(RuntimeError):
    """A peer did not start, or failed at its job."""
