"""Refusals of calls by lane that fail before their shards have them."""

from __future__ import annotations

import logging
from typing import Any

from daskps.cluster.lane.frames import pack_refusal
from daskps.cluster.wire.wellformed import refused
from daskps.errors import DaskPSError

logger = logging.getLogger(__name__)


def refusal_of(error: Exception, number: int) -> list[Any]:
    """Return the frame that refuses a call, after an error outside of its shards."""
    if isinstance(error, (DaskPSError, ValueError, TypeError)):
        return pack_refusal(error, number)
    logger.error("a call by a lane failed", exc_info=error)
    return pack_refusal(refused(error, "a call"), number)
