"""Devices that can decode some kinds of memory for constants."""

from __future__ import annotations

from driver.devices.reference import ReferenceDevice


class AshmemAlone(ReferenceDevice):
    """It decodes ashmem and nothing else."""

    memory_kinds = frozenset({"ashmem"})


class Nothing(ReferenceDevice):
    """It decodes no pool: constants have to be copied."""

    memory_kinds = frozenset[str]()
