"""Conditions on rows: what the store is known to hold no more as its name says does not count as held."""

from __future__ import annotations

from sqlalchemy import ColumnElement, exists

from bdn.mirror.db.tables import ContentRow, DamagedChunkRow, DamagedContentRow, SlabSliceRow


def chunks_are_sound() -> ColumnElement[bool]:
    """No chunk of the ``ContentRow``'s own is damaged."""
    return ~exists().where(DamagedContentRow.content == ContentRow.digest)


def slab_is_sound() -> ColumnElement[bool]:
    """The ``SlabSliceRow``'s slab is not damaged."""
    return ~exists().where(DamagedChunkRow.digest == SlabSliceRow.slab)
