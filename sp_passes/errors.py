# SPDX-License-Identifier: Apache-2.0
"""Exceptions. Every message says what was asked, what was found, and what to change."""

from __future__ import annotations


class SPError(Exception):
    """Base of every error that sp_passes raises on purpose."""


class PlacementError(SPError):
    """A value does not have the placement that an operation needs."""


class ShardingError(SPError):
    """The geometry does not fit: sizes that tp_size does not divide, truncated tensors."""


class ReplicationError(SPError):
    """A weight taken for replicated differs between ranks."""
