"""Names of folders in a checkpoint: one for each parameter, on one level.

A name of lower-case letters, digits, ``_``, ``-`` and ``.`` stays as it is, so that
checkpoints can be looked through. Any other one becomes what can be read of it and a hash
of all of it: names may have "/" or be long, and file systems may not tell upper from
lower case. The true name is in the attributes of the array and in the manifest.
"""

from __future__ import annotations

import hashlib
import re

#: Longest name that stays as it is, and what is kept of others.
_MOST, _KEPT = 64, 40
_PLAIN = re.compile(r"(?!__)[a-z0-9_]([a-z0-9_.-]*[a-z0-9_-])?")
#: The end of a name with a hash; no other name ends so.
_HASHED = re.compile(r"\.[0-9a-f]{20}")
#: Zarr's own name for the metadata of a node.
_RESERVED = "zarr.json"


def key(name: str) -> str:
    """Return the name of a parameter's folder.

    Parameters
    ----------
    name : str
        Any name of a parameter or table.

    Returns
    -------
    str
        At most 64 characters of ASCII, another one for each name, also where case is
        not told apart.

    Examples
    --------
    >>> key("layer1.weight")
    'layer1.weight'
    >>> key("../W")
    'W.4d7045e4c3d50b0e1725'
    """
    is_taken = name == _RESERVED or _HASHED.fullmatch(name[-21:])
    if len(name) <= _MOST and _PLAIN.fullmatch(name) and not is_taken:
        return name
    told = name.encode("utf-8", "surrogatepass")
    digest = hashlib.blake2b(told, digest_size=10).hexdigest()
    readable = re.sub(r"[^A-Za-z0-9_-]+", "_", name[:_KEPT]).strip("_-")
    return f"{readable or 'x'}.{digest}"
